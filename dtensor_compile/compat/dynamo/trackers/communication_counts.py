"""``CommDebugMode`` inside a program that is traced for our backend.

The mode counts the collectives of the operators that run while it is active, as eager sends them. When Dynamo traces an
operator, it runs it on fake tensors, including its collectives; the mode's own code counts these, once per compilation.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.trackers.after_graph import call_after_graph, is_export
from dtensor_compile.compat.dynamo.trackers.calls import ContextVariable
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    build,
    build_unguarded,
    constant_source,
    graph_break,
    read_attribute,
)
from dtensor_compile.compat.patches import feature, patch

_RUN_NODE = patch("torch._dynamo.utils:run_node", "tracer node args kwargs nnmodule")
_COUNTS = feature(
    "CommDebugMode in the region",
    _RUN_NODE,
    without="a program that enters one in the region raises an error",
    essential=True,
    upstream="#164143, for another mode",
    remove_when="Dynamo traces CommDebugMode",
)

#: Number of calls by operator packet.
Counts = dict[Any, int]


class _Counter(CommDebugMode):
    """Counts without following modules, which would add hooks to them.

    Args:
        ours: maps an operator of ours to the operator of torch's as which it counts; None if its collectives are
            unknown.
    """

    def __init__(self, ours: Mapping[Any, Any]) -> None:
        super().__init__()
        self.ours = ours
        self.comm_registry.update(ours)
        self.advanced_module_tracker.name = "Global"
        self.advanced_module_tracker.module_parents_dict["Global"] = set()

    def __enter__(self) -> _Counter:
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *args: Any) -> None:
        TorchDispatchMode.__exit__(self, *args)

    def counted(self) -> Counts:
        """The counts that the mode would have in eager."""
        found: Counts = defaultdict(int)
        for packet, count in self.comm_counts.items():
            found[self.ours.get(packet, packet)] += count
        return found


def is_counting() -> bool:
    """Whether operators that this thread runs are counted as eager's."""
    return any(isinstance(mode, _Counter) for mode in _get_current_dispatch_mode_stack())


def with_counts(mode: CommDebugMode, counts: Counts) -> CommDebugMode:
    """The mode with the given counts, as after a ``with`` statement, all of it outside of modules."""
    mode.comm_counts = defaultdict(int, counts)
    mode.comm_module_counts = {"Global": {"forward": defaultdict(int, counts), "backward": defaultdict(int)}}
    mode.comm_module_operation_counts = {}
    return mode


def _track_counts(tx: Translator, counts: Counts) -> VariableTracker:
    """A new dict with default 0."""
    cls = build_unguarded(tx, defaultdict, constant_source(tx, "class", defaultdict))
    return cls.call_function(tx, [build(tx, int), build(tx, dict(counts))], {})


class CommModeVariable(ContextVariable):
    """A mode that the program enters. One from outside of the graph gets its counts when the graph has run."""

    #: As in `_Counter`.
    ours: Mapping[Any, Any] = {}

    def __init__(self, value: CommDebugMode, **options: Any) -> None:
        super().__init__(value, **options)
        self.counter: _Counter | None = None

    @classmethod
    def track(cls, builder: VariableBuilder, value: CommDebugMode) -> VariableTracker:
        """The tracker of a mode that is an input."""
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return builder.tx.output.side_effects.track_object_existing(value, cls(value, source=builder.source))

    @classmethod
    def make(
        cls, tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        """``CommDebugMode()``"""
        return cls(CommDebugMode())

    def python_type(self) -> type:
        return CommDebugMode

    def begin(self) -> Callable[[], None]:
        _COUNTS.works()
        counter = self.counter = _Counter(self.ours)

        def run_node(stock: Any, *args: Any, **kwargs: Any) -> Any:
            with counter:
                return stock(*args, **kwargs)

        counting = contextlib.ExitStack()
        counting.enter_context(patched(_RUN_NODE, run_node))
        return counting.close

    def exit(self, tx: Translator, *args: VariableTracker) -> VariableTracker:
        result = super().exit(tx, *args)
        counts = self.counts()
        if self.source is not None and not is_export(tx):
            call_after_graph(tx, lambda mode: with_counts(mode, counts), [self])
        return result

    def counts(self) -> Counts:
        """The counts so far."""
        counts = self.counter.counted() if self.counter is not None else {}
        if self.counter is None and self.source is not None or None in counts:
            graph_break("comm-mode", f"counts of {self.source.name if self.source else 'CommDebugMode()'}")
        return counts

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        if name == "comm_counts":
            return _track_counts(tx, self.counts())
        if name not in ("get_comm_counts", "get_total_counts"):
            graph_break("comm-mode", f"CommDebugMode.{name}")
        return read_attribute(super(), tx, name)

    tp_getattro_impl = var_getattr  # since 2.14

    def call_method(
        self, tx: Translator, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if name == "get_comm_counts":
            return _track_counts(tx, self.counts())
        if name == "get_total_counts":
            return build(tx, sum(self.counts().values()))
        graph_break("comm-mode", f"CommDebugMode.{name}")

    def reconstruct(self, codegen: Any) -> None:
        if self.source is not None:
            return codegen(self.source)
        counts = self.counts()
        source = constant_source(codegen.tx, "comm_mode", lambda: with_counts(CommDebugMode(), counts))
        codegen.add_push_null(lambda: codegen(source))
        codegen.extend_output(create_call_function(0, False))
