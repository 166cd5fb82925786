"""Lowerings of collectives in Inductor.

Collectives are lowered without a type promotion, which would change the data that is sent, and waits without a run of
their operator, whose result is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtensor_compile.compat.apply_patches import on_this_thread, patched, patched_entries
from dtensor_compile.compat.distributed.functional_collectives import functional
from dtensor_compile.compat.patches import hook, needs, patch

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


_WAIT = patch("torch._inductor.ir:_WaitKernel.create_wait", "cls kernel inp")


@needs(
    "waits are lowered without a run of the operator",
    _WAIT,
    hook("torch._inductor.ir:_WaitKernel.__init__", "self layout kernel tensor_args nontensor_args unflatten_args ..."),
    hook("torch._inductor.ir:ExternKernel.realize_input", "cls x"),
    hook("torch._inductor.ir:as_storage_and_layout", "x freeze ..."),
    hook("torch._inductor.ir:MutationOutput", "layout mutated_node mutating_node"),
    without="programs take a few percent longer to compile",
    upstream="not reported: the operator of a wait is run with fake tensors, and its result dropped",
    remove_when="create_wait does not run the operator",
)
@contextlib.contextmanager
def waits_are_not_run() -> Iterator[None]:
    """While active, Inductor makes the kernel of a wait for one tensor from that tensor on this thread."""
    from torch._inductor import ir

    def create(stock: Any, cls: Any, kernel: Any, inp: Any) -> None:
        if not isinstance(inp, ir.TensorBox):  # a list, since 2.15
            stock(cls, kernel, inp)
            return
        given, layout = cls.realize_input(inp), ir.NoneLayout(device=inp.get_device())
        if ir.is_storage_and_layout(given):
            ir.as_storage_and_layout(given, freeze=True)
        wait = cls(layout, kernel, [given], [], lambda tensors, _: (tuple(tensors), {}))
        wait.mutation_outputs.append(ir.MutationOutput(layout, inp, wait))

    with patched(_WAIT, create):
        yield
