"""C++ code (`native.loader`) around compiled graphs with DTensors, instead of the Python that AOTAutograd generates.

    torch:  one append per local tensor and per mesh; per result and per gradient a new spec and a DTensor by its
        constructor
    here:   one call that unwraps all arguments, one that wraps all results; gradients go right into ``.grad``

    torch:  a few Python instructions for each argument, and for each tensor that is saved for the backward
    here:   one call for all of each

If any input or output is neither plain nor a DTensor over a plain tensor, torch's own code is used.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import PlainTensorMeta, SubclassCreationMeta
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _MaskPartial

from dtensor_compile.compat.aot.autograd_functions import BUILD, functions_built, traces_block
from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dtensor.shard_sizes import unflatten
from dtensor_compile.compat.dtensor.specs import spec_of_parts
from dtensor_compile.compat.dynamo.left_to_python import leave_frames_to_python
from dtensor_compile.compat.patches import hook, if_there, needs, patch
from dtensor_compile.native.loader import native

#: Both are missing before 2.13, and with them the feature of this module.
subclass_codegen = if_there("torch._functorch._aot_autograd:subclass_codegen")
OpaqueMeta = if_there("torch._functorch._aot_autograd.schemas:OpaqueMeta")

Meta = PlainTensorMeta | SubclassCreationMeta


class _NotPlain(Exception):
    """An input or output is a subclass other than a DTensor over a plain tensor."""


_VERSIONS = patch(
    "torch._functorch._aot_autograd.runtime_wrappers:_codegen_increment_mutation_versions",
    "rw_lines rw_globals ...",
    "buf ...",
)
_WRAPPER = patch(
    "torch._functorch._aot_autograd.subclass_codegen:codegen_subclass_wrapper",
    "compiled_fn inp_metas out_metas num_fw_outs_saved_for_bw ...",
)
_BACKWARD = patch("torch._functorch._aot_autograd.subclass_codegen:codegen_backward_subclass_fns", "grad_input_metas")


@needs(
    "DTensors unwrapped and wrapped in C++",
    *BUILD,
    _VERSIONS,
    _WRAPPER,
    _BACKWARD,
    hook("torch._functorch._aot_autograd.subclass_codegen:_compute_placeholders", "outer"),
    hook("torch._functorch._aot_autograd.subclass_codegen:_concrete_value", "val"),
    without="calls are as slow as under torch",
    upstream="#122029",
    remove_when="AOTAutograd unwraps and wraps DTensors in C++",
)
@contextlib.contextmanager
def native_calls(explain: Callable[[Exception], None], explains: Callable[[], None]) -> Iterator[None]:
    """While active, AOTAutograd uses the code of this module around graphs on this thread.

    Args:
        explain: called with an error that a forward graph raises while it runs.
        explains: called if `explain` will be.
    """
    fast = native() is not None

    def wrapper(
        stock: Any,
        compiled_fn: Callable[..., Any],
        inp_metas: Sequence[Meta],
        out_metas: Sequence[Meta],
        num_fw_outs_saved_for_bw: int | None,
        **others: Any,  # frozen inputs, unfinished collectives
    ) -> Callable[..., Any]:
        if fast and not traces_block() and not any(others.values()):
            with contextlib.suppress(_NotPlain):
                around = _around(compiled_fn, inp_metas, out_metas, num_fw_outs_saved_for_bw is not None, explain)
                explains()
                return around
        return stock(compiled_fn, inp_metas, list(map(_from_parts, out_metas)), num_fw_outs_saved_for_bw, **others)

    def backward(stock: Any, grad_input_metas: Sequence[Meta] | None = None) -> tuple[Any, Any]:
        if grad_input_metas is None:
            return stock(grad_input_metas)
        unwrap, wrap = stock(list(map(_from_parts, grad_input_metas)))
        if fast and not traces_block():
            with contextlib.suppress(_NotPlain):
                return unwrap, native().Wrap(_results(grad_input_metas)[0], True)
        return unwrap, _apart(wrap)

    def quicken(compiled: type[torch.autograd.Function], metadata: Any) -> None:
        if fast:
            _accumulate(compiled, metadata)
            _save(compiled, metadata)
            _apply(compiled, explain)
            explains()

    def versions(stock: Any, code: Any, *others: Any) -> None:
        stock(code, *others)
        names = others[0] if isinstance(code, list) else code.globals  # lines and names; one object since 2.14
        if fast and not traces_block() and "_increment_version_" in names:
            names["_increment_version_"] = native().increment_versions

    with (
        patched(_WRAPPER, wrapper),
        patched(_BACKWARD, backward),
        functions_built(after=quicken),
        patched(_VERSIONS, versions),
    ):
        yield


class _DTensorFromParts:
    """Replaces ``DTensor`` in generated code: rebuilds DTensors as in C++, including strided shards made by views."""

    __tensor_unflatten__ = staticmethod(functools.partial(unflatten, DTensor.__tensor_unflatten__))


def _from_parts(meta: Meta) -> Meta:
    if (
        not isinstance(meta, SubclassCreationMeta)
        or (meta.original_subclass_type or type(meta.original_subclass)) is not DTensor
    ):
        return meta
    changed = copy.copy(meta)
    changed.original_subclass_type = _DTensorFromParts
    return changed


def _apart(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """`wrap`, torch's function for gradients, with a copy if one tensor is the gradient of several DTensors."""

    def wrap_apart(results: Sequence[Any]) -> Any:
        times = collections.Counter(id(result) for result in results if isinstance(result, torch.Tensor))
        return wrap([result.clone() if times[id(result)] > 1 else result for result in results])

    leave_frames_to_python(wrap_apart)
    return wrap_apart


def _around(
    compiled: Callable[..., Any],
    inputs: Sequence[Meta],
    outputs: Sequence[Meta],
    saves: bool,
    explain: Callable[[Exception], None],
) -> Callable[..., Any]:
    """`compiled`, a boxed function of local tensors and meshes, as a boxed function of DTensors.

    Args:
        saves: results beyond those of `outputs` are passed on unchanged.
        explain: called with errors of `compiled`. A ``try`` takes no time where nothing raises.
    """
    unwrap = native().Unwrap([_argument(meta) for meta in inputs])
    plan, used = _results(outputs)
    wrap = native().Wrap(plan, False)

    def run(args: list[Any]) -> tuple[Any, ...]:
        try:
            return wrap(compiled(unwrap(args)))
        except Exception as error:
            explain(error)
            raise

    def run_and_save(args: list[Any]) -> tuple[Any, ...]:
        try:
            results = compiled(unwrap(args))
        except Exception as error:
            explain(error)
            raise
        return wrap(results) + tuple(results[used:])

    function = run_and_save if saves else run
    leave_frames_to_python(function)
    return functools.wraps(compiled)(function)


def _accumulate(compiled: Any, metadata: Any) -> None:
    """Accumulates gradients of a compiled ``torch.autograd.Function`` where they are made."""
    stock = vars(compiled)["_bw_epilogue_fn"]
    wrap = stock.__globals__.get("_wrap_")
    if type(wrap) is not native().Wrap or metadata.num_backward_tokens or metadata.is_rng_op_functionalized:
        return
    wrap.owner = compiled._backward_cls
    stock_backward = vars(compiled)["_bwd_fn"]

    def epilogue(results: Any, make_subclass_override: Any = None) -> Any:
        return wrap(results) if make_subclass_override is None else stock(results, make_subclass_override)

    def backward(arguments: Any, ctx: Any, prologue: Any, add_rng: Any, implementation: Any, _: Any, twice: Any) -> Any:
        # with create_graph=True gradients are results of another function and are left to autograd
        after = stock if torch.is_grad_enabled() else epilogue
        return stock_backward(arguments, ctx, prologue, add_rng, implementation, after, twice)

    for function in (epilogue, backward):
        leave_frames_to_python(function)
    compiled._bwd_fn = staticmethod(backward)


def _save(compiled: Any, metadata: Any) -> None:
    """Processes the tensors that a compiled ``torch.autograd.Function`` saves for its backward in C++."""
    stock_forward, detached = vars(compiled)["_fwd_fn"], native().detached_views

    def save(ctx: Any, results: Sequence[Any]) -> None:
        ctx.save_for_backward(*detached(results[metadata.tensors_saved_for_backwards_with_vc_check_slice]))
        ctx._tensors_no_vc_check = detached(results[metadata.tensors_saved_for_backwards_no_vc_check_slice])
        ctx.symints = results[metadata.symints_saved_for_backwards_slice]
        ctx.opaque_objects = results[metadata.opaque_objects_saved_for_backwards_slice]

    def forward(ctx: Any, arguments: Any, add_rng: Any, stock_save: Any, finalize: Any, implementation: Any) -> Any:
        keep = stock_save if metadata.dynamic_saved_tensors_idxs else save  # torch marks such tensors
        return stock_forward(ctx, arguments, add_rng, keep, finalize, implementation)

    for function in (save, forward):
        leave_frames_to_python(function)
    compiled._fwd_fn = staticmethod(forward)


def _apply(compiled: Any, explain: Callable[[Exception], None]) -> None:
    """Checks the arguments of a compiled ``torch.autograd.Function`` for ``torch.func`` wrappers in C++."""
    stock, call = compiled.apply, super(torch.autograd.Function, compiled).apply

    def apply(*arguments: Any) -> Any:
        if torch._C._are_functorch_transforms_active() or not native().without_wrappers(arguments):
            return stock(*arguments)
        try:
            return call(*arguments)
        except Exception as error:
            explain(error)
            raise

    leave_frames_to_python(apply)
    compiled.apply = staticmethod(apply)


def _symbolic(extents: Iterable[Any]) -> list[bool]:
    return subclass_codegen._compute_placeholders(extents)


def _check_plain(meta: SubclassCreationMeta) -> None:
    cls = meta.original_subclass_type or type(meta.original_subclass)
    kinds = {name: type(attribute) for name, attribute in meta.attrs.items()}
    if cls is not DTensor or list(kinds.items()) != [("_local_tensor", PlainTensorMeta), ("device_mesh", OpaqueMeta)]:
        raise _NotPlain
    if any(isinstance(placement, _MaskPartial) for placement in meta.meta[0]):
        raise _NotPlain  # the placement has the mask of this call
    local = meta.attrs["_local_tensor"]
    assert isinstance(local, PlainTensorMeta)
    _check_sizes(local)
    for extent, read_from in ((meta.outer_size, "outer_size_from_attr"), (meta.outer_stride, "outer_stride_from_attr")):
        if getattr(meta, read_from, None) is not None and any(_symbolic(extent)):
            raise _NotPlain  # since 2.14, read from the local tensor


def _check_sizes(meta: PlainTensorMeta) -> None:
    """Raises `_NotPlain` if sizes of a local tensor are inputs or results of their own (since 2.14); C++ does not
    expect them."""
    if getattr(meta, "arg_count", 1) != 1:
        raise _NotPlain


def _argument(meta: Meta) -> tuple[list[int], list[int]] | None:
    """For ``Unwrap``: None if it is no DTensor; otherwise the dims whose sizes, and those whose strides, are inputs."""
    if isinstance(meta, PlainTensorMeta):
        _check_sizes(meta)
        return None
    _check_plain(meta)
    sizes, strides = (
        [dim for dim, is_one in enumerate(_symbolic(e)) if is_one] for e in (meta.outer_size, meta.outer_stride)
    )
    return sizes, strides


def _results(metas: Sequence[Meta]) -> tuple[list[Any], int]:
    """For ``Wrap``: the plan of the results, and the number of results that it consumes.

    The plan has an index per plain output, and ``(index, sizes, strides, make_spec, requires_grad)`` per DTensor, with
    each size as ``(False, size)`` or ``(True, index)``.
    """
    plan: list[Any] = []
    place = used = 0
    for meta in metas:
        if isinstance(meta, PlainTensorMeta):
            _check_sizes(meta)
            plan.append(meta.unwrapped_idx)
            place = max(place, meta.unwrapped_idx + 1)
            used += 1
            continue
        _check_plain(meta)
        placements, tensor_meta, shard_order, requires_grad = meta.meta
        start, place, extents = place, place + 2, []
        for extent in (meta.outer_size, meta.outer_stride):
            entries = []
            for value, is_result in zip(extent, _symbolic(extent)):
                entries.append((True, place) if is_result else (False, subclass_codegen._concrete_value(value)))
                place += is_result
            extents.append(tuple(entries))
        make_spec = functools.partial(spec_of_parts, placements, tensor_meta.dtype, shard_order)
        plan.append((start, *extents, make_spec, requires_grad))
        used += meta.arg_count
    return plan, used
