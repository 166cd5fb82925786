"""Support for symmetric memory, by which a rank reads the results of another one while they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


def has_symmetric_memory(group_name: str) -> bool:
    """Whether the program has enabled symmetric memory for a group, and the installed torch has the fused operators for
    it."""
    try:
        from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
    except ImportError:
        return False
    ops = torch.ops.symm_mem
    known = all(hasattr(ops, name) for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"))
    return known and is_symm_mem_enabled_for_group(cast("GroupName", group_name))
