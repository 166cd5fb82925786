"""Guards of DTensors: one each, in C++ (`runtime.native`), in place of eight or more, of which two are in Python.

torch guards a DTensor by its type, its spec (compared without shapes), ``requires_grad``, its local tensor, and for its mesh that
it is the object that others have too. The one guard compares all that, sizes and strides as far as they are constants of the
graph, and instead of the identity of the mesh that it is equal to the one that was traced, as all others then are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.guards import convert_to_concrete_values, get_verbose_code_parts, install_guard
from torch._dynamo.source import AttrSource, GradSource, is_from_optimizer_source
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._guards import Guard, GuardsSet, Source, TracingContext
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dynamo import guard_sizes
from dtensor_compile.runtime.native import native

#: How a program marks sizes as dynamic or static: attributes of the tensor.
_MARKS = tuple(f"_dynamo_{kind}_indices" for kind in ("dynamic", "weak_dynamic", "unbacked", "strict_unbacked", "static"))


def track_and_guard(track: Callable[[], VariableTracker], source: Source, value: DTensor) -> VariableTracker:
    """The tracker that ``track()`` makes of `value`, an input of the graph, with one guard in place of those that it installs."""
    if not _one_will_do(value):
        variable = track()
        guard_sizes(source, value)
        return variable
    context = TracingContext.get().guards_context
    if context.skip_install:
        return track()
    installed, context.dynamo_guards = context.dynamo_guards, GuardsSet()
    try:
        variable = track()
    finally:
        own, context.dynamo_guards = context.dynamo_guards, installed
    local = AttrSource(source, "_local_tensor")
    for guard in own:
        about_it = guard.name.startswith(source.name)
        if not about_it or guard.originating_source == local and guard.create_fn_name() == "DUPLICATE_INPUT":
            installed.add(guard)
    install_guard(source.make_guard(_dtensor_match))
    return variable


def _one_will_do(value: DTensor) -> bool:
    local = value._local_tensor
    return (
        native() is not None
        and type(value) is DTensor
        and type(local) is torch.Tensor
        and not InstructionTranslator.current_tx().output.export
        and not any(hasattr(tensor, mark) for tensor in (value, local) for mark in _MARKS)
    )


def _dtensor_match(builder: Any, guard: Guard) -> None:
    value, source = builder.get(guard), guard.originating_source
    local = value._local_tensor
    sizes, strides = _extents(builder, source, value)
    local_sizes, local_strides = _extents(builder, AttrSource(source, "_local_tensor"), local)
    manager = builder.get_guard_manager(guard)
    name = builder.arg_ref(guard)
    code = (
        f"check_dtensor({name}, {value._spec}, {local.dtype}, device={local.device}, requires_grad={value.requires_grad}, "
        f"size={sizes}, stride={strides}, local_size={local_sizes}, local_stride={local_strides})"
    )
    check = native().Guard(value, sizes, strides, local_sizes, local_strides, None in sizes or None in strides)
    manager.add_lambda_guard(check, get_verbose_code_parts(code, guard), guard.user_stack)
    of_optimizer = isinstance(source, GradSource) and is_from_optimizer_source(source)
    if not isinstance(value, torch.nn.Parameter) and not of_optimizer:  # torch asks neither of plain ones
        builder.no_tensor_aliasing_names.append(name)
        builder.no_tensor_aliasing_guard_managers.append(manager)


_dtensor_match.__name__ = "DTENSOR_MATCH"


def _extents(builder: Any, source: Source, tensor: torch.Tensor) -> tuple[Sequence[int | None], Sequence[int | None]]:
    """Sizes and strides of a tensor; None where the graph has a symbol."""
    known = builder.check_fn_manager.output_graph.input_source_to_sizes_strides.get(source)
    if known is None:
        return list(tensor.size()), list(tensor.stride())
    return convert_to_concrete_values(known["size"]), convert_to_concrete_values(known["stride"])
