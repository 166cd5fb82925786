"""Data-parallel wrappers: FSDP2 (``fully_shard``), both forms of ``replicate``, and ``DistributedDataParallel``.

torch implements them with hooks around forwards and gradients, which cannot be traced. Their meaning can: while the
forward of a wrapped module is traced, its parameters are functions of themselves (``ops/unshard.py``) that are gathered
before use and whose gradients are reduced. The hooks themselves never run. Between calls, the module, its parameters
and its state are as eager expects, so that compiled and eager calls mix. The gradients of DTensor parameters are
DTensors with their placements.

This module has DDP and ``replicate``; ``fsdp_forwards.py`` has FSDP2. `HANDLERS` maps each replaced function to its
replacement. Settings in a compiled region:

| setting                                                | in a compiled region                                       |
|--------------------------------------------------------|------------------------------------------------------------|
| meshes of one and two dims, shards of any dim, with TP | same                                                       |
| dp_mesh_dims                                           | same                                                       |
| mixed precision, gradient_divide_factor, force_sum     | same                                                       |
| reshard_after_forward                                  | True, or a number: regathered in backward; False: kept     |
| parameters of one fully_shard                          | gathered together, reduced together, by dtype              |
| set_requires_gradient_sync, set_requires_all_reduce    | same: held where eager does, and reduced with the next     |
| prefetching, streams, symmetric memory, async unshard  | nothing: the graph is scheduled as a whole                 |
| DDP: bucket_cap_mb                                     | same                                                       |
| DDP: gradient_as_bucket_view, static_graph             | nothing                                                    |
| DDP: broadcast_buffers                                 | same, before the forward, a message for each dtype         |
| DDP: no_sync; the next call that averages              | same; the latter by torch's reducer, after the graph       |
| DDP: communication hooks, hooks of parameters          | torch's reducer averages after the graph, as hooks expect  |
| obstacles of ``compat/distributed/{fsdp,ddp}.py``      | graph break ``data-parallel-setting``; runs in eager       |

There are three differences. A parameter that a forward does not use gets no gradient, whereas DDP raises an error in
the next forward. ``torch.autograd.grad`` returns averaged gradients of a DDP module, whereas eager returns local ones
(DDP does not support it). After its forward, a module has its sharded parameters, whereas eager keeps those of the root
unsharded until the backward.

``torch.compile(module)`` compiles the code inside the hooks of `module`, as for any module with hooks: a sharded root
then gathers and reduces its own parameters in eager, and the code inside is one graph. If a function that calls the
module is compiled (or ``torch._dynamo.config.wrap_top_frame`` is set), the root is part of the graph, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtensor_compile.compat.distributed import ddp, fsdp
from dtensor_compile.compat.dynamo.backward import leaves_of_a_reducer
from dtensor_compile.compat.dynamo.left_to_python import leave_code_to_python
from dtensor_compile.compat.dynamo.observers.compiled_parts import CALL_WRAPPED, READ_WRAPPED
from dtensor_compile.compat.dynamo.tracing import keep_ddp_graphs_whole
from dtensor_compile.compat.dynamo.trackers.after_graph import call_after_graph
from dtensor_compile.compat.dynamo.trackers.calls import Call, attribute, emit_call
from dtensor_compile.compat.dynamo.trackers.module_calls import (
    attributes_are_static,
    dict_of,
    function_of,
    handle_functions,
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
    UserFunctionVariable,
    VariableTracker,
    fact_guard,
    function_variable,
)
from dtensor_compile.ops.unshard import average_gradient
from dtensor_compile.variables import fsdp_forwards
from dtensor_compile.variables.collectives import broadcast
from dtensor_compile.variables.wrapper_calls import gathering_name, move_tensors, refuse_setting, trace_function

_same_ddp = fact_guard("DDP_MATCH", ddp.facts)
_same_replicate = fact_guard("REPLICATE_MATCH", ddp.replicate_facts)
_same_gradients = fact_guard("DDP_REDUCER", ddp.needs_reducer)
_same_replicate_gradients = fact_guard("DDP_REDUCER", lambda state: ddp.needs_reducer(ddp.prepare_replicate(state)))


def _broadcast_buffers(tensors, group):
    """Copies the buffers of the first rank; those of one dtype and device in one message, as torch does it."""
    together = {}
    for tensor in tensors:
        together.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for bucket in together.values():
            whole = torch.cat([tensor.reshape(-1) for tensor in bucket])
            broadcast(whole, group=group, group_src=0)
            for tensor, part in zip(bucket, whole.split([tensor.numel() for tensor in bucket])):
                tensor.copy_(part.view_as(tensor))


def _set_param_sync(module, value):
    module.require_forward_param_sync = value


def _average(tx: Translator, owner: ddp.DDP, module: VariableTracker, in_sync: bool) -> None:
    """Averages the gradients of the parameters of `module` from here on; once per frame, even if it is called often.

    If gradients of earlier passes may wait to be averaged, or a hook has to see all of them, torch's reducer averages
    the gradients that autograd accumulates; it is set up for that after the graph has run.
    """
    if ddp.needs_reducer(owner) or not in_sync:
        call_after_graph(tx, functools.partial(ddp.arm_reducer, weakref.ref(owner)), [])
        leaves_of_a_reducer(tx).update({id(parameter): parameter for parameter in ddp.parameters(owner)})
        return
    made, group = notes(tx, "averaged"), ddp.group(owner)
    together, limits = gathering_name(tx, owner, owner), ddp.bucket_limits(owner)
    for path, name, parameter in ddp.paths_of(real_value(tx, module), set(ddp.parameters(owner))):
        of = submodule(tx, module, path)
        param = parameter_of(tx, of, name)
        if param is not None and id(parameter) not in made:
            made[id(parameter)] = emit_call(
                tx, average_gradient, param, group.group_name, group.size(), together, limits
            )
        replace_parameter(tx, of, name, made.get(id(parameter)))


def _plain_again(tx: Translator, owner: ddp.DDP, module: VariableTracker) -> None:
    for path, name, _ in ddp.paths_of(real_value(tx, module), set(ddp.parameters(owner))):
        restore_parameter(tx, submodule(tx, module, path), name)


def _moved(tx: Translator, owner: ddp.DDP, args: VariableTracker, kwargs: VariableTracker) -> VariableTracker:
    device = ddp.device_of_inputs(owner)
    if device is not None:
        args, kwargs = (trace_function(tx, move_tensors, value, device) for value in (args, kwargs))
    return tuple_of(args, kwargs)


def _flag(tx: Translator, module: VariableTracker, name: str) -> bool:
    """Attribute of a module as the program has it at this point, guarded."""
    return attribute(tx, module, name).as_python_constant()


def _ddp_pre_forward(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``module._pre_forward(*args, **kwargs)`` -> ``(args, kwargs)``; averages gradients from here on."""
    variable, *args = args
    owner, packed = real_value(tx, variable), (tuple_of(*args), dict_of(kwargs))
    if ddp.passes_through(owner):
        return tuple_of(*packed)
    refuse_setting(ddp.obstacle(owner), "DistributedDataParallel")
    ddp.prepare(owner)
    _same_ddp(source_of(variable))
    inner = attribute(tx, variable, "module").realize()
    buffers = [path.rpartition(".") for path in ddp.buffers(owner)]
    if buffers and _flag(tx, variable, "require_forward_param_sync"):
        tensors = [attribute(tx, submodule(tx, inner, path), name) for path, _, name in buffers]
        trace_function(tx, _broadcast_buffers, tuple_of(*tensors), ddp.group(owner))
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
    """``module._run_ddp_forward(*args, **kwargs)``, without its notes for the DDP optimizer, which one graph does not
    need.
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
            trace_function(tx, _set_param_sync, variable, averaged)
    return output


def _replicate_pre_forward(
    tx: Translator, hook: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``hook(module, args, kwargs)`` -> ``(args, kwargs)``; averages gradients from here on."""
    subject, module, *packed = args
    state = real_value(tx, subject)
    owner = ddp.prepare_replicate(state)
    refuse_setting(ddp.obstacle(owner), "replicate")
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


def _call_wrapped(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``module(*args, **kwargs)`` of a module that ``torch.compile`` wrapped before ``fully_shard`` did: Dynamo knows
    only the class of the first wrapper."""
    return function_variable(torch.nn.Module._call_impl).call_function(tx, args, kwargs)


def _read_wrapped(
    tx: Translator, method: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``module.name`` of such a module, where that is an attribute of the one inside."""
    module, name = args
    inner, path = member(tx, module, ("_orig_mod",)), name.as_python_constant()
    return inner if path == "_orig_mod" else attribute(tx, inner, path)


#: Functions of the wrappers, and the handlers of their calls.
HANDLERS: Mapping[Callable[..., Any], Call] = {
    ddp.PRE_FORWARD: _ddp_pre_forward,
    ddp.RUN_FORWARD: _ddp_run_forward,
    ddp.POST_FORWARD: _ddp_post_forward,
    ddp.REPLICATE_PRE_FORWARD: _replicate_pre_forward,
    ddp.REPLICATE_POST_FORWARD: _replicate_post_forward,
    CALL_WRAPPED: _call_wrapped,
    READ_WRAPPED: _read_wrapped,
    **fsdp_forwards.HANDLERS,
}


def _find(variable: UserFunctionVariable) -> Call | None:
    return HANDLERS.get(fsdp.method_of(function_of(variable)))


leave_code_to_python(ddp.belongs_to_python)

CONTEXTS = (
    keep_ddp_graphs_whole,
    attributes_are_static,
    functools.partial(handle_functions, _find),
)
