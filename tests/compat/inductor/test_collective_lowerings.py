"""Waits in Inductor's code, which are made without a run of their operator."""

import contextlib
from unittest import mock

import pytest
import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtensor_compile.compat.inductor import compile as inductor
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.offline import job
from dtensor_compile.testing import make_mesh


def gathered(x, w):
    """A sum of views, results of kernels and inputs that are gathered and reduced."""
    whole = x.redistribute(placements=[Replicate()])
    return (whole.t() @ w).redistribute(placements=[Shard(0)]) + torch.sin(x @ w.t()).redistribute(
        placements=[Shard(1)]
    ).sum()


def code_of_waits():
    """The generated code, and the operators that were run for waits."""
    written, ran, stock = [], [], ir.ExternKernel.process_kernel.__func__

    def process_kernel(cls, kernel, *args, **kwargs):
        ran.append((cls, kernel))
        return stock(cls, kernel, *args, **kwargs)

    torch._dynamo.reset()
    with (
        mock.patch.object(ir.ExternKernel, "process_kernel", classmethod(process_kernel)),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(written.append)),
        fresh_caches(),
        job(2),
    ):
        mesh = make_mesh((2,))
        x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.randn(8, 8), mesh, [Shard(1)]).requires_grad_()
        torch.compile(gathered, backend="dtensor")(x, w).to_local().sum().backward()
    code = [line.partition("#")[0] for text in written for line in text.splitlines()]
    return code, [kernel for cls, kernel in ran if cls is ir._WaitKernel]


@contextlib.contextmanager
def left_to_torch():
    yield


@pytest.mark.slow
def test_code_is_that_of_torchs_own_lowering():
    code, ran = code_of_waits()
    with mock.patch.object(inductor, "waits_are_not_run", left_to_torch):
        stock, run_by_stock = code_of_waits()
    assert sum("wait_tensor.default" in line for line in code) > 2
    assert code == stock
    assert not ran
    assert run_by_stock
