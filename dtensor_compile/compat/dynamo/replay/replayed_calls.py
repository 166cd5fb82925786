"""Calls of equal modules are traced once: Dynamo traces the first, and the graph of the others is copied from it.

A model is a list of blocks with the same code. Tracing the code of one takes tenths of a second, copying its nodes
milliseconds. The nodes of one call are copied for another where everything that the trace depended on is equal for it:

- its arguments: tensors with the same metadata (placements of DTensors included), the same sizes and constants;
- all facts under guards of the module and of everything below it, checked for the other module, which gets these
  guards;
- parameters that are one tensor in one module, and are one tensor in the other;
- the state of torch, and that the program has written to nothing since that it had not made itself.

The graph is the one that Dynamo would have traced. Nodes of both calls carry their `Place`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._guards import Source, TracingContext

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.replay.call_facts import (
    Differs,
    Fact,
    OtherModule,
    argument_facts,
    chain,
    guards_below,
    ordered_below,
    state_check,
)
from dtensor_compile.compat.dynamo.replay.call_traces import CallTrace, check_nodes, check_result, copy_call, inputs_of
from dtensor_compile.compat.dynamo.replay.node_copies import PLACE, Place
from dtensor_compile.compat.dynamo.tracing import options_on_stack
from dtensor_compile.compat.dynamo.trackers.communication_counts import is_counting
from dtensor_compile.compat.dynamo.trackers.module_calls import CALLS, function_of, notes, real_value
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, source_of
from dtensor_compile.compat.patches import hook, needs, patch

#: Name of the list of `traced_apart` in the context of a compilation.
_APART = "dtensor_compile_apart"

#: Name of the mark of `trace_each` on what Dynamo keeps between traces of a frame.
_EACH = "dtensor_compile_each"

_WRITES = patch("torch._dynamo.side_effects:SideEffects.check_allowed_side_effect", "self item")
_READS = patch("torch._dynamo.side_effects:SideEffects.load_attr", "self item name ...")


@dataclass
class Frame:
    """The calls of blocks in one frame.

    Attributes:
        traces: by the code that is called.
        count: number of the traces.
        tracing: whether a block is being traced.
        writes: number of writes to objects that the frame did not make.
        effects: side effects of the block that is being traced.
        known: ids of the trackers of objects that were there before.
    """

    traces: dict[Any, list[CallTrace]] = field(default_factory=dict)
    count: int = 0
    tracing: bool = False
    writes: int = 0
    effects: list[str] = field(default_factory=list)
    known: set[int] = field(default_factory=set)


def _frame(tx: Translator) -> Frame:
    found: Frame = notes(tx, "blocks").setdefault("frame", Frame())
    return found


def _frame_of(effects: SideEffects) -> Frame | None:
    """The frame that has these side effects, if it has called a block."""
    output = effects.output_graph_weakref()
    return vars(output).get("dtensor_compile_blocks", {}).get("frame") if output is not None else None


def note_traced_apart(tx: Translator, name: str, reason: str) -> None:
    """Notes, for `traced_apart`, why something is traced by itself."""
    vars(tx.output.tracing_context).setdefault(_APART, []).append((name, reason))


def _traced_apart(tx: Translator, module: VariableTracker, reason: Differs) -> None:
    name = tx.nn_module_stack.get(str(id(real_value(tx, module))), (source_of(module).name,))[0]
    note_traced_apart(tx, name, str(reason))


def traced_apart() -> list[tuple[str, str]]:
    """The module, or the function, and the reason for each call that was traced by itself in the graph being
    compiled."""
    found: list[tuple[str, str]] = vars(TracingContext.get()).get(_APART, [])
    return found


def trace_each(tx: Translator) -> None:
    """Starts the trace of the frame again, without copies, if it has any: the program differentiates inside of the
    region, for which Dynamo runs the backward pass of its fake tensors. Those of a copy have none.

    Raises:
        RestartAnalysis: it has copies.
    """
    traces = [trace for found in _frame(tx).traces.values() for trace in found]
    if any(trace.calls > 1 for trace in traces):
        log = tx.speculation_log
        log.clear()
        vars(log)[_EACH] = True
        raise TensorifyScalarRestartAnalysis(restart_reason="a backward pass inside of the region")


# ---- which calls ---------------------------------------------------------------------------------------------------


def is_inside_block(tx: Translator) -> bool:
    """Whether a call that may be copied is being traced."""
    return _frame(tx).tracing


def is_of_block(tx: Translator, function: Any, args: Sequence[VariableTracker]) -> bool:
    """Whether a call is that of the ``forward`` of one of several modules of a class, which one module holds."""
    if not args or getattr(function, "__name__", "") != "forward":
        return False
    variable = args[0]
    if not isinstance(variable, UnspecializedNNModuleVariable) or variable.source is None:
        return False
    inside = tx.output.current_tracer.parent is not None or torch._C._functorch.peek_interpreter_stack() is not None
    if inside or is_counting() or _frame(tx).tracing or vars(tx.speculation_log).get(_EACH):
        return False
    module = cast("torch.nn.Module", variable.value)
    owner = _owner(tx, variable.source, module)
    siblings = owner.children() if owner is not None else ()
    return sum(type(part) is type(module) for part in siblings) >= 2 and _is_large(module)


def _owner(tx: Translator, source: Source, module: torch.nn.Module) -> torch.nn.Module | None:
    """The module of which `module` is a member, as its source says."""
    here = OtherModule(tx, source, source)
    with contextlib.suppress(Differs):  # a source of a value that tracing made
        values = (here.value(base) for base in chain(source))
        return next((value for value in values if isinstance(value, torch.nn.Module) and value is not module), None)
    return None


def _is_large(module: torch.nn.Module) -> bool:
    """Whether several modules in `module` have parameters of their own; copying saves nothing for others."""
    return sum(bool(part._parameters) for part in module.modules()) >= 2


# ---- the first call ------------------------------------------------------------------------------------------------


def _trace(
    tx: Translator,
    code: Any,
    arguments: Sequence[VariableTracker],
    facts: list[Fact],
    stock: Callable[[], VariableTracker],
) -> VariableTracker:
    """Traces a call, and keeps its nodes if they can be copied."""
    module = arguments[0]
    frame, same_state, last = _frame(tx), state_check(), next(iter(reversed(tx.output.graph.nodes)), None)
    writes, hooks = frame.writes, len(tx.output.side_effects.tensor_hooks)
    happened, logged = len(notes(tx, "happened")), len(tx.output.root_tx.debug_locals)
    frame.tracing, frame.effects, frame.known = True, [], set()
    frame.known.update(map(id, tx.output.side_effects.id_to_variable.values()))
    VariableTracker.visit(lambda part: frame.known.add(id(part)), arguments)
    try:
        result = stock()
    finally:
        frame.tracing = False
    if len(tx.output.side_effects.tensor_hooks) != hooks:
        frame.effects.append("it registers a hook")
    if len(tx.output.root_tx.debug_locals) != logged:
        frame.effects.append("it prints")
    frame.effects += list(notes(tx, "happened").values())[happened:]
    try:
        if frame.effects or not same_state():
            raise Differs(frame.effects[0] if frame.effects else "it leaves torch in another state")
        nodes = _nodes_after(tx.output.graph, last)
        inputs = inputs_of(tx, nodes, module, facts)
        check_nodes(nodes)
        check_result(result, set(nodes))
        source = source_of(module)
        found, guards, ordered = [fact for fact, _ in facts], guards_below(tx, source), ordered_below(tx, source)
        region = code in notes(tx, "regions")
        kept = CallTrace(frame.count, region, source, found, guards, same_state, ordered, writes, nodes, inputs, result)
    except Differs as reason:
        _traced_apart(tx, module, reason)
        return result
    for number, node in enumerate(nodes):
        node.meta[PLACE] = Place(frame.count, 0, number, region)
    frame.count += 1
    frame.traces.setdefault(code, []).append(kept)
    return result


def _nodes_after(graph: torch.fx.Graph, last: torch.fx.Node | None) -> list[torch.fx.Node]:
    nodes: list[torch.fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        nodes.insert(0, node)
    return [node for node in nodes if node.op != "placeholder"]


# ---- the scope -----------------------------------------------------------------------------------------------------


@needs(
    "equal blocks traced once",
    *CALLS,
    _WRITES,
    _READS,
    hook("torch._dynamo.guards:GUARD_VALUE_DISPATCH"),
    hook("torch._dynamo.guards:SKIP_GUARD"),
    hook("torch._guards:GuardsSet.get_guards_for_source", "self source"),
    without="every block of a model is traced by itself",
    upstream="not reported: nested_compile_region does so for marked functions, but not with DTensors",
    remove_when="Dynamo traces equal modules once, with DTensors",
)
@contextlib.contextmanager
def blocks_traced_once() -> Iterator[None]:
    """While active, calls of equal modules in frames for our backend are traced once, if the options say so."""
    if options_on_stack().get("blocks") == "each":
        yield
        return

    def call(
        stock: Any,
        self: UserFunctionVariable,
        tx: Translator,
        args: Sequence[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        own = functools.partial(stock, self, tx, args, kwargs)
        function, given = function_of(self), [argument.realize() for argument in (*self.self_args(), *args)]
        if not is_of_block(tx, function, given):
            return own()
        return _call(tx, function.__code__, [*given, *kwargs.values()], argument_facts(given[1:], kwargs), own)

    with contextlib.ExitStack() as stack:
        for row in CALLS:
            stack.enter_context(patched(row, call))
        stack.enter_context(patched(_WRITES, _writes))
        stack.enter_context(patched(_READS, _reads))
        yield


def _call(
    tx: Translator,
    code: Any,
    arguments: list[VariableTracker],
    facts: list[Fact],
    stock: Callable[[], VariableTracker],
) -> VariableTracker:
    frame, module = _frame(tx), arguments[0]
    for trace in frame.traces.get(code, ()):
        try:
            return copy_call(tx, trace, module, facts, frame.writes)
        except Differs as reason:
            _traced_apart(tx, module, reason)
    return _trace(tx, code, arguments, facts, stock)


def _writes(stock: Any, self: SideEffects, item: VariableTracker) -> Any:
    """Counts writes to objects that the frame, or the block being traced, did not make."""
    frame = _frame_of(self)
    if frame is not None:
        outside = isinstance(item.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
        frame.writes += outside
        if outside or id(item) in frame.known:
            frame.effects.append(f"it writes to {item.source.name if item.source is not None else 'what was there'}")
    return stock(self, item)


def _reads(stock: Any, self: SideEffects, item: VariableTracker, name: str, *args: Any, **kwargs: Any) -> Any:
    """Notes reads of attributes that the program has written, of objects that a block did not make."""
    frame = _frame_of(self)
    if frame is not None and frame.tracing and id(item) in frame.known:
        frame.effects.append(f"it reads {name}, which the program has written")
    return stock(self, item, name, *args, **kwargs)
