"""Lowerings of collectives in Inductor without a type promotion, which would change the data that is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtensor_compile.compat.apply_patches import on_this_thread, patched_entries
from dtensor_compile.compat.distributed.functional_collectives import functional
from dtensor_compile.compat.patches import needs, patch

#: Collectives with an integer argument: the size of the group, or the source rank.
_WITH_NUMBERS = (functional("all_gather_into_tensor"), functional("broadcast"))


_LOWERINGS = patch("torch._inductor.lowering:lowerings")


@needs(
    "boolean masks in collectives",
    _LOWERINGS,
    without="masks are gathered as 64-bit integers, and kernels that select by them fail to compile",
    upstream="not reported: the result is right, and eight times as large",
    remove_when="all_gather_into_tensor and broadcast are lowered with type_promotion_kind=None",
)
@contextlib.contextmanager
def masks_are_sent_as_they_are() -> Iterator[None]:
    """While active, Inductor gathers and broadcasts booleans as booleans on this thread.

    It treats collectives as elementwise operators, whose tensors and numbers are promoted to one dtype: a boolean
    tensor with an integer group size became int64.
    """
    from torch._inductor.lowering import lowerings

    def unpromoted(stock: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        lower = stock.__wrapped__ if tensor.get_dtype() == torch.bool else stock  # type: ignore[attr-defined]
        return lower(tensor, *args, **kwargs)

    stock = {op: lowerings[op] for op in _WITH_NUMBERS if hasattr(lowerings.get(op), "__wrapped__")}
    with patched_entries(_LOWERINGS, {op: on_this_thread(lower, unpromoted) for op, lower in stock.items()}):
        yield
