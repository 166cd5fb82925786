"""Optimizers traced as part of a larger region, for our backend.

torch deliberately breaks the graph before and after every ``step()``, and prepares a step by really running
`_init_group` (which makes state, and collects parameters, gradients and state in lists) while it traces. Both assume
that a step is a region of its own. In a larger region they are wrong: the relevant gradients are those at that point of
the program, which a backward pass earlier in the region may have computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.optim.optimizer as _optimizer
from torch._dynamo import config, trace_rules
from torch._dynamo import graph_break as break_function  # noqa: F401 - a name for `variables.optimizer`
from torch._dynamo.bytecode_transformation import create_binary_subscr, create_call_function
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.decorators import mark_static_address
from torch._dynamo.source import (
    AttrSource,
    ChainedSource,
    ConstDictKeySource,
    DictGetItemSource,
    GetItemSource,
    is_from_optimizer_source,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_static_address_type
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.optimizer import ArgMappingException, OptimizerVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.amp import grad_scaler
from torch.optim import lr_scheduler

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.guards import Together, guarded_together
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Source,
    Translator,
    bound_method,
    fact_guard,
    read_attribute,
    source_of,
)
from dtensor_compile.compat.patches import if_there, needs, patch

if TYPE_CHECKING:
    from torch._dynamo.variables.dicts import ConstDictVariable

#: The trackers of the items of a list.
_items = if_there("torch._dynamo.utils:unpack_iterable") or (lambda tx, variable: variable.unpack_var_sequence(tx))
#: Reads the step count from the state of an optimizer.
read_step = _optimizer._get_value
#: Methods of an optimizer that torch does not trace although they can be traced.
_TRACEABLE = frozenset({"zero_grad"})
#: Files that torch does not trace although their code can be traced.
_TRACED_FILES = frozenset({lr_scheduler.__file__, grad_scaler.__file__})


class TracedOptimizerVariable(OptimizerVariable):
    """An optimizer whose steps are part of the surrounding region."""

    #: Since 2.14 this table takes precedence over `tp_getattro_impl`. torch's entry prepares parameters for a region of
    #: the step alone: it makes them attributes of the graph, and steps capturable.
    tp_getset = {"param_groups": None}

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        if name in _TRACEABLE and name not in vars(self.value):
            method = getattr(type(self.value), name)
            return bound_method(getattr(method, "__wrapped__", method), self)
        if name == "param_groups":
            for group in self.value.param_groups:
                _mark_static(group["params"])
            if not self._steps_as_in_eager():
                self._set_capturable(tx)
            return read_attribute(super(OptimizerVariable, self), tx, name)
        return read_attribute(super(), tx, name)

    tp_getattro_impl = var_getattr  # since 2.14

    def call_method(
        self, tx: Translator, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if name == "_init_group" and hasattr(self.value, "_init_group"):
            with contextlib.suppress(ArgMappingException):
                return self._prepare_step(tx, args, kwargs)
        return super().call_method(tx, name, args, kwargs)

    def _steps_as_in_eager(self) -> bool:
        """Whether a step can be traced by eager's formulas. torch traces those for ``capturable=True``, which round
        differently."""
        return isinstance(self.value, torch.optim.Adam) and not any(
            group["foreach"]
            or group["fused"]
            or group["amsgrad"]
            or any(p.device.type != "cpu" for p in group["params"])
            for group in self.value.param_groups
        )

    def _prepare_step(
        self, tx: Translator, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        """Really runs `_init_group`, on the gradients at this point of the program.

        It makes missing state, as the first step in eager does, and appends parameters, gradients and state to lists.
        Each tensor in these lists is looked up by identity and replaced by the tracker of its origin.
        """
        real_args, real_kwargs = self.get_python_args(*args, **kwargs)
        self.move_step_if_cpu()
        known: dict[int, VariableTracker] = {}
        kept: list[Any] = []  # keeps the keys of `known` alive
        optimizer: Any = self.value  # of a class with `_init_group`
        with contextlib.ExitStack() as restore, guarded_together(source_of(self)) as together:
            for parameter, variable, source in self._parameters(tx):
                together.add(variable, source, parameter)
                gradient = read_attribute(variable, tx, "grad").realize()
                if variable.source == source and not _has_pending_gradient(tx, variable):
                    together.add(gradient, AttrSource(source, "grad"), parameter.grad)
                known[id(parameter)] = variable
                kept.append(_show_gradient(tx, parameter, variable, gradient, restore))
                known[id(kept[-1])] = gradient
            for parameter, entry in self.value.state.items():
                known.update(_show_state(tx, parameter, entry, kept, restore))
            for group in self.value.param_groups:  # the other groups too, before the state gets its tracker
                optimizer._init_group(*[_instead(arg, group) for arg in real_args], **real_kwargs)
            result = optimizer._init_group(*real_args, **real_kwargs)
        with guarded_together(source_of(self)) as together:
            known.update(self._state(tx, together))
        for arg, real in zip(args, real_args):
            if isinstance(arg, ListVariable):
                tx.output.side_effects.mutation(arg)
                arg.items.extend(
                    known[id(value)] if id(value) in known else VariableTracker.build(tx, value) for value in real
                )
        return ConstantVariable.create(result)

    def written_by_a_step(self, tx: Translator) -> list[VariableTracker] | None:
        """Trackers of all tensors that a step mutates; None if it has other effects.

        Missing state is created: zeros, from which the first step computes the same as without state.
        """
        if not _only_writes(self.value):
            return None
        self.move_step_if_cpu()
        effects, written = tx.output.side_effects, list[VariableTracker]()
        with contextlib.ExitStack() as restore, guarded_together(source_of(self)) as together:
            parameters = list(self._parameters(tx))
            for parameter, variable, source in parameters:
                together.add(variable, source, parameter)
                gradient = read_attribute(variable, tx, "grad").realize()
                if variable.source == source and not _has_pending_gradient(tx, variable):
                    together.add(gradient, AttrSource(source, "grad"), parameter.grad)
                _show_gradient(tx, parameter, variable, gradient, restore)
                if not gradient.is_constant_none():
                    # with Nesterov momentum, the multi-tensor step mutates gradients
                    written += (
                        [variable, gradient] if any(g.get("nesterov") for g in self.value.param_groups) else [variable]
                    )
            for group in self.value.param_groups:
                _make_state(self.value, group)
            entries = [
                self.value.state.get(parameter, {}) for parameter, *_ in parameters if parameter.grad is not None
            ]
        if any(entry in effects and effects.is_modified(effects[entry]) for entry in entries):
            return None
        with guarded_together(source_of(self)) as together:
            return [*written, *self._state(tx, together).values()]

    def _parameters(self, tx: Translator) -> Iterator[tuple[torch.Tensor, TensorVariable, Source]]:
        """Every parameter, its tracker, and its source in the optimizer."""
        groups = read_attribute(self, tx, "param_groups").realize()
        for group, variable, source in zip(self.value.param_groups, _items(tx, groups), self._groups()):
            parameters = variable.realize().getitem_const(tx, ConstantVariable.create("params")).realize()
            for i, (parameter, tracker) in enumerate(zip(group["params"], _items(tx, parameters))):
                yield parameter, tracker.realize(), GetItemSource(source, i)

    def _groups(self) -> list[Source]:
        """The source of the parameters of each group."""
        groups = AttrSource(source_of(self), "param_groups")
        return [DictGetItemSource(GetItemSource(groups, i), "params") for i in range(len(self.value.param_groups))]

    def _state(self, tx: Translator, together: Together) -> dict[int, VariableTracker]:
        """Trackers by identity of all tensors in the state as it is outside of the region.

        Entries are accessed by position, with a guard on the parameter that each belongs to: `load_state_dict` may
        change the order.
        """
        state, found = source_of(read_attribute(self, tx, "state").realize()), dict[int, VariableTracker]()
        tx.output.guard_on_key_order.add(state)
        _same_length(source_of(self))
        owners = _owners(self.value)
        if None in owners or not together.guards:
            _same_owners(source_of(self))
        groups = zip(self.value.param_groups, self._groups())
        parameters = [GetItemSource(source, i) for group, source in groups for i in range(len(group["params"]))]
        for position, entry in enumerate(self.value.state.values()):
            source = DictGetItemSource(state, KeySource(state, position))
            VariableTracker.build(tx, entry, source).realize()
            if type(entry) is dict:
                together.types[source] = dict
            if (owner := owners[position]) is not None:
                together.same.append((KeySource(state, position), parameters[owner]))
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    _mark_static([value])
                    place = DictGetItemSource(source, name)
                    found[id(value)] = VariableTracker.build(tx, value, place).realize()
                    together.add(found[id(value)], place, value)
        return found


def _only_writes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of an optimizer with complete state does nothing but mutate tensors."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _optimizer._global_optimizer_pre_hooks,
        _optimizer._global_optimizer_post_hooks,
    )
    step = vars(optimizer).get("step")  # a scheduler wraps it, to record the first step
    stepped = step is None or getattr(step, "_wrapped_by_lr_sched", False) and getattr(optimizer, "_opt_called", False)
    known = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    damped = any(group.get("momentum") and group["dampening"] for group in optimizer.param_groups)
    return known and stepped and not damped and not any(hooks)


def _make_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Makes missing state for the parameters with a gradient, for an optimizer that `_only_writes`."""
    if isinstance(optimizer, torch.optim.Adam):
        optimizer._init_group(group, *([] for _ in range(6)))
        return
    for parameter in group["params"] if group["momentum"] else ():
        if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def _owners(optimizer: torch.optim.Optimizer) -> list[int | None]:
    """For each entry of the state, the position of its parameter among all parameters."""
    position = {
        id(parameter): i for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    return [position.get(id(parameter)) for parameter in optimizer.state]


_same_owners = fact_guard("STATE_OWNERS_MATCH", _owners)
_same_length = fact_guard("STATE_LENGTH_MATCH", lambda optimizer: len(optimizer.state))


@dataclass(frozen=True)
class _KeysSource(ChainedSource):
    """All keys of a dict, in a tuple."""

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from("builtins", "tuple"))
        codegen(self.base)
        codegen.extend_output(create_call_function(1, False))

    @property
    def _name_template(self) -> str:
        return "tuple({0})"


@dataclass(frozen=True)
class KeySource(ConstDictKeySource):
    """A key of a dict by its position. torch iterates to that position each time: quadratic if all entries are read."""

    def reconstruct(self, codegen: PyCodegen) -> None:
        keys = _KeysSource(self.base)
        codegen.mark_source_temp(keys)
        codegen(keys)
        codegen.append_output(codegen.create_load_const(self.index))
        codegen.append_output(create_binary_subscr())


def _mark_static(tensors: Sequence[torch.Tensor]) -> None:
    """Marks sizes and addresses as static. torch turns tensors it marks into attributes of the graph; here they stay
    inputs, because torch collects the leaves of a backward pass from the inputs."""
    for tensor in tensors:
        if get_static_address_type(tensor) is None:
            mark_static_address(tensor, guard=False)


def _has_pending_gradient(tx: Translator, variable: TensorVariable) -> bool:
    return tx.output.side_effects.has_pending_mutation_of_attr(variable, "grad")


def _show_gradient(
    tx: Translator,
    parameter: torch.Tensor,
    variable: TensorVariable,
    gradient: VariableTracker,
    restore: contextlib.ExitStack,
) -> Any:
    """Gives the real parameter a gradient exactly if it has one at this point of the program; returns that gradient."""
    if _has_pending_gradient(tx, variable):
        restore.callback(setattr, parameter, "grad", parameter.grad)
        parameter.grad = parameter.detach() if isinstance(gradient, TensorVariable) else None
    return parameter.grad


def _show_state(
    tx: Translator, parameter: torch.Tensor, entry: dict[str, Any], kept: list[Any], restore: contextlib.ExitStack
) -> dict[int, VariableTracker]:
    """Puts state that the region has written so far (as in the first step of many optimizers) into the real state of a
    parameter; returns trackers by the identity of their stand-ins."""
    effects, shown = tx.output.side_effects, dict[int, VariableTracker]()
    if entry not in effects or not effects.is_modified(effects[entry]):
        return shown
    restore.callback(entry.update, dict(entry))
    restore.callback(entry.clear)
    for key, value in cast("ConstDictVariable", effects[entry]).items.items():
        value = value.realize()
        if isinstance(value, TensorVariable):
            kept.append(parameter.detach())
            entry[key.vt.as_python_constant()] = kept[-1]
            shown[id(kept[-1])] = value
        else:
            entry[key.vt.as_python_constant()] = value.as_python_constant()
    return shown


def _instead(argument: Any, group: dict[str, Any]) -> Any:
    """An argument of `_init_group` for a call that makes the state of another group, with its lists discarded."""
    return group if isinstance(argument, dict) else [] if isinstance(argument, list) else argument


def _is_learning_rate(source: Source | None) -> bool:
    return isinstance(source, DictGetItemSource) and source.index == "lr" and is_from_optimizer_source(source)


def _without_value(builder: VariableBuilder, number: VariableTracker) -> VariableTracker:
    """Replaces a symbolic input `number` by an unbacked one.

    A backed symbol is specialized unless it is only a factor (``add(p, grad, alpha=-lr)``): torch can multiply tensors
    by such a symbol, but nothing else. An unbacked number is used as in eager.
    """
    made = builder.tx.output.unspec_variable_map.get(builder.name)
    if made is None or not config.capture_scalar_outputs or not isinstance(number, SymNodeVariable):
        return number
    copy = made.call_method(builder.tx, "clone", [], {})  # torch knows the value of the input itself
    return copy.call_method(builder.tx, "item", [], {})


_TRACK = patch("torch._dynamo.variables.builder:OptimizerVariable")
_CHECK_FILE = patch("torch._dynamo.trace_rules:check_file", "filename is_inlined_call")
_WRAP = patch("torch._dynamo.variables.builder:VariableBuilder.wrap_symfloat", "self value")


@needs(
    "optimizer steps inside of the region",
    _TRACK,
    _CHECK_FILE,
    _WRAP,
    without="a step breaks the graph, as in torch",
    upstream="#120814, #98461",
    remove_when="Dynamo traces optimizer.step() inside of a larger region without running _init_group",
)
@contextlib.contextmanager
def optimizers_in_the_region() -> Iterator[None]:
    """While active, frames that are compiled for our backend track optimizers as `TracedOptimizerVariable`.

    Their schedulers and gradient scalers are then traced like other code, and a learning rate that has changed between
    calls is a number of the graph.
    """

    def track(_: Any, value: torch.optim.Optimizer, **options: Any) -> VariableTracker:
        variable = TracedOptimizerVariable(
            value, **options
        )  # torch drops attributes that the program sets on an optimizer
        return InstructionTranslator.current_tx().output.side_effects.track_object_existing(value, variable)

    def check_file(stock: Any, filename: str | None, is_inlined_call: bool = False) -> trace_rules.SkipResult:
        if is_inlined_call and filename in _TRACED_FILES:
            return trace_rules.SkipResult(False, "traced by backend='dtensor'")
        return stock(filename, is_inlined_call)

    def wrap_symfloat(stock: Any, self: VariableBuilder, value: float) -> VariableTracker:
        number = stock(self, value)
        return _without_value(self, number) if _is_learning_rate(self.source) else number

    with patched(_TRACK, track), patched(_CHECK_FILE, check_file), patched(_WRAP, wrap_symfloat):
        yield
