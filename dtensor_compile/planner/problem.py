"""The problem of a search over specs, and a step of its solution with its cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtensor_compile.compat.dtensor.specs import Placement, Shard
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.planner import exchange
from dtensor_compile.planner import step_costs as costs
from dtensor_compile.planner.lower_bound import sent_lower_bound
from dtensor_compile.planner.shard_intervals import is_cut
from dtensor_compile.planner.step_costs import COLLECTIVES, StepKind, elements_sent, local_elements, local_sizes
from dtensor_compile.topology.network import Network

State = tuple[Placement, ...]

#: Maximum number of changing mesh dims for which all subsets are tried; beyond, only the largest merges.
MOST_FREE = 3


@dataclass(frozen=True)
class Step:
    """One change of placements.

    Attributes:
        kind: the collective or local operation.
        mesh_dims: mesh dims whose ranks communicate; for a local step those that change.
        before, after: the complete specs.
        elements: elements that one rank sends; the busiest one, if they differ.
        seconds: estimated time.
    """

    kind: StepKind
    mesh_dims: tuple[int, ...]
    before: State
    after: State
    elements: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def changed(self) -> tuple[int, ...]:
        return tuple(i for i, (a, b) in enumerate(zip(self.before, self.after)) if a != b)

    @property
    def sends(self) -> bool:
        return self.kind in COLLECTIVES

    def text(self, names: Sequence[str]) -> str:
        """As ``all_gather[dp,tp] S(0)S(0)->RR``, with these names of mesh dims."""
        before, after = (spec_text([state[i] for i in self.changed]) for state in (self.before, self.after))
        return f"{self.kind}[{','.join(names[i] for i in self.mesh_dims)}] {before}->{after}"

    def __str__(self) -> str:
        return self.text([str(i) for i in range(len(self.before))])


@dataclass(frozen=True)
class Problem:
    """The problem of a search.

    Attributes:
        start, goal: specs, ``R`` on mesh dims of size 1.
        mesh_shape: sizes of the mesh dims.
        shape: global sizes; hints if they are symbolic.
        divisors: known divisor of each size: the size itself if it is a number.
        itemsize: bytes of an element.
        network: links along the mesh dims.
        memory: maximum elements that a plan may hold at once besides its input (`planner/memory.py`).
        detours: whether steps towards placements of neither start nor goal are tried.
        most: exclusive upper bound on the elements of a path.
        collectives: maximum number of collectives of a path.
        end: spec to which a path has to lead, while steps towards another goal are tried.
    """

    start: State
    goal: State
    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    divisors: tuple[int, ...]
    itemsize: int
    network: Network
    memory: float = math.inf
    detours: bool = False
    most: float = math.inf
    collectives: float = math.inf
    end: State | None = None

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """Tensor dims along which shards are tried: the sharded dims of start and goal."""
        if self.detours:
            return tuple(range(len(self.shape)))
        return tuple(sorted({p.dim for p in (*self.start, *self.goal) if is_cut(p)}))

    @functools.cached_property
    def active(self) -> tuple[int, ...]:
        """Mesh dims whose placements change, and those that shard the same tensor dims; all mesh dims with detours."""
        if self.detours:
            return self.wide
        changed = {i for i, (a, b) in enumerate(zip(self.start, self.goal)) if a != b}
        cut = {p.dim for i in changed for p in (self.start[i], self.goal[i]) if is_cut(p)}
        more = {i for i, p in enumerate(self.start) if is_cut(p) and p.dim in cut}
        return tuple(sorted(changed | more))

    @property
    def free(self) -> bool:
        """Whether there are few enough subsets to try them all."""
        return len(self.active) <= MOST_FREE

    @property
    def wide(self) -> tuple[int, ...]:
        """Mesh dims of more than one rank."""
        return tuple(i for i, n in enumerate(self.mesh_shape) if n > 1)

    @property
    def may_detour(self) -> bool:
        """Whether a path over placements of neither start nor goal may send less: shards of two mesh dims may be
        uneven.

        The busiest rank counts, and over another spec its part may be a row less.
        """
        uneven = any(size % self.ranks(self.wide) for size in self.shape)
        return len(self.wide) == 2 and uneven and all(map(self.fixed, range(len(self.shape))))

    def fixed(self, dim: int) -> bool:
        """Whether the size of a tensor dim is a number."""
        return self.divisors[dim] == self.shape[dim]

    def even(self, dim: int, mesh_dims: Sequence[int]) -> bool:
        """Whether a tensor dim is a multiple of the ranks along these mesh dims, for all its sizes."""
        return self.divisors[dim] % math.prod(self.mesh_shape[i] for i in mesh_dims) == 0

    def local(self, state: State) -> int:
        return local_elements(state, self.mesh_shape, self.shape)

    def may_end(self, state: State, elements: int, collectives: float) -> bool:
        """Whether a path that sent `elements` on the way to `state` can end below `most` within `collectives` more
        collectives.
        """
        bound = sent_lower_bound(state, self.end or self.goal, self.mesh_shape, self.shape)
        # Each all-reduce of the rest may leave out the fraction of an element.
        return elements + bound - len(self.wide) < self.most if collectives > 0 else not bound

    def ranks(self, mesh_dims: Sequence[int]) -> int:
        return math.prod(self.mesh_shape[i] for i in mesh_dims)

    def step(self, kind: StepKind, mesh_dims: Sequence[int], before: State, after: State) -> Step:
        """A legal step with its cost."""
        n, copied, messages = self.ranks(mesh_dims), 1.0, None
        if kind == "exchange":
            counted = exchange.traffic(before, after, tuple(mesh_dims), self.mesh_shape, self.shape)
            assert counted is not None
            elements, messages = counted.elements, counted.partners
            copied = 2.0 * (self.local(before) + self.local(after))
        elif kind == "reduce_scatter":
            elements = elements_sent(kind, n, n * self.local(after))
            copied = n * self.local(after)
        elif kind == "all_to_all":
            sizes = local_sizes(before, self.mesh_shape, self.shape)
            target = after[mesh_dims[0]]
            assert isinstance(target, Shard)
            sizes[target.dim] = -(-sizes[target.dim] // n) * n
            elements, copied = elements_sent(kind, n, math.prod(sizes)), 2.0 * math.prod(sizes)
        else:
            elements, copied = elements_sent(kind, n, self.local(before)), self.local(after)
        time = costs.seconds(
            self.network, kind, mesh_dims, n, elements * self.itemsize, copied * self.itemsize, messages
        )
        return Step(kind, tuple(mesh_dims), before, after, elements, time)


def changed(state: State, new: Mapping[int, Placement]) -> State:
    """`state` with other placements on some mesh dims."""
    return tuple(new.get(i, p) for i, p in enumerate(state))
