"""``torch.distributed.nn.functional``: collectives with gradients.

torch's functions raise under ``torch.compile``. Their polyfills are ``torch.autograd.Function`` objects over operators
of ``ops/c10d.py``, with torch's gradients: the gradient of a collective communicates in the opposite direction.

    all_reduce <-> all_reduce     all_gather <-> sum of all_to_all     broadcast <-> reduce     gather <-> scatter
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from dtensor_compile.compat.distributed.functional_collectives import functions_of
from dtensor_compile.ops import c10d as ops


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, op, group):
        ctx.op, ctx.group = op, group
        return ops.all_reduce(tensor, op, group, 0)

    @staticmethod
    def backward(ctx, grad):
        return ops.all_reduce(grad, ctx.op, ctx.group, 0), None, None


class AllGather(torch.autograd.Function):
    """Returns a stack. The gradient is a sum over ranks, in the order that torch uses without reduce-scatter."""

    @staticmethod
    def forward(ctx, tensor, size, group, scatters):
        ctx.size, ctx.group, ctx.scatters = size, group, scatters
        return ops.all_gather_into_tensor(tensor, size, group, 0).view(size, *tensor.shape)

    @staticmethod
    def backward(ctx, grad):
        flat = grad.reshape(-1)
        if ctx.scatters:
            out = ops.reduce_scatter_tensor(flat, "sum", ctx.size, ctx.group, 0).view(grad.shape[1:])
        else:
            splits = [flat.shape[0] // ctx.size] * ctx.size
            out = ops.all_to_all_single(flat, splits, splits, ctx.group, 0).view(grad.shape).sum(0)
        return out, None, None, None


class AllToAllSingle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, output_splits, input_splits, group):
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return ops.all_to_all_single(tensor, output_splits, input_splits, group, 0)

    @staticmethod
    def backward(ctx, grad):
        return ops.all_to_all_single(grad, ctx.input_splits, ctx.output_splits, ctx.group, 0), None, None, None


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, peer, group, is_peer):
        ctx.peer, ctx.group, ctx.is_peer = peer, group, is_peer
        return ops.broadcast(tensor, peer, group, 0)

    @staticmethod
    def backward(ctx, grad):
        (out,) = ops.reduce([grad], [], ctx.peer, "sum", ctx.group, 0)
        return out if ctx.is_peer else torch.zeros_like(out), None, None, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, peer, op, group):
        ctx.peer, ctx.group = peer, group
        return ops.reduce([tensor], [], peer, op, group, 0)[0]

    @staticmethod
    def backward(ctx, grad):
        return ops.broadcast(grad, ctx.peer, ctx.group, 0), None, None, None


class Gather(torch.autograd.Function):
    """Returns a stack; zeros if this rank is not the destination."""

    @staticmethod
    def forward(ctx, tensor, size, peer, group, is_peer):
        ctx.peer, ctx.group, ctx.is_peer = peer, group, is_peer
        outputs = [torch.zeros_like(tensor) for _ in range(size)]
        results = ops.gather(outputs if is_peer else [], [tensor], peer, "", group, 0)
        return torch.stack(results if is_peer else outputs)

    @staticmethod
    def backward(ctx, grad):
        (out,) = ops.scatter([grad[0]], list(grad.unbind(0)) if ctx.is_peer else [], ctx.peer, "", ctx.group, 0)
        return out, None, None, None, None


class Scatter(torch.autograd.Function):
    """Takes a stack."""

    @staticmethod
    def forward(ctx, stacked, peer, group, is_peer):
        ctx.size, ctx.peer, ctx.group, ctx.is_peer = stacked.shape[0], peer, group, is_peer
        return ops.scatter([stacked[0]], list(stacked.unbind(0)) if is_peer else [], peer, "", group, 0)[0]

    @staticmethod
    def backward(ctx, grad):
        outputs = [torch.zeros_like(grad) for _ in range(ctx.size)]
        results = ops.gather(outputs if ctx.is_peer else [], [grad], ctx.peer, "", ctx.group, 0)
        return torch.stack(results if ctx.is_peer else outputs), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Takes a stack."""

    @staticmethod
    def forward(ctx, stacked, op, group):
        ctx.size, ctx.group = stacked.shape[0], group
        return ops.reduce_scatter([stacked[0]], list(stacked.unbind(0)), 0, op, group, 0)[0]

    @staticmethod
    def backward(ctx, grad):
        return ops.all_gather_into_tensor(grad, ctx.size, ctx.group, 0).view(ctx.size, *grad.shape), None, None


# ---- polyfills -----------------------------------------------------------------------------------------------------


def _group(group):
    return dist.group.WORLD if group is None else group


def _splits(sizes, total, n):
    return sizes if sizes else [total // n] * n


def all_reduce(tensor, op="sum", group=None):
    return AllReduce.apply(tensor, op, _group(group).group_name)


def all_gather(tensor, group=None):
    group = _group(group)
    return AllGather.apply(tensor, group.size(), group.group_name, dist.get_backend(group) in ("nccl", "xccl")).unbind(
        0
    )


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
    group = _group(group)
    outs = _splits(output_split_sizes, output.shape[0], group.size())
    ins = _splits(input_split_sizes, input.shape[0], group.size())
    result = AllToAllSingle.apply(input, outs, ins, group.group_name)
    ops.overwrite_(output, result.detach())
    return result


def all_to_all(output_tensor_list, input_tensor_list, group=None):
    ins, outs = [t.numel() for t in input_tensor_list], [t.numel() for t in output_tensor_list]
    flat = torch.cat([t.reshape(-1) for t in input_tensor_list])
    parts = AllToAllSingle.apply(flat, outs, ins, _group(group).group_name).split(outs)
    results = tuple(part.view(t.shape) for part, t in zip(parts, output_tensor_list))
    for output, result in zip(output_tensor_list, results):
        ops.overwrite_(output, result.detach())
    return results


def broadcast(tensor, src, group=None):
    group = _group(group)
    peer = dist.get_group_rank(group, src)
    return Broadcast.apply(tensor, peer, group.group_name, peer == group.rank())


def reduce(tensor, dst, op="sum", group=None):
    group = _group(group)
    return Reduce.apply(tensor, dist.get_group_rank(group, dst), op, group.group_name)


def gather(tensor, dst=0, group=None):
    group = _group(group)
    peer = dist.get_group_rank(group, dst)
    return Gather.apply(tensor, group.size(), peer, group.group_name, peer == group.rank()).unbind(0)


def scatter(tensors, src=0, group=None):
    group = _group(group)
    peer = dist.get_group_rank(group, src)
    return Scatter.apply(torch.stack(list(tensors)), peer, group.group_name, peer == group.rank())


def reduce_scatter(output, input_list, op="sum", group=None):
    result = ReduceScatter.apply(torch.stack(list(input_list)), op, _group(group).group_name)
    ops.overwrite_(output, result.detach())
    return result


#: Function of torch -> its polyfill.
POLYFILLS: Mapping[Any, Any] = {
    function: polyfill
    for polyfill in (
        all_reduce,
        all_gather,
        all_to_all_single,
        all_to_all,
        broadcast,
        reduce,
        gather,
        scatter,
        reduce_scatter,
    )
    for function in functions_of(differentiable, polyfill.__name__)
}
