"""Memoizes operations on symbolic sizes.

For every fake tensor with symbolic sizes, torch computes its number of elements, its bytes and its contiguity, and
checks whether they are positive: 250,000 operations in the compilation of three layers, of which 1,300 differ. torch
builds and simplifies a sympy expression for each. Here a result is cached until the shape env learns more about the
symbols:

    result(operation, a, b) = result(operation, a', b')    if expressions, hints and types are equal

Each call still returns a new node: a traced graph distinguishes sizes by their nodes. Nothing is cached while a tracer
sees the operation, while torch validates or records what it does, and for unbacked sizes. An answer that torch has
guarded on is kept apart from the same answer without a guard.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental import sym_node, symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dtensor_compile.compat.apply_patches import patched_values
from dtensor_compile.compat.patches import hook, needs, patch

_OPERATIONS = (
    "add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min", "mod", "int_floordiv", "and_", "or_",
)  # fmt: skip
_NODE = "torch.fx.experimental.sym_node:SymNode."
_BINARY = {name: patch(_NODE + name, "self other") for name in _OPERATIONS}
#: Attribute of a node that holds its `_Size`.
_SIZE = patch(_NODE + "_dtensor_size", optional=True)
_WRAP_INT = patch(_NODE + "wrap_int", "self num")
_AS_INT = patch(_NODE + "maybe_as_int", "self")
_TEXT = patch(_NODE + "str", "self")
_EVALUATE = patch(
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_sym_node", "self sym_node size_oblivious fallback_value"
)
_FILES = patch("torch.fx.experimental.symbolic_shapes:uninteresting_files", "")

_MISSING: Any = object()


class _Size:
    """All symbolic sizes of one shape env with the same expression, hint and type, and results computed from them.

    Attributes:
        version: of the shape env at that time; None if nothing may be cached.
        number: result of `SymNode.maybe_as_int`.
        text: their expression as text.
        results: attributes of the resulting node, per operation and other operand.
        answers: torch's answers if it is a condition.
    """

    __slots__ = ("version", "number", "text", "results", "answers")

    def __init__(self, version: int | None) -> None:
        self.version = version
        self.number: Any = _MISSING
        self.text: Any = _MISSING
        self.results: dict[tuple[str, _Size], dict[str, Any]] = {}
        self.answers: dict[tuple[Any, ...], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Size, (None,)  # copies and caches of a node start empty


class _Sizes:
    """The sizes of one shape env, and integers as its nodes."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.known: dict[tuple[Any, ...], _Size] = {}
        self.numbers: dict[int, dict[str, Any]] = {}


def _new(attributes: dict[str, Any]) -> SymNode:
    node = object.__new__(SymNode)
    node.__dict__ = attributes.copy()
    return node


class _Kept:
    """The caches of the shape envs of one compilation."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[ShapeEnv, _Sizes] = weakref.WeakKeyDictionary()

    def sizes(self, env: ShapeEnv) -> _Sizes:
        sizes = self.of.get(env)
        if sizes is None or sizes.version != env._version_counter:
            sizes = self.of[env] = _Sizes(env._version_counter)
        return sizes

    def size(self, node: SymNode) -> _Size | None:
        """The `_Size` of a node; None if nothing may be cached for it."""
        env = node.shape_env
        if env is None or not isinstance(node._expr, sympy.Basic) or type(node._hint) not in (int, bool, float):
            return None
        if env._translation_validation_enabled or env.should_record_events:
            return None
        sizes = self.sizes(env)
        key = node._expr, node._hint, node.pytype, node._optimized_summation
        found = sizes.known.get(key)
        if found is None:
            found = sizes.known[key] = _Size(sizes.version)
        node._dtensor_size = found  # type: ignore[attr-defined]
        return found

    def forget(self) -> None:
        for sizes in self.of.values():
            for size in sizes.known.values():
                size.version = None
                size.results.clear()
                size.answers.clear()


@needs(
    "memoized operations on symbolic sizes",
    *_BINARY.values(),
    _SIZE,
    _WRAP_INT,
    _AS_INT,
    _TEXT,
    _EVALUATE,
    _FILES,
    hook("torch.fx.experimental.symbolic_shapes:ShapeEnv._suppress_guards_tls"),
    hook("torch.fx.experimental.symbolic_shapes:ShapeEnv._update_version_counter"),
    hook("torch.fx.experimental.proxy_tensor:get_proxy_mode"),
    without="programs of symbolic sizes compile more slowly",
    upstream="#193219, #193489",
    remove_when="ShapeEnv keeps results of arithmetic between equal sizes, and answers",
)
@contextlib.contextmanager
def results_computed_once() -> Iterator[None]:
    """While active, operations on equal symbolic sizes are computed once. Results and guards are torch's."""
    if sym_node.sym_node_log.isEnabledFor(10) or torch._logging._internal.GET_DTRACE_STRUCTURED:
        yield  # each operation has to be logged
        return
    kept, files = _Kept(), symbolic_shapes.uninteresting_files

    @functools.cache
    def uninteresting() -> set[str]:
        return {*files(), __file__}  # guards report the user frame that caused them

    replaced = {
        _SIZE: None,
        **{row: _binary(kept, name) for name, row in _BINARY.items()},
        _WRAP_INT: _wrap_int(kept),
        _AS_INT: _read_once(kept, "maybe_as_int", "number"),
        _TEXT: _read_once(kept, "str", "text"),
        _EVALUATE: _evaluate(kept),
        _FILES: uninteresting,
    }
    try:
        with patched_values(replaced):  # on every thread: checking the thread would cost as much as this saves
            yield
    finally:
        kept.forget()


def _binary(kept: _Kept, name: str) -> Callable[[SymNode, SymNode], Any]:
    """A memoized operation of two sizes."""
    stock, size_of = getattr(SymNode, name), kept.size

    def operation(self: Any, other: Any) -> Any:
        env: Any = self.shape_env
        if get_proxy_mode() is not None or env is None or not isinstance(other, SymNode):
            return stock(self, other)
        a, b, version = self._dtensor_size, other._dtensor_size, env._version_counter  # type: ignore[attr-defined]
        if a is None or a.version != version:
            a = size_of(self)
        if b is None or b.version != version:
            b = size_of(other)
        if a is None or b is None or other.shape_env != env:
            return stock(self, other)
        known = a.results.get((name, b))
        if known is not None:
            return _new(known)
        result = stock(self, other)
        if type(result) is SymNode and size_of(result) is not None and env._version_counter == version:
            a.results[name, b] = result.__dict__.copy()
        return result

    return operation


def _wrap_int(kept: _Kept) -> Callable[[SymNode, int], Any]:
    """A memoized `SymNode.wrap_int`."""
    stock = SymNode.wrap_int

    def wrap_int(self: Any, num: int) -> Any:
        env = self.shape_env
        if type(num) is not int or env is None:
            return stock(self, num)
        numbers = kept.sizes(env).numbers
        known = numbers.get(num)
        if known is None:
            node = stock(self, num)
            if kept.size(node) is None:
                return node
            known = numbers[num] = node.__dict__.copy()
        return _new(known)

    return wrap_int


def _read_once(kept: _Kept, name: str, slot: str) -> Callable[[SymNode], Any]:
    """A memoized method without arguments; its result is kept in the attribute `slot` of a `_Size`."""
    stock = getattr(SymNode, name)

    def read(self: Any) -> Any:
        size = self._dtensor_size
        if size is None or size.version != self.shape_env._version_counter:
            size = kept.size(self)
            if size is None:
                return stock(self)
        value = getattr(size, slot)
        if value is _MISSING:
            value = stock(self)
            setattr(size, slot, value)
        return value

    return read


def _evaluate(kept: _Kept) -> Callable[..., Any]:
    """A memoized `ShapeEnv.evaluate_sym_node`."""
    stock = ShapeEnv.evaluate_sym_node

    def evaluate_sym_node(
        self: Any, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        size = sym_node._dtensor_size
        if size is None or size.version != self._version_counter:
            size = kept.size(sym_node)
        if size is None or sym_node.shape_env is not self:
            return stock(self, sym_node, size_oblivious, fallback_value)
        key = size_oblivious, fallback_value, self._suppress_guards_tls()
        answer = size.answers.get(key, _MISSING)
        if answer is _MISSING:
            answer = size.answers[key] = stock(self, sym_node, size_oblivious, fallback_value)
        return answer

    return evaluate_sym_node
