"""The text form of a spec: one word per mesh dim, ``S(0)R``, which can be parsed.

    R              replicate
    S(d)           shard tensor dim d, left to right if several mesh dims shard the same tensor dim
    _S(d,f)        strided shard of tensor dim d with split factor f (another order than left to right)
    P(op)          partial, pending a reduction: sum, avg, min, max, product, band, bor, bxor

Example: on a mesh (dp, tp) a weight sharded by rows over dp and replicated over tp is ``S(0)R``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.errors import SpecTextError

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")

_WORD = re.compile(r"R|S\((?P<dim>[0-9]+)\)|_S\((?P<sdim>[0-9]+),(?P<factor>[1-9][0-9]*)\)|P\((?P<op>\w+)\)")


def placement_text(placement: Placement) -> str:
    """``Shard(0)`` -> ``"S(0)"``. Raises `SpecTextError` for a kind of placement without a text form."""
    if isinstance(placement, StridedShard):
        return f"_S({placement.dim},{int(placement.split_factor)})"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Partial and placement.reduce_op in REDUCE_OPS:
        return f"P({placement.reduce_op})"
    raise SpecTextError(
        f"{placement!r} has no text form; known are Shard, Replicate, strided shards and Partial of "
        f"{', '.join(REDUCE_OPS)}"
    )


def spec_text(placements: Sequence[Placement]) -> str:
    """``(Shard(0), Replicate())`` -> ``"S(0)R"``."""
    return "".join(placement_text(p) for p in placements)


def parse_spec(text: str) -> tuple[Placement, ...]:
    """``"S(0)R"`` -> ``(Shard(0), Replicate())``. Raises `SpecTextError` naming the place that does not parse."""
    placements: list[Placement] = []
    position = 0
    while position < len(text):
        match = _WORD.match(text, position)
        if match is None:
            raise SpecTextError(f"spec {text!r} does not parse at {text[position:]!r}; a spec looks like 'S(0)RP(sum)'")
        if match["dim"] is not None:
            placements.append(Shard(int(match["dim"])))
        elif match["sdim"] is not None:
            placements.append(StridedShard(int(match["sdim"]), split_factor=int(match["factor"])))
        elif match["op"] is not None:
            if match["op"] not in REDUCE_OPS:
                raise SpecTextError(f"spec {text!r}: unknown reduce op {match['op']!r}; known: {', '.join(REDUCE_OPS)}")
            placements.append(Partial(match["op"]))
        else:
            placements.append(Replicate())
        position = match.end()
    return tuple(placements)
