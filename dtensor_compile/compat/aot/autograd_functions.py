"""The ``torch.autograd.Function`` that AOTAutograd builds from a compiled graph and its backward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import if_there, needs, patch

_PLACE = "torch._functorch._aot_autograd.runtime_wrappers:"
#: The class that builds such a function; before 2.13, a longer method builds it.
_FACTORY: Any = if_there(_PLACE + "_AOTDispatchAutogradFunctionFactory")
#: Whether torch generates the Python that runs around a graph (since 2.13).
IS_GENERATED = _FACTORY is not None
_WRAP = patch(_PLACE + "RuntimeWrapper.post_compile")
#: The patch that `functions_built` applies first, and all of its patches.
_BUILD = (
    patch(_PLACE + "_AOTDispatchAutogradFunctionFactory.build", "self")
    if IS_GENERATED
    else patch(_PLACE + "AOTDispatchAutograd.post_compile", "compiled_fw_func compiled_bw_func ...")
)
BUILD = (_BUILD,) if IS_GENERATED else (_BUILD, _WRAP)
_NOTE = patch("torch._functorch._aot_autograd.schemas:SubclassCreationMeta.__post_init__", "self")


def _leave(*_: Any) -> None: ...


class _Inside(threading.local):
    """Whether this thread traces a block by itself, whose function runs while the program is traced."""

    block = False


_inside = _Inside()


@contextlib.contextmanager
def inside_of_block() -> Iterator[None]:
    """While active, functions that this thread builds run while another graph is traced, and not at run time."""
    before, _inside.block = _inside.block, True
    try:
        yield
    finally:
        _inside.block = before


def traces_block() -> bool:
    """Whether `inside_of_block` is active on this thread."""
    return _inside.block


@contextlib.contextmanager
def functions_built(
    before: Callable[[Any], None] = _leave,
    after: Callable[[type[torch.autograd.Function], Any], None] = _leave,
    *,
    at_run_time: bool = True,
) -> Iterator[None]:
    """While active, calls `before` and `after` around the construction of functions on this thread.

    Args:
        before: called with AOTAutograd's metadata of the graph (``ViewAndMutationMeta``).
        after: called with the function, which has not run yet, and that metadata.
        at_run_time: whether functions that do not run at run time (`inside_of_block`) are left out.
    """

    def build(stock: Any, self: Any) -> type[torch.autograd.Function]:
        if at_run_time and traces_block():
            return stock(self)  # type: ignore[no-any-return]
        before(self.spec.fw_metadata)
        compiled = stock(self)
        after(compiled, self.spec.fw_metadata)
        return compiled

    def post_compile(stock: Any, *args: Any, fw_metadata: Any, **others: Any) -> Callable[..., Any]:
        def wrap_function(wrap: Any, self: Any, apply: Any, *rest: Any, **more: Any) -> Callable[..., Any]:
            after(apply.__self__, fw_metadata)
            return wrap(self, apply, *rest, **more)

        before(fw_metadata)
        with patched(_WRAP, wrap_function):
            return stock(*args, fw_metadata=fw_metadata, **others)

    with patched(_BUILD, build if IS_GENERATED else post_compile):
        yield


def _right_strides(meta: SubclassCreationMeta, all_args: Sequence[Any], *, curr_start_idx: int) -> tuple[Any, Any]:
    """Size and stride of a DTensor result; torch 2.11 reads symbolic strides from the position of the sizes."""
    given = iter(all_args[curr_start_idx:])
    size, stride = (
        tuple(next(given) if s is None else s for s in outer) for outer in (meta.outer_size, meta.outer_stride)
    )
    return size, stride


@needs(
    "strides of DTensors that a graph returns, before 2.13",
    _NOTE,
    without="symbolic strides are wrong",
    upstream="fixed in 2.13",
    remove_when="2.11 is no longer supported",
)
@contextlib.contextmanager
def strides_of_results() -> Iterator[None]:
    """While active, metadata that this thread creates for DTensor inputs and results of a graph has the right
    strides."""
    if IS_GENERATED:
        yield
        return

    def note(stock: Any, self: SubclassCreationMeta) -> None:
        stock(self)  # set on the object, as torch checks for exactly this class
        vars(self)["compute_outer_size_and_stride"] = functools.partial(_right_strides, self)

    with patched(_NOTE, note):
        yield
