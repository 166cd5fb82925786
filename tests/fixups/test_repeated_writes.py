"""An operator over a list in which one tensor comes twice writes to it twice, as in eager."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.testing import make_mesh, on_ranks


def add(a, b, c):
    torch._foreach_add_([a, b, a, a], 1.0)


def add_one_to_the_other(a, b, c):
    torch._foreach_add_([a, b, a], [b, a, c])  # what is read was just written
    torch._foreach_add_([b, c], [c, b])


def multiply_by_numbers(a, b, c):
    torch._foreach_mul_([a, a, b, b], [2.0, 3.0, 5.0, 7.0])


def copy(a, b, c):
    torch._foreach_copy_([a, a, b], [b, c, a])


def no_tensor_twice(a, b, c):
    torch._foreach_add_([a, b, c], 1.0)


PROGRAMS = [add, add_one_to_the_other, multiply_by_numbers, copy, no_tensor_twice]


KINDS = [
    (program, kind) for program in PROGRAMS for kind in ("plain", "dtensor") if (program, kind) != (copy, "dtensor")
]


@pytest.mark.parametrize("program, kind", KINDS)  # eager copies no lists of DTensors
@on_ranks(2)
def test_like_eager(program, kind):
    mesh, found = make_mesh((2,), ("tp",)), []
    for run in (program, torch.compile(program, backend="dtensor_aten", fullgraph=True)):
        locals_ = [torch.arange(3.0) + i for i in range(3)]
        values = (
            locals_ if kind == "plain" else [DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for x in locals_]
        )
        run(*values), run(*values)
        found.append([x if kind == "plain" else x.to_local() for x in values])
    for eager, compiled in zip(*found):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
