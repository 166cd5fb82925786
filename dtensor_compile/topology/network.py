"""The network of the ranks of one mesh, and the topology for which this thread plans.

A plan depends on specs, sizes and a `Network`: a link per mesh dim and the communication backend. It follows from the
mesh and the topology alone, never from the rank, so that all ranks choose the same plan. If the user names no topology,
all mesh dims have equal links.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtensor_compile.ir.mesh import MeshLayout, merges
from dtensor_compile.topology.backends import sent_as
from dtensor_compile.topology.links import Cluster, Link, seconds_over, together

#: The default link: about 10 Gbit/s. With equal links plans are chosen by bytes; this only breaks ties.
PLAIN = Link(2e-5, 1.25e9)


@dataclass(frozen=True)
class Network:
    """Links along the mesh dims of one mesh.

    Attributes:
        links: one per mesh dim; empty if all are equal.
        backend: communication backend, empty for none.
        merges: whether process groups over several mesh dims exist.
    """

    links: tuple[Link, ...] = ()
    backend: str = ""
    merges: bool = True

    @property
    def uniform(self) -> bool:
        """Whether all mesh dims have equal links, so that bytes compare."""
        return len(set(self.links)) <= 1 and not self.backend

    def link(self, mesh_dims: Sequence[int]) -> Link:
        """The effective link of a collective over these mesh dims together."""
        return together([self.links[i] for i in mesh_dims]) if self.links else PLAIN

    def seconds(
        self, kind: str, mesh_dims: Sequence[int], n: int, bytes_sent: float, messages: int | None = None
    ) -> float:
        """Seconds of one collective of `n` ranks over these mesh dims, in the form in which it is sent; as
        `seconds_over`.
        """
        return seconds_over(self.link(mesh_dims), self.backend, sent_as(self.backend, kind), bytes_sent, n, messages)


#: The default if the user names no topology: all mesh dims have equal links.
NO_TOPOLOGY = Network()


_topology: contextvars.ContextVar[Cluster | None] = contextvars.ContextVar("dtensor_compile_topology", default=None)
_memory: contextvars.ContextVar[int | None] = contextvars.ContextVar("dtensor_compile_memory", default=None)


@contextlib.contextmanager
def plans_for(cluster: Cluster | None, memory: int | None = None) -> Iterator[None]:
    """While active, this thread plans for that topology; None: for equal links along all mesh dims.

    Args:
        memory: bytes that a redistribution may hold at once besides its input; None for no bound.
    """
    tokens = _topology.set(cluster), _memory.set(memory)
    try:
        yield
    finally:
        _topology.reset(tokens[0])
        _memory.reset(tokens[1])


def current_topology() -> Cluster | None:
    """The topology for which this thread plans."""
    return _topology.get()


def current_memory() -> int | None:
    """Bytes that plans of this thread may hold at once; None for no bound."""
    return _memory.get()


def network_of(layout: MeshLayout) -> Network:
    """The network of a mesh in the topology for which this thread plans."""
    cluster, merged = _topology.get(), merges(str(layout))
    return Network(merges=merged) if cluster is None else _network(cluster, layout, merged)


@functools.lru_cache(maxsize=1024)
def _network(cluster: Cluster, layout: MeshLayout, merged: bool) -> Network:
    links = []
    for i, dim in enumerate(layout.dims):
        groups = sorted({layout.group(rank, i) for rank in layout.ranks})
        links.append(cluster.dim_link(dim.name, groups))
    return Network(tuple(links), cluster.backend, merged)
