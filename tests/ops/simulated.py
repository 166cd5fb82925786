"""All ranks of a mesh in one process: plans carried out on real numbers, one thread a rank, collectives among the
threads.

Fast enough for every pair of specs; what process groups do is shown by the tests on real ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from unittest import mock

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_compile.ir.mesh import MeshDim, MeshLayout
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops import expand as expand_module
from dtensor_compile.ops import rearrange as rearrange_module
from dtensor_compile.ops.expand import RankPlace, expand
from dtensor_compile.planner.search import bytes_sent, cheapest_plan

REDUCE = {
    "sum": lambda xs: sum(xs[1:], xs[0]),
    "avg": lambda xs: sum(xs[1:], xs[0]) / len(xs),
    "max": lambda xs: torch.stack(xs).amax(0),
    "min": lambda xs: torch.stack(xs).amin(0),
    "product": lambda xs: math.prod(xs[1:], start=xs[0]),
}


class Threads(threading.local):
    rank: int


class Collectives:
    """torch's functional collectives among threads; what each rank sends is counted."""

    def __init__(self, world):
        self.me, self.lock = Threads(), threading.Condition()
        self.posted, self.calls, self.sent = {}, {}, [0] * world
        self.failed = False

    def _meet(self, group, what):
        """What all ranks of the group give to this call, in the order of the process group."""
        ranks, me = tuple(map(int, group.split("."))), self.me.rank
        with self.lock:
            number = self.calls[group, me] = self.calls.get((group, me), 0) + 1
            self.posted[group, number, me] = what
            self.lock.notify_all()
            keys = [(group, number, rank) for rank in ranks]
            if not self.lock.wait_for(lambda: self.failed or all(key in self.posted for key in keys), timeout=20):
                self.failed = True
            if self.failed:
                raise RuntimeError(f"rank {me} waits in vain in {group}")
            return [self.posted[key] for key in keys], ranks.index(me)

    def _count(self, elements):
        self.sent[self.me.rank] += elements

    def all_reduce(self, x, op, group):
        xs, _ = self._meet(group, x)
        self._count(2 * (len(xs) - 1) * x.numel() // len(xs))
        return REDUCE[op](xs)

    def all_gather_into_tensor(self, x, n, group):
        assert x.is_contiguous()
        xs, _ = self._meet(group, x)
        self._count((n - 1) * x.numel())
        return torch.cat(xs)

    def reduce_scatter_tensor(self, x, op, n, group):
        assert x.is_contiguous() and x.shape[0] % n == 0
        xs, me = self._meet(group, x)
        self._count((n - 1) * x.numel() // n)
        return REDUCE[op](xs).chunk(n)[me].clone() if x.numel() else x.new_empty(x.shape[0] // n, *x.shape[1:])

    def all_to_all_single(self, x, out, into, group):
        xs, me = self._meet(group, (x, into))
        assert sum(into) == x.shape[0]
        row = math.prod(x.shape[1:])
        self._count((sum(into) - into[me]) * row)
        parts = [y.split(list(splits))[me] for y, splits in xs]
        assert [p.shape[0] for p in parts] == list(out), "what is sent is not what is received"
        return torch.cat(parts)

    def wait_tensor(self, x):
        return x


def by_hand(full, placements, coordinate, mesh_shape):
    """The local tensor, cut by ``torch.chunk``; a partial sum falls into terms that differ from rank to rank."""
    local = full
    for i, (placement, c, n) in enumerate(zip(placements, coordinate, mesh_shape)):
        if isinstance(placement, Partial):
            terms = [
                (torch.arange(local.numel()).reshape(local.shape) * (k + 3) % (5 + i)).to(local.dtype) for k in range(n)
            ]
            if placement.reduce_op == "sum":
                local = local - sum(terms[1:]) if c == 0 else terms[c]
            else:
                low = -1 if placement.reduce_op == "max" else 1
                shift = terms[c].where((torch.arange(local.numel()).reshape(local.shape) + c) % n != 0, terms[c] * 0)
                local = local + low * shift if n > 1 else local
        elif isinstance(placement, (Shard, _StridedShard)):
            pieces = (
                local.chunk(placement.split_factor, placement.dim) if isinstance(placement, _StridedShard) else [local]
            )
            mine = []
            for piece in pieces:
                chunks = piece.chunk(n, placement.dim)
                mine.append(chunks[c] if c < len(chunks) else piece.narrow(placement.dim, 0, 0))
            local = torch.cat(mine, placement.dim)
    return local.clone()


def layout_of(mesh_shape, ranks=None):
    strides, step = [], 1
    for n in reversed(mesh_shape):
        strides.insert(0, step)
        step *= n
    return MeshLayout(
        "cpu", tuple(MeshDim(None, (n,), (s,)) for n, s in zip(mesh_shape, strides)), ranks or tuple(range(step))
    )


def wrong_plans(mesh_shape, cases, ranks=None, dtype=torch.float64, planner=cheapest_plan):
    """Complaints about plans carried out: ``cases`` are source, target, shape. Values, and the bytes that the plan
    says.
    """
    layout = layout_of(mesh_shape, ranks)
    world = len(layout.ranks)
    mesh_shape = tuple(mesh_shape)
    comm = Collectives(max(layout.ranks) + 1)
    plans, fulls = [], []
    for source, target, shape in cases:
        plans.append(planner(source, target, mesh_shape, shape))
        n = math.prod(shape)
        fulls.append((torch.arange(n) * 7 % 31 - 15).to(dtype).reshape(shape))
    results, sent, errors = {}, {}, []

    def run(rank):
        comm.me.rank = rank

        def group_name(dims):
            return ".".join(map(str, sorted(layout.group_over(rank, dims))))

        place = RankPlace(layout, rank, group_name)
        for k, ((source, target, shape), steps, full) in enumerate(zip(cases, plans, fulls)):
            before = comm.sent[rank]
            try:
                results[k, rank] = expand(
                    by_hand(full, parse_spec(source), place.coordinate, mesh_shape), steps, place, list(shape)
                )
            except Exception as error:
                if not comm.failed:
                    errors.append(
                        f"{source}->{target} {shape} on {mesh_shape} at {rank}: {type(error).__name__}: {error}: "
                        f"{list(map(str, steps))}"
                    )
                with comm.lock:
                    comm.failed = True
                    comm.lock.notify_all()
                return
            sent[k, rank] = comm.sent[rank] - before

    with contextlib.ExitStack() as stack:
        for module in (expand_module, rearrange_module):
            stack.enter_context(mock.patch.object(module, "_c10d", comm))
        threads = [threading.Thread(target=run, args=(rank,)) for rank in layout.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        return errors
    wrong = []
    for k, ((source, target, shape), steps, full) in enumerate(zip(cases, plans, fulls)):
        planned, most = bytes_sent(steps, 1), max(sent[k, rank] for rank in layout.ranks)
        case = f"{source}->{target} {tuple(shape)} on {mesh_shape}: {[str(step) for step in steps]}"
        alone = sum(step.sends for step in steps) == 1  # of several, the busiest rank need not be the same
        if most > planned or alone and most < planned - world:  # shares are rounded down
            wrong.append(f"{case}: sends {most}, the plan says {planned}")
        after = parse_spec(target)
        pending = [i for i, p in enumerate(after) if isinstance(p, Partial)]
        whole = tuple(Replicate() if isinstance(p, Partial) else p for p in after)
        for at in itertools.product(*(range(1 if i in pending else n) for i, n in enumerate(mesh_shape))):
            members = [
                rank
                for rank in layout.ranks
                if all(c == a for i, (c, a) in enumerate(zip(layout.coordinate(rank), at)) if i not in pending)
            ]
            terms = [results[k, rank] for rank in members]
            got = REDUCE[after[pending[0]].reduce_op](terms) if pending else terms[0]
            wanted = by_hand(full, whole, at, mesh_shape)
            rounds = any(step.kind == "partition" for step in steps)  # v/n, n times
            if got.shape != wanted.shape or not (torch.allclose(got, wanted) if rounds else torch.equal(got, wanted)):
                wrong.append(
                    f"{case}: at {at} {got.flatten()[:8].tolist()} of {tuple(got.shape)}, wanted "
                    f"{wanted.flatten()[:8].tolist()} of {tuple(wanted.shape)}"
                )
                break
    return wrong
