"""Products beside collectives in parts: golden graphs, what pays and what does not, numbers on real ranks."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from expecttest import TestCase
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import dtensor_compile
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.schedule.decompose import decompose_matmuls
from dtensor_compile.schedule.fuse_matmuls import fuse_matmuls
from dtensor_compile.testing import graph_text, make_mesh, on_ranks, run_on_ranks
from dtensor_compile.topology.links import Cluster, Device, Link
from tests.cases import mostly_slow

aten = torch.ops.aten
R, K, N = 8, 4, 6

#: Hosts of one rank: a matmul of a part takes as long as the part on the link, and copies take nothing.
SLOW = Cluster("slow", 1, Link(6e-2, 1e3), Link(6e-2, 1e3), Device(((4, 3e3),), 1e9, 1e-6), backend="gloo")
#: Starting takes longer than sending.
LATENT = dataclasses.replace(SLOW, between=Link(1.0, 1e9))
#: Copies take longer than sending.
COPYING = dataclasses.replace(SLOW, device=Device(((4, 3e6),), 1e5, 1e-9))


def gathered(x, w):
    return aten.mm(redistribute_op(x, "S(0)", "R", mesh_text(make_mesh((2,))), [2 * R, K]), w)


def reduced(h, w):
    return redistribute_op(aten.mm(h, w), "P(sum)", "S(0)", mesh_text(make_mesh((2,))), [2 * R, N])


def gathered_for_several(x, w, v):
    g = redistribute_op(aten.view(x, [R // 2, 2, K]), "S(0)", "R", mesh_text(make_mesh((2,))), [R, 2, K])
    rows = aten.view(g, [2 * R, K])
    return aten.mm(rows, w), aten.mm(rows, v), aten.sum(g)


def block(x, w, v):
    return reduced(aten.relu(gathered(x, w)), v)


def gathered_for_its_own_factor(x, w):
    g = redistribute_op(x, "S(0)", "R", mesh_text(make_mesh((2,))), [2 * R, K])
    return aten.mm(g, aten.mul(w, aten.sum(g)))


#: Its matmul cannot be part of the operator that gathers.
LATE = {"late": (gathered_for_its_own_factor, [(R, K), (K, N)])}

PROGRAMS = {
    "gathered": (gathered, [(R, K), (K, N)]),
    "reduced": (reduced, [(2 * R, K), (K, N)]),
    "gathered for several": (gathered_for_several, [(R, K), (K, N), (K, N)]),
    "block": (block, [(R, K), (K, N), (N, N)]),
}


def numbers(*shape):
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 + dist.get_rank()) % 31 - 15).float().reshape(shape)


def divided(name, cluster=SLOW):
    """The graph afterwards, decisions, whether its values are those before to the bit (small integers)."""
    make_mesh((2,))
    function, shapes = PROGRAMS[name]
    args = [numbers(*shape) for shape in shapes]
    gm = make_fx(function, tracing_mode="fake")(*args)
    lower_redistributions(gm.graph, strict=True)
    gm.recompile()
    wanted = gm(*args)
    decisions = decompose_matmuls(gm.graph, cluster, float("inf"))
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*args), wanted, rtol=0, atol=0)
    return graph_text(gm.graph), [(d.before, d.after, d.reason) for d in decisions]


class Golden(TestCase):
    maxDiff = None

    def test_a_matmul_of_what_is_gathered(self):
        (text, decisions), other = run_on_ranks(2, divided, "gathered")
        assert (text, decisions) == other
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 4]
w_1: [4, 6]
view_default: [8, 4] = view(x_1, [8, 4])
slice_tensor: [4, 4] = slice(view_default, 0, 0, 4)
slice_tensor_1: [4, 4] = slice(view_default, 0, 4, 8)
all_gather_into_tensor_default: [8, 4] = all_gather_into_tensor(slice_tensor, 2)
all_gather_into_tensor_default_1: [8, 4] = all_gather_into_tensor(slice_tensor_1, 2)
wait_tensor_default: [8, 4] = wait_tensor(all_gather_into_tensor_default)
wait_tensor_default_1: [8, 4] = wait_tensor(all_gather_into_tensor_default_1)
mm_default: [8, 6] = mm(wait_tensor_default, w_1)
mm_default_1: [8, 6] = mm(wait_tensor_default_1, w_1)
view_default_1: [2, 4, 6] = view(mm_default, [2, 4, 6])
view_default_2: [2, 4, 6] = view(mm_default_1, [2, 4, 6])
cat_default: [2, 8, 6] = cat([view_default_1, view_default_2], 1)
view_default_3: [16, 6] = view(cat_default, [16, 6])
return view_default_3
""",
        )
        reason = "188.00 of 188.00 ms exposed become 124.00, copies and launches take 0.16"
        assert decisions == [("all_gather and 1 mm", "2 parts", reason)]

    def test_a_matmul_that_is_reduced(self):
        (text, decisions), other = run_on_ranks(2, divided, "reduced")
        assert (text, decisions) == other
        self.assertExpectedInline(
            text,
            """\
h_1: [16, 4]
w_1: [4, 6]
reshape_default: [2, 2, 4, 4] = reshape(h_1, [2, 2, 4, 4])
select_int: [2, 4, 4] = select(reshape_default, 1, 0)
clone_default: [2, 4, 4] = clone(select_int, memory_format=torch.contiguous_format)
view_default: [8, 4] = view(clone_default, [8, 4])
mm_default: [8, 6] = mm(view_default, w_1)
select_int_1: [2, 4, 4] = select(reshape_default, 1, 1)
clone_default_1: [2, 4, 4] = clone(select_int_1, memory_format=torch.contiguous_format)
view_default_1: [8, 4] = view(clone_default_1, [8, 4])
mm_default_1: [8, 6] = mm(view_default_1, w_1)
reduce_scatter_tensor_default: [4, 6] = reduce_scatter_tensor(mm_default, sum, 2)
reduce_scatter_tensor_default_1: [4, 6] = reduce_scatter_tensor(mm_default_1, sum, 2)
wait_tensor_default: [4, 6] = wait_tensor(reduce_scatter_tensor_default)
wait_tensor_default_1: [4, 6] = wait_tensor(reduce_scatter_tensor_default_1)
cat_default: [8, 6] = cat([wait_tensor_default, wait_tensor_default_1])
view_default_2: [8, 6] = view(cat_default, [8, 6])
return view_default_2
""",
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_values(name):
    for _, decisions in run_on_ranks(2, divided, name):
        assert decisions and all(after.endswith("parts") for _, after, _ in decisions)


@pytest.mark.parametrize("cluster, why", [(LATENT, "would be in 2 parts"), (COPYING, "with the copies that takes")])
def test_what_does_not_pay_stays_whole(cluster, why):
    for name in PROGRAMS:
        for text, decisions in run_on_ranks(2, divided, name, cluster):
            assert "cat(" not in text and all(before == after and why in reason for before, after, reason in decisions)


def test_a_collective_more_costs_the_host_time_too():
    """A thousand times as fast: 0.06 ms would be hidden, and gloo takes 0.16 ms of the host for one collective."""
    fast = dataclasses.replace(SLOW, between=Link(6e-5, 1e6), device=Device(((4, 3e6),), 1e12, 1e-9))
    for backend, parts in (("gloo", "all_gather and 1 mm"), ("", "2 parts")):
        ((_, after, _),) = run_on_ranks(2, divided, "gathered", dataclasses.replace(fast, backend=backend))[0][1]
        assert after == parts


def hidden():
    """A gather that is not needed until a long matmul has run."""
    make_mesh((2,))

    def program(x, w, a):
        g = redistribute_op(x, "S(0)", "R", mesh_text(make_mesh((2,))), [2 * R, K])
        return aten.mm(aten.mm(a, aten.mm(a, a)), aten.mm(g, w))

    gm = make_fx(program, tracing_mode="fake")(numbers(R, K), numbers(K, N), numbers(16, 16))
    lower_redistributions(gm.graph, strict=True)
    return [(d.after, d.reason) for d in decompose_matmuls(gm.graph, SLOW, float("inf"))]


def test_what_is_hidden_already_stays_whole():
    assert run_on_ranks(2, hidden) == [[("all_gather and 1 mm", "nothing of it is exposed")]] * 2


# ---- compiled ------------------------------------------------------------------------------------------------------


def step(kernels, rows, kind="decompose_matmuls"):
    """A sequence-parallel block compiled for a slow network, forward and backward, twice; against eager."""
    n = dist.get_world_size()
    mesh, gen = make_mesh((n,), ("tp",)), torch.Generator().manual_seed(0)
    shapes = (rows, 8), (8, 4 * n), (4 * n, 8)
    values = [torch.randint(-2, 3, shape, generator=gen).float() for shape in shapes]  # sums are exact in any order

    def program(x, up, down):
        hidden = torch.relu(x.redistribute(placements=[Replicate()]) @ up)
        return (hidden @ down).redistribute(placements=[Shard(0)])

    def run(function):
        placements = [Shard(0)], [Shard(1)], [Shard(0)]
        args = [distribute_tensor(v, mesh, p).requires_grad_() for v, p in zip(values, placements)]
        for _ in range(2):
            out = function(*args)
            out.to_local().square().sum().backward()
        return [out.full_tensor().detach(), *(a.grad.full_tensor() for a in args)]

    torch._dynamo.reset()
    options = {"topology": SLOW, "enable_passes": ["decompose_matmuls"], "kernels": kernels, "strict": True}
    with dtensor_compile.record() as recording:
        ours = run(torch.compile(program, backend="dtensor", fullgraph=True, options=options))
    for a, b in zip(ours, run(program)):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return [d.after for d in recording.decisions if d.kind == kind and d.before != d.after]


@pytest.mark.parametrize(
    "kernels, ranks", mostly_slow([("aten", 2), ("aten", 3), ("inductor", 2)], ("aten", 2), ("aten", 3))
)
def test_numbers(kernels, ranks):
    found = run_on_ranks(ranks, step, kernels, 8 * ranks)
    assert all(other == found[0] for other in found) and len(found[0]) >= 2


@on_ranks(2)
def test_uneven_shards_are_left_alone():
    assert step("aten", 15) == []


# ---- symmetric memory ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def symmetric_memory():
    """Every group counts as one with symmetric memory, whose operators are torch's own references for them, on a CPU
    too.
    """
    ours = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        ours.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
    try:
        with symmetric._test_mode():
            yield
    finally:
        ours._destroy()


def fused(kernels):
    with symmetric_memory():
        return step(kernels, 16, "fuse_matmuls")


@pytest.mark.parametrize("kernels", ["aten", "inductor"])
def test_symmetric_memory_makes_one_operator_of_both(kernels):
    found = run_on_ranks(2, fused, kernels)
    assert found[0] == found[1] and {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"} <= {*found[0]}


def fused_graph(name):
    make_mesh((2,))
    function, shapes = (PROGRAMS | LATE)[name]
    args = [numbers(*shape) for shape in shapes]
    with symmetric_memory():
        gm = make_fx(function, tracing_mode="fake")(*args)
        lower_redistributions(gm.graph, strict=True)
        gm.recompile()
        wanted = gm(*args)
        decided = [d.after for d in decompose_matmuls(gm.graph, SLOW, float("inf"))]
        decided += [d.after for d in fuse_matmuls(gm.graph)]
        gm.graph.lint()
        gm.recompile()
        torch.testing.assert_close(gm(*args), wanted, rtol=0, atol=0)
    return graph_text(gm.graph), decided


class GoldenSymmetric(TestCase):
    maxDiff = None

    def test_several_matmuls_and_another_reader(self):
        (text, decided), other = run_on_ranks(2, fused_graph, "gathered for several")
        assert (text, decided) == other and decided == ["one operator", "fused_all_gather_matmul"]
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 4]
w_1: [4, 6]
v_1: [4, 6]
view: [4, 2, 4] = view(x_1, [4, 2, 4])
view_default: [8, 4] = view(view, [8, 4])
fused_all_gather_matmul_default: tuple = fused_all_gather_matmul(view_default, [w_1, v_1], 0, 0, return_A=True)
getitem: list = getitem(fused_all_gather_matmul_default, 1)
getitem_1: [16, 6] = getitem(getitem, 0)
getitem_2: [16, 6] = getitem(getitem, 1)
getitem_3: [16, 4] = getitem(fused_all_gather_matmul_default, 0)
view_default_1: [8, 2, 4] = view(getitem_3, [8, 2, 4])
sum_1: [] = sum(view_default_1)
return [getitem_1, getitem_2, sum_1]
""",
        )

    def test_block(self):
        (text, decided), other = run_on_ranks(2, fused_graph, "block")
        assert (text, decided) == other and decided == ["one operator"] * 2 + [
            "fused_all_gather_matmul",
            "fused_matmul_reduce_scatter",
        ]
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 4]
w_1: [4, 6]
v_1: [6, 6]
view_default: [8, 4] = view(x_1, [8, 4])
fused_all_gather_matmul_default: tuple = fused_all_gather_matmul(view_default, [w_1], 0, 0, return_A=False)
getitem: list = getitem(fused_all_gather_matmul_default, 1)
getitem_1: [16, 6] = getitem(getitem, 0)
relu: [16, 6] = relu(getitem_1)
fused_matmul_reduce_scatter_default: [8, 6] = fused_matmul_reduce_scatter(relu, v_1, sum, 0, 0)
view_default_1: [8, 6] = view(fused_matmul_reduce_scatter_default, [8, 6])
return view_default_1
""",
        )


def test_a_matmul_whose_other_factor_needs_the_gather_is_not_fused():
    for text, decided in run_on_ranks(2, fused_graph, "late"):
        assert decided == ["one operator", "all_gather and 1 mm"] and "= mm(" in text and "fused" not in text


def test_without_symmetric_memory_nothing_is_fused():
    assert run_on_ranks(2, step, "aten", 16, "fuse_matmuls") == [[], []]
