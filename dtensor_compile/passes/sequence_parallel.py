"""Turns all-reduces into reduce-scatters and later all-gathers: sequence parallelism, found by the compiler.

    f(redistribute(x, P -> R), y)  =  redistribute(f(redistribute(x, P -> S(d)), y'), S(d) -> R)

Correct by the algebra of ``algebra.py``: operators between an all-reduce and the next matmul (residual sums, norms) run
on shards. An all-reduce sends what a reduce-scatter and an all-gather send together; the gain is memory and compute:
each rank holds and computes one shard of the activations between. The pass shards the dim with the largest gain, and
finds the place of the all-gathers over the whole graph (``minimum_cut.py``).

It is opt-in (``options={"enable_passes": ("sequence_parallel",)}``), for two reasons. There are more collectives, and a
few percent more bytes: gradients of weights of norms are sums over ranks then. And models with plain tensors between
layers (`ColwiseParallel` and `RowwiseParallel` by default) say nothing of these: the pass assumes that plain inputs of
the graph, and numbers in it, are the same on all ranks of a mesh on which the program makes them `Replicate()`.

    before   y = redistribute(x, P(sum) -> R); s = add(y, h); n = mul(s, w); z = mm(n, u)
    after    y = redistribute(x, P(sum) -> S(0)); k = redistribute(h, R -> S(0)); s = add(y, k); n = mul(s, w)
             z = mm(redistribute(n, S(0) -> R), u)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
import torch.distributed as dist

from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.compat.dtensor.specs import Partial, Replicate, Shard
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.global_annotations import MARK
from dtensor_compile.graph.nodes import Cost, is_redistribution, redistribution_of, redistributions, source_line
from dtensor_compile.graph.rank_uniformity import mark_of, may_use_sizes
from dtensor_compile.ir.mesh import MeshLayout, parse_mesh
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.passes.global_tensor import Global
from dtensor_compile.passes.minimum_cut import cheapest_cut
from dtensor_compile.passes.region import Region, grow_region

#: Bytes of local tensors that must be saved per byte that is sent, and the limit of additional bytes sent.
_SAVED_PER_BYTE = 64
_MORE_BYTES = 0.01


def sequence_parallel(graph: torch.fx.Graph) -> list[Decision]:
    """Scatters sums in `graph` whose readers can work on shards."""
    if not may_use_sizes():
        sums = [
            node
            for node in redistributions(graph)
            if "P(sum)" in redistribution_of(node).source and "P(sum)" not in redistribution_of(node).target
        ]
        reason = (
            f"{len(sums)} sums and their readers stay whole: some shards of the graph are uneven, and ranks have "
            "different sizes"
        )
        return [Decision("sequence_parallel", source_line(sums[0]), reason, left_alone=True)] if sums else []
    decisions = []
    for mesh in dict.fromkeys(redistribution_of(node).mesh for node in redistributions(graph)):
        layout = parse_mesh(mesh)
        same = _replicated(graph, layout)
        best: tuple[int, Region, list[tuple[frozenset[torch.fx.Node], Cost, Cost]]] | None = None
        for dim in range(_most_dims(graph, mesh)):
            region = grow_region(graph, mesh, _seeds(graph, mesh, layout, dim), same.get)
            if region is None:
                break
            chosen = [found for part in region.parts() if (found := _choose(region, part)) is not None]
            saved = sum(_saved(region, held) for held, _, _ in chosen)
            if saved and (best is None or saved > best[0]):
                best = saved, region, chosen
        if best is None:
            continue
        _, region, chosen = best
        for held, before, after in chosen:
            decisions += _held_values(region, held, before, after)
            region.rewrite(held)
    return decisions


def _most_dims(graph: torch.fx.Graph, mesh: str) -> int:
    return max(
        len(redistribution_of(node).shape) for node in redistributions(graph) if redistribution_of(node).mesh == mesh
    )


def _seeds(graph: torch.fx.Graph, mesh: str, layout: MeshLayout, dim: int) -> Mapping[torch.fx.Node, Global]:
    """Redistributions that could end in shards of `dim`: all-reduces, and gathers of that dim."""
    seeds = {}
    for node in redistributions(graph):
        this = redistribution_of(node)
        source, target = (Global.of(spec, this.shape) for spec in (this.source, this.target))
        if this.mesh != mesh or source is None or target is None or dim >= len(this.shape):
            continue
        held = list(target.placements)
        for i, (a, b) in enumerate(zip(source.placements, target.placements)):
            if b == Replicate() and (a == Shard(dim) or isinstance(a, Partial) and a.reduce_op == "sum"):
                held[i] = Shard(dim)
        form = Global(tuple(held), target.shape)
        if form != target and form.is_even(layout):
            seeds[node] = form
    return seeds


def _choose(region: Region, part: list[torch.fx.Node]) -> tuple[frozenset[torch.fx.Node], Cost, Cost] | None:
    if all(is_redistribution(node) for node in part):
        return None
    held = cheapest_cut(region, part, lambda c: _SAVED_PER_BYTE * c.bytes + c.collectives, held_bytes=1)
    before, after = region.cost(part, frozenset()), region.cost(part, held)
    if before is None or after is None or after.bytes > before.bytes * (1 + _MORE_BYTES) or _saved(region, held) <= 0:
        return None
    return held, before, after


def _saved(region: Region, held: frozenset[torch.fx.Node]) -> int:
    """Bytes by which results of operators and gathers shrink on each rank."""
    total = 0
    for node in held:
        member = region.members[node]
        if len(member.was) == 1:
            mine, _, others = region.readers(node)
            whole, local = (
                math.prod(g[0].local_shape(region.layout, region.coordinate)) for g in (member.was, member.held)
            )
            gathered = whole if others or any(user not in held for user in mine) else 0
            total += (whole - local - gathered) * value_of(node).element_size()
    return total


def _held_values(region: Region, held: frozenset[torch.fx.Node], before: Cost, after: Cost) -> list[Decision]:
    sums = [node for node in region.members if node in held and is_redistribution(node)]
    reason = (
        f"{len(held) - len(sums)} operators run on shards: they give {_saved(region, held):,} bytes less; {after} "
        f"and not {before}"
    )
    return [
        Decision(
            "sequence_parallel",
            source_line(node),
            reason,
            str(redistribution_of(node)),
            f"{redistribution_of(node).source}->{region.members[node].held[0].spec}",
        )
        for node in sums
    ]


def _replicated(graph: torch.fx.Graph, layout: MeshLayout) -> dict[torch.fx.Node, Global]:
    """Tensors without a mark that are the same on all ranks of a mesh if the plain inputs are, with their replicated
    form.
    """
    whole = tuple(Replicate() for _ in layout.shape)
    group = _group(layout)
    same: set[torch.fx.Node] = set()
    found: dict[torch.fx.Node, Global] = {}
    for node in graph.nodes:
        mark, value = mark_of(node), node.meta.get("val")
        if mark is not None:
            if group <= _group(parse_mesh(mark.mesh)) and all(p == Replicate() for p in parse_spec(mark.spec)):
                same.add(node)
        elif node.op == "placeholder":
            if (
                isinstance(value, torch.Tensor) and MARK not in node.meta
            ):  # the local tensor of a DTensor has a mark, or None
                same.add(node)
        elif _is_deterministic(node) and all(x in same for x in node.all_input_nodes):
            same.add(node)
        else:
            continue
        if (
            node in same
            and mark is None
            and isinstance(value, torch.Tensor)
            and all(type(size) is int for size in value.shape)
        ):
            found[node] = Global(whole, tuple(value.shape))
    return found


def _group(layout: MeshLayout) -> set[int]:
    """The ranks that hold one tensor on a mesh together with this one."""
    rank = dist.get_rank()
    return set(layout.group_over(rank, range(len(layout.dims)))) if rank in layout.ranks else {rank}


def _is_deterministic(node: torch.fx.Node) -> bool:
    """Whether a node gives equal results on ranks that call it with equal arguments."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return target.namespace in ("aten", "prims") and not draws(target)
