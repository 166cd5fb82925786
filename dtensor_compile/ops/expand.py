"""Execution of a plan on a local tensor: the eager kernel, the fake kernel and the lowering all call `expand`.

In: the local tensor of this rank, a plan, the layout of the mesh. Out: the local tensor in the target spec. Every step
is one functional collective (or a local slice) between two rearrangements; a rearrangement is one permutation that a
compiler can fuse into the producer or the readers of the tensor. Uneven shards are padded to the size of the largest
for the collective and sliced after it; even ones are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor_compile.compat.aot.symbolic.shapes import has_hint, is_multiple
from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.ir.mesh import MeshLayout
from dtensor_compile.ops.coordinates import mesh_coordinate, shard_of
from dtensor_compile.ops.rearrange import rearrange
from dtensor_compile.planner.problem import Step

#: The process group of this rank along these mesh dims together, by name.
GroupName = Callable[[tuple[int, ...]], str]
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class RankPlace:
    """The place of execution: the mesh, a global rank in it, and its process groups.

    Attributes:
        read_at_run_time: whether the coordinate is read when the traced graph runs, where shards are even.
    """

    layout: MeshLayout
    rank: int
    group_name: GroupName
    read_at_run_time: bool = False

    @property
    def coordinate(self) -> tuple[int, ...]:
        coordinate = self.layout.coordinate(self.rank)
        assert coordinate is not None, "plans are carried out by members of the mesh"
        return coordinate


def shard_range(size: Any, n: int, coordinate: int) -> tuple[Any, Any]:
    """Start and length of shard `coordinate` of `n` of a dim of `size` elements (as ``torch.chunk``)."""
    if is_multiple(size, n):
        return size // n * coordinate, size // n
    chunk = (size + n - 1) // n
    start, end = (torch.sym_min(chunk * c, size) if c else 0 for c in (coordinate, coordinate + 1))
    # For an unbacked size, torch has to know that this is not negative: else the shard of a shard gets a new symbol.
    return start, end - start if has_hint(size) else torch.sym_max(end - start, 0)


def local_shape(
    placements: Sequence[Placement], layout: MeshLayout, coordinate: Sequence[int], shape: Sequence[Any]
) -> list[Any]:
    """Shape of the local tensor at `coordinate`."""
    sizes = list(shape)
    for placement, n, c in zip(placements, layout.shape, coordinate):
        if isinstance(placement, Shard) and n > 1:
            sizes[placement.dim] = shard_range(sizes[placement.dim], n, c)[1]
        elif isinstance(placement, StridedShard) and n > 1:
            sizes[placement.dim] = sum(lengths[c] for lengths in _strided_pieces(placement, sizes[placement.dim], n))
    return sizes


def _strided_pieces(placement: StridedShard, size: Any, n: int) -> list[list[Any]]:
    """Lengths of the pieces in which ``_S(d, f)`` cuts a dim of `size`, in order: ``[k][c]`` is the part of c in the
    k-th of f.
    """
    factor = int(placement.split_factor)
    return [[shard_range(shard_range(size, factor, k)[1], n, c)[1] for c in range(n)] for k in range(factor)]


def canonical(x: torch.Tensor) -> torch.Tensor:
    """`x` contiguous, with the strides of a fresh tensor of its shape on dims of size 1 too."""
    x = x.contiguous()
    if not all(isinstance(size, int) for size in x.shape):
        return x
    strides, step = list[int](), 1
    for size in reversed(x.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return x if x.stride() == tuple(strides) else x.flatten().view(x.shape)


def expand(x: torch.Tensor, steps: Sequence[Step], place: RankPlace, shape: Sequence[Any]) -> torch.Tensor:
    """Carries out `steps`.

    Args:
        x: local tensor of this rank under the spec before the first step.
        steps: a plan.
        place: this rank.
        shape: global shape; may be symbolic.
    """
    for step in steps:
        if step.kind == "all_reduce":
            op, group = _reduce_op(step.before[step.mesh_dims[0]]), place.group_name(step.mesh_dims)
            x = _wait(_c10d.all_reduce(x.contiguous(), op, group))
        elif not _is_plain(step):
            x = rearrange(x, step, place, shape)
        else:
            (i,) = step.mesh_dims
            # Sizes of the tensor that the ranks along this mesh dim hold together: cut by the mesh dims to the left
            # (those shards enclose this one) and by those to the right (which, by the rules of the plan, shard other
            # tensor dims).
            others = [Replicate() if j == i else p for j, p in enumerate(step.before)]
            sizes = local_shape(others, place.layout, place.coordinate, shape)
            x = _send(x, step, place, sizes) if step.sends else _change(x, step, place, sizes)
    return x


def _send(x: torch.Tensor, step: Step, place: RankPlace, sizes: list[Any]) -> torch.Tensor:
    """Carries out one collective over one mesh dim.

    Args:
        sizes: sizes of the tensor that the ranks along it hold together.
    """
    (i,) = step.mesh_dims
    source, target, n, c = step.before[i], step.after[i], place.layout.shape[i], place.coordinate[i]
    group = place.group_name((i,))
    if step.kind == "all_gather" and isinstance(source, StridedShard):
        return _all_gather_strided(x, source, sizes, n, group)
    if step.kind == "all_gather":
        return _all_gather(x, _dim(source), sizes, n, group)
    if step.kind == "reduce_scatter":
        return _reduce_scatter(x, _dim(target), sizes, n, c, _reduce_op(source), group)
    assert step.kind == "all_to_all", f"{step.kind} is not a step that can be expanded"
    return _all_to_all(x, _dim(source), _dim(target), sizes, n, c, group)


def _change(x: torch.Tensor, step: Step, place: RankPlace, sizes: list[Any]) -> torch.Tensor:
    """Carries out a step of one mesh dim that sends nothing; `sizes` are as for `_send`."""
    (i,) = step.mesh_dims
    source, target, n, c = step.before[i], step.after[i], place.layout.shape[i], place.coordinate[i]
    if step.kind == "slice" and isinstance(target, StridedShard):
        return _slice_strided(x, target, sizes, n, c)
    if step.kind == "slice" and place.read_at_run_time and is_multiple(x.size(_dim(target)), n):
        return shard_of(x, _dim(target), str(place.layout), i)
    if step.kind == "slice":
        start, length = shard_range(x.size(_dim(target)), n, c)
        return x.narrow(_dim(target), start, length).clone()
    if step.kind == "partition":
        return x / n if _reduce_op(target) == "sum" else x.clone()
    assert step.kind == "spread", f"{step.kind} is not a step that can be expanded"
    d = _dim(source)
    if place.read_at_run_time and is_multiple(sizes[d], n):
        mine = torch.arange(n, device=x.device) == mesh_coordinate(str(place.layout), i, x.device)
        chunks = x.unsqueeze(d).expand(*x.shape[:d], n, *x.shape[d:])
        return torch.where(mine.view(n, *[1] * (x.dim() - d)), chunks, x.new_zeros(())).flatten(d, d + 1)
    start, length = shard_range(sizes[d], n, c)
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - d - 1) + [start, sizes[d] - start - length])


def _is_plain(step: Step) -> bool:
    """Whether a step changes one mesh dim, whose shard is not nested in that of a mesh dim to its right."""
    if step.kind == "exchange" or len(step.changed) != 1:
        return False
    (i,) = step.changed
    if step.kind == "reduce_scatter" and isinstance(step.after[i], StridedShard):
        return False
    if step.kind == "spread" and isinstance(step.before[i], StridedShard):
        return False
    cut = [p.dim for p in (step.before[i], step.after[i]) if isinstance(p, (Shard, StridedShard))]
    return not any(isinstance(p, (Shard, StridedShard)) and p.dim in cut for p in step.before[i + 1 :])


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim


def _reduce_op(placement: Placement) -> str:
    assert isinstance(placement, Partial)
    return placement.reduce_op


def _wait(x: torch.Tensor) -> torch.Tensor:
    return _c10d.wait_tensor(x)


def _pad(x: torch.Tensor, dim: int, to: Any) -> torch.Tensor:
    missing = to - x.size(dim)
    if isinstance(missing, int) and missing == 0:
        return x
    widths = [0, 0] * (x.dim() - dim - 1) + [0, missing]
    return torch.constant_pad_nd(x, widths)


def _chunks_first(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """(..., n*c, ...) -> (n, ..., c, ...), contiguous: the layout in which collectives exchange the n chunks of
    `dim`.
    """
    return x.unflatten(dim, (n, x.size(dim) // n)).movedim(dim, 0).contiguous()


def _chunks_back(x: torch.Tensor, dim: int) -> torch.Tensor:
    """(n, ..., c, ...) -> (..., n*c, ...), contiguous: the inverse of `_chunks_first`."""
    return x.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _padded(size: Any, n: int) -> Any:
    return size if is_multiple(size, n) else (size + n - 1) // n * n


def _all_gather(x: torch.Tensor, dim: int, sizes: Sequence[Any], n: int, group: str) -> torch.Tensor:
    size, padded = sizes[dim], _padded(sizes[dim], n)
    uneven = padded is not size
    if uneven:
        x = _pad(x, dim, padded // n)
    x = x.contiguous()
    local = list(x.shape)
    x = _wait(_c10d.all_gather_into_tensor(x, n, group))
    if dim != 0:
        x = _chunks_back(x.view(n, *local), dim)
    return x.narrow(dim, 0, size).contiguous() if uneven else x


def _all_gather_strided(
    x: torch.Tensor, placement: StridedShard, sizes: Sequence[Any], n: int, group: str
) -> torch.Tensor:
    dim, pieces = placement.dim, _strided_pieces(placement, sizes[placement.dim], n)
    x = _pad(x, dim, sum(lengths[0] for lengths in pieces)).contiguous()  # rank 0 has the longest
    chunks = _wait(_c10d.all_gather_into_tensor(x, n, group)).view(n, *x.shape).unbind(0)
    parts, starts = [], [0] * n
    for lengths in pieces:
        for c, length in enumerate(lengths):
            parts.append(chunks[c].narrow(dim, starts[c], length))
            starts[c] = starts[c] + length
    return torch.cat(parts, dim)


def _slice_strided(x: torch.Tensor, placement: StridedShard, sizes: Sequence[Any], n: int, c: int) -> torch.Tensor:
    parts, start = [], 0
    for lengths in _strided_pieces(placement, sizes[placement.dim], n):
        parts.append(x.narrow(placement.dim, start + sum(lengths[:c]), lengths[c]))
        start = start + sum(lengths)
    return torch.cat(parts, placement.dim)


def _reduce_scatter(
    x: torch.Tensor, dim: int, sizes: Sequence[Any], n: int, c: int, op: str, group: str
) -> torch.Tensor:
    size, padded = sizes[dim], _padded(sizes[dim], n)
    if padded is not size:
        x = _pad(x, dim, padded)
    if dim != 0:
        x = _chunks_first(x, dim, n).flatten(0, 1)
    x = _wait(_c10d.reduce_scatter_tensor(x.contiguous(), op, n, group))
    if padded is not size:
        x = x.narrow(dim, 0, shard_range(size, n, c)[1]).contiguous()
    return x


def _all_to_all(
    x: torch.Tensor, gather: int, scatter: int, sizes: Sequence[Any], n: int, c: int, group: str
) -> torch.Tensor:
    if x.is_complex():  # gloo does not exchange complex numbers
        return torch.view_as_complex(
            _all_to_all(torch.view_as_real(x.resolve_conj()), gather, scatter, sizes, n, c, group)
        )
    whole, split = _padded(sizes[gather], n), _padded(sizes[scatter], n)
    if whole is not sizes[gather]:
        x = _pad(x, gather, whole // n)
    if split is not sizes[scatter]:
        x = _pad(x, scatter, split)
    x = _chunks_first(x, scatter, n)
    even = [x.size(0) // n] * n
    x = _wait(_c10d.all_to_all_single(x, even, even, group))
    x = _chunks_back(x, gather)
    if whole is not sizes[gather]:
        x = x.narrow(gather, 0, sizes[gather])
    if split is not sizes[scatter]:
        x = x.narrow(scatter, 0, shard_range(sizes[scatter], n, c)[1])
    return x.contiguous()
