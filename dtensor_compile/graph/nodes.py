"""Reading and making redistribute nodes: the only module that knows the order of their arguments and their cost."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from dtensor_compile.compat.aot.fx import as_fake_as
from dtensor_compile.compat.aot.symbolic.shapes import size_hints
from dtensor_compile.compat.distributed.functional_collectives import wait_tensor
from dtensor_compile.compat.dynamo.observers.observe import FRAME
from dtensor_compile.errors import MemoryBudgetError
from dtensor_compile.graph.arguments import operator_of, sizes_of, value_of
from dtensor_compile.graph.global_annotations import MARK, Mark
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops.held_gradients import HOLDS
from dtensor_compile.ops.messages import STARTS
from dtensor_compile.ops.redistribute import plan_of, redistribute_op
from dtensor_compile.ops.redistribute_across import redistribute_across_op
from dtensor_compile.planner.search import bytes_sent, collectives
from dtensor_compile.planner.shard_intervals import cuts_evenly

#: Key of a node's ``meta``: the number of the redistribution in a recording, also on the collectives that it becomes.
#: For a merged collective: pairs of the number and the bytes that are sent for it.
RECORDED_AS = "dtensor_compile_recorded_as"

#: Key of a node's ``meta``: the operator whose sharding rule asked for the redistribution, empty if the program did.
FORCED_BY = "dtensor_compile_forced_by"

#: Key of the ``meta`` of nodes that torch's own code made of a redistribution: a
#: `dtensor_compile.capture.trace.HandedBack`.
HANDED_BACK = "dtensor_compile_handed_back"

#: Key of a node's ``meta``: it starts a part of a decomposed collective, and is not merged.
PART = "dtensor_compile_part"

#: Key of a node's ``meta``: it is fused with the matmuls beside it, and is not merged.
FUSED = "dtensor_compile_fused"

#: Key of a node's ``meta``: the redistribution between meshes that it is part of.
ACROSS = "dtensor_compile_across"


#: Namespaces of operators that communicate.
COMMUNICATES = frozenset(("dtensor_compile", "_c10d_functional", "_dtensor"))


class RedistributeNode(NamedTuple):
    """Arguments of a redistribute node."""

    local: torch.fx.Node
    source: str
    target: str
    mesh: str
    shape: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"

    @property
    def sizes(self) -> list[Any]:
        """`shape` as numbers and symbols."""
        return sizes_of(self.shape)


def redistributions(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The redistribute nodes of a graph in order."""
    return iter([node for node in graph.nodes if is_redistribution(node)])


def is_redistribution(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target is redistribute_op


def across(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes of a graph that redistribute from one mesh to another, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target is redistribute_across_op]


def describe(node: torch.fx.Node) -> str:
    """``S(0)->R`` for a redistribute node, ``S(0)->R from cpu[2:1]@2 to cpu[2:1]@2.3`` for one between meshes."""
    source, target, *meshes = node.args[1 : -1 if node.target is redistribute_op else -2]
    return f"{source}->{target}" + (f" from {meshes[0]} to {meshes[1]}" if len(meshes) > 1 else "")


def is_start(node: torch.fx.Node) -> bool:
    """Whether a node of a lowered graph starts a functional collective, for whose result a `wait_tensor` waits."""
    return starts_collective(node) and not operator_of(node)._schema.is_mutable


def starts_collective(node: torch.fx.Node) -> bool:
    """The same, including a collective that Inductor made in-place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is wait_tensor:
        return False
    return target.namespace == "_c10d_functional" or target in STARTS


def is_wait(node: torch.fx.Node) -> bool:
    return node.target is wait_tensor


def is_fixed(node: torch.fx.Node) -> bool:
    """Whether a node of a lowered graph must not move: it writes to memory, has effects, or communicates
    synchronously.
    """
    if node.op != "call_function" or is_start(node) or is_wait(node) or node.target in HOLDS:
        return False
    return communicates(node.target) or node.is_impure(impure_random=False)


def communicates(target: Any) -> bool:
    """Whether an operator sends, or waits for a collective. Operators that hold gradients only affect those of one
    parameter.
    """
    return getattr(target, "namespace", None) in COMMUNICATES and target not in HOLDS


def redistribution_of(node: torch.fx.Node) -> RedistributeNode:
    """Arguments of a redistribute node.

    Raises:
        TypeError: the node has other arguments.
    """
    match node.args:
        case torch.fx.Node() as local, str() as source, str() as target, str() as mesh, list() | tuple() as shape, *_:
            return RedistributeNode(local, source, target, mesh, tuple(shape))
    raise TypeError(f"{node.name} = {node.target}{node.args} has not the arguments of a redistribution")


class Cost(NamedTuple):
    """The cost of one rank: number of collectives, bytes sent."""

    collectives: int
    bytes: int

    def __str__(self) -> str:
        if self.bytes >= OVER_BUDGET.bytes:
            return "more than the memory allows"
        return f"{self.bytes:,} bytes in {self.collectives}"

    def is_less(self, other: Cost) -> bool:
        """Whether this has no more bytes and no more collectives than `other`, and is not equal to it."""
        return self.collectives <= other.collectives and self.bytes <= other.bytes and self != other


#: Cost of a redistribution without a plan within the memory bound: more than any other.
OVER_BUDGET = Cost(1 << 40, 1 << 60)


def redistribution_cost(this: RedistributeNode, itemsize: int) -> Cost:
    """Cost of a redistribution of elements of `itemsize` bytes; symbolic sizes count with their hints.

    Raises:
        PlanError: no plan leads from the source to the target spec.
    """
    try:
        steps = plan_of(this.source, this.target, parse_mesh(this.mesh), this.sizes, itemsize)
    except MemoryBudgetError:
        return OVER_BUDGET
    return Cost(collectives(steps), bytes_sent(steps, itemsize))


def cost_of(nodes: Iterable[torch.fx.Node]) -> Cost:
    """Total cost of redistribute nodes."""
    each = [redistribution_cost(redistribution_of(node), value_of(node).element_size()) for node in nodes]
    return Cost(sum(c.collectives for c in each), sum(c.bytes for c in each))


def has_even_shards(node: torch.fx.Node) -> bool:
    """Whether the local tensors of a redistribute node, before and after, have the same sizes on every rank of the
    mesh.

    A symbolic size counts with its hint, which is all that a rank knows of it while it compiles.
    """
    this = redistribution_of(node)
    shape, mesh_shape = size_hints(this.sizes), parse_mesh(this.mesh).shape
    return all(cuts_evenly(parse_spec(spec), mesh_shape, shape) for spec in (this.source, this.target))


#: Keys of a node's ``meta`` that say in which of the two graphs it runs, and whether it is recomputed.
_WHEN = ("partitioner_tag", "recompute", "ac_graph_id")


def runs_when(node: torch.fx.Node) -> tuple[Any, ...]:
    """The graph in which a node runs, and whether it is recomputed: nodes that are merged have to agree."""
    return tuple(node.meta.get(key) for key in _WHEN)


def call_before(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: torch.fx.Node,
    before: torch.fx.Node,
    mark: Mark | None = None,
) -> torch.fx.Node:
    """A new node in front of `before`, with the origin of `like`, in the graph of `before`, and a fake value of its
    own.

    Args:
        mark: its global form.
    """
    meta = {**inherited(like, _WHEN), MARK: mark, **{key: before.meta[key] for key in _WHEN if key in before.meta}}
    with before.graph.inserting_before(before), as_fake_as(like.meta["val"]):
        return add_call(before.graph, target, args, kwargs, meta=meta)


def zeros(shape: list[int], value: torch.Tensor, *, like: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
    """A new node in front of `before` of zeros with the dtype and device of `value`; a number for the shape ``[]``."""
    options = {"dtype": value.dtype, "layout": value.layout, "device": value.device, "pin_memory": False}
    return call_before(torch.ops.aten.full.default, (shape, 0), options, like=like, before=before)


def redistribute(this: RedistributeNode, *, like: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
    """A new redistribute node in front of `before`, which inherits from `like`."""
    return call_before(redistribute_op, (this.local, *this[1:4], list(this.shape)), like=like, before=before)


#: Frames that stand between the user's line and a node: torch's, and those of annotations (`spmd`).
_BETWEEN = (os.path.dirname(torch.__file__) + os.sep, str(pathlib.Path(__file__).parents[1] / "spmd") + os.sep)


def source_line(node: torch.fx.Node) -> str:
    """The user's line that caused a node, ``file:line: code``; for a node of the backward that of its forward
    operator.
    """
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith(_BETWEEN)]
    file, line, code = (own or frames)[-1]
    return f"{file}:{line}: {code.strip()}"
