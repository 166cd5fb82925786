"""Actual traffic of communication backends, relative to textbook algorithms.

A table of factors: bytes on the wire of one rank, divided by the bytes of `planner/step_costs.py` (ring algorithms).
NCCL follows the textbook. gloo has no reduce_scatter: it reduces the whole input and keeps a part, which sends twice as
much (measured on the wire, 2 ranks and a 16 MiB input: 16 MiB; all_gather and all_to_all send 8 MiB each, as the
formulas say). Bytes are not time: gloo's all_to_all, and its all_gather of two ranks, use one direction of the network
after the other, which `lowering/receive_before_sending.py` fixes.
"""

from __future__ import annotations

#: Backend, then kind of collective: bytes on the wire for one byte of the formula.
TRAFFIC: dict[str, dict[str, float]] = {
    "gloo": {"reduce_scatter": 2.0},
    "nccl": {},
}


#: Backend, then kind of collective: the kind that the lowering sends instead (`lowering/reduce_by_exchange.py`).
SENT_AS: dict[str, dict[str, str]] = {"gloo": {"reduce_scatter": "all_to_all"}}


#: Backend: seconds for which a collective blocks the compute thread, besides its time on the link. gloo: 0.11 ms to
#: start it and 0.05 ms for a wait that finds it done (medians of 300 with 64 KiB, one core for each of 2 ranks). NCCL's
#: are on another stream.
HOST_SECONDS: dict[str, float] = {"gloo": 1.6e-4}


#: Backends whose groups have several collectives under way, so that one sends while another copies or waits for its
#: turn of a core. A group of gloo has two threads for them; NCCL's kernels follow each other on a stream.
SEVERAL_UNDER_WAY = frozenset({"gloo"})


def host_seconds(backend: str) -> float:
    """Seconds for which one collective blocks the compute thread, besides its time on the link."""
    return HOST_SECONDS.get(backend, 0.0)


def sent_as(backend: str, kind: str) -> str:
    """The kind of collective that a step of a plan is sent as."""
    return SENT_AS.get(backend, {}).get(kind, kind)


def traffic(backend: str, kind: str, n: int) -> float:
    """Bytes on the wire for each byte of the formula, in a collective of `n` ranks; 1 for kinds that are not in the
    table.
    """
    return TRAFFIC.get(backend, {}).get(kind, 1.0) if n > 1 else 1.0
