import torch
from expecttest import TestCase

from dtensor_compile.passes.move_redistributions import move_redistributions
from dtensor_compile.testing import on_ranks, run_on_ranks
from tests.passes.graphs import local, marked, move, rewritten, unchanged


def two_products_of_one_gather():
    """Rows are gathered, multiplied by two matrices and cut to a corner."""

    def function(x, w):
        whole = move(x, "S(0)", "R")
        return ((whole @ marked(w, "R", (6, 2))).relu() * torch.relu(marked(whole[:, :1], "R", (4, 1))),)

    return rewritten(move_redistributions, function, torch.ones(2, 6), torch.ones(6, 2))


class Golden(TestCase):
    def test_it(self):
        before, after, decisions = run_on_ranks(2, two_products_of_one_gather)[0]
        self.assertExpectedInline(before, """\
x_1: [2, 6]
w_1: [6, 2]
redistribute: [4, 6] = redistribute(x_1, S(0)->R)
mm: [4, 2] = mm(redistribute, w_1)
relu: [4, 2] = relu(mm)
slice_1: [4, 1] = slice(redistribute, 1, 0, 1)
relu_1: [4, 1] = relu(slice_1)
mul: [4, 2] = mul(relu, relu_1)
return [mul]
""")
        self.assertExpectedInline(after, """\
x_1: [2, 6]
w_1: [6, 2]
mm_default: [2, 2] = mm(x_1, w_1)
relu_default: [2, 2] = relu(mm_default)
slice_tensor: [2, 1] = slice(x_1, 1, 0, 1)
relu_default_1: [2, 1] = relu(slice_tensor)
mul_tensor: [2, 2] = mul(relu_default, relu_default_1)
redistribute_default: [4, 2] = redistribute(mul_tensor, S(0)->R)
return [redistribute_default]
""")
