"""A process group over gloo that stages tensors of a device through host memory, for ranks that share one GPU.

NCCL refuses two ranks on one GPU, and gloo's ``all_gather`` of CUDA tensors, as functional collectives call it, crashes
(pytorch/pytorch#152645). With this group the kernels of several ranks run on one GPU, on real data. Every collective
blocks the host, so that nothing of what it takes says anything about overlap.

    staged_group.register()
    dist.init_process_group(staged_group.NAME, ...)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils import _pytree as pytree

NAME = "staged"
#: Collectives of a process group, whose first argument holds what they write, by the names of torch 2.13, and the names
#: under which gloo has them.
_COLLECTIVES = {
    **{name: name for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "alltoall")},
    **{name: name for name in ("allgather", "gather", "reduce_scatter", "scatter")},
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def register() -> None:
    """Makes `NAME` a backend of ``init_process_group``, for tensors on the CPU and on GPUs."""
    dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


class StagedGroup(dist.ProcessGroup):
    """Each collective copies its tensors to the host, runs there over gloo, and copies back what was written."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return [self.all_gather_single(*pair, *options) for pair in zip(outputs, inputs)][-1]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return [self.reduce_scatter_single(*pair, *options) for pair in zip(outputs, inputs)][-1]

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self.gloo.barrier(*args, **kwargs)


def _staged(of_gloo: str) -> Callable[..., Any]:
    def collective(self: StagedGroup, *args: Any, **kwargs: Any) -> Any:
        hosts: dict[int, torch.Tensor] = {}

        def to_host(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return hosts.setdefault(id(x), torch.empty(x.shape, dtype=x.dtype).copy_(x))

        with torch.no_grad():
            getattr(self.gloo, of_gloo)(*pytree.tree_map(to_host, args), **pytree.tree_map(to_host, kwargs)).wait()
            written = [x for x in pytree.tree_leaves(args[0]) if isinstance(x, torch.Tensor)]
            for x in written:
                x.detach().copy_(hosts[id(x)])
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(written)
        return _create_work_from_future(future)

    return collective


for _name, _of_gloo in _COLLECTIVES.items():
    setattr(StagedGroup, _name, _staged(_of_gloo))
