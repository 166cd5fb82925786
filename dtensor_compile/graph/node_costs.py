"""Collectives and operators of a lowered graph in order, with sizes, lines and modules.

In: a forward or backward graph after lowering, of this backend or of another. Out: plain records that hold no torch
objects. Work is counted from the fake values of the nodes: floating-point operations by torch's own formulas, bytes
read and written from shapes. A compiler fuses an elementwise operator with its producers, so that such an operator only
writes its result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from dtensor_compile.compat.aot.random_state import WITH_RANDOM_STATE, takes_random_state, without_state
from dtensor_compile.compat.aot.symbolic.shapes import size_hint, size_hints
from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dynamo.observers.module_names import module_name
from dtensor_compile.graph.arguments import fake_arguments, function_of, list_arg, node_arg, operator_of, sizes_of
from dtensor_compile.graph.nodes import RECORDED_AS, source_line, starts_collective
from dtensor_compile.graph.operator_traits import is_pointwise, is_view
from dtensor_compile.ir.mesh import group_dim_name
from dtensor_compile.planner.search import StepKind, elements_sent
from dtensor_compile.topology.rates import ATTENTION, ATTENTION_BACKWARD, UNMASKED

aten = torch.ops.aten

_KINDS: dict[str, StepKind] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_LISTS: dict[str, StepKind] = {
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}


@dataclass(frozen=True)
class SentCollective:
    """One functional collective of a graph.

    Attributes:
        kind: as in `dtensor_compile.planner.search`; the operator's name if it has no kind there.
        bytes: bytes that this rank sends (0 for a kind of unknown cost).
        where: the user's line, ``file:line: code``.
        module: path of the module.
        mesh_dim: name of the mesh dim that the group belongs to, or the name of the group.
        ranks: global ranks of the group.
        shape, dtype: of the local input; symbolic sizes by their hints.
        carries: number of each `CapturedRedistribution` that it carries, and the bytes that it sends for it; several if
            collectives were merged.
    """

    kind: str
    bytes: int
    where: str
    module: str = ""
    mesh_dim: str = ""
    ranks: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    carries: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Operation:
    """One node that takes time, or that starts or waits for a collective.

    Attributes:
        name: name of the operator (``aten.mm``).
        where, module: the user's line, the path of the module.
        flops: floating-point operations.
        bytes: bytes read and written.
        itemsize: bytes of an element.
        fused: whether it is part of the kernel that feeds it.
        kind: of the operations, for `dtensor_compile.topology.links.compute_seconds`.
        starts, waits_for: index of a collective of the graph; None for an operator that computes.
    """

    name: str
    where: str
    module: str
    flops: int = 0
    bytes: int = 0
    itemsize: int = 4
    fused: bool = False
    kind: str = ""
    starts: int | None = None
    waits_for: int | None = None

    def renumbered(self, number: Callable[[int], int]) -> Operation:
        """The same in a graph in which collectives have other numbers."""
        starts, waits_for = (None if i is None else number(i) for i in (self.starts, self.waits_for))
        return replace(self, starts=starts, waits_for=waits_for)


def operations_of(graph: torch.fx.Graph) -> tuple[list[SentCollective], list[Operation]]:
    """The collectives of a graph in order, and everything that takes time in order."""
    collectives: list[SentCollective] = []
    operations: list[Operation] = []
    started: dict[torch.fx.Node, int] = {}
    computed: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        called = called_operator(node)
        if called is None:
            of = next(iter(node.all_input_nodes), None)
            if of in started:  # an item of a list
                started[node] = started[of]
            continue
        namespace, name = called._schema.name.split("::")
        here = Operation(f"{namespace}.{name}", source_line(node), module_path(node))
        if name == "wait_tensor":
            index = started.get(node_arg(node, 0))
            if index is not None:
                operations.append(replace(here, waits_for=index))
        elif starts_collective(node) or namespace == "dtensor_compile" and name.startswith("c10d_"):
            collectives.append(_collective(node, name))
            started[node] = len(collectives) - 1
            operations.append(replace(here, starts=len(collectives) - 1))
            if not starts_collective(node) and name != "c10d_exchange":  # blocks until it has ended
                operations.append(replace(here, waits_for=len(collectives) - 1))
        elif (work := work_of(node, computed)) is not None:
            operations.append(replace(here, **work._asdict()))
    return collectives, operations


class OperatorWork(NamedTuple):
    """The work of an operator; fields as in `Operation`."""

    flops: int
    bytes: int
    itemsize: int
    fused: bool
    kind: str


def work_of(node: torch.fx.Node, computed: set[torch.fx.Node]) -> OperatorWork | None:
    """The work of an operator; None for one that takes no time (a view, a size).

    Args:
        computed: the operators before it that take time; this one is added.
    """
    operator = called_operator(node)
    if operator is None or is_view(operator):
        return None
    fused = is_pointwise(node.target) and not computed.isdisjoint(node.all_input_nodes)
    moved = result_bytes(node)
    if not fused:
        moved += sum(map(result_bytes, node.all_input_nodes))
    if not moved:
        return None
    computed.add(node)
    return OperatorWork(flops_of(node), moved, itemsize_of(node), fused, kind_of(node))


def result_bytes(node: torch.fx.Node) -> int:
    """Bytes of the tensors that a node returns; symbolic sizes by their hints."""
    return sum(map(_bytes, _values(node.meta.get("val"))))


def device_of(graph: torch.fx.Graph) -> str:
    """Type of the device that a graph computes on: an accelerator if any tensor is on one."""
    types = [value.device.type for node in graph.nodes for value in _values(node.meta.get("val"))]
    return next((device for device in types if device not in ("cpu", "meta")), "cpu")


def collective_of(node: torch.fx.Node) -> SentCollective:
    """The record of a node that starts a functional collective."""
    return _collective(node, operator_of(node)._schema.name.split("::")[1])


def _values(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values(item)


def _bytes(value: torch.Tensor) -> int:
    return math.prod(size_hints(value.shape)) * value.element_size()


def itemsize_of(node: torch.fx.Node) -> int:
    """Bytes of an element of a node's result."""
    return next((value.element_size() for value in _values(node.meta.get("val"))), 4)


#: Operators without a formula in torch, mapped to operators with the same arguments that have one.
_COUNTED_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def called_operator(node: torch.fx.Node) -> torch._ops.OpOverload | None:
    """The operator that a node calls, also with a state of the random generator; None if it calls something else."""
    target = node.target
    if takes_random_state(target):
        target = node.args[WITH_RANDOM_STATE[function_of(node).__name__][0]]  # type: ignore[assignment]
    return target if isinstance(target, torch._ops.OpOverload) else None


def flops_of(node: torch.fx.Node) -> int:
    """Floating-point operations of a node, by torch's formulas; 0 without one."""
    target = called_operator(node)
    if target is None or _flop_formula(target) is None:
        return 0
    return flops_of_call(*_fake_call(node))


def kind_of(node: torch.fx.Node) -> str:
    """The kind of a node's operations, for `dtensor_compile.topology.links.compute_seconds`."""
    target = called_operator(node)
    if target is None or not _is_attention(target):
        return ""
    _, args, _, kwargs = _fake_call(node)
    return kind_of_call(target, args, kwargs)


def _fake_call(node: torch.fx.Node) -> tuple[Any, Any, Any, Any]:
    """The function that a node calls, its arguments, its result and its named arguments, with fake values;
    `without_state`."""
    args, kwargs = fake_arguments(node)
    return without_state(node.target, args, node.meta["val"], kwargs)


def _is_attention(target: torch._ops.OpOverload) -> bool:
    return "scaled_dot_product" in target._schema.name


def kind_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = {}) -> str:
    """As `kind_of`, of a call of an operator."""
    if not isinstance(target, torch._ops.OpOverload) or not _is_attention(target):
        return ""
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    kind = ATTENTION_BACKWARD if target._schema.name.endswith("backward") else ATTENTION
    return kind if given.get("is_causal", False) else kind + UNMASKED


def flops_of_call(target: Any, args: Sequence[Any], result: Any, kwargs: Mapping[str, Any] = {}) -> int:
    """Floating-point operations of a call of an operator, by torch's formulas; 0 without one."""
    formula = _flop_formula(target)
    return 0 if formula is None else size_hint(formula(*args, **kwargs, out_val=result))


def _flop_formula(target: Any) -> Any:
    packet = getattr(target, "overloadpacket", None)  # operators of higher order have none
    return None if packet is None else flop_registry.get(_COUNTED_AS.get(packet, packet))


def _collective(node: torch.fx.Node, name: str) -> SentCollective:
    inputs = [value for source in node.all_input_nodes for value in _values(source.meta.get("val"))]
    kind = _KINDS.get(name) or _LISTS.get(name)
    group = group_of(node)
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    sent = 0
    if kind is not None:
        counted = inputs if name in _LISTS else inputs[-1:] if name.endswith("_out") else inputs[:1]
        sent = sum(elements_sent(kind, len(ranks), math.prod(size_hints(x.shape))) * x.element_size() for x in counted)
        if kind == "all_to_all" and ranks:
            splits = size_hints(sizes_of(list_arg(node, 2)))
            away = sum(splits) - splits[ranks.index(dist.get_rank())]
            sent = math.prod(size_hints(inputs[0].shape)) * inputs[0].element_size() * away // max(1, sum(splits))
    return SentCollective(
        kind=kind or name.removeprefix("c10d_"),
        bytes=sent,
        where=source_line(node),
        module=module_path(node),
        mesh_dim=group_dim_name(group) if group is not None else "",
        ranks=ranks,
        shape=size_hints(inputs[0].shape) if inputs else (),
        dtype=str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        carries=_carried(node.meta.get(RECORDED_AS), sent),
    )


def _carried(recorded: int | tuple[tuple[int, int], ...] | None, sent: int) -> tuple[tuple[int, int], ...]:
    if recorded is None:
        return ()
    return ((recorded, sent),) if isinstance(recorded, int) else recorded


#: Arguments of operators that name a process group.
GROUP_ARGUMENTS = ("group", "group_name", "groups")


def group_of(node: torch.fx.Node) -> dist.ProcessGroup | None:
    """The process group of a collective: the argument of its schema with such a name."""
    for argument, value in zip(operator_of(node)._schema.arguments, node.args):
        if argument.name in GROUP_ARGUMENTS:
            return compat_mesh.group_named(str(value[0] if isinstance(value, (list, tuple)) else value))
    return None


_ROOT = re.compile(r"^[LG](?:\[['\"](?P<name>\w+)['\"]\]|__self___?)\.?")
#: Dynamo's names of the compiled module: in a method of it, and in torch's own call of it.
_SELF = ("self", "fn", None)


def module_path(node: torch.fx.Node) -> str:
    """Path of the innermost module whose forward a node belongs to; for a node of the backward that of its forward
    operator.
    """
    return path_of(module_name(node))


def path_of(name: str) -> str:
    """The path of a module in the program (``blocks.0.norm``), from its name in Dynamo's graphs."""
    root = _ROOT.match(name)
    if root is not None:
        name = ("" if root["name"] in _SELF else root["name"]) + "." + name[root.end() :]
    name = re.sub(r"\.?(?:_modules)?\[['\"](\w+)['\"]\]|\[(\d+)\]", lambda m: f".{m[1] or m[2]}", name)
    return name.strip(".").replace("..", ".")
