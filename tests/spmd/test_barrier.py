"""The backward barrier: graph and kernels show that a module's backward is not fused or reordered with its
neighbours'.
"""

import re

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch._inductor.utils import run_and_get_code

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.spmd import apply_backward_optimization_barrier
from dtensor_compile.testing import captured_graph


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(x) * 2


def waves(barrier):
    model = nn.Sequential(Wave(), Wave(), Wave())
    if barrier:
        apply_backward_optimization_barrier(model[1])
    return model


def kernels_of_backward(model):
    """Names of the kernels and operators that the code of the backward calls, in order."""
    x = torch.randn(2, 8, requires_grad=True)
    torch.compiler.reset()
    with simulated_job(2, 0), fresh_caches():
        _, codes = run_and_get_code(lambda: torch.compile(model, backend="dtensor", fullgraph=True)(x).sum().backward())
    body = codes[-1][codes[-1].index("def call(") :]
    return re.findall(
        r"^ +(?:buf\d+ = )?(?:torch\.ops\.dtensor_compile\.(backward_barrier)\.default|(cpp_fused)_\w+)\(", body, re.M
    )


class Barrier(TestCase):
    def test_backward_stands_between_two_barriers(self):
        x = torch.randn(2, 8, requires_grad=True)
        with simulated_job(2, 0):
            text = captured_graph(waves(True), x, options={"kernels": "aten"}, stage="planned")
        self.assertExpectedInline(
            text,
            """\
primals_1: [2, 8]
tangents_1: [2, 8]
sin: [2, 8] = sin(primals_1)
mul: [2, 8] = mul(sin, 2)
view: [2, 8] = view(mul, [2, 8])
sin_1: [2, 8] = sin(view)
mul_1: [2, 8] = mul(sin_1, 2)
view_1: [2, 8] = view(mul_1, [2, 8])
sin_2: [2, 8] = sin(view_1)
mul_2: [2, 8] = mul(sin_2, 2)
mul_3: [2, 8] = mul(tangents_1, 2)
cos: [2, 8] = cos(view_1)
mul_4: [2, 8] = mul(mul_3, cos)
backward_barrier: list = backward_barrier([mul_4])
getitem: [2, 8] = getitem(backward_barrier, 0)
mul_5: [2, 8] = mul(getitem, 2)
cos_1: [2, 8] = cos(view)
mul_6: [2, 8] = mul(mul_5, cos_1)
backward_barrier_1: list = backward_barrier([mul_6])
getitem_1: [2, 8] = getitem(backward_barrier_1, 0)
mul_7: [2, 8] = mul(getitem_1, 2)
cos_2: [2, 8] = cos(primals_1)
mul_8: [2, 8] = mul(mul_7, cos_2)
return [mul_2, mul_8]
""",
        )

    @pytest.mark.slow
    def test_kernels_end_at_the_barrier(self):
        self.assertEqual(len(kernels_of_backward(waves(False))), 1)
        called = [barrier or kernel for barrier, kernel in kernels_of_backward(waves(True))]
        self.assertEqual(called, ["cpp_fused", "backward_barrier", "cpp_fused", "backward_barrier", "cpp_fused"])
