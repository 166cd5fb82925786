"""Inputs of a compiled region that are AsyncCollectiveTensors, or DTensors over one: results of collectives that eager
has started but not waited for.

    torch:  traces the inner tensor, which does not require a gradient: results that depend on it have none either
    here:   traces a tensor that requires a gradient if the input does; the compiled call waits before its graph runs

Upstream: `process_inputs` in ``torch/_functorch/_aot_autograd/frontend_utils.py`` calls ``trigger_wait()``, and the
result has no autograd history. Can go once torch keeps ``requires_grad`` there, and waits for local tensors of DTensors
as well."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.left_to_python import leave_frames_to_python
from dtensor_compile.compat.patches import FEATURES, if_there, needs, patch


def async_inputs(values: Sequence[Any]) -> tuple[int, ...]:
    """Positions of AsyncCollectiveTensors, and of DTensors whose local tensor is one."""
    return tuple(i for i, value in enumerate(values) if _is_async(value))


def _is_async(value: Any) -> bool:
    return isinstance(value._local_tensor if isinstance(value, DTensor) else value, AsyncCollectiveTensor)


def writes_are_kept() -> bool:
    """Whether what a compiled program writes to such an input reaches it, which needs the feature of this module."""
    return not FEATURES[_NAME].problems()


def waited_for(value: Any) -> Any:
    """`value` with its AsyncCollectiveTensor replaced by the completed plain tensor, without autograd history."""
    if isinstance(value, AsyncCollectiveTensor):
        return value.trigger_wait()
    return DTensor(value._local_tensor.trigger_wait(), value._spec, requires_grad=False) if _is_async(value) else value


class _Interior(torch.autograd.Function):
    """Gives a tensor that is neither a leaf of the autograd graph nor a view."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _plain(value)


def _plain(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the sizes and strides of `value`, in its own storage. `value` is a fake AsyncCollectiveTensor
    or a DTensor over one."""
    if isinstance(value, DTensor):
        return DTensor(_plain(value._local_tensor), value._spec, requires_grad=False)
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _as_traced(value: torch.Tensor, fake_mode: Any, static_shapes: bool) -> torch.Tensor:
    """The tensor to trace for an input: with the sizes that Dynamo knows, and the same role (leaf or not) in the
    autograd graph."""
    context = TracingContext.try_get()
    symbolic = context.tensor_to_context.get(value) if context is not None else None
    source = getattr(symbolic, "tensor_source", None)
    fake = fake_mode.from_tensor(
        value, static_shapes=static_shapes, symbolic_context=symbolic, source=source, trace=symbolic is None
    )
    with fake_mode:
        if not value.requires_grad:
            return _plain(fake)
        if value.is_leaf:
            return _plain(fake).requires_grad_()
        with torch.enable_grad():
            return _Interior.apply(torch.zeros((), requires_grad=True), fake)


@contextlib.contextmanager
def keep_gradients_of_async_inputs(example_inputs: Sequence[Any]) -> Iterator[None]:
    """While active, programs that AOTAutograd compiles on this thread keep the gradients of AsyncCollectiveTensor
    inputs.

    Args:
        example_inputs: of the program. Without an AsyncCollectiveTensor among them nothing changes.
    """
    if async_inputs(example_inputs):
        with _traced_with_gradients():
            yield
    else:
        yield


_NAME = "gradients of inputs that are AsyncCollectiveTensors"
_PROCESS = patch(
    "torch._functorch.aot_autograd:process_inputs", "flat_args aot_config fake_mode shape_env ignore_shape_env"
)
_WRAPPER = patch(
    "torch._functorch._aot_autograd.subclass_codegen:codegen_subclass_wrapper",
    "compiled_fn inp_metas out_metas num_fw_outs_saved_for_bw ...",
)


_codegen = if_there("torch._functorch._aot_autograd.subclass_codegen:codegen_subclass_wrapper")
#: Whether torch notes an input that it waits for as a pair of its index and the path to an inner tensor, as of 2.15;
#: before, as the index. The path of ours is empty.
_HAS_PATHS = _codegen is not None and "act_input_paths" in inspect.signature(_codegen).parameters
_NOTES = "act_input_paths" if _HAS_PATHS else "act_input_indices"


def _note(place: int) -> Any:
    return (place, ()) if _HAS_PATHS else place


def _place_of(note: Any) -> int | None:
    """The position that a note of ours stands for; None for a note of torch's own, which has a path."""
    if not _HAS_PATHS:
        return note
    place, path = note
    return None if path else place


@needs(
    _NAME,
    _PROCESS,
    _WRAPPER,
    without="torch handles them, their gradients can be lost, and programs that write to them run in eager",
    upstream="#191113, #180614",
    remove_when="process_inputs keeps requires_grad of an AsyncCollectiveTensor, and waits for one that is the local "
    "tensor of a DTensor",
)
@contextlib.contextmanager
def _traced_with_gradients() -> Iterator[None]:
    """While active, AOTAutograd traces such inputs on this thread with their role in the autograd graph."""

    def process(
        stock: Any,
        flat_args: list[Any],
        aot_config: Any,
        fake_mode: Any,
        shape_env: Any,
        ignore_shape_env: bool = False,
    ) -> tuple[Any, list[Any]]:
        found = async_inputs(flat_args)
        for i in found:
            flat_args[i] = _as_traced(flat_args[i], fake_mode, ignore_shape_env)
        fake, others = stock(flat_args, aot_config, fake_mode, shape_env, ignore_shape_env)
        return fake, sorted({*map(_note, found), *others})

    def wrapper(
        stock: Any,
        compiled_fn: Callable[..., Any],
        *metas: Any,
        **others: Any,
    ) -> Any:
        noted = others.pop(_NOTES, None) or ()
        ours = tuple(place for note in noted if (place := _place_of(note)) is not None)
        if len(ours) < len(noted):
            others[_NOTES] = [note for note in noted if _place_of(note) is None]
        made = stock(compiled_fn, *metas, **others)
        return _waiting(made, ours) if ours else made

    with patched(_PROCESS, process), patched(_WRAPPER, wrapper):
        yield


def _waiting(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """`compiled`, a boxed function, called once the arguments at `places` are complete."""

    def run(args: list[Any]) -> Any:
        for i in places:
            args[i] = waited_for(args[i])
        return compiled(args)

    leave_frames_to_python(run)
    return functools.wraps(compiled)(run)
