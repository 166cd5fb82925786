"""Tensors that are constants of a traced program, whose values can be read while tracing."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dtensor_compile.compat.dynamo.trackers.opaque_trackers import CALL_METHOD, calls_of_methods
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
)
from dtensor_compile.compat.patches import needs

#: Pure functions: the result depends on the arguments only, and none of these is mutated.
_PURE = frozenset(
    [
        "tensor",
        "arange",
        "full",
        "zeros",
        "ones",
        "zeros_like",
        "ones_like",
        "full_like",
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "ravel",
        "squeeze",
        "unsqueeze",
        "permute",
        "transpose",
        "t",
        "clone",
        "contiguous",
        "to",
        "long",
        "int",
        "short",
        "float",
        "double",
        "bool",
        "cpu",
        "detach",
        "getitem",
        "select",
        "narrow",
        "index_select",
        "gather",
        "take",
        "movedim",
        "swapaxes",
        "expand",
        "repeat",
        "cat",
        "stack",
        "concat",
        "hstack",
        "vstack",
        "split",
        "chunk",
        "unbind",
        "tile",
        "flip",
        "roll",
        "sort",
        "argsort",
        "topk",
        "sum",
        "prod",
        "min",
        "max",
        "amin",
        "amax",
        "argmin",
        "argmax",
        "mean",
        "any",
        "all",
        "cumsum",
        "cumprod",
        "count_nonzero",
        "numel",
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "neg",
        "pow",
        "div",
        "remainder",
        "floor_divide",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and_",
        "or_",
        "xor",
        "invert",
        "logical_and",
        "logical_or",
        "logical_not",
        "isin",
        "nonzero",
        "unique",
        "where",
        "equal",
        "item",
        "tolist",
        "diff",
        "searchsorted",
        "bucketize",
        "abs",
        "sign",
        "clamp",
        "minimum",
        "maximum",
        "constant_tensor",
    ]
)


_IN_PLACE = frozenset(
    [
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "set_data",
    ]
)


#: Limit on the number of nodes to evaluate; longer chains are not constants.
_MOST_NODES = 256


def constant_value(variable: VariableTracker) -> torch.Tensor:
    """The value of a tensor that is computed from constants of the program only.

    Raises:
        NotImplementedError: the value is only known at run time.
    """
    if not isinstance(variable, TensorVariable) or variable.source is not None:
        raise NotImplementedError(f"{variable} is not a constant tensor")
    node, known = variable.as_proxy().node, dict[torch.fx.Node, Any]()
    with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
        value = _evaluate(node, known)
    memory = {storage for other in known for storage in _storages(other)}
    if any(not memory.isdisjoint(_storages(written)) for other in node.graph.nodes for written in _written(other)):
        raise NotImplementedError(f"{node} is changed in place")
    return value


def _evaluate(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> Any:
    if node in known:
        return known[node]
    if not _is_pure(node) or len(known) >= _MOST_NODES:
        raise NotImplementedError(f"{node} is not a constant")
    args = torch.fx.map_arg(node.args, lambda n: _evaluate(n, known))
    kwargs = torch.fx.map_arg(node.kwargs, lambda n: _evaluate(n, known))
    if node.op == "call_method":
        known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def target_name(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_pure(node: torch.fx.Node) -> bool:
    name = target_name(node)
    if name not in _PURE or "out" in node.kwargs:
        return False
    owners = (torch, operator, torch.Tensor)
    return node.op == "call_method" or (
        node.op == "call_function"
        and (node.target is constant_tensor or any(getattr(o, name, None) is node.target for o in owners))
    )


def _written(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
    """The nodes whose values a node may mutate."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return ()
    if isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes if node.target._schema.is_mutable else ()
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        overloads = [getattr(node.target, overload) for overload in node.target.overloads()]
        return node.all_input_nodes if any(overload._schema.is_mutable for overload in overloads) else ()
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.kwargs.get("inplace") or "out" in node.kwargs:
        return node.all_input_nodes
    name = target_name(node)
    if _is_pure(node) or not (name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
        return ()
    of_tensor = node.op == "call_method" or node.target is getattr(operator, name, None)
    return (
        node.all_input_nodes[:1] if of_tensor else node.all_input_nodes
    )  # a function of lists writes to their elements


def _storages(node: torch.fx.Node) -> set[int]:
    """The storages of the tensors that a node returns, while it is traced; views share that of their base."""
    tensors = [t for t in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]
    locals_ = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    return {t.untyped_storage()._cdata for t in locals_ if t.layout == torch.strided}


def constant_tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of these values, on the CPU; a node of the graph that `constant_value` can evaluate."""
    return torch.tensor(values, dtype=dtype)


@needs(
    "item() of constant tensors",
    CALL_METHOD,
    without="it breaks the graph, as in torch",
    upstream="not reported: torch breaks the graph on purpose",
    remove_when="Dynamo evaluates item() of a tensor that is computed from constants",
)
@contextlib.contextmanager
def read_constant_tensors() -> Iterator[None]:
    """While active, ``item`` and ``tolist`` of a tensor that is computed from constants give constants of the
    program."""

    def call(tx: Translator, tensor: TensorVariable, name: str, *_: Any) -> VariableTracker | None:
        if name not in ("item", "tolist"):
            return None
        try:
            value = constant_value(tensor)
        except NotImplementedError:
            return None
        return VariableTracker.build(tx, getattr(value, name)())

    with calls_of_methods(CALL_METHOD, call):
        yield
