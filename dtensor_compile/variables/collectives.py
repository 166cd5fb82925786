"""Polyfills of the communicating functions of ``torch.distributed``.

A polyfill is a Python function with the same arguments that Dynamo traces in place of torch's. It resolves the
arguments of the call on this rank (a group by its name, a rank of the group) and calls an operator of ``ops/c10d.py``.
In the graph an operation is complete as soon as it is called, so that the `Work` of an asynchronous call has nothing
left to do; the lowering makes it start early and wait late.

`POLYFILLS` has those of functions, ``group_methods.py`` those of methods of process groups; ``collective_calls.py``
calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed.functional_collectives import other_names
from dtensor_compile.ops import c10d as ops
from dtensor_compile.variables import differentiable_collectives
from dtensor_compile.variables.work_handles import Future, Work

Group = Any


# ---- what polyfills share ------------------------------------------------------------------------------------------


def _member_group(group: Group) -> Group:
    """The group of the call; None if this rank is not in it, where eager's collectives do nothing."""
    group = dist.group.WORLD if group is None else group
    if group is None:  # as eager
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else group


def _peer(group: Group, rank: int | None, group_rank: int | None, name: str, default: int | None = None) -> int:
    """Rank within the group, from either a global rank or a group rank."""
    if rank is not None and group_rank is not None:
        raise ValueError(f"Can't specify both group_{name} and {name}")
    if group_rank is not None:
        return group_rank
    if rank is None:
        rank = default
    if rank is None:
        raise ValueError(f"Must specify {name} or group_{name}")
    return dist.get_group_rank(group, rank)


def _same_dtype(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"Invalid usage of tensors with different dtypesFound {tensors[0].dtype} and  {tensor.dtype}"
            )


def _put(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for output, value in zip(outputs, values):
        ops.overwrite_(output, value)


def _copy_over(output: torch.Tensor, own: torch.Tensor, value: torch.Tensor) -> None:
    """Writes `value`, the reduced form of `own`, as the backend does.

    NCCL writes without autograd. gloo reduces a copy of the input and then copies this rank's part of it under
    autograd, so that the gradient of the output is that of `own`.
    """
    if output.device.type != "cpu":
        ops.overwrite_(output, value)
        return
    own = own.clone()
    ops.overwrite_(own, value)
    output.copy_(own)


def _done(results: list[torch.Tensor], async_op: bool) -> Work | None:
    return Work(results) if async_op else None


def complete_work(results: list[torch.Tensor], source: int | None = None) -> Work:
    """Returns the `Work` of a complete operation.

    Those in other modules call this function, since Dynamo replaces a class that it finds in the globals of one module
    and mistakes it for another one in the globals of a second module.
    """
    return Work(results, source)


# ---- collectives ---------------------------------------------------------------------------------------------------


def all_reduce(tensor, op="sum", group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    if tensor.is_complex():
        if op not in ("sum", "avg"):
            raise ValueError(f"all_reduce does not support {op} on complex tensors")
        parts = ops.all_reduce(torch.view_as_real(tensor.detach()), op, group.group_name, 0)
        ops.overwrite_(tensor, torch.view_as_complex(parts))
    else:
        ops.overwrite_(tensor, ops.all_reduce(tensor, op, group.group_name, 0))
    return _done([tensor], async_op)


def all_reduce_coalesced(tensors, op="sum", group=None, async_op=False):
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    _same_dtype(*tensors)
    for tensor in tensors:
        all_reduce(tensor, op, group)
    return Future(list(tensors)) if async_op and _member_group(group) is not None else None


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    group = _member_group(group)
    if group is None:
        return None
    peer = _peer(group, src, group_src, "src")
    ops.overwrite_(tensor, ops.broadcast(tensor, peer, group.group_name, 0))
    return _done([tensor], async_op)


def reduce(tensor, dst=None, op="sum", group=None, async_op=False, group_dst=None):
    group = _member_group(group)
    if group is None:
        return None
    peer = _peer(group, dst, group_dst, "dst")
    _put([tensor], ops.reduce([tensor], [], peer, op, group.group_name, 0))
    return _done([tensor], async_op)


def all_gather_single(output_tensor, input_tensor, group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    _same_dtype(output_tensor, input_tensor)
    ops.overwrite_(output_tensor, ops.all_gather_into_tensor(input_tensor, group.size(), group.group_name, 0))
    return _done([output_tensor], async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    _same_dtype(tensor, *tensor_list)
    _put(tensor_list, ops.all_gather(tensor_list, [tensor], 0, "", group.group_name, 0))
    return _done(list(tensor_list), async_op)


def all_gather_coalesced(output_tensor_lists, input_tensor_list, group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    for i, tensor in enumerate(input_tensor_list):
        all_gather([outputs[i] for outputs in output_tensor_lists], tensor, group)
    return Future(output_tensor_lists) if async_op else None


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    group = _member_group(group)
    if group is None:
        return None
    outputs = [] if gather_list is None else gather_list
    peer = _peer(group, dst, group_dst, "dst", default=0)
    _same_dtype(tensor, *outputs)
    if group.rank() == peer:
        if not outputs:
            raise ValueError("Argument ``gather_list`` must be specified on destination rank.")
    elif outputs:
        raise ValueError("Argument ``gather_list`` must NOT be specified on non-destination ranks.")
    results = ops.gather(outputs, [tensor], peer, "", group.group_name, 0)
    _put(outputs, results)
    return _done(list(outputs), async_op)


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    group = _member_group(group)
    if group is None:
        return None
    inputs = [] if scatter_list is None else scatter_list
    peer = _peer(group, src, group_src, "src", default=0)
    _same_dtype(tensor, *inputs)
    if group.rank() == peer:
        if not inputs:
            raise ValueError("Argument ``scatter_list`` must be specified on source rank.")
    elif inputs:
        raise ValueError("Argument ``scatter_list`` must NOT be specified on non-source ranks.")
    _put([tensor], ops.scatter([tensor], inputs, peer, "", group.group_name, 0))
    return _done([tensor], async_op)


def reduce_scatter(output, input_list, op="sum", group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    _same_dtype(output, *input_list)
    results = ops.reduce_scatter([output], input_list, 0, op, group.group_name, 0)
    _copy_over(output, input_list[group.rank()], results[0])
    return _done([output], async_op)


def reduce_scatter_single(output, input, op="sum", group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    _same_dtype(output, input)
    result = ops.reduce_scatter_tensor(input, op, group.size(), group.group_name, 0)
    start = group.rank() * result.shape[0]
    _copy_over(output, input[start : start + result.shape[0]], result)
    return _done([output], async_op)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    _same_dtype(output, input)
    n = group.size()
    outs = output_split_sizes if output_split_sizes else [output.shape[0] // n] * n
    ins = input_split_sizes if input_split_sizes else [input.shape[0] // n] * n
    if input.is_complex():
        parts = ops.all_to_all_single(torch.view_as_real(input.detach()), outs, ins, group.group_name, 0)
        ops.overwrite_(output, torch.view_as_complex(parts))
    else:
        ops.overwrite_(output, ops.all_to_all_single(input, outs, ins, group.group_name, 0))
    return _done([output], async_op)


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    _same_dtype(*output_tensor_list, *input_tensor_list)
    _put(output_tensor_list, ops.all_to_all(output_tensor_list, input_tensor_list, 0, "", group.group_name, 0))
    return _done(list(output_tensor_list), async_op)


def barrier(group=None, async_op=False, device_ids=None, timeout=None):
    group = _member_group(group)
    if group is None:
        return None
    ops.barrier(group.group_name, 0)
    return _done([], async_op)


def check_local_tensor(local, mesh, placements, check_sizes):
    """Does what ``DTensor.from_local`` does with ``run_check=True``, in place: compares metadata, copies replicas from
    the first rank.
    """
    if not mesh._is_current_rank_part_of_mesh():
        return local
    sizes = [*local.shape, *local.stride()] if check_sizes else []
    ops.check_equal(f"{local.dtype} {local.requires_grad}", sizes, dist.group.WORLD.group_name, 0)
    for i in range(mesh.ndim):
        if placements is None or placements[i].is_replicate():
            local = local.contiguous()
            broadcast(local, group=mesh.get_group(i), group_src=0)
    return local


# ---- from one rank to another --------------------------------------------------------------------------------------


def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    group = _member_group(group)
    if group is None:
        return None
    peer = _peer(group, dst, group_dst, "dst")
    if peer == group.rank():
        raise ValueError(
            "Invalid destination rank: destination rank should not be the same as the rank of the current process."
        )
    ops.isend(tensor, peer, tag, group.group_name, 0)
    return Work([tensor])


def irecv(tensor, src=None, group=None, tag=0, group_src=None):
    group = _member_group(group)
    if group is None:
        return None
    peer = _peer(group, src, group_src, "src")
    if peer == group.rank():
        raise ValueError("Invalid source rank: source rank should not be the same as the rank of the current process.")
    ops.overwrite_(tensor, ops.irecv(tensor, peer, tag, group.group_name, 0))
    return Work([tensor], peer)


def send(tensor, dst=None, group=None, tag=0, group_dst=None):
    isend(tensor, dst, group, tag, group_dst)


def recv(tensor, src=None, group=None, tag=0, group_src=None):
    work = irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    return dist.get_global_rank(_member_group(group), work.source_rank())


def batch_isend_irecv(p2p_op_list):
    works = []
    for p in p2p_op_list:
        if p.op.__name__ == "isend":
            work = isend(p.tensor, group=p.group, tag=p.tag, group_dst=p.group_peer)
        else:
            work = irecv(p.tensor, group=p.group, tag=p.tag, group_src=p.group_peer)
        if work is not None:
            works.append(work)
    return works


# ---- the table -----------------------------------------------------------------------------------------------------

POLYFILLS: Mapping[Any, Any] = {
    dist.all_reduce: all_reduce,
    dist.all_reduce_coalesced: all_reduce_coalesced,
    dist.broadcast: broadcast,
    dist.reduce: reduce,
    dist.all_gather: all_gather,
    dist.all_gather_coalesced: all_gather_coalesced,
    dist.all_gather_into_tensor: all_gather_single,
    dist.gather: gather,
    dist.scatter: scatter,
    dist.reduce_scatter: reduce_scatter,
    dist.reduce_scatter_tensor: reduce_scatter_single,
    dist.all_to_all_single: all_to_all_single,
    dist.all_to_all: all_to_all,
    dist.barrier: barrier,
    dist.isend: isend,
    dist.irecv: irecv,
    dist.send: send,
    dist.recv: recv,
    dist.batch_isend_irecv: batch_isend_irecv,
    **{function: all_gather_single for function in other_names("all_gather_single", "_all_gather_base")},
    **differentiable_collectives.POLYFILLS,
    **{function: reduce_scatter_single for function in other_names("reduce_scatter_single", "_reduce_scatter_base")},
}
