"""Elements that a step of a plan sends, and its seconds.

Elements that one rank sends, with n ranks and a local input of L elements (ring algorithms, the counts of NCCL's
documentation of its performance figures; unit: elements of the tensor):

    all_reduce       2 (n-1)/n L
    reduce_scatter     (n-1)/n L       n times the largest shard: uneven ones are padded
    all_gather         (n-1)   L       L the largest shard
    all_to_all         (n-1)/n L       padded likewise
    exchange         elements that the busiest rank sends to others (`planner/exchange.py`)

Seconds: `dtensor_compile.topology.links`, over the slowest link of the mesh dims that take part, plus a copy of the
local tensor at `COPY` bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from dtensor_compile.compat.dtensor.specs import Placement
from dtensor_compile.planner.shard_intervals import cuts_of, pieces_of
from dtensor_compile.topology.network import Network

StepKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange", "slice", "partition", "spread"
]

#: Kinds of steps that communicate.
COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange"})

#: Bytes per second of a local copy: slow enough to matter, fast enough never to outweigh a message.
COPY = 1e11

#: Seconds of a local step, so that of two plans the one with fewer steps wins.
STEP = 1e-9


def elements_sent(kind: str, n: int, local: int) -> int:
    """Elements that one rank sends for a collective over `n` ranks on a local input of `local` elements."""
    if kind == "all_reduce":
        return 2 * (n - 1) * local // n
    if kind in ("reduce_scatter", "all_to_all"):
        return (n - 1) * local // n
    if kind == "all_gather":
        return (n - 1) * local
    return 0


def local_sizes(placements: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Sizes of the largest local tensor under these placements."""
    return [_largest(size, cuts_of(placements, mesh_shape, dim)) for dim, size in enumerate(shape)]


def local_elements(placements: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int]) -> int:
    """Elements of the largest local tensor under these placements (uneven shards count as the padded ones)."""
    return math.prod(local_sizes(placements, mesh_shape, shape))


def _largest(size: int, cuts: Sequence[tuple[int, int, int]]) -> int:
    for _, n, factor in cuts:
        if factor == 1:
            size = -(-size // n)
            continue
        # Each of the pieces is sharded as torch.chunk does: full pieces, then the rest.
        piece = -(-size // factor)
        size = sum(-(-min(piece, max(0, size - piece * k)) // n) for k in range(factor))
    return size


def seconds(
    network: Network,
    kind: StepKind,
    mesh_dims: Sequence[int],
    n: int,
    sent: float,
    copied: float,
    messages: int | None = None,
) -> float:
    """Seconds of a step.

    Args:
        n: ranks that take part.
        sent, copied: bytes that one rank sends, and copies locally.
        messages: as in `dtensor_compile.topology.links.seconds_over`.
    """
    local = copied / COPY + STEP
    if kind not in COLLECTIVES:
        return local
    return local + network.seconds("all_to_all" if kind == "exchange" else kind, mesh_dims, n, sent, messages)


__all__ = ["COLLECTIVES", "StepKind", "elements_sent", "local_elements", "local_sizes", "pieces_of", "seconds"]
