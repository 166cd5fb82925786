"""Data-parallel wrappers: FSDP2 (``fully_shard``), both forms of ``replicate``, and ``DistributedDataParallel``.

torch implements them with hooks around forwards and gradients, which cannot be traced. What the hooks mean can: while
the forward of a wrapped module is traced, its parameters are functions of themselves (``ops/unshard.py``), gathered
before they are used and with a gradient that is reduced. The hooks themselves never run, and the module, its parameters
and its state are between calls what eager expects: compiled and eager calls mix. The gradients of DTensor parameters
are DTensors with their placements.

`HANDLERS` says which functions are replaced, by which of ours. What becomes of a setting:

| setting                                                       | in a compiled region                                          |
|---------------------------------------------------------------|---------------------------------------------------------------|
| meshes of one and two dims, shards of any dim, with TP         | same                                                          |
| dp_mesh_dims                                                  | same                                                          |
| mixed precision, gradient_divide_factor, force_sum            | same                                                          |
| reshard_after_forward                                         | True: gathered again in backward; False: kept; number: as True |
| what one fully_shard wraps                                    | gathered together, reduced together, by dtype                 |
| set_requires_gradient_sync, set_requires_all_reduce           | same: held where eager holds them, and reduced with the next  |
| prefetching, streams, symmetric memory, unshard(async_op)     | nothing: the graph is scheduled as a whole                    |
| DDP: bucket_cap_mb                                            | same                                                          |
| DDP: gradient_as_bucket_view, static_graph                    | nothing                                                       |
| DDP: broadcast_buffers                                        | same, before the forward, a message for each dtype            |
| DDP: no_sync; the next call that averages                     | same; in the latter torch's reducer does it, after the graph  |
| DDP: communication hooks, hooks of parameters                 | torch's reducer averages, as the hooks expect, after the graph |
| what ``compat/distributed/fsdp.py`` and ``compat/distributed/ddp.py`` list as obstacles | graph break ``data-parallel-setting``; runs in eager        |

Three things differ. A parameter that a forward does not use gets no gradient, where DDP would raise an error in the
next forward. ``torch.autograd.grad`` gives averaged gradients of a DDP module, where eager leaves them as they are (DDP
does not support it). After its forward, a module has its sharded parameters, where eager leaves those of the root whole
until the backward.

``torch.compile(module)`` compiles what is inside of the hooks of `module`, as for any module with hooks: a sharded root
itself then gathers and reduces in eager, and what is inside is one graph. Where a function that calls the module is
compiled (or ``torch._dynamo.config.wrap_top_frame`` is set), the root is part of it, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.compat.distributed import ddp, fsdp, fsdp_gradients
from dtensor_compile.compat.dynamo.after_graph import call_after_graph
from dtensor_compile.compat.dynamo.backward import leaves_of_a_reducer
from dtensor_compile.compat.dynamo.calls import Call, attribute, emit_call, is_used
from dtensor_compile.compat.dynamo.module_calls import (
    attributes_are_static,
    dict_of,
    function_of,
    handle_functions,
    member,
    notes,
    real_value,
    replace_parameter,
    restore_parameter,
    source_of,
    submodule,
    tuple_of,
)
from dtensor_compile.compat.dynamo.tracing import keep_ddp_graphs_whole, leave_code_to_python
from dtensor_compile.compat.dynamo.tracker_tools import (
    Translator,
    UserFunctionVariable,
    VariableTracker,
    build,
    fact_guard,
    graph_break,
)
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.unshard import Reduction, average_gradient, reduce_held, unshard
from dtensor_compile.variables.collectives import broadcast

_same_fsdp = fact_guard("FSDP_MATCH", lambda owner: fsdp.facts(fsdp.state_of(owner)))
_same_fsdp_gradients = fact_guard("FSDP_GRADIENTS", lambda owner: fsdp.gradient_facts(fsdp.state_of(owner)))
_same_ddp = fact_guard("DDP_MATCH", ddp.facts)
_same_replicate = fact_guard("REPLICATE_MATCH", ddp.replicate_facts)
_same_gradients = fact_guard("DDP_REDUCER", ddp.needs_reducer)
_same_replicate_gradients = fact_guard("DDP_REDUCER", lambda state: ddp.needs_reducer(ddp.prepare_replicate(state)))


# ---- code that is traced -------------------------------------------------------------------------------------------


def _for_tensors(change, value):
    """`value` with ``change(tensor)`` in place of every tensor in it, for the containers that torch's wrappers look
    into.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _for_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_for_tensors(change, item) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)([_for_tensors(change, item) for item in value])
    return value


def _cast(value, dtype):
    """Floating-point tensors in `value` in another dtype."""
    return _for_tensors(lambda x: x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x, value)


def _move(value, device):
    """Tensors in `value` on another device."""
    return _for_tensors(lambda x: x.to(device), value)


def _broadcast_buffers(tensors, group):
    """Takes the buffers of the first rank; those of one dtype and device in one message, as torch does it."""
    together = {}
    for tensor in tensors:
        together.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for alike in together.values():
            whole = torch.cat([tensor.reshape(-1) for tensor in alike])
            broadcast(whole, group=group, group_src=0)
            for tensor, part in zip(alike, whole.split([tensor.numel() for tensor in alike])):
                tensor.copy_(part.view_as(tensor))


def _set_param_sync(module, value):
    module.require_forward_param_sync = value


def _trace(tx: Translator, function: Callable[..., Any], *args: Any) -> VariableTracker:
    """Traces a function of ours; arguments are trackers or constants."""
    variables = [arg if isinstance(arg, VariableTracker) else build(tx, arg) for arg in args]
    return UserFunctionVariable(function).call_function(tx, variables, {})


def _refuse(why: str | None, what: str) -> None:
    if why is not None:
        graph_break("data-parallel-setting", f"{what}: {why}")


# ---- FSDP2 ---------------------------------------------------------------------------------------------------------


def _places(module: torch.nn.Module, sharded: fsdp.Sharded) -> list[tuple[str, str]]:
    """Path and name of the places of a parameter that are in `module`."""
    paths = {part: path for path, part in module.named_modules()}
    return [(paths[part], name) for part, name in sharded.places if part in paths]


def _group_name(tx: Translator, owner: Any, module: torch.nn.Module) -> str:
    """Name of what one forward of a wrapped module gathers: that of `owner`, and how often `module` was called before.

    Modules that were wrapped in one list have one owner, and are gathered together.
    """
    numbers, calls = notes(tx, "owners"), notes(tx, "calls")
    number = numbers.setdefault(id(owner), len(numbers))
    call = calls[id(module)] = calls.get(id(module), -1) + 1
    return f"{type(owner).__name__} {number}, call {call}"


def _of_state(tx: Translator, subject: VariableTracker, path: Sequence[str | int]) -> VariableTracker:
    """What is found from a state along a path; `subject` is the state, or a hook of modules in a list."""
    return member(tx, subject, (*fsdp.path_to_state(real_value(tx, subject)), *path))


def _unsharded(
    tx: Translator, sharded: fsdp.Sharded, param: VariableTracker, group: str, subject: VariableTracker
) -> VariableTracker:
    held = ()
    if any(sharded.held) and torch.is_grad_enabled():
        held = (tuple(sharded.held), _of_state(tx, subject, sharded.holder), sharded.index)
    outer = None
    if sharded.outer_mesh is not None:
        outer = tuple_of(
            build(tx, sharded.outer_mesh),
            build(tx, spec_text(sharded.outer_placements)),
            build(tx, sharded.data_parallel),
        )
    return emit_call(
        tx,
        unshard,
        param,
        build(tx, sharded.mesh),
        outer,
        spec_text(sharded.placements),
        sharded.size,
        sharded.dtype,
        tuple(Reduction.of(sharded)),
        sharded.reshard,
        group,
        *held,
    )


def _fsdp_pre_forward(
    tx: Translator, hook: VariableTracker, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> VariableTracker:
    """``hook(module, args, kwargs)`` -> ``(args, kwargs)``; from here on the module has whole parameters."""
    *owner, module, inputs, named_inputs = args
    subject = owner[0] if owner else hook
    state = fsdp.state_of(real_value(tx, subject))
    _refuse(fsdp.obstacle(state, torch.is_grad_enabled()), "fully_shard or replicate")
    fsdp.prepare(state)
    _same_fsdp(source_of(subject))
    if torch.is_grad_enabled():
        _same_fsdp_gradients(source_of(subject))
        fsdp_gradients.make_holders(state)
    policy, at_rest = fsdp.mixed_precision(state), fsdp.is_at_rest(state)
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        inputs, named_inputs = (_trace(tx, _cast, value, policy.param_dtype) for value in (inputs, named_inputs))
    group, unsharded = _group_name(tx, state, real_value(tx, module)), notes(tx, "unsharded").setdefault(id(state), {})
    for sharded in fsdp.sharded_parameters(state):
        made: list[VariableTracker] = []

        def whole(
            found: VariableTracker, sharded: fsdp.Sharded = sharded, made: list[VariableTracker] = made
        ) -> VariableTracker:
            if not made:  # a tied parameter is gathered once
                param = found.realize() if at_rest else _of_state(tx, subject, sharded.path)
                made.append(_unsharded(tx, sharded, param, group, subject))
                unsharded.setdefault(sharded.path, []).extend(made)
            return made[0]

        for path, name in _places(real_value(tx, module), sharded):
            replace_parameter(tx, submodule(tx, module, path), name, whole)
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
        holding = [sharded.path for sharded in fsdp.sharded_parameters(state) if sharded.held.whole == "release"]
        unused = [path for path in holding if not any(is_used(whole) for whole in made.get(path, ()))]
        if unused:
            call_after_graph(tx, functools.partial(reduce_held, weakref.ref(state), unused), [])
    dtype = fsdp.mixed_precision(state).output_dtype
    return output if dtype is None else _trace(tx, _cast, output, dtype)


def _setter(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``model.set_requires_gradient_sync(...)`` and the others: what follows is another graph, by the state as it is
    then.
    """
    graph_break("data-parallel-setting", "fully_shard or replicate: the setting changes inside of what is compiled")


# ---- DDP and replicate ---------------------------------------------------------------------------------------------


def _average(tx: Translator, owner: ddp.DDP, module: VariableTracker, in_sync: bool) -> None:
    """From here on the parameters of `module` have averaged gradients; once per frame, however often it is called.

    Where gradients of earlier passes may wait to be averaged, or a hook has to see all of them, torch's reducer does
    it: it is told, when the graph has run, to average what autograd accumulates.
    """
    if ddp.needs_reducer(owner) or not in_sync:
        call_after_graph(tx, functools.partial(ddp.arm_reducer, weakref.ref(owner)), [])
        leaves_of_a_reducer(tx).update({id(parameter): parameter for parameter in ddp.parameters(owner)})
        return
    made, group = notes(tx, "averaged"), ddp.group(owner)
    together, limits = _group_name(tx, owner, owner), ddp.bucket_limits(owner)
    for path, name, parameter in ddp.paths_of(real_value(tx, module), set(ddp.parameters(owner))):

        def averaged(param: VariableTracker, parameter: torch.nn.Parameter = parameter) -> VariableTracker:
            if id(parameter) not in made:
                made[id(parameter)] = emit_call(
                    tx, average_gradient, param, group.group_name, group.size(), together, limits
                )
            return made[id(parameter)]

        replace_parameter(tx, submodule(tx, module, path), name, averaged)


def _plain_again(tx: Translator, owner: ddp.DDP, module: VariableTracker) -> None:
    for path, name, _ in ddp.paths_of(real_value(tx, module), set(ddp.parameters(owner))):
        restore_parameter(tx, submodule(tx, module, path), name)


def _moved(tx: Translator, owner: ddp.DDP, args: VariableTracker, kwargs: VariableTracker) -> VariableTracker:
    device = ddp.device_of_inputs(owner)
    if device is not None:
        args, kwargs = (_trace(tx, _move, value, device) for value in (args, kwargs))
    return tuple_of(args, kwargs)


def _flag(tx: Translator, module: VariableTracker, name: str) -> bool:
    """An attribute of a module as the program has it at this point, under a guard."""
    return attribute(tx, module, name).as_python_constant()


def _ddp_pre_forward(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``module._pre_forward(*args, **kwargs)`` -> ``(args, kwargs)``; from here on gradients are averaged."""
    variable, *args = args
    owner, packed = real_value(tx, variable), (tuple_of(*args), dict_of(kwargs))
    if ddp.passes_through(owner):
        return tuple_of(*packed)
    _refuse(ddp.obstacle(owner), "DistributedDataParallel")
    ddp.prepare(owner)
    _same_ddp(source_of(variable))
    inner = attribute(tx, variable, "module").realize()
    buffers = [path.rpartition(".") for path in ddp.buffers(owner)]
    if buffers and _flag(tx, variable, "require_forward_param_sync"):
        tensors = [attribute(tx, submodule(tx, inner, path), name) for path, _, name in buffers]
        _trace(tx, _broadcast_buffers, tuple_of(*tensors), ddp.group(owner))
    if torch.is_grad_enabled():
        if _flag(tx, variable, "require_backward_grad_sync"):
            _same_gradients(source_of(variable))
            _average(tx, owner, inner, in_sync=_flag(tx, variable, "require_forward_param_sync"))
        else:
            ddp.leave_gradients(owner)
    return _moved(tx, owner, *packed)


def _ddp_run_forward(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``module._run_ddp_forward(*args, **kwargs)``: what it notes for the optimizer of DDP graphs is of no use in one
    graph.
    """
    variable, *args = args
    return attribute(tx, variable, "module").call_function(tx, args, kwargs)


def _ddp_post_forward(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``module._post_forward(output)`` -> output"""
    variable, output = args
    owner = real_value(tx, variable)
    if not ddp.passes_through(owner):
        _plain_again(tx, owner, attribute(tx, variable, "module").realize())
        averaged = torch.is_grad_enabled() and _flag(tx, variable, "require_backward_grad_sync")
        if not averaged or not _flag(tx, variable, "require_forward_param_sync"):
            _trace(tx, _set_param_sync, variable, averaged)
    return output


def _replicate_pre_forward(
    tx: Translator, hook: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``hook(module, args, kwargs)`` -> ``(args, kwargs)``; from here on gradients are averaged."""
    subject, module, *packed = args
    state = real_value(tx, subject)
    owner = ddp.prepare_replicate(state)
    _refuse(ddp.obstacle(owner), "replicate")
    _same_replicate(source_of(subject))
    if torch.is_grad_enabled():
        if not ddp.wants_gradients_averaged(state):
            ddp.leave_gradients(owner)
        else:
            _same_replicate_gradients(source_of(subject))
            _average(tx, owner, module, in_sync=True)
    return _moved(tx, owner, *packed)


def _replicate_post_forward(
    tx: Translator, hook: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``hook(module, args, output)`` -> output"""
    subject, module, _, output = args
    _plain_again(tx, ddp.prepare_replicate(real_value(tx, subject)), module)
    return output


#: Functions of the wrappers, and what their calls become.
HANDLERS: Mapping[Callable[..., Any], Call] = {
    ddp.PRE_FORWARD: _ddp_pre_forward,
    ddp.RUN_FORWARD: _ddp_run_forward,
    ddp.POST_FORWARD: _ddp_post_forward,
    ddp.REPLICATE_PRE_FORWARD: _replicate_pre_forward,
    ddp.REPLICATE_POST_FORWARD: _replicate_post_forward,
    fsdp.PRE_FORWARD: _fsdp_pre_forward,
    fsdp.POST_FORWARD: _fsdp_post_forward,
    **dict.fromkeys(fsdp.SETTERS, _setter),
}


def _find(variable: UserFunctionVariable) -> Call | None:
    return HANDLERS.get(fsdp.method_of(function_of(variable)))


leave_code_to_python(ddp.belongs_to_python)

CONTEXTS = (
    keep_ddp_graphs_whole,
    attributes_are_static,
    functools.partial(handle_functions, _find),
)
