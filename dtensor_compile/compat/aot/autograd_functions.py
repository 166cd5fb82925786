"""The ``torch.autograd.Function`` that AOTAutograd builds of a compiled graph and its backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import if_there, needs, patch

_PLACE = "torch._functorch._aot_autograd.runtime_wrappers:"
#: The class whose one method builds such a function; before 2.13 it is built amid a longer one.
_FACTORY: Any = if_there(_PLACE + "_AOTDispatchAutogradFunctionFactory")
#: Whether torch generates the Python that runs around a graph, as of 2.13.
IS_GENERATED = _FACTORY is not None
_WRAP = patch(_PLACE + "RuntimeWrapper.post_compile")
#: What `functions_built` replaces first, and all that it replaces.
_BUILD = (
    patch(_PLACE + "_AOTDispatchAutogradFunctionFactory.build", "self")
    if IS_GENERATED
    else patch(_PLACE + "AOTDispatchAutograd.post_compile", "compiled_fw_func compiled_bw_func ...")
)
BUILD = (_BUILD,) if IS_GENERATED else (_BUILD, _WRAP)
_NOTE = patch("torch._functorch._aot_autograd.schemas:SubclassCreationMeta.__post_init__", "self")


def _leave(*_: Any) -> None: ...


@contextlib.contextmanager
def functions_built(
    before: Callable[[Any], None] = _leave, after: Callable[[type[torch.autograd.Function], Any], None] = _leave
) -> Iterator[None]:
    """While active, functions built on this thread pass by: `before` gets what AOTAutograd knows of the graph
    (``ViewAndMutationMeta``), `after` the function as well, which nothing has called yet.
    """

    def build(stock: Any, self: Any) -> type[torch.autograd.Function]:
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
    """torch 2.11 takes symbolic strides of a tensor that a graph returns from where its sizes are."""
    given = iter(all_args[curr_start_idx:])
    size, stride = (
        tuple(next(given) if s is None else s for s in outer) for outer in (meta.outer_size, meta.outer_stride)
    )
    return size, stride


@needs(
    "strides of DTensors that a graph returns, before 2.13",
    _NOTE,
    without="symbolic strides are wrong",
    upstream="done in 2.13",
    remove_when="2.11 is not supported any more",
)
@contextlib.contextmanager
def strides_of_results() -> Iterator[None]:
    """While active, what this thread notes of the DTensors that go in and out of a graph gives them their
    strides.
    """
    if IS_GENERATED:
        yield
        return

    def note(stock: Any, self: SubclassCreationMeta) -> None:
        stock(self)  # an attribute of the object: torch asks whether it is of this very class
        vars(self)["compute_outer_size_and_stride"] = functools.partial(_right_strides, self)

    with patched(_NOTE, note):
        yield
