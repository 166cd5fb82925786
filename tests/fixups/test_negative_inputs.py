"""An input with the negative bit has its sign in compiled code."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.offline import job
from dtensor_compile.recording.recorder import record
from dtensor_compile.testing import make_mesh


def _conjugated():
    return torch.randn(4, 4, dtype=torch.complex64).conj().imag


def _plain():
    return torch.randn(4, 4)


@pytest.mark.parametrize("kind", ["plain", "dtensor"])
def test_sign_of_an_input(kind):
    def program(x):
        return x * 3

    def made(x):
        return x if kind == "plain" else DTensor.from_local(x, mesh, [Shard(0)], run_check=False)

    with job(2):
        mesh = make_mesh((2,), ("dp",))
        compiled = torch.compile(program, backend="dtensor", fullgraph=True)
        for make in (_plain, _conjugated):
            x = made(make())
            torch._dynamo.reset()
            with record() as recording:
                got = compiled(x)
            torch.testing.assert_close(got, program(x))
            kinds = [decision.kind for decision in recording.decisions]
            assert ("run_negative_inputs" in kinds) == (make is _conjugated)
        for make in (_plain, _conjugated):  # a call of the same compiled function
            x = made(make())
            torch.testing.assert_close(compiled(x), program(x))
