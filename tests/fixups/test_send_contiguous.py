"""Reductions over all ranks are of contiguous tensors, whose copies are part of the kernels before them."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtensor_compile
from dtensor_compile.fixups.send_contiguous import send_contiguous
from dtensor_compile.testing import graph_text, on_ranks, run_on_ranks
from tests.schedule.test_schedule_graph import changed, traced

_c10d = torch.ops._c10d_functional


def reduced(x):
    return _c10d.wait_tensor(_c10d.all_reduce(x.t() / 2, "sum", dist.group.WORLD.group_name)) * 2


def sent(graph):
    send_contiguous(graph)
    return []


class Golden(TestCase):
    maxDiff = None

    def test_what_is_reduced_is_made_contiguous(self):
        (text, _), _ = run_on_ranks(2, changed, sent, reduced, (4, 3))
        self.assertExpectedInline(
            text,
            """\
x_1: [4, 3]
t: [3, 4] = t(x_1)
div: [3, 4] = div(t, 2)
clone_default: [3, 4] = clone(div, memory_format=torch.contiguous_format)
all_reduce: [3, 4] = all_reduce(clone_default, sum)
wait_tensor: [3, 4] = wait_tensor(all_reduce)
mul: [3, 4] = mul(wait_tensor, 2)
return mul
""",
        )


@on_ranks(2)
def test_what_stays():
    def contiguous(x):
        return _c10d.wait_tensor(_c10d.all_reduce(x, "sum", dist.group.WORLD.group_name))

    for gm in (traced(contiguous, (4, 3)), traced(reduced, (4, 3), redistributes=False)):
        before = graph_text(gm.graph)
        send_contiguous(gm.graph)
        assert graph_text(gm.graph) == before


@pytest.mark.slow
@on_ranks(2)
def test_gradients_of_convolutions_are_not_copied_when_they_come_back():
    """They are made in channels-last by Inductor, and returned in the layout of their parameters."""

    def model():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
        return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)

    def gradients(ddp, run):
        torch.manual_seed(1 + dist.get_rank())
        run(torch.randn(2, 3, 16, 16)).backward()
        return [p.grad for p in ddp.parameters()]

    eager, ours = model(), model()
    wanted = gradients(eager, lambda x: F.relu(eager(x)).sum())
    with dtensor_compile.record() as recording:
        found = gradients(ours, torch.compile(lambda x: F.relu(ours(x)).sum(), backend="dtensor", fullgraph=True))
    for a, b in zip(wanted, found):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    operations = [operation for graph in recording.graphs for operation in graph.operations]
    assert any(operation.starts is not None for operation in operations)  # DDP's buckets of a first pass are one
    backward = [operation for operation in operations if operation.name == "aten.convolution_backward"]
    assert len(backward) == 3 and all(operation.flops for operation in backward)  # its kernel has several results
    assert not any(operation.name == "fused wait_tensor" for operation in operations)
