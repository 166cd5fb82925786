"""Two-phase rendezvous through the store before a blocking collective setup.

All ranks get the same answer: whether all of them have arrived at the same topic. No rank waits much longer than
`PATIENCE` for it, whatever the others do: a rank that compiles something alone, for instance to inspect its parameters,
must not hang.

Each rank writes ``here`` to the store. When the first rank sees that all have arrived, it turns each ``here`` into
``locked``; once it has all, it writes ``go``. A rank that times out turns its own ``here`` into ``gone``, which fails
if it is locked: then the answer is on its way. Both are compare-and-set operations, so exactly one of them wins. The
first rank makes two requests for each of n ranks, the others poll one key each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from dtensor_compile.store.ledger import current_ledger

#: Seconds that a rank waits for the others.
PATIENCE = 10.0

_HERE, _LOCKED, _GONE = "here", "locked", "gone"


def all_arrive(topic: str, ranks: Sequence[int], patience: float | None = None) -> bool:
    """Whether all of `ranks`, including this one, have arrived at the same topic; the same answer on each of them.

    Args:
        topic: names the joint operation.
        ranks: global ranks.
        patience: seconds that a rank waits for the others; None for `PATIENCE`.
    """
    seconds = PATIENCE if patience is None else patience
    ledger = current_ledger()
    if ledger is None:
        return True
    store, ranks, me = ledger.store, tuple(sorted(ranks)), dist.get_rank()
    number = ledger.rendezvous.get((ranks, topic), 0)  # completed rendezvous, which all ranks counted
    keys = {rank: ledger.key(ranks, "meet", topic, number, rank) for rank in ranks}
    go = ledger.key(ranks, "meet", topic, number, "go")
    store.set(keys[me], _HERE)
    if me == ranks[0]:
        if not _until(lambda: _lock_all(store, keys, me), seconds):
            return False
        store.set(go, "1")
    else:
        while not _until(lambda: store.check([go]), seconds):
            if store.compare_set(keys[me], _HERE, _GONE).decode() == _GONE:
                return False
    ledger.rendezvous[ranks, topic] = number + 1
    return True


def _lock_all(store: dist.Store, keys: dict[int, str], me: int) -> bool:
    """Locks all ranks but `me`, or none."""
    others = [key for rank, key in keys.items() if rank != me]
    if not all(store.check([key]) and store.get(key).decode() == _HERE for key in others):
        return False
    for i, key in enumerate(others):
        if store.compare_set(key, _HERE, _LOCKED).decode() != _LOCKED:
            for locked in others[:i]:
                store.set(locked, _HERE)
            return False
    return True


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition becomes true within `seconds`."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
