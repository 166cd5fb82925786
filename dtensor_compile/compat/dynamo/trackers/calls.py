"""Trackers of functions, classes and objects whose calls we handle, and of contexts.

Built on ``compat/dynamo/tracing.py``; active only while Dynamo traces for our backend, as the table entries are."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable
from torch._dynamo.variables.misc import IgnoredFunctionVariable
from torch._dynamo.variables.tensor import TensorSubclassVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.left_to_python import leave_calls_to_python
from dtensor_compile.compat.dynamo.trackers.constant_tensors import target_name
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import CALL_METHOD, OpaqueClassVariable
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack, TrackGiven
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    COMPARE,
    READ,
    Translator,
    graph_break,
    member_function,
    read_attribute,
)
from dtensor_compile.compat.patches import FEATURES, if_there, needs, patch

if TYPE_CHECKING:
    from torch._dynamo.variables.constant import ConstantVariable

#: Handles a call: ``(tx, stock, args, kwargs)``, where `stock` is torch's tracker of the function that is called.
Call = Callable[[Translator, VariableTracker, list[VariableTracker], dict[str, VariableTracker]], VariableTracker]


class CallVariable(VariableTracker):
    """Tracks a function whose calls go to ours; everything else goes to torch's tracker of it."""

    def __init__(self, stock: VariableTracker, call: Call) -> None:
        super().__init__(source=stock.source)
        self.stock, self.call = stock, call

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return self.call(tx, self.stock, list(args), dict(kwargs))

    def python_type(self) -> type:
        return self.stock.python_type()

    def as_python_constant(self) -> Any:
        return self.stock.as_python_constant()

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        return read_attribute(self.stock, tx, name)

    def call_method(
        self, tx: Translator, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return self.stock.call_method(tx, name, args, kwargs)

    def call_obj_hasattr(self, tx: Translator, name: str) -> ConstantVariable:
        return self.stock.call_obj_hasattr(tx, name)

    def reconstruct(self, codegen: Any) -> None:
        self.stock.reconstruct(codegen)

    tp_getattro_impl = var_getattr  # since 2.14


def handle_calls(call: Call) -> Retrack:
    """Makes a tracker of a function whose calls go to `call`."""
    return lambda stock: CallVariable(stock, call)


class _OpaqueClass(OpaqueClassVariable):
    """The class of an opaque object, constructed by `make`."""

    make: Call
    if hasattr(UserDefinedClassVariable, COMPARE):  # ``type(x) is DTensor``, ``type(x) in [...]``
        richcompare_impl = tp_richcompare_impl = getattr(UserDefinedClassVariable, COMPARE)

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return type(self).make(tx, self, list(args), dict(kwargs))


class _TensorClass(TensorSubclassVariable):
    """A tensor class, constructed by `make`."""

    make: Call

    def construct(
        self, tx: Translator, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        """Constructs as torch does."""
        return super().call_function(tx, args, kwargs)

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return type(self).make(tx, self, list(args), dict(kwargs))


class _PlainClass(UserDefinedClassVariable):
    """Any other class, constructed by `make`."""

    make: Call

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return type(self).make(tx, self, list(args), dict(kwargs))


_CLASSES = (
    (TensorSubclassVariable, _TensorClass),
    (OpaqueClassVariable, _OpaqueClass),
    (UserDefinedClassVariable, _PlainClass),
)


def handle_construction(make: Call) -> Retrack:
    """Makes a tracker of a class whose construction goes to `make`; for anything else, acts as `handle_calls`."""
    trackers = {
        base: type(f"{ours.__name__}_{make.__name__}", (ours,), {"make": staticmethod(make)}) for base, ours in _CLASSES
    }

    def retrack(stock: VariableTracker) -> VariableTracker:
        base = next((base for base, _ in _CLASSES if isinstance(stock, base)), None)
        if base is None:
            return CallVariable(stock, make)
        return trackers[base](stock.as_python_constant(), source=stock.source)

    return retrack


def emit_call(tx: Translator, function: Callable[..., Any], *args: Any) -> VariableTracker:
    """Adds a node that calls `function`; trackers among `args` (also in nested tuples) become their proxies."""

    def proxy(arg: Any) -> Any:
        if isinstance(arg, (tuple, list)):
            return tuple(map(proxy, arg))
        return arg.as_proxy() if isinstance(arg, VariableTracker) else arg

    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", function, tuple(map(proxy, args)), {}))


def is_used(variable: VariableTracker) -> bool:
    """Whether any node of the graph so far reads a tensor."""
    return bool(variable.as_proxy().node.users)


# ---- contexts ------------------------------------------------------------------------------------------------------


class ContextVariable(GenericContextWrappingVariable):
    """An object for a ``with`` statement; a graph break inside leaves the frame to Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super(GenericContextWrappingVariable, self).__init__(*args, **kwargs)

    def begin(self) -> Callable[[], None]:
        """Does what ``__enter__`` does while tracing; returns the function that undoes it."""
        raise NotImplementedError

    def enter(self, tx: Translator) -> VariableTracker:
        undo = self.begin()
        pending = [undo]

        def leave() -> None:
            while pending:
                pending.pop()()

        _leave.setdefault(self, []).append(leave)
        tx.output.add_cleanup_hook(leave)  # tracing may end inside the context
        return self

    def exit(self, tx: Translator, *args: VariableTracker) -> VariableTracker:
        _leave[self].pop()()
        tx.active_generic_context_managers.pop()
        return VariableTracker.build(tx, None)


#: Per tracker, functions that leave the contexts that it entered and that are open.
_leave: weakref.WeakKeyDictionary[ContextVariable, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


_READ = patch(f"torch._dynamo.variables.tensor:TensorVariable.{READ}", "self tx name")


@needs(
    "members of tensor classes that cannot be traced",
    CALL_METHOD,
    _READ,
    without="they break the graph for a cause that the report does not know",
    upstream="not reported: an extension point",
    remove_when="a backend can refuse members of a tensor subclass",
)
@contextlib.contextmanager
def refuse_tensor_members(cls: type, refused: Mapping[str, str]) -> Iterator[None]:
    """While active, members of tensors of `cls` break the graph; `refused` maps their names to causes."""

    def ask(stock: Any, self: TensorVariable, tx: Translator, name: str, *args: Any) -> VariableTracker:
        if name in refused and self.python_type() is cls:
            member = getattr(cls, name, None)
            if args or not callable(member):  # called, or read
                if isinstance(member, types.FunctionType):
                    leave_calls_to_python(member)
                graph_break(refused[name], f"{cls.__name__}.{name}")
        return stock(self, tx, name, *args)

    with patched(CALL_METHOD, ask), patched(_READ, ask):
        yield


# ---- helpers of handlers -------------------------------------------------------------------------------


class ObjectVariable(CallVariable):
    """Tracks an object, some of whose methods we handle."""

    def __init__(self, stock: VariableTracker, methods: Mapping[str, Call]) -> None:
        super().__init__(stock, lambda tx, stock, args, kwargs: stock.call_function(tx, args, kwargs))
        self.methods = methods

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        if name in self.methods:
            return member_function(self, name, lambda args, kwargs: self.call_method(tx, name, args, kwargs))
        return read_attribute(self.stock, tx, name)

    def call_method(
        self, tx: Translator, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if name in self.methods:
            return self.methods[name](tx, self.stock, list(args), dict(kwargs))
        return self.stock.call_method(tx, name, args, kwargs)

    tp_getattro_impl = var_getattr


def handle_methods(**methods: Call) -> Retrack:
    """Makes a tracker of an object, some of whose methods go to ours."""
    return lambda stock: ObjectVariable(stock, methods)


def attribute(tx: Translator, owner: VariableTracker, name: str) -> VariableTracker:
    """``owner.name``"""
    return read_attribute(owner.realize(), tx, name)


class NamespaceVariable(CallVariable):
    """Tracks an object that only holds values that never change; `read` looks them up."""

    def __init__(self, stock: VariableTracker, read: Callable[[Translator, str], VariableTracker]) -> None:
        super().__init__(stock, lambda tx, stock, args, kwargs: stock.call_function(tx, args, kwargs))
        self.read = read

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        return self.read(tx, name)

    tp_getattro_impl = var_getattr


class RefusingVariable(UserDefinedObjectVariable):
    """Tracks an object, some of whose methods are not traced: calling one goes to `refuse`."""

    names: frozenset[str] = frozenset()
    refuse: Callable[[str], NoReturn]

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        if name in self.names:
            return member_function(self, name, lambda args, kwargs: self.refuse(name))
        return read_attribute(super(), tx, name)

    def call_method(
        self, tx: Translator, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return self.refuse(name) if name in self.names else super().call_method(tx, name, args, kwargs)

    tp_getattro_impl = var_getattr


def refuse_methods(names: Iterable[str], refuse: Callable[[str], NoReturn]) -> TrackGiven:
    """Makes a tracker of an input whose methods of those names are not traced."""

    def track(builder: VariableBuilder, value: Any) -> VariableTracker:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        variable = RefusingVariable(value, source=builder.source)
        variable.names, variable.refuse = frozenset(names), refuse
        return builder.tx.output.side_effects.track_object_existing(value, variable)

    return track


_met: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def call_site(tx: Translator) -> tuple[Any, ...]:
    """The place in the program that is being traced: code and offset of every frame, and the number of earlier
    visits."""
    frames: list[tuple[Any, Any]] = []
    at: Translator | None = tx
    while at is not None:
        frames.append((at.f_code, at.current_instruction.offset))
        at = at.parent if hasattr(at, "parent") else None
    place = tuple(frames)
    counts = _met.setdefault(tx.output.tracing_context, {})
    counts[place] = counts.get(place, -1) + 1
    return *place, counts[place]


# ---- leaves made in the program ------------------------------------------------------------------------------------


_LEAVES = "leaf tensors made by the program"
_RequiresGradRestartAnalysis = if_there("torch._dynamo.exc:RequiresGradRestartAnalysis")


def leaf_is_returned(tx: Translator) -> bool:
    """Whether an earlier attempt to trace this frame returned a leaf that the program makes; see `keep_leaves_inside`.

    Also true if nothing would detect that.
    """
    return not FEATURES[_LEAVES].works() or bool(tx.speculation_log.graph_break_on_requires_grad_)


def _depends_on_leaves(output: OutputGraph, returned: Sequence[VariableTracker]) -> bool:
    """Whether a returned tensor has autograd history from one on which the program called ``requires_grad_()``.

    torch checks for any data dependency; a detached tensor carries no gradient.
    """
    reached = {
        v.as_proxy().node for v in output.leaf_var_creation_order if isinstance(v, TensorVariable) and not v.source
    }
    for node in output.graph.nodes:
        if target_name(node) != "detach" and any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    return any(isinstance(v, TensorVariable) and v.requires_grad and v.as_proxy().node in reached for v in returned)


_CHECK = patch("torch._dynamo.output_graph:OutputGraph._check_requires_grad_intermediate_outputs", "self rv tx")


@needs(
    _LEAVES,
    _CHECK,
    without="requires_grad_() inside of a region is handled by torch, and distribute_tensor of a leaf breaks the graph",
    upstream="#170487, #196653",
    remove_when="Dynamo breaks the graph only where the leaf itself is returned",
)
@contextlib.contextmanager
def keep_leaves_inside(make_leaf: Callable[..., Any]) -> Iterator[None]:
    """While active, a frame that returns the result of `make_leaf` itself is traced again, with a graph break there.

    Values computed from such a tensor may leave the graph; the tensor itself would, in eager, collect a gradient
    outside.
    """

    def check(stock: Any, self: OutputGraph, returned: list[VariableTracker], tx: Translator) -> None:
        if _depends_on_leaves(self, returned):
            stock(self, returned, tx)
        leaves = [v for v in returned if isinstance(v, TensorVariable) and v.as_proxy().node.target is make_leaf]
        if not leaves:
            return
        if tx.one_graph:
            graph_break("leaf-made", str(leaves))
        tx.speculation_log.graph_break_on_requires_grad_ = True
        raise _RequiresGradRestartAnalysis(restart_reason="a leaf made in the program is returned")

    with patched(_CHECK, check):
        yield


def is_ignored(function: Any) -> bool:
    """Whether the user made Dynamo ignore calls of a function, a method, or the function of a tracker."""
    if isinstance(function, IgnoredFunctionVariable):
        return True
    ignored = torch._dynamo.config.ignore_logging_functions
    return not isinstance(function, VariableTracker) and (
        function in ignored or getattr(function, "__func__", None) in ignored
    )
