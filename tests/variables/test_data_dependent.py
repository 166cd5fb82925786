"""Data-dependent numbers are part of the graph; if the value of one is needed, there is one break and eager's
result.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.testing import assert_parity, make_mesh, on_ranks
from tests.cases import mostly_slow


def sharded(rows=6, requires_grad=False):
    mesh = make_mesh((dist.get_world_size(),), ("tp",))
    values = torch.linspace(-1, 2, rows * 4).view(rows, 4)
    return distribute_tensor(values, mesh, [Shard(0)]).requires_grad_(requires_grad)


def clipped(x):
    norm = x.norm().item()
    return x * min(1.0, 1.0 / (norm + 1e-6))


def of_a_partial(x):
    return x * DTensor.from_local(x.to_local().sum(), x.device_mesh, [Partial()]).item()


ONE_GRAPH = {
    "item of a sum": lambda x: x * x.sum().item(),
    "item of an integer": lambda x: x * x.long().max().item(),
    "float of a tensor": lambda x: x + float(x.mean()),
    "bool of a tensor": lambda x: (x * 2, bool((x > -5).all())),
    "several numbers returned": lambda x: {"loss": (x * x).sum(), "mean": x.mean().item(), "all": [x.max().item()]},
    "math of a number": lambda x: x * math.sqrt(x.pow(2).sum().item()),
    "a number in a text": lambda x: (x * 2, f"{x.sum().item():.3f}"),
    "a clipped norm": clipped,
    "item of a partial": of_a_partial,
    "a list of integers": lambda x: (x * 2, x.sum(0).full_tensor().long().tolist()),
    "rows that fit": lambda x: x.to_local()[x.to_local().sum(1) > 0].sum(0),
    "equal": lambda x: (x * 2, torch.equal(x, x + 0), torch.equal(x, x + 1), torch.equal(x, x.sum(0))),
}


@pytest.mark.parametrize("name", ONE_GRAPH)
@on_ranks(2)
def test_one_graph(name):
    assert_parity(ONE_GRAPH[name], [sharded(requires_grad=True)], backend="dtensor_aten", fullgraph=True)


@on_ranks(2)
def test_values_that_differ_from_call_to_call_do_not_recompile():
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda x: x * x.sum().item(), backend="dtensor_aten", fullgraph=True)
    x = sharded()
    for factor in (1, 2, -3, 0):
        y = x * factor
        torch.testing.assert_close(compiled(y).to_local(), (y * y.sum().item()).to_local())
    assert counters["stats"]["unique_graphs"] == 1


def known_by_a_loop(x):
    for _ in range(int(x.sum().item()) % 3):
        x = x + 1
    return x


def known_by_a_list(x):
    return x * [1.0, 2.0, 3.0][int(x.sum().item()) % 3]


def known_by_a_branch(x):
    return x * 2 if x.sum() > 0 else x * 3


@pytest.mark.parametrize("program", [known_by_a_loop, known_by_a_list, known_by_a_branch])
@on_ranks(2)
def test_a_number_that_has_to_be_known_ends_the_graph_once(program):
    torch._dynamo.reset()
    counters.clear()
    x = sharded()
    compiled = torch.compile(program, backend="dtensor_aten")
    for factor in (1, 5, -2):
        torch.testing.assert_close(compiled(x * factor).to_local(), program(x * factor).to_local())
    assert sum(counters["graph_break"].values()) <= 1


def written_in_a_list(found, inf):
    torch._amp_foreach_non_finite_check_and_unscale_([inf], found, torch.ones(()))


def written_by_a_foreach(found, inf):
    torch._foreach_add_([inf, found], 1.0)


def written_through_a_view(found, inf):
    found.expand(1, 1).diagonal().fill_(1.0)


def written_as_out(found, inf):
    torch.sum(inf, dim=(), out=found)


def written_as_an_argument_in_place(found, inf):
    torch.nn.functional.threshold(found, 0.5, 1.0, inplace=True)


WRITES = [
    written_in_a_list, written_by_a_foreach, written_through_a_view, written_as_out, written_as_an_argument_in_place
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@on_ranks(2)
def test_a_constant_that_is_written_to_is_a_number_of_the_data(write):
    """As the flag of a `GradScaler`, which says whether gradients are finite: a step was made in any case."""

    def program(x):
        found = torch.full((), 0.0)
        write(found, torch.full((2,), float("inf")))
        return x + 1 if not found.item() else x + 2

    torch._dynamo.reset()
    x = sharded()
    torch.testing.assert_close(torch.compile(program, backend="dtensor_aten")(x).to_local(), (x + 2).to_local())


@on_ranks(2)
def test_the_switches_of_torch_are_as_before():
    from torch._dynamo import config

    seen = []

    def other(gm, inputs):
        seen.append((config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops))
        return gm.forward

    before = config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops
    torch.compile(lambda x: x * x.sum().item(), backend="dtensor_aten")(sharded())
    torch.compile(lambda x: x + 1, backend=other)(torch.ones(2))
    assert seen == [before]
    assert (config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops) == before


@on_ranks(2)
def test_replicated_values_stay_replicated():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    assert_parity(lambda x: x + x.mean().item(), [x], backend="dtensor_aten", fullgraph=True)


def sizes_of_all(x):
    size = torch.tensor([x.shape[0]])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    return x * int(torch.stack(sizes).max().item())


@on_ranks(2)
def test_what_ranks_tell_each_other_is_no_constant_though_each_tells_a_constant():
    torch._dynamo.reset()
    compiled = torch.compile(sizes_of_all, backend="dtensor_aten", fullgraph=True, dynamic=False)
    for rows in (2, 3):  # rank 1 is compiled again, alone
        x = torch.ones(2 if dist.get_rank() == 0 else rows, 4)
        torch.testing.assert_close(compiled(x), x * rows)


# ---- sizes ---------------------------------------------------------------------------------------------------------


def rows_of(count, x, mesh, placements):
    """A tensor of as many rows as `count` says, which depends on `x`, under these placements."""
    rows = int((count + 0).item())  # of an input itself Dynamo guards the number
    torch._check(rows >= 0)
    whole = DTensor.from_local(x.new_ones(rows, 8) * x.sum(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements)


ONE_DIM = {
    "replicated, cut": lambda count, x, w, mesh: rows_of(count, x, mesh, [Shard(0)]),
    "multiplied": lambda count, x, w, mesh: rows_of(count, x, mesh, [Replicate()]) @ w,
    "cut and multiplied": lambda count, x, w, mesh: rows_of(count, x, mesh, [Shard(0)]) @ w,
    "gathered": lambda count, x, w, mesh: (
        (rows_of(count, x, mesh, [Shard(0)]) @ w).redistribute(placements=[Replicate()])
    ),
    "summed and cut": lambda count, x, w, mesh: (
        rows_of(count, x, mesh, [Shard(1)]) @ w.redistribute(placements=[Shard(0)])
    ).redistribute(placements=[Shard(0)]),
    "exchanged": lambda count, x, w, mesh: rows_of(count, x, mesh, [Shard(0)]).redistribute(placements=[Shard(1)]) * 2,
}  # fmt: skip


def check_sizes(program, mesh, kernels="aten"):
    """One graph for rows that divide and that do not, one and none, against eager, backward too.

    Whole tensors are compared: eager does not keep rows cut that are fewer than ranks where it multiplies.
    """
    torch._dynamo.reset()
    counters.clear()

    def step(count, x, w):
        return program(count, x, w, mesh).full_tensor()

    compiled = torch.compile(step, backend="dtensor", options={"kernels": kernels}, fullgraph=True)
    for rows in (7, 8, 1, 0):
        results = []
        for run in (compiled, step):
            x = torch.linspace(-1, 2, 8).requires_grad_()
            w = distribute_tensor(
                torch.linspace(-1, 1, 64).view(8, 8), mesh, [Replicate()] * mesh.ndim
            ).requires_grad_()
            out = run(torch.tensor(rows), x, w)
            out.square().sum().backward()
            results.append((out, x.grad, None if w.grad is None else w.grad.full_tensor()))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", mostly_slow(ONE_DIM, "gathered", "exchanged", "replicated, cut"))
@on_ranks(2)
def test_a_size_that_only_the_data_decides(name):
    check_sizes(ONE_DIM[name], make_mesh((2,), ("tp",)))


@pytest.mark.slow
@on_ranks(2)
def test_a_size_that_only_the_data_decides_in_kernels_of_inductor():
    check_sizes(ONE_DIM["cut and multiplied"], make_mesh((2,), ("tp",)), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [
    ([Replicate(), Replicate()], [Shard(0), Shard(0)]),
    ([Shard(0), Shard(0)], [Shard(0), Replicate()]),
    ([Shard(0), Shard(0)], [Shard(1), Shard(0)]),
    ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
])  # fmt: skip
@on_ranks(4)
def test_shards_of_shards_of_a_size_that_only_the_data_decides(before, after):
    mesh = make_mesh((2, 2), ("dp", "tp"))
    check_sizes(lambda count, x, w, mesh: rows_of(count, x, mesh, before).redistribute(placements=after) * 2, mesh)
