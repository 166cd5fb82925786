"""What is said where a third-party package is missing, or is another version than the tested ones."""

import importlib.metadata
import subprocess
import sys
import warnings

import pytest

from dtensor_compile.integrations import third_party


def test_missing_package_is_named():
    says = "integrations.no_such_package needs no_such_package, .* tested versions: 1.0, 1.1"
    with pytest.raises(ImportError, match=says):
        third_party("no_such_package", ("1.0", "1.1"))


def test_untested_version_warns_once_and_is_used():
    with pytest.warns(UserWarning, match="is tested with pytest 0.1; .* is installed") as caught:
        assert third_party("pytest", ("0.1",)) is pytest
    assert len(caught) == 1


def test_tested_version_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third_party("pytest", (importlib.metadata.version("pytest"),))


@pytest.mark.slow
def test_nothing_is_imported_by_the_package():
    code = (
        "import sys, dtensor_compile, dtensor_compile.backend\n"
        "others = ('dtensor_compile.integrations', 'accelerate', 'lightning')\n"
        "assert not [name for name in sys.modules if name.startswith(others)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
