"""Polyfills of the communicating methods of process groups (``collectives.py`` has those of functions).

Ranks are ranks of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dtensor_compile.variables.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    complete_work,
    gather,
    irecv,
    isend,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    scatter,
)


def pg_allreduce(group, tensors, op="sum", timeout=None):
    for tensor in _list(tensors):
        all_reduce(tensor, op, group)
    return complete_work(_list(tensors))


def pg_allreduce_coalesced(group, tensors):
    return pg_allreduce(group, tensors)


def pg_broadcast(group, tensor, root=0, timeout=None):
    for part in _list(tensor):
        broadcast(part, group_src=root, group=group)
    return complete_work(_list(tensor))


def pg_reduce(group, tensor, root=0, op="sum", timeout=None):
    for part in _list(tensor):
        reduce(part, group_dst=root, op=op, group=group)
    return complete_work(_list(tensor))


def pg_allgather(group, output_tensors, input_tensors, timeout=None):
    if isinstance(input_tensors, torch.Tensor):
        all_gather(output_tensors, input_tensors, group)
    else:
        for outputs, tensor in zip(output_tensors, input_tensors):
            all_gather(outputs, tensor, group)
    return complete_work([])


def pg_allgather_coalesced(group, output_lists, input_list):
    all_gather_coalesced(output_lists, input_list, group)
    return complete_work([])


def pg_allgather_single(group, output, input):
    return all_gather_single(output, input, group, True)


def pg_allgather_single_coalesced(group, outputs, inputs):
    for output, tensor in zip(outputs, inputs):
        all_gather_single(output, tensor, group)
    return complete_work(list(outputs))


def pg_reduce_scatter(group, output_tensors, input_tensors, op="sum", timeout=None):
    if isinstance(output_tensors, torch.Tensor):
        return reduce_scatter(output_tensors, input_tensors, op, group, True)
    for output, tensors in zip(output_tensors, input_tensors):
        reduce_scatter(output, tensors, op, group)
    return complete_work(list(output_tensors))


def pg_reduce_scatter_single(group, outputTensor, inputTensor, op="sum"):  # noqa: N803 - torch's names
    return reduce_scatter_single(outputTensor, inputTensor, op, group, True)


def pg_reduce_scatter_single_coalesced(group, outputs, inputs):
    for output, tensor in zip(outputs, inputs):
        reduce_scatter_single(output, tensor, "sum", group)
    return complete_work(list(outputs))


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
    return complete_work(tensors)


def pg_recv(group, tensors, srcRank, tag):  # noqa: N803 - torch's names
    for tensor in tensors:
        irecv(tensor, group=group, tag=tag, group_src=srcRank)
    return complete_work(tensors, srcRank)


def pg_barrier(group, timeout=None):
    return barrier(group, True)


def _list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


#: Name of a method -> its polyfill.
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
