"""Symbolic sizes: hints that planning may use without adding a guard."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max, Min

from dtensor_compile.compat.apply_patches import patched, patched_entries
from dtensor_compile.compat.patches import if_there, needs, patch

#: Hint for an unbacked size, so that it can be planned at all. It differs from the known divisors of a size, because a
#: size that equals its divisor would look static.
UNKNOWN_SIZE = 1024


def size_hint(size: int | torch.SymInt) -> int:
    """The hint of a size; for an unbacked one its known divisor times `UNKNOWN_SIZE`."""
    if isinstance(size, int):
        return size
    return size.node.hint if has_hint(size) else UNKNOWN_SIZE * _divisor(size.node.expr)


def has_hint(size: int | torch.SymInt) -> bool:
    """Whether a size is known from the trace: False for an unbacked one."""
    return isinstance(size, int) or size.node.has_hint()


def size_hints(shape: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """`size_hint` of every dim."""
    return tuple(size_hint(size) for size in shape)


def divisors(shape: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """The largest known divisor of each size, whatever its symbols are: an integer itself, 4 for ``4*s0``."""
    return tuple(size if isinstance(size, int) else _divisor(size.node.expr) for size in shape)


def is_multiple(size: int | torch.SymInt, n: int) -> bool:
    """Whether a size is a multiple of `n`; adds a guard for a backed size.

    An unbacked size cannot be guarded on: it counts as no multiple unless its expression is always one. The caller then
    takes the path for uneven shards, which also handles even ones.
    """
    return guard_or_false(size % n == 0)


def guard_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> None:
    """Guards on two backed sizes being equal, or unequal, as they are; equal ones are one size from here on."""
    guard_or_false(a == b)


def expressions(shape: Sequence[int | torch.SymInt]) -> tuple[sympy.Expr, ...]:
    """The sizes as sympy expressions."""
    return tuple(sympy.Integer(size) if isinstance(size, int) else size.node.expr for size in shape)


def _divisor(expression: sympy.Expr) -> int:
    if expression.is_Integer:
        return abs(int(expression))
    # Expressions with functions other than sums and products (floors, maxima) count as 1.
    terms = sympy.Add.make_args(sympy.expand(expression)) if expression.is_polynomial(*expression.free_symbols) else ()
    return math.gcd(*(int(term.as_coeff_Mul()[0]) for term in terms)) if terms else 1


def _nary_min(*sizes: Any) -> Any:
    return functools.reduce(torch.sym_min, sizes)


def _nary_max(*sizes: Any) -> Any:
    return functools.reduce(torch.sym_max, sizes)


def _nary_add(*sizes: Any) -> Any:
    return torch.sym_sum(sizes)


#: The functions that torch traces for a minimum or maximum of several sizes in an expression; ours before 2.13.
_SYM_MIN = if_there("torch.fx.experimental.proxy_tensor:_nary_sym_min") or _nary_min
_SYM_MAX = if_there("torch.fx.experimental.proxy_tensor:_nary_sym_max") or _nary_max
_OLDER = {Min: _nary_min, Max: _nary_max, sympy.Min: _nary_min, sympy.Max: _nary_max, sympy.Add: _nary_add}


def _nary_mul(*sizes: Any) -> Any:
    """The product of any number of sizes, traced for a product in an expression."""
    return math.prod(sizes)


_REGISTER = patch("torch.fx.experimental.proxy_tensor:_sym_register", "tracer func args out")
_HANDLERS = patch("torch.fx.experimental.proxy_tensor:_sympy_handlers", "")
_NOTE = patch("torch.fx.experimental.proxy_tensor:_extract_tensor_metadata", "result ...")


@needs(
    "sizes that sharding propagation computes",
    _REGISTER,
    _HANDLERS,
    _NOTE,
    without="strides could be wrong",
    essential=True,
    upstream="#159709, #188278, #175398, #192677",
    remove_when="a SymInt that the tracer did not see is rebuilt before anything is computed from it, with powers and "
    "products of three, and metadata is noted without guards",
)
@contextlib.contextmanager
def sizes_from_expressions() -> Iterator[None]:
    """While active, torch can trace the origin of any symbolic size.

    Sizes that DTensor's sharding propagation computes are not traced, and torch rebuilds their expressions from traced
    sizes:

    - It does not support powers, so the strides of ``(x @ x.t()).unsqueeze(0)`` aborted the compilation.
    - It traces a product of three as ``operator.mul(a, b, c)``, which a graph's code prints as ``a * b``: strides were
      wrong.
    - It rebuilds a size when a node first needs it, from a node with the same expression if there is one. That node may
      have been computed from the size itself (``1 + (x - 1)``), and tracing never ended. Here a size is rebuilt before
      anything is computed from it.
    - It records for each node in which memory formats its value is contiguous, with guards. ``s - 2`` rows are
      contiguous in any format if `s` is 3, so `s` was specialized to 3 in a graph that torch had already planned to
      return `s`. Here this is recorded without guards.
    """

    def register(stock: Any, tracer: Any, function: Any, args: tuple[Any, ...], out: object) -> None:
        for size in args if all(isinstance(arg, _NUMBERS) for arg in args) else pytree.tree_leaves(args):
            if isinstance(size, torch.SymInt) and size not in tracer.symnode_tracker:
                known = proxy_tensor.get_proxy_slot(size, tracer, None)
                if known is not None and size not in tracer.symnode_tracker:
                    tracer.symnode_tracker[size] = known
        stock(tracer, function, args, out)

    def note_without_guards(stock: Any, result: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        env = getattr(getattr(result, "fake_mode", None), "shape_env", None)
        with env.suppress_guards() if env is not None else contextlib.nullcontext():
            return stock(result, *args, **kwargs)

    handlers = {**(_OLDER if _SYM_MIN is _nary_min else {}), sympy.Pow: operator.pow, sympy.Mul: _nary_mul}
    with (
        patched_entries(_HANDLERS, handlers, proxy_tensor._sympy_handlers()),
        patched(_REGISTER, register),
        patched(_NOTE, note_without_guards),
    ):
        yield


#: Types of the arguments of most operations on sizes.
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


#: The traced functions of any number of sizes, and the binary ones that Inductor supports.
_NARY = {_SYM_MIN: torch.sym_min, _SYM_MAX: torch.sym_max, _nary_mul: operator.mul, _nary_add: operator.add}


def split_nary(graph: torch.fx.Graph) -> None:
    """Turns ``min(a, b, c)`` of symbolic sizes into ``min(min(a, b), c)``: Inductor supports the binary form only."""
    for node in list(graph.nodes):
        binary = _NARY.get(node.target) if node.op == "call_function" else None
        if binary is None:
            continue
        with graph.inserting_before(node):
            result: Any = node.args[0]
            for size in node.args[1:]:
                values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in (result, size)]
                result = graph.call_function(binary, (result, size))
                result.meta["val"] = binary(*values)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
