"""Inductor's lowerings of collectives, without a promotion that changes what is sent."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtensor_compile.compat.distributed.functional_collectives import functional
from dtensor_compile.compat.hooks import hook, needs

#: Those with a number beside the tensor: the size of the group, or the rank that sends.
_WITH_NUMBERS = (functional("all_gather_into_tensor"), functional("broadcast"))


@needs(
    "masks that are sent as they are",
    hook("torch._inductor.lowering:lowerings"),
    without="masks are gathered as integers of eight bytes, and kernels that choose by them are not written",
)
@contextlib.contextmanager
def masks_are_sent_as_they_are() -> Iterator[None]:
    """While it is entered, Inductor, on this thread, gathers and broadcasts booleans as booleans.

    It takes collectives for elementwise operators, whose tensors and numbers have one dtype: a boolean beside the size
    of a group became an integer of 64 bits.
    """
    from torch._inductor.lowering import lowerings

    owner = threading.get_ident()

    def unpromoted(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def lower(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            ours = threading.get_ident() == owner and tensor.get_dtype() == torch.bool
            return (stock.__wrapped__ if ours else stock)(tensor, *args, **kwargs)

        return lower

    stock = {op: lowerings[op] for op in _WITH_NUMBERS if hasattr(lowerings.get(op), "__wrapped__")}
    lowerings.update({op: unpromoted(lowering) for op, lowering in stock.items()})
    try:
        yield
    finally:
        lowerings.update(stock)  # what others added to the table meanwhile stays
