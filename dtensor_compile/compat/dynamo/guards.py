"""Guards of DTensors: one C++ guard each (`native.loader`) instead of eight or more, two of which run Python.

torch guards a DTensor by its type, its spec (compared without shapes), ``requires_grad``, its local tensor, and the
identity of its mesh. Our guard compares all that, and sizes and strides as far as they are constants of the graph. It
requires a mesh equal to the traced one instead of the same object.

If an object holds many tensors, as an optimizer does, they share one guard, which checks all in one pass
(`guarded_together`). That no two of them are aliases is left to `fixups.aliased_inputs`, which checks all inputs of a
graph that mutates.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.guards import convert_to_concrete_values, get_verbose_code_parts, install_guard
from torch._dynamo.source import AttrSource, GradSource, is_from_optimizer_source
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._guards import Guard, GuardsContext, GuardsSet, Source, TracingContext
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dynamo.trackers.tracker_tools import guard_sizes
from dtensor_compile.compat.inductor.input_fetch_codegen import Plan
from dtensor_compile.native.loader import native

#: Attributes of a tensor by which a program marks sizes as dynamic or static.
_MARKS = tuple(
    f"_dynamo_{kind}_indices" for kind in ("dynamic", "weak_dynamic", "unbacked", "strict_unbacked", "static")
)


def track_and_guard(track: Callable[[], VariableTracker], source: Source, value: DTensor) -> VariableTracker:
    """The tracker that ``track()`` makes of `value`, an input of the graph, with one guard instead of those it
    installs."""
    if not _one_will_do(value):
        variable = track()
        guard_sizes(source, value)
        return variable
    context = TracingContext.get().guards_context
    if _skips_guards(context):
        return track()
    installed, context.dynamo_guards = context.dynamo_guards, GuardsSet()
    try:
        variable = track()
    finally:
        own, context.dynamo_guards = context.dynamo_guards, installed
    local = AttrSource(source, "_local_tensor")
    for guard in own:
        about_it = guard.name.startswith(source.name)
        duplicate = guard.originating_source == local and guard.create_fn_name() == "DUPLICATE_INPUT"
        # A tensor marked as static is part of the graph, under a guard.
        itself = guard.originating_source == source and guard.create_fn_name() == "ID_MATCH"
        if not about_it or duplicate or itself:
            installed.add(guard)
    install_guard(source.make_guard(_dtensor_match))
    return variable


def _skips_guards(context: GuardsContext) -> bool:
    return getattr(context, "skip_install", False)  # before 2.13, installed guards are dropped instead


def _one_will_do(value: torch.Tensor) -> bool:
    tensors = (value, value._local_tensor) if type(value) is DTensor else (value,)
    return (
        native() is not None
        and (type(value) is torch.nn.Parameter or type(tensors[-1]) is torch.Tensor)
        and not InstructionTranslator.current_tx().output.export
        and not any(hasattr(tensor, mark) for tensor in tensors for mark in _MARKS)
    )


def _settings(guard: Guard) -> dict[str, Any]:
    """The keyword arguments with which a guard was created."""
    assert isinstance(guard.create_fn, functools.partial)
    return guard.create_fn.keywords


class Together:
    """Parts of an object that share one guard.

    Attributes:
        guards: False if torch's own guards are used, and nothing that is added here is guarded.
        tensors: sources of tensors.
        types: the expected type per source.
        same: pairs of sources of one object.
    """

    def __init__(self, guards: bool) -> None:
        self.guards = guards
        self.tensors: dict[Source, None] = {}
        self.types: dict[Source, type] = {}
        self.same: list[tuple[Source, Source]] = []

    def add(self, variable: VariableTracker, source: Source, value: Any) -> None:
        """Adds the tensor that `variable` tracks, if `source` is its own source."""
        if variable.source == source and isinstance(value, torch.Tensor) and _one_will_do(value):
            self.tensors[source] = None

    def leave_to(self, other: Together) -> None:
        """Removes everything that `other` guards."""
        self.tensors = {source: None for source in self.tensors if source not in other.tensors}
        self.types = {source: cls for source, cls in self.types.items() if source not in other.types}
        self.same = [pair for pair in self.same if pair not in other.same]

    def covers(self, guard: Guard) -> bool:
        """Whether the shared guard implies `guard`."""
        kind = guard.create_fn_name()
        if guard.originating_source in self.tensors:
            # every tensor has that attribute
            has_gradient = kind == "HASATTR" and _settings(guard) == {"attr": "grad"}
            return has_gradient or kind in ("TENSOR_MATCH", "DTENSOR_MATCH")
        return guard.originating_source in self.types and kind == "TYPE_MATCH"


@contextlib.contextmanager
def guarded_together(root: Source) -> Iterator[Together]:
    """Facts added to the result while this is active are checked by one guard on `root` instead of guards of
    their own."""
    context, together = TracingContext.get().guards_context, Together(native() is not None)
    if _skips_guards(context) or not together.guards:
        yield together
        return
    yield together
    kept = GuardsSet()
    for guard in context.dynamo_guards:
        if not together.covers(guard):
            kept.add(guard)
    context.dynamo_guards = kept
    for guard in kept:
        if guard.originating_source == root and guard.create_fn_name() == _all_match.__name__:
            together.leave_to(_settings(guard)["together"])
    if together.tensors or together.same:
        install_guard(root.make_guard(functools.partial(_all_match, together=together)))


def _all_match(builder: Any, guard: Guard, *, together: Together) -> None:
    root = guard.originating_source
    wanted = dict.fromkeys((*together.tensors, *together.types, *(source for pair in together.same for source in pair)))
    plan = Plan(list(wanted), [root])
    reads = plan.reads()
    found = dict(zip(plan.order(), native().Fetch(1, reads)(builder.get(guard))))
    places = plan.places()
    checks: list[tuple[int, Any]] = [(places[source], cls) for source, cls in together.types.items()]
    checks += [(places[one], places[other]) for one, other in together.same]
    checks += [(places[source], _guard_of(builder, source, found[source])[0]) for source in together.tensors]
    code = f"check_all({guard.name}, {len(checks)} facts about {len(reads)} objects in it)"
    check = native().GuardAll(1, reads, checks)
    builder.get_guard_manager(guard).add_lambda_guard(check, get_verbose_code_parts(code, guard), guard.user_stack)


_all_match.__name__ = "ALL_MATCH"


def _dtensor_match(builder: Any, guard: Guard) -> None:
    value, source = builder.get(guard), guard.originating_source
    manager = builder.get_guard_manager(guard)
    check, (sizes, strides, local_sizes, local_strides) = _guard_of(builder, source, value)
    local = value._local_tensor
    code = (
        f"check_dtensor({builder.arg_ref(guard)}, {value._spec}, {local.dtype}, device={local.device}, "
        f"requires_grad={value.requires_grad}, size={sizes}, stride={strides}, local_size={local_sizes}, "
        f"local_stride={local_strides})"
    )
    manager.add_lambda_guard(check, get_verbose_code_parts(code, guard), guard.user_stack)
    of_optimizer = isinstance(source, GradSource) and is_from_optimizer_source(source)
    if not isinstance(value, torch.nn.Parameter) and not of_optimizer:  # torch checks neither of plain ones
        builder.no_tensor_aliasing_names.append(builder.arg_ref(guard))
        builder.no_tensor_aliasing_guard_managers.append(manager)


_dtensor_match.__name__ = "DTENSOR_MATCH"


def _guard_of(builder: Any, source: Source, value: torch.Tensor) -> tuple[Any, Sequence[Sequence[int | None]]]:
    """The C++ ``Guard`` of a tensor, and the sizes and strides that it requires: the tensor's, then those of its local
    tensor."""
    sizes, strides = _extents(builder, source, value)
    local: tuple[Sequence[int | None], ...] = ([], [])
    if type(value) is DTensor:
        local = _extents(builder, AttrSource(source, "_local_tensor"), value._local_tensor)
    return native().Guard(value, sizes, strides, *local, None in sizes or None in strides), (sizes, strides, *local)


def _extents(builder: Any, source: Source, tensor: torch.Tensor) -> tuple[Sequence[int | None], Sequence[int | None]]:
    """Sizes and strides of a tensor; None where the graph has a symbol."""
    known = builder.check_fn_manager.output_graph.input_source_to_sizes_strides.get(source)
    if known is None:
        return list(tensor.size()), list(tensor.stride())
    return convert_to_concrete_values(known["size"]), convert_to_concrete_values(known["stride"])
