"""Announcement of a graph to other ranks: its collectives over one process group, in order.

Input: a lowered graph. Output: for each process group an `Announcement`, whose digest ranks compare
(`runtime.collective_agreement`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed.device_meshes import group_named
from dtensor_compile.graph.arguments import texts_in
from dtensor_compile.graph.inline_subgraph import nodes_with_blocks
from dtensor_compile.graph.node_costs import group_of
from dtensor_compile.graph.nodes import ACROSS, source_line, starts_collective
from dtensor_compile.ir.rank_free import dims_of_name
from dtensor_compile.ops.groups import REDISTRIBUTES
from dtensor_compile.recording.recorder import graph_name
from dtensor_compile.store.ledger import digest

#: Collectives to which all members contribute equal numbers of elements.
_EQUAL_SIZES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
_NO_COLLECTIVE = ("wait_tensor", "c10d_exchange", "c10d_isend", "c10d_irecv")


@dataclass(frozen=True)
class Call:
    """A collective of a graph.

    Attributes:
        kind: operator, reduction, dtype, and the meshes if it is part of a redistribution between meshes:
            ``all_reduce sum float32``.
        elements: per member; None if they may differ or are unknown before the graph runs.
        where: the user's line.
        redistributes: whether it is part of a redistribution.
        blocks: whether the graph has waited for it when it returns: on a CPU, but not on a device with streams.
    """

    kind: str
    elements: int | None
    where: str
    redistributes: bool = False
    blocks: bool = False

    def __str__(self) -> str:
        size = "" if self.elements is None else f" of {self.elements} elements"
        return f"{self.kind}{size}" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Announcement:
    """The collectives of one graph over one group: digests to compare, and the calls for messages.

    Attributes:
        kinds: digest of the kinds in order.
        sizes: digest of the sizes; ``"?"``, which agrees with any other, if one of them is symbolic.
    """

    kinds: str
    sizes: str
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, calls: Sequence[Call], symbolic: bool) -> Announcement:
        kinds = digest([c.kind for c in calls])
        return cls(kinds, "?" if symbolic else digest([c.elements for c in calls]), tuple(calls))

    @property
    def digest(self) -> str:
        return f"{self.kinds}:{self.sizes}"

    @property
    def redistributes(self) -> bool:
        """Whether all calls are parts of redistributions, which all ranks of a group run in the same way."""
        return all(call.redistributes for call in self.calls)

    @property
    def blocks(self) -> bool:
        """Whether the graph has waited for the other ranks in all of its calls when it returns."""
        return all(call.blocks for call in self.calls)

    def agrees(self, digest: str) -> bool:
        kinds, _, sizes = digest.partition(":")
        return kinds == self.kinds and (sizes == self.sizes or "?" in (sizes, self.sizes))


def _collectives(graph: torch.fx.Graph) -> Iterator[tuple[dist.ProcessGroup, Call]]:
    """The collectives of a lowered graph and of blocks that it calls, in order, with the process group of each."""
    for node in nodes_with_blocks(graph):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        namespace, name = node.target._schema.name.split("::")
        ours = namespace == "dtensor_compile" and name.startswith("c10d_")
        if name in _NO_COLLECTIVE or not (starts_collective(node) or ours):
            continue
        group = group_of(node)
        if group is not None and group.size() > 1:
            yield group, _call(node, name)


def graph_text(graph: torch.fx.Graph) -> str:
    """Everything that ranks compare of a lowered graph, as text that a cache can keep.

    Process groups are those of this rank. If the graph is rank-free, so that another rank may find it, each group also
    has its name in rank-free graphs.
    """
    symbolic = any(isinstance(n.meta.get("val"), torch.SymInt) for n in graph.find_nodes(op="placeholder"))
    names = {group_named(name): name for name in texts_in(nodes_with_blocks(graph)) if dims_of_name(name)}
    calls = [
        [sorted(dist.get_process_group_ranks(group)), names.get(group, ""), list(vars(call).values())]
        for group, call in _collectives(graph)
    ]
    return json.dumps([graph_name(graph), symbolic, calls])


def read_graph_text(text: str) -> tuple[str, dict[tuple[int, ...], Announcement]]:
    """``"forward"`` or ``"backward"``, and the announcements of the graph by the ranks that take part."""
    kind, symbolic, found = json.loads(text)
    calls: dict[tuple[int, ...], list[Call]] = {}
    for ranks, name, call in found:
        members = sorted(dist.get_process_group_ranks(group_named(name))) if name else ranks
        calls.setdefault(tuple(members), []).append(Call(*call))
    return kind, {ranks: Announcement.of(theirs, symbolic) for ranks, theirs in calls.items()}


def _call(node: torch.fx.Node, name: str) -> Call:
    value = next((v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)), None)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    arguments = [value for value, argument in zip(node.args, schema) if argument.name in ("reduce_op", "op")]
    dtype = [] if value is None else [str(value.dtype).removeprefix("torch.")]
    name = name.removeprefix("c10d_")
    elements = value.numel() if value is not None and name.rstrip("_") in _EQUAL_SIZES else None
    known = elements if isinstance(elements, int) else None
    across = [node.meta[ACROSS]] if ACROSS in node.meta else []
    blocks = value is not None and value.device.type == "cpu"
    return Call(
        " ".join([name, *map(str, arguments), *dtype, *across]),
        known,
        source_line(node),
        REDISTRIBUTES in node.meta,
        blocks,
    )
