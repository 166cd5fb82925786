"""``torch.distributed.nn.functional``: collectives with gradients.

Each is a ``torch.autograd.Function`` over the collectives of ``torch.distributed``, which can be traced, behind a function that raises
under ``torch.compile``. The twins call the former, so that the gradients are torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from dtensor_compile.compat.collectives import autograd_function

_AllGather = autograd_function("_AllGather")
_AllGatherBase = autograd_function("_AllGatherBase")
_AllReduce = autograd_function("_AllReduce")
_AllToAll = autograd_function("_AlltoAll")
_AllToAllSingle = autograd_function("_AlltoAllSingle")
_Broadcast = autograd_function("_Broadcast")
_Gather = autograd_function("_Gather")
_Reduce = autograd_function("_Reduce")
_ReduceScatter = autograd_function("_Reduce_Scatter")
_Scatter = autograd_function("_Scatter")

SUM = dist.ReduceOp.SUM


def broadcast(tensor, src, group=None):
    return _Broadcast.apply(src, group, tensor)


def gather(tensor, dst=0, group=None):
    return _Gather.apply(dst, group, tensor)


def scatter(tensors, src=0, group=None):
    return _Scatter.apply(src, group, *tensors)


def reduce(tensor, dst, op=SUM, group=None):
    return _Reduce.apply(dst, op, group, tensor)


def reduce_scatter(output, input_list, op=SUM, group=None):
    return _ReduceScatter.apply(op, group, output, *input_list)


def all_gather(tensor, group=None):
    return _AllGather.apply(group, tensor)


def all_gather_base(output_tensor, input_tensor, group=None):
    return _AllGatherBase.apply(output_tensor, input_tensor, group)


def all_to_all(output_tensor_list, input_tensor_list, group=None):
    return _AllToAll.apply(group, output_tensor_list, *input_tensor_list)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
    return _AllToAllSingle.apply(group, output, output_split_sizes, input_split_sizes, input)


def all_reduce(tensor, op=SUM, group=None):
    return _AllReduce.apply(op, group, tensor)


#: Function of torch -> its twin.
TWINS: Mapping[Any, Any] = {
    **{
        getattr(differentiable, twin.__name__): twin
        for twin in (broadcast, gather, scatter, reduce, reduce_scatter, all_gather, all_to_all, all_to_all_single, all_reduce)
    },
    autograd_function("_all_gather_base"): all_gather_base,
}
