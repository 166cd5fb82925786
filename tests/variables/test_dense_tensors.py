"""Gradients in a bucket: lists of tensors as one flat tensor and back."""

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dtensor_compile.testing import on_ranks


def averaged(tensors):
    flat = _flatten_dense_tensors(tensors)
    dist.all_reduce(flat)
    return _unflatten_dense_tensors(flat / dist.get_world_size(), tensors)


@on_ranks(2)
def test_a_bucket_is_one_graph_for_each_size_and_then_for_all():
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(averaged, backend="dtensor_aten", fullgraph=True)
    for rows in (3, 5, 7):
        tensors = [torch.randn(rows, 4), torch.ones(3), torch.randn(2, rows).t()]
        for eager, ours in zip(averaged(tensors), compiled(tensors), strict=True):
            torch.testing.assert_close(eager, ours)
    assert counters["stats"]["unique_graphs"] == 2
