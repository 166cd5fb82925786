"""The functions of ``torch.distributed`` that communicate.

Each function has a twin: a Python function with the same arguments that Dynamo traces in its place. It finds out what
the call means on this rank (a group by its name, a rank of the group) and calls an operator of ``ops/c10d.py``. In the
graph an operation is complete as soon as it is called; that it starts early and is waited for late is the business of
the lowering. So the `Work` of an asynchronous call has nothing left to do.

``functions.py`` says which functions have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dtensor_compile.causes import cause
from dtensor_compile.compat.distributed.functional_collectives import P2POpClassVariable, other_names, reduction_name
from dtensor_compile.compat.dynamo.calls import RefusingVariable
from dtensor_compile.compat.dynamo.tracing import Retrack
from dtensor_compile.compat.dynamo.tracker_tools import (
    Translator,
    UserFunctionVariable,
    VariableTracker,
    build,
    graph_break,
    raise_in_program,
)
from dtensor_compile.ops import c10d as ops
from dtensor_compile.variables import differentiable_collectives
from dtensor_compile.variables import work_handles as work
from dtensor_compile.variables.work_handles import Future, Work

Group = Any


# ---- what twins share ----------------------------------------------------------------------------------------------


def _member_group(group: Group) -> Group:
    """The group that is meant; None where this rank is not in it: there eager's collectives do nothing."""
    group = dist.group.WORLD if group is None else group
    if group is None:  # as eager
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else group


def _peer(group: Group, rank: int | None, group_rank: int | None, name: str, default: int | None = None) -> int:
    """A rank of the group, given as such or as a rank of the job."""
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

    NCCL writes past autograd. gloo reduces a copy of the input and then copies this rank's part of it with autograd
    looking on: the gradient of the output is that of `own`.
    """
    if output.device.type != "cpu":
        ops.overwrite_(output, value)
        return
    own = own.clone()
    ops.overwrite_(own, value)
    output.copy_(own)


def _done(results: list[torch.Tensor], async_op: bool) -> Work | None:
    return Work(results) if async_op else None


# ---- collectives ---------------------------------------------------------------------------------------------------


def all_reduce(tensor, op="sum", group=None, async_op=False):
    group = _member_group(group)
    if group is None:
        return None
    if tensor.is_complex():
        if op != "sum" and op != "avg":
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
    """What ``DTensor.from_local`` does with ``run_check=True``: compares metadata, takes replicas from the first rank,
    in place.
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


# ---- methods of process groups: ranks are ranks of the group -------------------------------------------------------


def pg_allreduce(group, tensors, op="sum", timeout=None):
    for tensor in _list(tensors):
        all_reduce(tensor, op, group)
    return Work(_list(tensors))


def pg_allreduce_coalesced(group, tensors):
    return pg_allreduce(group, tensors)


def pg_broadcast(group, tensor, root=0, timeout=None):
    for part in _list(tensor):
        broadcast(part, group_src=root, group=group)
    return Work(_list(tensor))


def pg_reduce(group, tensor, root=0, op="sum", timeout=None):
    for part in _list(tensor):
        reduce(part, group_dst=root, op=op, group=group)
    return Work(_list(tensor))


def pg_allgather(group, output_tensors, input_tensors, timeout=None):
    if isinstance(input_tensors, torch.Tensor):
        all_gather(output_tensors, input_tensors, group)
    else:
        for outputs, tensor in zip(output_tensors, input_tensors):
            all_gather(outputs, tensor, group)
    return Work([])


def pg_allgather_coalesced(group, output_lists, input_list):
    all_gather_coalesced(output_lists, input_list, group)
    return Work([])


def pg_allgather_single(group, output, input):
    return all_gather_single(output, input, group, True)


def pg_allgather_single_coalesced(group, outputs, inputs):
    for output, tensor in zip(outputs, inputs):
        all_gather_single(output, tensor, group)
    return Work(list(outputs))


def pg_reduce_scatter(group, output_tensors, input_tensors, op="sum", timeout=None):
    if isinstance(output_tensors, torch.Tensor):
        return reduce_scatter(output_tensors, input_tensors, op, group, True)
    for output, tensors in zip(output_tensors, input_tensors):
        reduce_scatter(output, tensors, op, group)
    return Work(list(output_tensors))


def pg_reduce_scatter_single(group, outputTensor, inputTensor, op="sum"):  # noqa: N803 - torch's names
    return reduce_scatter_single(outputTensor, inputTensor, op, group, True)


def pg_reduce_scatter_single_coalesced(group, outputs, inputs):
    for output, tensor in zip(outputs, inputs):
        reduce_scatter_single(output, tensor, "sum", group)
    return Work(list(outputs))


def pg_alltoall_single(group, output, input, output_split_sizes, input_split_sizes, timeout=None):
    return all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, True)


def pg_alltoall(group, output_tensors, input_tensors):
    return all_to_all(output_tensors, input_tensors, group, True)


def pg_gather(group, output_tensors, input_tensor, root=0, timeout=None):
    if isinstance(input_tensor, torch.Tensor):
        return gather(input_tensor, output_tensors if output_tensors else None, None, group, True, root)
    return gather(input_tensor[0], output_tensors[0] if output_tensors else None, None, group, True, 0)


def pg_scatter(group, output_tensor, input_tensors, root=0, timeout=None):
    if isinstance(output_tensor, torch.Tensor):
        return scatter(output_tensor, input_tensors if input_tensors else None, None, group, True, root)
    return scatter(output_tensor[0], input_tensors[0] if input_tensors else None, None, group, True, root)


def pg_send(group, tensors, dstRank, tag):  # noqa: N803 - torch's names
    for tensor in tensors:
        isend(tensor, group=group, tag=tag, group_dst=dstRank)
    return Work(tensors)


def pg_recv(group, tensors, srcRank, tag):  # noqa: N803 - torch's names
    for tensor in tensors:
        irecv(tensor, group=group, tag=tag, group_src=srcRank)
    return Work(tensors, srcRank)


def pg_barrier(group, timeout=None):
    return barrier(group, True)


def _list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


# ---- the tables ----------------------------------------------------------------------------------------------------

TWINS: Mapping[Any, Any] = {
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
    **differentiable_collectives.TWINS,
    **{function: reduce_scatter_single for function in other_names("reduce_scatter_single", "_reduce_scatter_base")},
}

METHODS: Mapping[str, Any] = {
    "allreduce": pg_allreduce,
    "broadcast": pg_broadcast,
    "reduce": pg_reduce,
    "allgather": pg_allgather,
    "_allgather_base": pg_allgather_single,
    "_reduce_scatter_base": pg_reduce_scatter_single,
    "all_gather_single": pg_allgather_single,
    "all_gather_single_coalesced": pg_allgather_single_coalesced,
    "all_to_all_single": pg_alltoall_single,
    "allgather_coalesced": pg_allgather_coalesced,
    "allgather_into_tensor_coalesced": pg_allgather_single_coalesced,
    "allreduce_coalesced": pg_allreduce_coalesced,
    "alltoall_base": pg_alltoall_single,
    "reduce_scatter": pg_reduce_scatter,
    "reduce_scatter_single": pg_reduce_scatter_single,
    "reduce_scatter_single_coalesced": pg_reduce_scatter_single_coalesced,
    "reduce_scatter_tensor_coalesced": pg_reduce_scatter_single_coalesced,
    "alltoall": pg_alltoall,
    "gather": pg_gather,
    "scatter": pg_scatter,
    "send": pg_send,
    "recv": pg_recv,
    "barrier": pg_barrier,
}


def refuse(name: str, code: str) -> NoReturn:
    """The graph break for a call that is not traced."""
    graph_break(code, name, f"backend='dtensor' does not trace this call of {name}. {cause(code).why}")


class DistributedFunctionVariable(UserFunctionVariable):
    """A function of torch.distributed: itself, whose calls are those of its twin."""

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        arguments = _bind(tx, name, self.fn, args, kwargs)
        if self.fn in (dist.recv, dist.irecv) and all(_is_none(arguments.get(name)) for name in ("src", "group_src")):
            refuse(name, "receive-from-any")
        return UserFunctionVariable(TWINS[self.fn]).call_function(tx, [], arguments)


def call_method_twin(
    tx: Translator,
    group: VariableTracker,
    name: str,
    args: Sequence[VariableTracker],
    kwargs: Mapping[str, VariableTracker],
) -> VariableTracker:
    """Calls the twin of method `name` of a process group; one that is given C++ options breaks the graph."""
    if any(isinstance(argument.realize(), RefusingVariable) for argument in (*args, *kwargs.values())):
        refuse(f"ProcessGroup.{name}", "raw-object")
    arguments = _bind(tx, f"ProcessGroup.{name}", METHODS[name], [group, *args], kwargs)
    return UserFunctionVariable(METHODS[name]).call_function(tx, [], arguments)


def _bind(
    tx: Translator, name: str, function: Any, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> dict[str, VariableTracker]:
    """Arguments by name. Reductions are C++ objects: twins take their names."""
    try:
        arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise_in_program(tx, error)
    if "op" in arguments:
        reduction = reduction_name(getattr(arguments["op"], "value", None))
        if reduction is None:
            refuse(name, "reduction-not-plain")
        arguments["op"] = build(tx, reduction)
    return arguments


def checked_local_tensor(
    tx: Translator, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> tuple[list[VariableTracker], dict[str, VariableTracker]]:
    """Arguments of ``DTensor.from_local`` with ``run_check=True`` -> those without it, once `check_local_tensor` is
    traced.
    """
    named = dict(zip(("local_tensor", "device_mesh", "placements"), args)) | dict(kwargs)
    del named["run_check"]
    sizes_known = not _is_none(named.get("shape"))
    placements = named.get("placements", build(tx, None))
    check = UserFunctionVariable(check_local_tensor)
    local = check.call_function(
        tx, [named["local_tensor"], named["device_mesh"], placements, build(tx, not sizes_known)], {}
    )
    return [], {**named, "local_tensor": local}


def _is_none(argument: VariableTracker | None) -> bool:
    return argument is None or argument.is_python_constant() and argument.as_python_constant() is None


def retrack(function: Any) -> Retrack:
    """What makes the tracker of a function that has a twin.

    Raises:
        KeyError: it has none.
    """
    TWINS[function]
    return lambda stock: DistributedFunctionVariable(function, source=stock.source)


#: Entries for `compat.dynamo.tracing.Entries.objects`.
OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    *((function, retrack(function)) for function in other_names("_all_gather_base", "_reduce_scatter_base")),
    *work.OBJECTS,
    (dist.P2POp, lambda stock: P2POpClassVariable(dist.P2POp, source=stock.source)),
)
