"""Several redistributions traced as one operator become nodes of their own."""

import torch
from expecttest import TestCase

from dtensor_compile.ops.redistribute_together import redistribute_together
from dtensor_compile.passes.separate_redistributions import separate_redistributions
from dtensor_compile.testing import on_ranks, run_on_ranks
from tests.passes.graphs import local, mesh, rewritten


def together(tensors, changes):
    return redistribute_together(tensors, [(*specs, mesh(), shape) for *specs, shape in changes])


def separated(graph):
    separate_redistributions(graph)
    return []


def two_parameters():
    def function(x, y, z):
        u, v, _ = together([x, y, z], [("S(0)", "R", (4, 6)), ("S(1)", "R", (2, 6)), ("S(0)", "R", (4,))])
        return torch.sin(u), torch.cos(v)

    return rewritten(separated, function, local(2, 6), local(2, 3), local(2))


class Golden(TestCase):
    def test_unread_results_are_not_redistributed(self):
        _, after, _ = run_on_ranks(2, two_parameters)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
y_1: [2, 3]
z_1: [2]
redistribute_default: [4, 6] = redistribute(x_1, S(0)->R)
redistribute_default_1: [2, 6] = redistribute(y_1, S(1)->R)
sin: [4, 6] = sin(redistribute_default)
cos: [2, 6] = cos(redistribute_default_1)
return [sin, cos]
""",
        )


@on_ranks(2)
def test_operator_gives_the_results_of_single_ones():
    x, y = local(2, 6), local(4, 3)
    changes = [("S(0)", "R", (4, 6)), ("P(sum)", "S(1)", (4, 3))]
    for result, tensor, (source, target, shape) in zip(together([x, y], changes), (x, y), changes):
        alone = torch.ops.dtensor_compile.redistribute(tensor, source, target, mesh(), shape)
        assert torch.equal(result, alone)
