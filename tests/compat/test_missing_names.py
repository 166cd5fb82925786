"""A private name that torch has no more costs what needs it: programs that do not are right, others get an error that
names it.
"""

import subprocess
import sys

import pytest

from dtensor_compile import UnsupportedTorchError
from dtensor_compile.compat.missing_names import StandIn

#: Where a feature is off, where an essential one is, where a scope is not entered, where a base class is missing, where
#: a table is read while a module is loaded, and where two modules import it.
SOME = (
    "torch._dynamo.variables.misc:StringFormatVariable",
    "torch._dynamo.variables.script_object:",
    "torch._inductor.scheduler:",
    "torch._dynamo.variables.user_defined:UserDefinedObjectVariable",
    "torch._dynamo.variables.builder:VariableBuilder",
    "torch.distributed.tensor._dispatch:",
)


def _run(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "tests.compat.hidden_names", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2400, check=False)


@pytest.mark.slow
def test_a_small_program_without_some_of_torchs_private_names():
    done = _run(*SOME)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("right ") >= 3 and done.stdout.count("named ") >= 1, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_a_small_program_without_each_of_torchs_private_names():
    done = _run()
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_stand_in_is_an_error_where_it_is_called_or_derived_from():
    gone = StandIn("torch._gone:Thing")
    with pytest.raises(UnsupportedTorchError, match=r"has no torch\._gone:Thing$"):
        gone(1)
    with pytest.raises(UnsupportedTorchError, match=r"has no torch\._gone:Thing\.make$"):
        gone.make()

    class Derived(gone):
        pass

    with pytest.raises(UnsupportedTorchError, match=r"has no torch\._gone:Thing$"):
        Derived()


def test_nothing_is_an_instance_of_a_stand_in():
    gone = StandIn("torch._gone:Thing")
    assert not isinstance(1, gone) and not isinstance(1, (gone, str)) and not issubclass(int, gone)
    assert list(gone) == [] and gone.__name__ == "Thing"
