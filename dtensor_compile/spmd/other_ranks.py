"""Whether an operator runs on the shards of every rank: each rank evaluates it for all, so that all decide the same.

If shards are uneven, local shapes differ between ranks and may be empty, and an operator may run on one rank and raise
on another (the maximum of an empty tensor). A rank that only considered its own shard would fall back to full tensors
alone, and start a collective that no other rank joins.

    amax(x: S(0) of 3 rows, 4 ranks)      runs on ranks 0 to 2, raises on rank 3: full tensors on all of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.distributed.device_meshes import seen_by
from dtensor_compile.compat.dtensor.record import DrawsOnShards, refusing_draws, run_node
from dtensor_compile.compat.dtensor.specs import local_and_spec, with_local
from dtensor_compile.ir.mesh import MeshLayout, mesh_layout
from dtensor_compile.ops.expand import local_shape
from dtensor_compile.spmd.in_place import function_name

#: Functions that have no result for an empty tensor. Not all of them raise for a tensor without values.
_NEED_NUMBERS = frozenset(
    {
        "amax",
        "amin",
        "aminmax",
        "argmax",
        "argmin",
        "kthvalue",
        "max",
        "median",
        "min",
        "mode",
        "nanmedian",
        "nanquantile",
        "quantile",
    }
)


def fails_on_some_rank(
    gm: torch.fx.GraphModule, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]
) -> Exception | None:
    """The exception of a node on the first rank on which it raises, given fake values of the nodes before it, whose
    shapes differ between ranks; None if it runs on all ranks, if ranks have equal shapes, or if sizes are symbolic."""
    placed = {used: values[used] for used in node.all_input_nodes if isinstance(values.get(used), DTensor)}
    if not all(isinstance(size, int) for value in placed.values() for size in value.shape):
        return None
    layouts = {used: mesh_layout(value.device_mesh) for used, value in placed.items()}
    ranks = sorted(set().union(*(layout.ranks for layout in layouts.values())))
    seen: dict[Any, int] = {}
    for rank in ranks:
        seen.setdefault(tuple(_shape(value, layouts[used], rank) for used, value in placed.items()), rank)
    if len(seen) < 2:
        return None
    if function_name(node) in _NEED_NUMBERS and any(0 in shape for shapes in seen for shape in shapes):
        return ValueError(f"{function_name(node)} of an empty tensor on some rank")
    for shapes, rank in seen.items():
        there = {used: _of_shape(value, shape) for (used, value), shape in zip(placed.items(), shapes)}
        where = [(value.device_mesh, layouts[used].coordinate(rank) or ()) for used, value in placed.items()]
        try:
            with torch.no_grad(), seen_by(rank, where), refusing_draws():
                run_node(gm, node, {**values, **there})
        except DrawsOnShards:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            return error
    return None


def _shape(value: DTensor, layout: MeshLayout, rank: int) -> tuple[int, ...]:
    return tuple(local_shape(value.placements, layout, layout.coordinate(rank) or (), value.shape))


def _of_shape(value: DTensor, shape: tuple[int, ...]) -> DTensor:
    local, spec = local_and_spec(value)
    return with_local(local.new_empty(shape), spec)
