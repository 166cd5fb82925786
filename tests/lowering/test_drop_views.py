"""Views that show a tensor as it is: golden graph, what stays, and what a compiled program keeps for its backward."""

import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.tensor import Shard, distribute_tensor

from dtensor_compile.compat.release import minor_release
from dtensor_compile.graph.rank_uniformity import sizes_differ
from dtensor_compile.lowering.drop_views import drop_views
from dtensor_compile.recording.recorder import watch_graphs
from dtensor_compile.testing import make_mesh, on_ranks
from tests.lowering.graphs import text_after

aten = torch.ops.aten


def after(function, x=None):
    return text_after(drop_views, function, torch.arange(12.0).reshape(3, 4) if x is None else x)


class Golden(TestCase):
    def test_transposes_of_transposes_and_views_in_the_same_shape(self):
        def function(x):
            turned = aten.t(x)
            back = aten.permute(turned, [1, 0])
            return aten.sin(aten.view(aten.detach(back), [3, 4])), aten.cos(turned), aten.exp(aten.view(x, [12]))

        self.assertExpectedInline(after(function), """\
x_1: [3, 4]
t: [4, 3] = t(x_1)
sin: [3, 4] = sin(x_1)
cos: [4, 3] = cos(t)
view_1: [12] = view(x_1, [12])
exp: [12] = exp(view_1)
return [sin, cos, exp]
""")  # fmt: skip


def test_what_is_an_output_or_written_to_stays():
    def function(x):
        y = aten.sin(x)
        written = aten.detach(y)
        aten.mul_(written, 2)
        return aten.detach(y), aten.t(aten.t(y)), aten.cos(y)

    text = after(function)
    shown = "detach" if minor_release(torch.__version__) in ("2.11", "2.13", "2.14") else "alias"
    assert text.count(f"= {shown}(") == 2 and text.count("= t(") == 2


def test_other_permutations_stay():
    x = torch.arange(24.0).reshape(2, 3, 4)
    text = after(lambda x: aten.sin(aten.permute(aten.permute(x, [1, 2, 0]), [1, 2, 0])), x)
    assert text.count("= permute(") == 2


def test_sizes_of_one_rank_decide_nothing_where_ranks_have_others():
    with sizes_differ(True):
        text = after(lambda x: aten.sin(aten.view(x, [3, 4])))
    assert text.count("= view(") == 1


@on_ranks(2)
def test_nothing_is_kept_for_the_backward_twice():
    mesh, kept = make_mesh((2,)), []

    def step(wrap):
        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 4, bias=False)
        linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight, mesh, [Shard(0)]))
        x = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])
        wrap(lambda x: linear(linear(x).sin()).square().sum())(x).full_tensor().backward()
        return linear.weight.grad.full_tensor()

    def watch(stage, graph):
        if stage == "lowered":
            kept.append({node.target for node in graph.nodes})

    wanted = step(lambda function: function)
    with watch_graphs(watch):
        found = step(lambda function: torch.compile(function, backend="dtensor_aten", options={"strict": True}))
    torch.testing.assert_close(found, wanted)
    assert len(kept) == 2 and not any(aten.detach.default in targets for targets in kept), dist.get_rank()
