"""Copies that nobody can tell from their original: golden graph, what stays, and numbers and addresses on real
ranks.
"""

import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.fixups.view_again import view_again
from dtensor_compile.graph.extra_copies import extra_copies
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.lowering.drop_copies import drop_copies
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.recording.recorder import watch_graphs
from dtensor_compile.testing import make_mesh, run_on_ranks
from tests.lowering.graphs import text_after

aten = torch.ops.aten


def gather(x, source="S(0)"):
    return redistribute_op(x, source, "R", mesh_text(make_mesh((2,))), [3, 4])


def after(function, size=None):
    """On a shard of `size` rows, or of two rows or one."""
    make_mesh((2,))  # process groups are not made while a program is traced
    return text_after(drop_copies, function, torch.arange(4.0 * (size or 2 - dist.get_rank())).reshape(-1, 4))


def read_twice(x):
    y = gather(x)
    return aten.sin(y), aten.cos(aten.view(aten.clone(y), [12]))


class Golden(TestCase):
    def test_a_copy_between_operators_goes_away_with_uneven_shards_too(self):
        texts = run_on_ranks(2, after, read_twice)
        assert [text.count("clone") for text in texts] == [0, 0]
        self.assertExpectedInline(texts[0], """\
x_1: [2, 4]
redistribute: [3, 4] = redistribute(x_1, S(0)->R)
sin: [3, 4] = sin(redistribute)
view: [12] = view(redistribute, [12])
cos: [12] = cos(view)
return [sin, cos]
""")  # fmt: skip


def of_an_input(x):
    return aten.cos(aten.clone(x))  # the program may write to x before its backward reads the copy


def of_what_was_not_sent(x):
    return aten.cos(aten.clone(redistribute_op(x, "R", "P(sum)", mesh_text(make_mesh((2,))), [3, 4])))


def both_returned(x):
    y = gather(x)
    return y, aten.view(aten.clone(y), [12])


def written_to(x):
    y = gather(x)
    z = aten.clone(y)
    return aten.add(aten.mul_(aten.view(z, [12]), 2), aten.view(y, [12]))


def original_written_to(x):
    y = gather(x)
    z = aten.clone(y)
    return aten.add(aten.mul_(y, 2), z)


def other_strides(x):
    y = redistribute_op(x, "S(0)", "R", mesh_text(make_mesh((2,))), [4, 3, 2, 2])
    return aten.cos(aten.clone(y, memory_format=torch.channels_last))


def kept():
    found = [
        function.__name__ for function in (both_returned, written_to, original_written_to) if "clone" in after(function)
    ]
    found += [
        function.__name__ for function in (of_an_input, of_what_was_not_sent) if "clone" in after(function, size=3)
    ]
    gm = make_fx(other_strides, tracing_mode="fake")(torch.ones(2, 3, 2, 2))
    return found + ["other_strides"] * (drop_copies(gm.graph) == [])


def test_what_somebody_can_tell_from_its_original_stays():
    names = [
        "both_returned",
        "written_to",
        "original_written_to",
        "of_an_input",
        "of_what_was_not_sent",
        "other_strides",
    ]
    assert run_on_ranks(2, kept) == [names] * 2


def memories():
    """Which memory fake values name for a gathered tensor and views of it, after a copy has gone, and after views were
    made again.
    """

    def function(x):
        left, _ = aten.split(aten.permute(aten.view(aten.clone(gather(x)), [12, 1]), [1, 0]), 6, 1)
        return aten.cos(left)

    make_mesh((2,))
    gm = make_fx(function, tracing_mode="fake")(torch.ones(2 - dist.get_rank(), 4))
    assert drop_copies(gm.graph)
    places = []
    for _ in range(2):
        views = [node for node in gm.graph.nodes if node.name in ("redistribute", "view", "permute", "getitem")]
        places.append(len({node.meta["val"].untyped_storage()._cdata for node in views}))
        view_again(gm.graph)
    return places


def test_views_say_whose_memory_they_are():
    assert run_on_ranks(2, memories) == [[2, 1]] * 2


def projections(x, w1, w2):
    mesh = make_mesh((2,), ("tp",))
    x = DTensor.from_local(x, mesh, [Shard(1)])
    w1, w2 = (DTensor.from_local(w, mesh, [Shard(1)]) for w in (w1, w2))
    first, second = (x.redistribute(mesh, [Replicate()]) @ w for w in (w1, w2))
    return (first * second).to_local()


def step(options):
    torch.manual_seed(dist.get_rank())
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(3, 4, 8), (8, 6), (8, 6)]]
    lowered = []
    with watch_graphs(lambda stage, graph: lowered.append(graph) if stage == "lowered" else None):
        compiled = torch.compile(projections, backend="dtensor_aten", fullgraph=True, options=options)
        function = projections if options is None else compiled
        for _ in range(2):
            out = function(*args)
            out.square().sum().backward()
    return [out.detach(), *(a.grad for a in args)], sum(map(extra_copies, lowered))


def steps():
    (eager, _), (kept, before), (ours, now) = (
        step(o) for o in (None, {"disable_passes": ("drop_copies",)}, {"strict": True})
    )
    torch.testing.assert_close(ours, kept, rtol=0, atol=0)
    torch.testing.assert_close(ours, eager)
    return before, now


def test_two_gathers_of_one_activation_are_kept_once():
    for before, now in run_on_ranks(2, steps):
        assert before > 0 == now


def one_written_to(backend):
    """Sum of the second of two equal results after the first was set to zero."""
    mesh = make_mesh((2,), ("tp",))

    @torch.compile(backend=backend, fullgraph=True)
    def both(x):
        x = DTensor.from_local(x, mesh, [Shard(0)])
        return x.redistribute(mesh, [Replicate()]).to_local(), x.redistribute(mesh, [Replicate()]).to_local()

    first, second = both(torch.arange(4.0))
    first.zero_()
    return second.sum().item()


def test_outputs_do_not_share_memory():
    for backend in ("dtensor_aten", "dtensor"):
        assert run_on_ranks(2, one_written_to, backend, timeout=280) == [12.0, 12.0]
