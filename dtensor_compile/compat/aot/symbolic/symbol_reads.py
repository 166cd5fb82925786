"""Faster reads of the expression of a symbolic size.

Every computation with a size reads its expression, a million times in the compilation of three layers. torch first
checks whether it is a number, which sympy derives from all its parts each time, and then whether anything in it is to
be replaced. Here the version of the replacements is checked first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx.experimental.sym_node import SymNode

from dtensor_compile.compat.apply_patches import patched_value
from dtensor_compile.compat.patches import hook, needs, patch

_EXPR = patch("torch.fx.experimental.sym_node:SymNode.expr")


@needs(
    "fast reads of symbolic expressions",
    _EXPR,
    hook("torch.fx.experimental.symbolic_shapes:ShapeEnv.replace"),
    without="programs of symbolic sizes compile more slowly",
    upstream="#192677",
    remove_when="SymNode.expr reads its cache first",
)
@contextlib.contextmanager
def quick_expressions() -> Iterator[None]:
    """While active, a symbolic size caches its expression until replacements change. The expressions are torch's."""
    stock = vars(SymNode)["expr"].fget

    def read(self: Any) -> sympy.Basic:
        env = self.shape_env
        version = getattr(env, "_replacements_version_counter", None)
        if version == 0:
            return self._expr
        known = getattr(self, "_expr_cache", None)
        return known if known is not None and version == self._expr_ver else stock(self)

    with patched_value(_EXPR, property(read)):  # on every thread: checking the thread would cost as much as this saves
        yield
