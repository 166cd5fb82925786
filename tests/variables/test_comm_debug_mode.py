"""``CommDebugMode`` in a program: one graph, eager's counts."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values

WHOLE = [Replicate()]
GIVEN = CommDebugMode()


def unread(x):
    with CommDebugMode() as mode:  # noqa: F841 - a mode that nothing reads, as a program may leave it
        y = x.redistribute(placements=WHOLE)
    return y * 2


def read_after(x):
    with CommDebugMode() as mode:
        y = x.redistribute(placements=WHOLE)
        z = (y + 1).redistribute(placements=[Shard(1)])
    gathers = mode.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
    return z * mode.get_total_counts(), gathers, mode.get_comm_counts(), mode.comm_counts


def read_inside(x):
    with CommDebugMode() as mode:
        y = x.redistribute(placements=WHOLE)
        first = mode.get_total_counts()
        z = x.redistribute(placements=WHOLE)
        second = mode.get_total_counts()
    outside = x.redistribute(placements=WHOLE)
    return y + z + outside, first, second, mode.get_total_counts()


def given(x):
    with GIVEN:
        return x.redistribute(placements=WHOLE) + x.sum().redistribute(placements=WHOLE)


def returned(x):
    mode = CommDebugMode()
    with mode:
        y = (x @ x.t()).sum().full_tensor()
    return y, mode


def collectives(x):
    with CommDebugMode() as mode:
        t = x.to_local() * 2
        dist.all_reduce(t)
        gathered = torch.empty(2 * t.shape[0], 4)
        dist.all_gather_into_tensor(gathered, t)
        dist.broadcast(t, 0)
        u = funcol.all_reduce(t, "sum", dist.group.WORLD) * 1
    return t, gathered, u, mode.get_comm_counts()


def entered_twice(x):
    mode = CommDebugMode()
    with mode:
        y = x.redistribute(placements=WHOLE)
    first = mode.get_total_counts()
    with mode:
        z = y + 1
    return z, first, mode.get_total_counts()


def nested(x):
    with CommDebugMode() as outer:
        y = x.redistribute(placements=WHOLE)
        with CommDebugMode() as inner:
            z = x.redistribute(placements=WHOLE)
    return y + z, outer.get_total_counts(), inner.get_total_counts()


def backward_inside(x):
    w = x.detach().requires_grad_()
    with CommDebugMode() as mode:
        y = (w.redistribute(placements=WHOLE) ** 2).sum().to_local()
        y.backward()
    return y.detach(), w.grad, mode.get_total_counts()


def around_a_module(x):
    with CommDebugMode() as mode:
        y = nn.Tanh()(x.redistribute(placements=WHOLE))
    return y * 2 if mode.get_total_counts() == 1 else y * 3


PROGRAMS = [
    unread, read_after, read_inside, given, returned, collectives, entered_twice, nested, backward_inside,
    around_a_module,
]  # fmt: skip


def argument(rows):
    torch.manual_seed(1)
    return distribute_tensor(torch.randn(rows, 4), make_mesh((2,), ("tp",)), [Shard(0)]).detach()


def counted(value):
    """Modes and dicts of counts as dicts of text."""
    if isinstance(value, CommDebugMode):
        value = value.get_comm_counts()
    if isinstance(value, dict):
        return {str(key): count for key, count in value.items() if count}
    return tuple(map(counted, value)) if isinstance(value, tuple) else value


def calls(run):
    return [(counted(run(argument(rows))), counted(GIVEN)) for rows in (6, 6, 8)]


@pytest.mark.slow
@on_ranks(2)
def test_counts_equal_eagers():
    for program in PROGRAMS:
        counters.reset()
        compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
        assert not compare_values(program.__name__, calls(program), calls(compiled))
        assert counters.graphs() <= 2


@on_ranks(2)
def test_what_the_mode_does_not_know_here_breaks_the_graph():
    def table(x):
        with CommDebugMode() as mode:
            y = x.redistribute(placements=WHOLE)
        return y, mode.generate_comm_debug_tracing_table(noise_level=0)

    def counts_from_outside(x):
        return x.redistribute(placements=WHOLE), GIVEN.get_total_counts()

    for program in (table, counts_from_outside):
        counters.reset()
        compiled = torch.compile(program, backend="dtensor_aten")
        assert not compare_values("program", program(argument(6)), compiled(argument(6)))
        counters.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="comm-mode"):
            torch.compile(program, backend="dtensor_aten", fullgraph=True)(argument(6))
