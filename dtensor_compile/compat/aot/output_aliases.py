"""Results that are views of an input or of another result, which AOTAutograd regenerates after the graph, and results
that torch wrongly takes for views of an input."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch._functorch._aot_autograd import runtime_wrappers
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from dtensor_compile.compat.aot.autograd_functions import BUILD, IS_GENERATED, functions_built, strides_of_results
from dtensor_compile.compat.aot.tangents import expected_placements
from dtensor_compile.compat.apply_patches import patched, patched_entries, patched_value
from dtensor_compile.compat.patches import needs, patch

_ALIAS = patch("torch._functorch._aot_autograd.runtime_wrappers:gen_alias_from_base")
_WRAPPER = patch("torch._functorch._aot_autograd.runtime_wrappers:_create_runtime_wrapper")
_ANALYZE = patch("torch._functorch.aot_autograd:run_functionalized_fw_and_collect_metadata", "f ...")
_UNWRAP = patch(
    "torch._functorch._aot_autograd.graph_capture:aot_dispatch_subclass",
    "flat_fn_maybe_joint args args_descs is_joint_structure meta fw_only",
)
#: Before 2.13, the classes of handlers that regenerate views.
_HANDLERS = patch("torch._functorch._aot_autograd.runtime_wrappers:_HANDLER_MAP")


@needs(
    "results that are views of DTensors",
    _ALIAS,
    _WRAPPER,
    *BUILD,
    _ANALYZE,
    _UNWRAP,
    *(() if IS_GENERATED else (_HANDLERS,)),
    without="values of views could be wrong",
    essential=True,
    upstream="#184002, #184367, #158954",
    remove_when="AOTAutograd replays views of DTensors of symbolic sizes, and a view operator that redistributed its "
    "argument returns a new storage",
)
@contextlib.contextmanager
def views_of_dtensors() -> Iterator[None]:
    """While active, code that AOTAutograd builds on this thread can return views of DTensors with symbolic sizes.

    With static sizes torch replays the view on its base; otherwise it calls ``as_strided`` on the base, which DTensor
    does not support. The replacement stays with the compiled code; torch's own function is unchanged.

    A result of a view operator whose argument DTensor redistributed (``x.narrow(1, 2, 1)`` of `x` sharded along dim 1)
    is an ordinary result: its values are not in the memory of `x`, an input or another result, though DTensor gives
    both the same storage.

    A result that is the only view of its base is returned as it is. torch calls ``_unsafe_view`` on it first, so that
    autograd does not treat it as a view. A new DTensor is none, and an empty one cannot be viewed in shards.

    The graph returns the bases that the DTensors need. torch counts those of the local tensors: DTensors made from one
    tensor are not views, while their local tensors are.
    """
    ours = functools.partial(_alias, runtime_wrappers.gen_alias_from_base)

    def build(stock: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        with patched_value(_ALIAS, ours), _handlers_that_call(ours):  # the built code keeps the current function
            return stock(*args, **kwargs)

    def analyze(stock: Any, function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        return stock(_without_false_views(function), **kwargs)

    def unwrap(stock: Any, *args: Any, meta: Any, **kwargs: Any) -> Any:
        unwrapped = stock(*args, meta=meta, **kwargs)
        if unwrapped.maybe_subclass_meta is not None:
            results = meta.subclass_fw_graph_out_meta
            bases = results[len(results) - meta.num_intermediate_bases :]
            unwrapped.maybe_subclass_meta.fw_metadata.num_intermediate_bases = sum(
                getattr(base, "arg_count", 1) for base in bases
            )
        return unwrapped

    def keep_views(metadata: Any) -> None:
        kinds = metadata.output_info
        metadata.unsafe_view_out_indices = [
            i for i in metadata.unsafe_view_out_indices if kinds[i].raw_type is not DTensor
        ]
        metadata.num_unsafe_view_outputs = len(metadata.unsafe_view_out_indices)

    with (
        patched(_WRAPPER, build),
        functions_built(before=keep_views, at_run_time=False),
        strides_of_results(),
        patched(_ANALYZE, analyze),
        patched(_UNWRAP, unwrap),
    ):
        yield


@contextlib.contextmanager
def _handlers_that_call(alias: Callable[..., torch.Tensor]) -> Iterator[None]:
    """While active, handlers that regenerate views are created to call `alias`. Since 2.13, generated code does that,
    and keeps the function that it finds."""
    if IS_GENERATED:
        yield
        return
    ours = {}
    for kind, handler in runtime_wrappers._HANDLER_MAP.items():
        names = {**handler.__call__.__globals__, "gen_alias_from_base": alias}
        ours[kind] = type(
            handler.__name__, (handler,), {"__call__": types.FunctionType(handler.__call__.__code__, names)}
        )
    with patched_entries(_HANDLERS, ours):
        yield


def _without_false_views(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with results that share a storage only with arguments, bases and results whose local tensors do.

    Results that share a storage share that of the argument whose memory they are in: `split` of an argument has a new
    storage, and torch refuses two results there.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        results = function(*args)
        placed = [x for x in pytree.tree_leaves(results) if isinstance(x, DTensor)]
        owners = [
            *(x for x in args if isinstance(x, DTensor)),
            *(cast("DTensor", x._base) for x in placed if x._base is not None),
            *placed,
        ]
        locals_of: dict[StorageWeakRef, torch.Tensor] = {}  # by storage; the first is an argument, else a base
        for x in owners:
            locals_of.setdefault(StorageWeakRef(x.untyped_storage()), x._local_tensor)
        for x in placed:
            local, base = x._local_tensor, locals_of[StorageWeakRef(x.untyped_storage())]
            if StorageWeakRef(local.untyped_storage()) != StorageWeakRef(base.untyped_storage()):
                torch._functionalize_unsafe_set(x, DTensor(local.detach(), x._spec, requires_grad=False))
        inputs = {StorageWeakRef(x._local_tensor.untyped_storage()): x for x in args if isinstance(x, DTensor)}
        known = {StorageWeakRef(x.untyped_storage()) for x in inputs.values()}
        shared = collections.Counter(StorageWeakRef(x.untyped_storage()) for x in placed)
        for x in placed:
            own, source = (
                StorageWeakRef(x.untyped_storage()),
                inputs.get(StorageWeakRef(x._local_tensor.untyped_storage())),
            )
            if shared[own] > 1 and own not in known and source is not None:
                torch._functionalize_unsafe_set(x, source)
        return results

    return run


def _alias(
    stock: Callable[..., torch.Tensor],
    base: torch.Tensor,
    result: torch.Tensor,
    requires_grad: bool,
    views: Any = None,
    *,
    replay_views: bool,
) -> torch.Tensor:
    """The view of `base` that has the layout of `result`, which the graph returned."""
    again = replay_views and views is not None and not any(view.has_symbolic_inputs for view in views.sequence)
    if again or result._base is not None or not (isinstance(base, DTensor) and isinstance(result, DTensor)):
        return stock(base, result, requires_grad, views, replay_views=replay_views)
    like = result._local_tensor
    # If the view is replicated, the gradient is, too, as in eager. The gradient of a partial input is replicated:
    # `to_local` trusts `grad_placements`, and as partial each rank's copy would count as one term of a sum.
    gradient = expected_placements([p if p.is_replicate() else q for p, q in zip(result.placements, base.placements)])
    local = base.to_local(grad_placements=gradient) if requires_grad else base._local_tensor
    view = _laid_out_like(local, like)
    spec = result._spec
    whole = DTensor.from_local(view, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)
    return _refusing_writes(whole) if whole.requires_grad else whole


def _laid_out_like(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The view of the memory of `base`, a plain tensor, with the dtype, sizes, strides and offset of `like`, which is
    in that memory.

    Autograd knows the view, unless it reinterprets the bits as another kind of number, which has no gradient. Inductor
    copies a slice before it reinterprets its bits: the result is then `like` itself, with the right values in its own
    memory.
    """
    stored = base.conj() if base.is_conj() else base
    stored = torch._neg_view(stored) if stored.is_neg() else stored
    view = _stored_like(stored, like)
    view = view.conj() if like.is_conj() else view
    return torch._neg_view(view) if like.is_neg() else view


def _stored_like(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`_laid_out_like` for numbers as they are stored, ignoring the conjugate and negative bits."""
    sizes, strides, offset = like.size(), like.stride(), like.storage_offset()
    if like.dtype == base.dtype:
        return base.as_strided(sizes, strides, offset)
    if base.is_complex() and like.dtype == base.dtype.to_real():
        return torch.view_as_real(base).as_strided(sizes, strides, offset)
    if like.is_complex() and base.dtype == like.dtype.to_real():
        pairs = base.as_strided((*sizes, 2), (*(2 * stride for stride in strides), 1), 2 * offset)
        return torch.view_as_complex(pairs)
    if like.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return like
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides)) if like.numel() else -1
    used = (offset + last + 1) * like.itemsize if like.numel() else 0  # bytes of memory up to the end of `like`
    flat = base.detach().as_strided((-(-used // base.itemsize),), (1,), 0)
    return flat.view(like.dtype).as_strided(sizes, strides, offset)


def _refusing_writes(x: torch.Tensor) -> torch.Tensor:
    """`x`, made to refuse in-place writes by the program.

    Autograd does not know that it is a view of an argument, and would give the argument and its other views the
    gradients from before the write. torch raises its error for views made in custom functions.
    """
    with torch.enable_grad():
        x = torch.ops.aten.alias.default(x)
    torch._C._autograd._set_creation_meta(x, torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION)
    return x
