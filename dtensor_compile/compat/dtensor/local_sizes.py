"""Sizes of a DTensor's local tensor are symbolic exactly where the sizes of the DTensor are.

Dynamo makes a size symbolic once it has changed, and decides for the DTensor and its local tensor separately. With 7
rows on 3 ranks and then 9, the shard of the last rank grows from 1 to 3 and the others stay at 3: one rank would trace
with a symbol and the others with a constant, their passes and plans would issue different collectives, and the ranks
would deadlock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

_DYNAMIC = patch("torch._dynamo.variables.builder:_automatic_dynamic", "e tx source static_shapes ...")


@needs(
    "one symbol for a global and a local size",
    _DYNAMIC,
    without="a dynamic size may recompile more often",
    upstream="#152963, #130935",
    remove_when="automatic dynamic shapes decide for a DTensor and its local tensor together",
)
@contextlib.contextmanager
def local_sizes_follow_global_ones() -> Iterator[None]:
    """While active, Dynamo's choice of dynamic dims for a DTensor applies to its local tensor, too."""

    def decide(stock: Any, e: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(e, *args, **kwargs)
        local = getattr(found, "inner_contexts", {}).get("_local_tensor") if isinstance(e, DTensor) else None
        if local is not None and len(local.dynamic_sizes) == len(found.dynamic_sizes):
            for dim, size in enumerate(found.dynamic_sizes):
                if (size is DimDynamic.STATIC) != (local.dynamic_sizes[dim] is DimDynamic.STATIC):
                    local.dynamic_sizes[dim] = size
                    local.constraint_sizes[dim] = None
        return found

    with patched(_DYNAMIC, decide):
        yield
