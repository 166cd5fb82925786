"""The nodes of one call of a module, their dependencies, and their copy for a call of another module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Source
from torch.utils._pytree import tree_map

from dtensor_compile.compat.dynamo.replay.call_facts import (
    Differs,
    Fact,
    GuardFact,
    OtherModule,
    add_guards,
    chain,
    flat_facts,
    tensor_facts,
)
from dtensor_compile.compat.dynamo.replay.node_copies import PLACE, Fakes, Names, Place
from dtensor_compile.compat.dynamo.trackers.module_calls import notes, real_value
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, source_of


class _Argument(NamedTuple):
    """A node from outside is an argument of the call: its place among the facts about these."""

    place: int


class _Below(NamedTuple):
    """It is an input of the graph that is read below the module."""

    source: Source


class _InPlaceOf(NamedTuple):
    """It stands for a parameter of the module, as a gathered one does."""

    path: str
    name: str


@dataclass
class CallTrace:
    """The nodes of one call, and their dependencies.

    Attributes:
        number: in the frame.
        region: whether the program marks it as one to compile once.
        module: source of the module.
        facts, guards, same_state: as `call_facts` has them.
        ordered: dicts below the module whose order of keys is guarded.
        writes: number of writes of the frame to objects that it did not make, when the call was traced.
        nodes: of the call.
        inputs: origins of the nodes from outside; None if those are the same for each call.
        result: of the call.
        calls: number of calls so far.
    """

    number: int
    region: bool
    module: Source
    facts: list[Any]
    guards: list[GuardFact]
    same_state: Callable[[], bool]
    ordered: list[Source]
    writes: int
    nodes: list[torch.fx.Node]
    inputs: dict[torch.fx.Node, _Argument | _Below | _InPlaceOf | None]
    result: VariableTracker
    calls: int = 1


def inputs_of(
    tx: Translator, nodes: Sequence[torch.fx.Node], module: VariableTracker, facts: Sequence[Fact]
) -> dict[torch.fx.Node, _Argument | _Below | _InPlaceOf | None]:
    """Origins of the nodes from outside that a call uses.

    Raises:
        Differs: of one, it is not known.
    """
    given = {variable.as_proxy().node: _Argument(i) for i, (_, variable) in enumerate(facts) if variable is not None}
    replaced = {
        variable.as_proxy().node: _InPlaceOf(path, name)
        for path, part in real_value(tx, module).named_modules()
        for name in part._parameters
        if (variable := notes(tx, "replaced_by").get((id(part), name))) is not None
    }
    has_objects = any(fact[0] == "object" for fact, _ in facts)
    inside, source = set(nodes), source_of(module)
    found: dict[torch.fx.Node, _Argument | _Below | _InPlaceOf | None] = {}
    for outer in dict.fromkeys(outer for node in nodes for outer in node.all_input_nodes if outer not in inside):
        if outer.op == "placeholder":
            read = getattr(outer.meta.get("grapharg"), "source", None)
            below = _Below(read) if read is not None and source in chain(read) else None
            if below is not None and has_symbols(outer):
                raise Differs(f"{below.source.name} has a symbolic size, or is a number that is an input")
            found[outer] = given.get(outer) or below
        elif outer in given or outer in replaced:
            found[outer] = given.get(outer) or replaced[outer]
        elif has_objects:
            found[outer] = None  # in an object, which is the same one for each call
        else:
            raise Differs(f"it uses {outer.name}, which is not among its arguments")
    return found


def has_symbols(node: torch.fx.Node) -> bool:
    """Whether an input of the graph has symbolic sizes, or is a number."""
    value, argument = node.meta.get("example_value"), node.meta.get("grapharg")
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or getattr(argument, "pass_arg_as_tensor", False):
        return True
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def check_nodes(nodes: Sequence[torch.fx.Node]) -> None:
    """Checks that nodes can be copied.

    Raises:
        Differs: one has an unbacked size, with a symbol of its own.
    """
    for node in nodes:
        if node.meta.get("unbacked_bindings") or node.target is torch.ops.aten._local_scalar_dense.default:
            raise Differs("sizes in it depend on data")


def check_result(result: VariableTracker, known: set[torch.fx.Node]) -> None:
    """Checks that the result can be made of copied nodes.

    Raises:
        Differs: it cannot.
    """
    for fact, variable in flat_facts(result):
        if fact[0] == "object":
            raise Differs(f"it returns a {fact[1].variable.python_type_name()}")
        if variable is not None and variable.as_proxy().node not in known:
            raise Differs("it returns what it did not compute")


# ---- the other calls -----------------------------------------------------------------------------------------------


def copy_call(
    tx: Translator, trace: CallTrace, module: VariableTracker, facts: list[Fact], writes: int
) -> VariableTracker:
    """Copies the nodes of a trace for another call; the result of that call.

    Raises:
        Differs: something that the trace depends on is different; nothing was changed.
    """
    if [fact for fact, _ in facts] != trace.facts:
        raise Differs("its arguments differ")
    if not trace.same_state():
        raise Differs("the state of torch differs")
    if writes != trace.writes:
        raise Differs("the program has written to objects since")
    old, new = trace.module, source_of(module)
    other, effects = OtherModule(tx, old, new), tx.output
    guards = [guard.moved(other) for guard in trace.guards]
    values = _inputs_of_copy(tx, trace, module, facts, other)
    effects.guard_on_key_order.update(map(other.source, trace.ordered))
    add_guards(tx, guards)
    assert tx.fake_mode is not None
    fakes, names = Fakes(tx.fake_mode), Names(tx, effects.resolve_source_value(old), real_value(tx, module))
    for number, node in enumerate(trace.nodes):
        copied = effects.graph.node_copy(node, lambda outer: values[outer])
        if node.op == "get_attr" and isinstance(part := effects.nn_modules.get(str(node.target)), torch.fx.GraphModule):
            copied.target = effects.install_subgraph(str(node.target).rpartition("_")[0], names.graph_module(part))
        copied.meta = names.meta(node.meta)
        if "example_value" in node.meta:
            copied.meta["example_value"] = tree_map(fakes.copy, node.meta["example_value"])
        copied.meta[PLACE] = Place(trace.number, trace.calls, number, trace.region)
        values[node] = copied
    trace.calls += 1
    return _result(tx, trace.result, values, fakes)


def _inputs_of_copy(
    tx: Translator, trace: CallTrace, module: VariableTracker, facts: Sequence[Fact], other: OtherModule
) -> dict[torch.fx.Node, torch.fx.Node]:
    """The counterparts of nodes from outside in the other call.

    Raises:
        Differs: something is missing or different; nothing was changed.
    """
    real, values, below = real_value(tx, module), {}, {}
    seen: dict[int, torch.fx.Node] = {}
    for outer, origin in trace.inputs.items():
        if isinstance(origin, _Argument):
            variable = facts[origin.place][1]
        elif isinstance(origin, _InPlaceOf):
            variable = notes(tx, "replaced_by").get((id(real.get_submodule(origin.path)), origin.name))
        elif isinstance(origin, _Below):
            source = other.source(origin.source)
            below[outer] = source, other.value(source)
            if seen.setdefault(id(below[outer][1]), outer) is not outer:
                raise Differs(f"{source.name} is one object with another input")
            continue
        else:
            values[outer] = outer
            continue
        node = variable.as_proxy().node if variable is not None else None
        if node is None or _facts_of(node) != _facts_of(outer):
            raise Differs(f"{outer.name} is gathered otherwise")
        values[outer] = node
    for outer, (source, value) in below.items():
        values[outer] = VariableBuilder(tx, source)(value).as_proxy().node
    return values


def _facts_of(node: torch.fx.Node) -> Any:
    value = node.meta["example_value"]
    return tensor_facts(value) if isinstance(value, torch.Tensor) else str(value)


def _result(
    tx: Translator, variable: VariableTracker, values: Mapping[torch.fx.Node, torch.fx.Node], fakes: Fakes
) -> VariableTracker:
    """A tracker like `variable`, of the nodes of another call."""
    variable = variable.realize()
    again = functools.partial(_result, tx, values=values, fakes=fakes)
    if isinstance(variable, (TensorVariable, SymNodeVariable)):
        node = values[variable.as_proxy().node]
        proxy = torch.fx.Proxy(node, tx.output.current_tracer)
        if isinstance(variable, SymNodeVariable):
            return SymNodeVariable.create(tx, proxy, variable.sym_num)
        return wrap_fx_proxy(tx, proxy, example_value=fakes.not_a_leaf(node.meta.pop("example_value")))
    if isinstance(variable, ConstDictVariable):
        items = {key: again(item) for key, item in variable.items.items()}
        return ConstDictVariable(items, mutation_type=ValueMutationNew())
    if isinstance(variable, ListVariable):
        return ListVariable([again(item) for item in variable.items], mutation_type=ValueMutationNew())
    if isinstance(variable, TupleVariable):
        return TupleVariable([again(item) for item in variable.items])
    return variable
