"""The ledger: this rank's record of its communication through the store of the current process group."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch.distributed as dist

from dtensor_compile.compat.distributed.device_meshes import default_store


class Ledger:
    """The store, and this rank's entries in it.

    Attributes:
        group, store: the default process group and its store.
        announced: announcements of graphs, by the ranks of a group and the graph's name
            (`runtime.collective_agreement`).
        refused: keys of announcements that disagreed with another rank's.
        unanswered: keys of announcements that another rank could not answer, because it failed.
        announcements: number of announcements of the same collectives of a group, for any graphs.
        graphs: number of compilations per graph, by name.
        compilations: number of compilations started per function, by name.
        partners: by function, the ranks with which its graphs communicate.
        in_eager: number of times that a function was left to eager, by name (`runtime.eager_fallback`).
        rendezvous: number of rendezvous of `ranks` per topic (`store.rendezvous`).
        epoch: number of process groups that this rank has had on that store, which may outlive them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.store = group, default_store()
        self.announced: dict[tuple[tuple[int, ...], str], list[Any]] = {}
        self.refused: set[tuple[tuple[int, ...], str, int]] = set()
        self.unanswered: set[tuple[tuple[int, ...], str, int]] = set()
        self.announcements: dict[tuple[tuple[int, ...], str], int] = {}
        self.graphs: dict[str, int] = {}
        self.compilations: dict[str, int] = {}
        self.partners: dict[str, set[int]] = {}
        self.in_eager: dict[str, int] = {}
        self.rendezvous: dict[tuple[tuple[int, ...], str], int] = {}
        self.epoch = self.store.add(f"dtensor_compile/epoch/{dist.get_rank()}", 1)

    def key(self, ranks: tuple[int, ...], *parts: object) -> str:
        """A key of the store that concerns `ranks`."""
        return "/".join(map(str, ("dtensor_compile", self.epoch, digest(ranks), *parts)))


class _Current:
    """The ledger of the current default process group."""

    ledger: Ledger | None = None


def current_ledger() -> Ledger | None:
    """The ledger of the current process group; None if there are no other ranks, or if they could not answer while this
    rank waits (ranks that are threads run one at a time)."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() in ("fake", "threaded"):
        return None
    group = dist.group.WORLD
    if _Current.ledger is None or _Current.ledger.group is not group:
        assert group is not None
        _Current.ledger = Ledger(group)
    return _Current.ledger


def digest(value: Any) -> str:
    """A short digest of plain data."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
