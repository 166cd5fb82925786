"""Forwards of modules wrapped by FSDP2 (``fully_shard``): parameters are unsharded before, and sharded after."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.compat.distributed import fsdp, fsdp_gradients
from dtensor_compile.compat.dynamo.trackers.after_graph import call_after_graph
from dtensor_compile.compat.dynamo.trackers.calls import Call, emit_call, is_used
from dtensor_compile.compat.dynamo.trackers.module_calls import (
    items_of,
    member,
    notes,
    parameter_of,
    real_value,
    replace_parameter,
    restore_parameter,
    source_of,
    submodule,
    tuple_of,
)
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build,
    fact_guard,
    graph_break,
)
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.unshard import Reduction, reduce_held, unshard
from dtensor_compile.variables.wrapper_calls import cast_tensors, gathering_name, refuse_setting, trace_function

_same_fsdp = fact_guard("FSDP_MATCH", lambda owner: fsdp.facts(fsdp.state_of(owner)))
_same_fsdp_gradients = fact_guard("FSDP_GRADIENTS", lambda owner: fsdp.gradient_facts(fsdp.state_of(owner)))


def _places(module: torch.nn.Module, sharded: fsdp.Sharded) -> list[tuple[str, str]]:
    """Path and name of the places of a parameter that are in `module`."""
    paths = {part: path for path, part in module.named_modules()}
    return [(paths[part], name) for part, name in sharded.places if part in paths]


def _of_state(tx: Translator, subject: VariableTracker, path: Sequence[str | int]) -> VariableTracker:
    """Tracker of the object at a path from a state; `subject` is the state, or a hook of modules in a list."""
    return member(tx, subject, (*fsdp.path_to_state(real_value(tx, subject)), *path))


def _unsharded(
    tx: Translator, params: Sequence[tuple[fsdp.Sharded, VariableTracker]], group: str, subject: VariableTracker
) -> dict[tuple[str | int, ...], VariableTracker]:
    """The whole parameters by their paths from the state, by one call."""
    sharded = [each for each, _ in params]
    holders: tuple[VariableTracker, ...] = ()
    held = torch.is_grad_enabled() and any(any(each.held) for each in sharded)
    if held:
        holders = tuple(_of_state(tx, subject, each.holder) for each in sharded)
    constants = tuple(
        (
            build(tx, each.mesh),
            None
            if each.outer_mesh is None
            else (build(tx, each.outer_mesh), spec_text(each.outer_placements), each.data_parallel),
            spec_text(each.placements),
            each.size,
            each.dtype,
            tuple(Reduction.of(each)),
            tuple(each.held if held else fsdp.HeldGradient()),
            each.index,
        )
        for each in sharded
    )
    called = emit_call(tx, unshard, tuple(param for _, param in params), constants, sharded[0].reshard, group, holders)
    return {each.path: whole for each, whole in zip(sharded, items_of(called), strict=True)}


def _fsdp_pre_forward(
    tx: Translator, hook: VariableTracker, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> VariableTracker:
    """``hook(module, args, kwargs)`` -> ``(args, kwargs)``; the module has unsharded parameters from here on."""
    *owner, module, inputs, named_inputs = args
    subject = owner[0] if owner else hook
    state = fsdp.state_of(real_value(tx, subject))
    refuse_setting(fsdp.obstacle(state, torch.is_grad_enabled()), "fully_shard or replicate")
    fsdp.prepare(state)
    _same_fsdp(source_of(subject))
    if torch.is_grad_enabled():
        _same_fsdp_gradients(source_of(subject))
        fsdp_gradients.make_holders(state)
    policy, at_rest = fsdp.mixed_precision(state), fsdp.is_at_rest(state)
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        inputs, named_inputs = (
            trace_function(tx, cast_tensors, value, policy.param_dtype) for value in (inputs, named_inputs)
        )
    group, unsharded = (
        gathering_name(tx, state, real_value(tx, module)),
        notes(tx, "unsharded").setdefault(id(state), {}),
    )
    places = [
        (sharded, submodule(tx, module, path), name)
        for sharded in fsdp.sharded_parameters(state)
        for path, name in _places(real_value(tx, module), sharded)
    ]
    found: dict[tuple[str | int, ...], tuple[fsdp.Sharded, VariableTracker]] = {}
    for sharded, of, name in places:
        param = parameter_of(tx, of, name)
        if param is not None and sharded.path not in found:  # a tied parameter is gathered once
            found[sharded.path] = sharded, param.realize() if at_rest else _of_state(tx, subject, sharded.path)
    made: dict[tuple[str | int, ...], VariableTracker] = {}
    for reshard in dict.fromkeys(sharded.reshard for sharded, _ in found.values()):
        together = [(sharded, param) for sharded, param in found.values() if sharded.reshard == reshard]
        made |= _unsharded(tx, together, group, subject)
    for path, whole in made.items():
        unsharded.setdefault(path, []).append(whole)
    for sharded, of, name in places:
        replace_parameter(tx, of, name, made.get(sharded.path))
    if not at_rest:
        call_after_graph(tx, functools.partial(fsdp.put_to_rest, weakref.ref(state)), [])
    return tuple_of(inputs, named_inputs)


def _fsdp_post_forward(
    tx: Translator, hook: VariableTracker, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> VariableTracker:
    """``hook(module, args, output)`` -> output; the module has its sharded parameters again."""
    *owner, module, _, output = args
    state = fsdp.state_of(real_value(tx, owner[0] if owner else hook))
    for sharded in fsdp.sharded_parameters(state):
        for path, name in _places(real_value(tx, module), sharded):
            restore_parameter(tx, submodule(tx, module, path), name)
    if torch.is_grad_enabled():
        made = notes(tx, "unsharded").get(id(state), {})
        holding = [sharded.path for sharded in fsdp.sharded_parameters(state) if "release" in sharded.held]
        unused = [path for path in holding if not any(is_used(whole) for whole in made.get(path, ()))]
        if unused:
            call_after_graph(tx, functools.partial(reduce_held, weakref.ref(state), unused), [])
    dtype = fsdp.mixed_precision(state).output_dtype
    return output if dtype is None else trace_function(tx, cast_tensors, output, dtype)


def _setter(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``model.set_requires_gradient_sync(...)`` and other setters: breaks the graph, since the next graph depends on
    the new state.
    """
    graph_break("data-parallel-setting", "fully_shard or replicate: the setting changes inside the compiled region")


#: Functions of the wrapper, and the handlers of their calls.
HANDLERS: Mapping[Callable[..., Any], Call] = {
    fsdp.PRE_FORWARD: _fsdp_pre_forward,
    fsdp.POST_FORWARD: _fsdp_post_forward,
    **dict.fromkeys(fsdp.SETTERS, _setter),
}
