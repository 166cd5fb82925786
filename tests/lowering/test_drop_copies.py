"""Copies that nobody can tell from their original: golden graph, what stays, and numbers and addresses on real ranks."""

import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.lowering.drop_copies import drop_copies
from dtensor_compile.lowering.extra_copies import extra_copies
from dtensor_compile.lowering.view_again import view_again
from dtensor_compile.report.recorder import watch_graphs
from dtensor_compile.testing import graph_text, make_mesh, run_on_ranks

aten = torch.ops.aten


def after(function, *args):
    """Text of the graph afterwards; the values stay."""
    args = args or (torch.arange(12.0).reshape(3, 4),)
    gm = make_fx(function, tracing_mode="fake")(*args)
    wanted = gm(*(a.clone() for a in args))
    drop_copies(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*(a.clone() for a in args)), wanted, rtol=0, atol=0)
    return graph_text(gm.graph)


class Golden(TestCase):
    def test_a_copy_between_operators_goes_away(self):
        def function(x):
            y = aten.exp(x)
            return aten.sin(y), aten.cos(aten.view(aten.clone(y), [12]))

        self.assertExpectedInline(after(function), """\
x_1: [3, 4]
exp: [3, 4] = exp(x_1)
sin: [3, 4] = sin(exp)
view: [12] = view(exp, [12])
cos: [12] = cos(view)
return [sin, cos]
""")  # fmt: skip


def stays(function, *args):
    return "clone" in after(function, *args)


def test_what_somebody_can_tell_from_its_original_stays():
    assert stays(lambda x: aten.cos(aten.clone(x)))  # the program may write to x before its backward reads the copy

    def both_returned(x):
        y = aten.exp(x)
        return y, aten.view(aten.clone(y), [12])

    def written_to(x):
        y = aten.exp(x)
        z = aten.clone(y)
        return aten.add(aten.mul_(z, 2), y)

    def original_written_to(x):
        y = aten.exp(x)
        z = aten.clone(y)
        return aten.add(aten.mul_(y, 2), z)

    def other_strides(x):
        y = aten.permute(aten.exp(x), [1, 0])
        return aten.cos(aten.clone(y, memory_format=torch.contiguous_format))

    assert all(map(stays, (both_returned, written_to, original_written_to, other_strides)))


def test_symbolic_sizes_stay_without_a_guard():
    gm = make_fx(lambda x: aten.cos(aten.clone(aten.exp(x))), tracing_mode="symbolic")(torch.ones(3, 4))
    assert drop_copies(gm.graph) == [] and not gm.shape_env.guards


def test_views_say_whose_memory_they_are():
    def function(x):
        y = aten.exp(x)
        left, _ = aten.split(aten.permute(aten.view(aten.clone(y), [12, 1]), [1, 0]), 6, 1)
        return aten.cos(left)

    gm = make_fx(function, tracing_mode="fake")(torch.ones(3, 4))
    drop_copies(gm.graph)

    def memory():
        return {node.name: node.meta["val"].untyped_storage()._cdata for node in gm.graph.nodes if node.name in names}

    names = ("exp", "view", "permute", "getitem")
    assert len(set(memory().values())) == 2
    view_again(gm.graph)
    assert len(set(memory().values())) == 1


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
    (eager, _), (kept, before), (ours, now) = (step(o) for o in (None, {"disable_passes": ("drop_copies",)}, {"strict": True}))
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
