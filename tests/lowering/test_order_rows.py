"""Gathered rows in the order of the collective: golden graph, nothing to gain, what is left alone, and numbers on real
ranks.
"""

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch._inductor.utils import run_and_get_code
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.graph.extra_copies import extra_copies, standalone_copies
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.lowering.order_rows import order_rows
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.recording.recorder import record, watch_graphs
from dtensor_compile.testing import graph_text, make_mesh, on_ranks, run_on_ranks

aten = torch.ops.aten
B, S, D, H = 2, 6, 4, 8


def gather(x, shape=(B, S, D)):
    return redistribute_op(x, "S(1)", "R", mesh_text(make_mesh((2,))), list(shape))


def scatter(x, shape=(B, S, D)):
    return redistribute_op(x, "P(sum)", "S(1)", mesh_text(make_mesh((2,))), list(shape))


def mlp(x, w1, w2, w3):
    rows = aten.view(gather(x), [B * S, D])
    hidden = aten.mul(aten.silu(aten.mm(rows, w1)), aten.mm(rows, w2))
    return scatter(aten.view(aten.mm(hidden, w3), [B, S, D]))


def weight_gradient(x, y):
    rows, others = (aten.view(gather(v), [B * S, D]) for v in (x, y))
    return aten.mm(aten.permute(rows, [1, 0]), others)


def heads(x, w):
    rows = aten.view(aten.mm(aten.view(gather(x), [B * S, D]), w), [B, S, 2, H // 2])
    return aten.exp(aten.permute(rows, [0, 2, 1, 3]))


def attention_output(x, w):
    rows = aten.view(aten.clone(aten.permute(x, [0, 2, 1, 3]), memory_format=torch.contiguous_format), [B * S, H])
    return scatter(aten.view(aten.mm(rows, w), [B, S, D]))


def gradients_of_projections(x, q, k, w1, w2):
    """Gradients of two projections of `x`, from those that an elementwise kernel writes: of the weights, and summed of
    `x`.
    """
    q, k = (aten.mul(v, 2) for v in (q, k))
    sent = aten.add(*(aten.view(aten.mm(v, w), [B, S, D]) for v, w in ((q, w1), (k, w2))))
    rows = aten.view(gather(x), [B * S, D])
    return scatter(sent), aten.mm(aten.permute(q, [1, 0]), rows), aten.mm(aten.permute(k, [1, 0]), rows)


def logits(x, w):
    value = aten.view(aten.mm(aten.view(gather(x), [B * S, D]), w), [B, S, H])
    return aten.exp(redistribute_op(value, "S(2)", "R", mesh_text(make_mesh((2,))), [B, S, 2 * H]))


def local(*shape):
    make_mesh((2,))  # process groups are not made while a program is traced
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 + dist.get_rank()) % 31 - 15).float().reshape(shape)


PROGRAMS = {
    "mlp": (mlp, [(B, S // 2, D), (D, H), (D, H), (H, D)]),
    "weight gradient": (weight_gradient, [(B, S // 2, D), (B, S // 2, D)]),
    "heads": (heads, [(B, S // 2, D), (D, H)]),
    "attention output": (attention_output, [(B, 2, S, H // 2), (H, D)]),
    "gradients of projections": (gradients_of_projections, [(B, S // 2, D), (B * S, H), (B * S, H), (H, D), (H, D)]),
    "logits": (logits, [(B, S // 2, D), (D, H)]),
}


def ordered(name):
    """Text of the graph afterwards; copies of their own in the lowered one, before and after."""
    function, shapes = PROGRAMS[name]
    args = [local(*shape) for shape in shapes]
    gm = make_fx(function, tracing_mode="fake")(*args)
    plain = make_fx(function, tracing_mode="fake")(*args)
    wanted = gm(*args)
    assert order_rows(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*args), wanted, rtol=0, atol=0)  # small integers: sums are exact in any order
    text = graph_text(gm.graph)
    counts = []
    for graph in (plain.graph, gm.graph):
        lower_redistributions(graph, strict=True)
        counts.append(extra_copies(graph))
    gm.recompile()
    torch.testing.assert_close(gm(*args), wanted, rtol=0, atol=0)
    return text, counts


class Golden(TestCase):
    maxDiff = None

    def test_permutations_meet_and_are_gone(self):
        (text, counts), other = run_on_ranks(2, ordered, "mlp")
        assert (text, counts) == other and counts == [2 * B * S * D * 4, 0]
        self.assertExpectedInline(
            text,
            """\
x_1: [2, 3, 4]
w1_1: [4, 8]
w2_1: [4, 8]
w3_1: [8, 4]
unsqueeze_default: [1, 2, 3, 4] = unsqueeze(x_1, 0)
redistribute_default: [2, 2, 3, 4] = redistribute(unsqueeze_default, S(0)->R)
view_default: [12, 4] = view(redistribute_default, [12, 4])
mm_default: [12, 8] = mm(view_default, w1_1)
silu_default: [12, 8] = silu(mm_default)
mm_default_1: [12, 8] = mm(view_default, w2_1)
mul_tensor: [12, 8] = mul(silu_default, mm_default_1)
mm_default_2: [12, 4] = mm(mul_tensor, w3_1)
view_default_1: [2, 2, 3, 4] = view(mm_default_2, [2, 2, 3, 4])
redistribute_default_1: [1, 2, 3, 4] = redistribute(view_default_1, P(sum)->S(0))
view_default_2: [2, 3, 4] = view(redistribute_default_1, [2, 3, 4])
return view_default_2
""",
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_values_without_copies_of_their_own(name):
    for _, (before, after) in run_on_ranks(2, ordered, name):
        assert after == 0 < before


def block_and_whole_logits(x, w1, w2, w3, w):
    """Activations of a block, and logits that are the result: a collective writes them chunk after chunk, whatever the
    rows' order.
    """
    value = aten.view(aten.mm(aten.view(gather(mlp(x, w1, w2, w3)), [B * S, D]), w), [B, S, 5 * H])
    return redistribute_op(value, "S(2)", "R", mesh_text(make_mesh((2,))), [B, S, 10 * H])


def copies_of_logits():
    args = [local(*shape) for shape in (*PROGRAMS["mlp"][1], (D, 5 * H))]
    plain, gm = (make_fx(block_and_whole_logits, tracing_mode="fake")(*args) for _ in range(2))
    wanted, counts = gm(*args), []
    assert order_rows(gm.graph)
    for module in (plain, gm):
        lower_redistributions(module.graph, strict=True)
        module.recompile()
        torch.testing.assert_close(module(*args), wanted, rtol=0, atol=0)
        counts.append(extra_copies(module.graph))
    return counts


def test_a_copy_of_the_result_hides_no_copies_of_activations():
    whole = B * S * 10 * H * 4
    assert run_on_ranks(2, copies_of_logits) == [[whole + 3 * B * S * D * 4, whole]] * 2


def copies_of_gradients():
    function, shapes = PROGRAMS["gradients of projections"]
    gm = make_fx(function, tracing_mode="fake")(*(local(*shape) for shape in shapes))
    assert order_rows(gm.graph)
    lower_redistributions(gm.graph, strict=True)
    return list(map(str, standalone_copies(gm.graph)))


def test_a_gradient_is_written_in_one_order_for_both_its_matmuls():
    assert run_on_ranks(2, copies_of_gradients) == [[], []]


def test_a_copy_of_what_is_in_memory_for_another_reader_is_one_of_its_own():
    def one_order(x, w):
        return aten.mm(aten.clone(aten.permute(aten.exp(x), [1, 0]), memory_format=torch.contiguous_format), w)

    def two_orders(x, w):
        y = aten.exp(x)
        return aten.mm(aten.clone(aten.permute(y, [1, 0]), memory_format=torch.contiguous_format), w), aten.mm(y, w)

    for function, copies in ((one_order, 0), (two_orders, 1)):
        gm = make_fx(function, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4))
        assert len(standalone_copies(gm.graph)) == copies, function


def untouched(function, *shapes):
    gm = make_fx(function, tracing_mode="fake")(*(local(*shape) for shape in shapes))
    before = graph_text(gm.graph)
    return [d.bytes for d in order_rows(gm.graph) if d.left_alone], graph_text(gm.graph) == before


def elementwise_reader(x):
    return aten.exp(gather(x))


def returned(x):
    return gather(x)


def one_sequence(x, w):
    return aten.mm(aten.view(gather(x, (1, S, D)), [S, D]), w)


def uneven(x, w):
    return aten.mm(aten.view(gather(x, (B, 5, D)), [B * 5, D]), w)


@on_ranks(2)
def test_nothing_to_gain_nothing_changes():
    assert untouched(elementwise_reader, (B, S // 2, D)) == ([], True)
    assert untouched(returned, (B, S // 2, D)) == ([], True)
    assert untouched(one_sequence, (1, S // 2, D), (D, H)) == ([], True)


@on_ranks(2)
def test_rows_that_are_cut_unevenly_are_left_alone_with_the_bytes_that_are_copied():
    assert untouched(uneven, (B, 3 - dist.get_rank(), D), (D, H)) == ([B * 5 * D * 4], True)


def block(x, w1, w2, w3):
    mesh = make_mesh((2,), ("tp",))
    x = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    w1, w2 = (DTensor.from_local(w, mesh, [Shard(0)]) for w in (w1, w2))
    w3 = DTensor.from_local(w3, mesh, [Shard(1)])
    hidden = torch.nn.functional.silu(x @ w1.t()) * (x @ w2.t())
    return (hidden @ w3.t()).redistribute(mesh, [Shard(1)]).to_local()


def step(options):
    torch.manual_seed(dist.get_rank())
    args = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(3, 4, 8), (6, 8), (6, 8), (8, 6)]
    ]
    lowered = []
    with watch_graphs(lambda stage, graph: lowered.append(graph) if stage == "lowered" else None):
        function = (
            block if options is None else torch.compile(block, backend="dtensor_aten", fullgraph=True, options=options)
        )
        out = function(*args)
        out.square().sum().backward()
    return (
        out.detach(),
        [a.grad for a in args],
        [sum(map(extra_copies, lowered)), sum(len(standalone_copies(g)) for g in lowered)],
    )


def steps():
    eager, plain, ours = (step(o) for o in (None, {"disable_passes": ("order_rows",)}, {"strict": True}))
    assert torch.equal(ours[0], plain[0])  # rows keep their values
    for mine, theirs in ((ours, plain), (ours, eager)):
        torch.testing.assert_close(mine[0], theirs[0])
        torch.testing.assert_close(mine[1], theirs[1])
    return plain[2], ours[2]


def test_forward_and_backward_of_a_sequence_parallel_block():
    for plain, ours in run_on_ranks(2, steps):
        assert plain[0] > 0 and ours == [0, 0], (plain, ours)


def block_beside_an_uneven_tensor(x, w1, w2, w3, other):
    mesh = make_mesh((2,), ("tp",))
    whole = DTensor.from_local(other, mesh, [Shard(0)], shape=(5, 3), stride=(3, 1)).redistribute(mesh, [Replicate()])
    return block(x, w1, w2, w3), whole.to_local().sin()


def beside_an_uneven_tensor():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    args = [torch.randn(shape, dtype=torch.float64) for shape in [(3, 4, 8), (6, 8), (6, 8), (8, 6), (3 - rank, 3)]]
    graphs = []
    with record() as recording, watch_graphs(lambda stage, graph: graphs.append(graph) if stage == "lowered" else None):
        out = torch.compile(block_beside_an_uneven_tensor, backend="dtensor_aten", options={"strict": True})(*args)
    torch.testing.assert_close(out, block_beside_an_uneven_tensor(*args))
    operators = [str(node.target) for graph in graphs for node in graph.nodes]
    return [d.kind for d in recording.decisions], [name for name in operators if "c10d" in name or "mm" in name]


def test_rows_of_equal_sizes_are_in_order_beside_a_tensor_that_is_cut_unevenly():
    first, second = run_on_ranks(2, beside_an_uneven_tensor)
    assert first[0].count("order_rows") == 2
    assert first == second


def kernels(options):
    """Kernels that Inductor writes for the forward of a block."""
    args = [torch.randn(shape) for shape in [(3, 4, 8), (6, 8), (6, 8), (8, 6)]]
    wanted = block(*args)
    out, codes = run_and_get_code(torch.compile(block, backend="dtensor", fullgraph=True, options=options), *args)
    torch.testing.assert_close(out, wanted)
    return sum(code.count("async_compile.cpp") for code in codes)


def kernels_of_both():
    """Without and with the pass; a reduce-scatter stays one, which has no kernel for its sum."""
    return kernels({"disable_passes": ("order_rows", "reduce_by_exchange")}), kernels(
        {"disable_passes": ("reduce_by_exchange",)}
    )


@pytest.mark.slow
def test_inductor_writes_no_kernel_for_a_copy():
    for plain, ours in run_on_ranks(2, kernels_of_both, timeout=280):
        assert (plain, ours) == (3, 1)  # two copies and silu(a) * b; that alone
