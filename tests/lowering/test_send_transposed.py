"""Columns that are sent as rows of the transpose: golden graphs, what is left alone, and numbers on real ranks."""

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.fixups.view_again import view_again
from dtensor_compile.graph.extra_copies import extra_copies
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.lowering.send_transposed import send_transposed
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.recording.recorder import record, watch_graphs
from dtensor_compile.testing import graph_text, make_mesh, run_on_ranks

aten = torch.ops.aten
ROWS, OUT, IN = 5, 3, 8


def redistribute(x, source, target, shape):
    return redistribute_op(x, source, target, mesh_text(make_mesh((dist.get_world_size(),))), list(shape))


def linear(x, w):
    return aten.mm(x, aten.t(aten.view(redistribute(w, "S(1)", "R", (OUT, IN)), [OUT, IN])))


def weight_gradient(x, y):
    return redistribute(aten.mm(aten.t(y), x), "P(sum)", "S(1)", (OUT, IN))


def transposed_weight_gradient(x, y):
    return redistribute(aten.t(aten.mm(aten.t(x), y)), "P(sum)", "S(1)", (OUT, IN))


def local(*shape):
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 + dist.get_rank()) % 31 - 15).float().reshape(shape)


PROGRAMS = {
    "linear": (linear, [(ROWS, IN), (OUT, "part")]),
    "weight gradient": (weight_gradient, [(ROWS, IN), (ROWS, OUT)]),
    "transposed weight gradient": (transposed_weight_gradient, [(ROWS, IN), (ROWS, OUT)]),
}


def traced(function, shapes):
    make_mesh((dist.get_world_size(),))  # process groups are not made while a program is traced
    args = [local(*(IN // dist.get_world_size() if size == "part" else size for size in shape)) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*args), args


def sent(name):
    """Text of the graph afterwards, and bytes of copies in the lowered one, before and after; the values and strides
    stay.
    """
    function, shapes = PROGRAMS[name]
    gm, args = traced(function, shapes)
    plain, _ = traced(function, shapes)
    wanted = gm(*args)
    assert send_transposed(gm.graph)
    view_again(gm.graph)
    gm.graph.lint()
    gm.recompile()
    out, text = gm(*args), graph_text(gm.graph)
    assert torch.equal(out, wanted) and out.stride() == wanted.stride()  # small integers: sums are exact
    copies = []
    for graph in (plain.graph, gm.graph):
        lower_redistributions(graph, strict=True)
        copies.append(extra_copies(graph))
    gm.recompile()
    assert torch.equal(gm(*args), wanted)
    return text, copies


class Golden(TestCase):
    maxDiff = None

    def test_gather_is_read_by_a_matmul(self):
        text, copies = run_on_ranks(2, sent, "linear")[0]
        assert copies == [OUT * IN * 4, OUT * IN * 4 // 2]
        self.assertExpectedInline(text, """\
x_1: [5, 8]
w_1: [3, 4]
permute_default: [4, 3] = permute(w_1, [1, 0])
redistribute_default: [8, 3] = redistribute(permute_default, S(0)->R)
permute_default_1: [3, 8] = permute(redistribute_default, [1, 0])
view: [3, 8] = view(permute_default_1, [3, 8])
t: [8, 3] = t(view)
mm: [5, 3] = mm(x_1, t)
return mm
""")  # fmt: skip

    def test_matmul_is_scattered(self):
        text, copies = run_on_ranks(2, sent, "weight gradient")[0]
        assert copies == [OUT * IN * 4, OUT * IN * 4 // 2]
        self.assertExpectedInline(text, """\
x_1: [5, 8]
y_1: [5, 3]
t: [3, 5] = t(y_1)
permute_default: [5, 3] = permute(t, [1, 0])
permute_default_1: [8, 5] = permute(x_1, [1, 0])
mm_default: [8, 3] = mm(permute_default_1, permute_default)
redistribute_default: [4, 3] = redistribute(mm_default, P(sum)->S(0))
permute_default_2: [3, 4] = permute(redistribute_default, [1, 0])
clone_default: [3, 4] = clone(permute_default_2, memory_format=torch.contiguous_format)
return clone_default
""")  # fmt: skip

    def test_matmul_is_the_transpose_already(self):
        text, copies = run_on_ranks(2, sent, "transposed weight gradient")[0]
        assert copies == [OUT * IN * 4, OUT * IN * 4 // 2]
        self.assertExpectedInline(text, """\
x_1: [5, 8]
y_1: [5, 3]
t: [8, 5] = t(x_1)
mm: [8, 3] = mm(t, y_1)
redistribute_default: [4, 3] = redistribute(mm, P(sum)->S(0))
permute_default: [3, 4] = permute(redistribute_default, [1, 0])
clone_default: [3, 4] = clone(permute_default, memory_format=torch.contiguous_format)
return clone_default
""")  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_values_on_four_ranks(name):
    for _, (before, after) in run_on_ranks(4, sent, name):
        assert after * 4 == before


def untouched(function, *shapes):
    gm, _ = traced(function, shapes)
    before = graph_text(gm.graph)
    return [d.bytes for d in send_transposed(gm.graph) if d.left_alone], graph_text(gm.graph) == before


def read_by_more(x, w):
    w = redistribute(w, "S(1)", "R", (OUT, IN))
    return aten.mm(x, aten.t(w)), aten.exp(w)


def returned(w):
    return aten.t(redistribute(w, "S(1)", "R", (OUT, IN)))


def rows(x, w):
    return aten.mm(x, redistribute(w, "S(0)", "R", (IN, OUT)))


def uneven(x, w):
    return aten.mm(x, aten.t(redistribute(w, "S(1)", "R", (OUT, 7))))


def matmul_read_twice(x, y):
    matmul = aten.mm(aten.t(y), x)
    return redistribute(matmul, "P(sum)", "S(1)", (OUT, IN)), aten.exp(matmul)


def left_alone():
    return [
        untouched(read_by_more, (ROWS, IN), (OUT, "part")),
        untouched(returned, (OUT, "part")),
        untouched(rows, (ROWS, IN), ("part", OUT)),
        untouched(uneven, (ROWS, 7), (OUT, 4 - dist.get_rank())),
        untouched(matmul_read_twice, (ROWS, IN), (ROWS, OUT)),
    ]


def test_what_is_left_alone():
    uneven_columns = [OUT * 7 * 4]
    assert run_on_ranks(2, left_alone) == [[([], True), ([], True), ([], True), (uneven_columns, True), ([], True)]] * 2


def block(x, w1, w2):
    """Weights in shards of columns over `dp`, whole while they are used, split by rows over `tp`."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    for w in (w1, w2):
        w = DTensor.from_local(w, mesh, [Shard(1), Shard(0)]).redistribute(mesh, [Replicate(), Shard(0)])
        w = w.to_local(grad_placements=[Partial(), Shard(0)])
        x = torch.nn.functional.silu(x @ w.t())
    return x


def block_beside_an_uneven_tensor(x, w1, w2, other):
    mesh = make_mesh((2, 2), ("dp", "tp"))
    other = DTensor.from_local(other, mesh, [Replicate(), Shard(0)], shape=(5, 3), stride=(3, 1))
    return block(x, w1, w2), other.redistribute(mesh, [Replicate(), Replicate()]).to_local().sin()


def beside_an_uneven_tensor():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(dist.get_rank())
    args = [
        torch.randn(shape, dtype=torch.float64)
        for shape in [(5, 8), (6, 4), (4, 3), (3 - mesh.get_local_rank("tp"), 3)]
    ]
    torch._dynamo.reset()
    with record() as recording:
        out = torch.compile(block_beside_an_uneven_tensor, backend="dtensor_aten", options={"strict": True})(*args)
    torch.testing.assert_close(out, block_beside_an_uneven_tensor(*args))
    return [str(d) for d in recording.decisions if d.kind != "schedule"]  # what hides depends on the sizes of a rank


def test_even_columns_are_sent_transposed_beside_a_tensor_that_is_cut_unevenly():
    first, *others = run_on_ranks(4, beside_an_uneven_tensor)
    assert sum(text.startswith("[send_transposed]") for text in first) == 2
    assert all(other == first for other in others)


def step(options):
    torch.manual_seed(dist.get_rank())
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(5, 8), (6, 4), (4, 3)]]
    lowered = []
    with watch_graphs(lambda stage, graph: lowered.append(graph) if stage == "lowered" else None):
        backend, others = ("dtensor", {}) if options is None else ("dtensor_aten", options)
        function = block if options == {} else torch.compile(block, backend=backend, fullgraph=True, options=others)
        for _ in range(2):
            out = function(*args)
            out.square().sum().backward()
    return [out.detach(), *(a.grad for a in args)], [a.grad.stride() for a in args], sum(map(extra_copies, lowered))


def steps():
    alone = "bucket_collectives"  # what is packed for one message is copied for that
    options = {}, {"disable_passes": ("send_transposed", alone)}, {"strict": True, "disable_passes": (alone,)}, None
    eager, plain, ours, kernels = map(step, options)
    for this in (plain, ours, kernels):
        torch.testing.assert_close(this[0], eager[0])
        assert this[1] == eager[1]
    return plain[2], ours[2]


@pytest.mark.slow
def test_forward_and_backward_with_sharded_columns():
    for plain, ours in run_on_ranks(4, steps, timeout=280):
        assert (
            0 < ours == plain // 4
        )  # half of what is gathered; gradients are written by the kernel that adds what was exchanged
