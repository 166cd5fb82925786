"""Missed optimizations of the collectives of a lowered graph, with reasons, from its schedule.

not hidden         its wait follows its start with too little or nothing in between
not decomposed     it feeds a matmul, or a matmul feeds it, and the two are not split into overlapping parts
not bucketed       small collectives of one kind over one group follow each other
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.node_costs import Operation, SentCollective
from dtensor_compile.graph.operator_traits import MATMULS
from dtensor_compile.recording.recorder import GraphRecord
from dtensor_compile.report.schedule import Schedule

#: Operators (copies, elementwise work) between a collective and a matmul that still count as adjacent.
NEAR = 5
#: A collective with fewer bytes is dominated by its latency, so that merging it with others pays.
SMALL = 1 << 20


def missed(graph: GraphRecord, timing: Schedule) -> Iterator[Decision]:
    """Decisions about missed optimizations of the collectives of `graph`, whose schedule is `timing`."""
    yield from _not_hidden(graph, timing)
    yield from _not_decomposed(graph, timing)
    yield from _not_bucketed(graph.collectives)


def _not_hidden(graph: GraphRecord, timing: Schedule) -> Iterator[Decision]:
    durations = {timed.index: timed.seconds for timed in timing.compute}
    for index, collective in enumerate(graph.collectives):
        exposed = timing.exposed[index]
        if exposed <= 0:
            continue
        between = _between(graph.operations, index)
        hidden = sum(durations.get(i, 0.0) for i in between)
        if hidden:
            reason = (
                f"{_time(hidden)} of compute stand between its start and its wait, {_time(exposed)} more would be "
                "needed"
            )
        else:
            reason = (
                "its result is waited for at once: nothing stands between its start and its wait "
                f"({_time(exposed)} exposed)"
            )
        yield Decision("overlap", collective.where, reason, _text(collective), _text(collective))


_IN_PARTS = (
    "`decompose_matmuls` (enable_passes) runs the two in parts beside each other where its estimate says that it pays"
)


def _not_decomposed(graph: GraphRecord, timing: Schedule) -> Iterator[Decision]:
    for index, collective in enumerate(graph.collectives):
        if timing.exposed[index] <= 0 or collective.kind not in ("all_gather", "reduce_scatter", "all_reduce"):
            continue
        matmul = _matmul_beside(graph.operations, index, after=collective.kind == "all_gather")
        if matmul is not None:
            side = "feeds" if collective.kind == "all_gather" else "follows"
            can = (
                "`decompose_matmuls` leaves sums that all ranks get whole"
                if collective.kind == "all_reduce"
                else _IN_PARTS
            )
            reason = f"it {side} {matmul.name}; {can}"
            yield Decision("decompose_matmul", collective.where, reason, _text(collective), _text(collective))


def _not_bucketed(collectives: Sequence[SentCollective]) -> Iterator[Decision]:
    run: list[SentCollective] = []
    for collective in [*collectives, None]:
        if run and (collective is None or not _can_share_bucket(run[0], collective)):
            if len(run) > 1:
                text = f"{len(run)} {_text(run[0])}"
                total = sum(c.bytes for c in run)
                reason = (
                    f"they follow each other in one group and send {total:,} bytes together; `bucket_collectives` "
                    "did not merge them"
                )
                yield Decision("bucket", run[0].where, reason, text, text)
            run = []
        if collective is not None and 0 < collective.bytes < SMALL:
            run.append(collective)


def _can_share_bucket(a: SentCollective, b: SentCollective) -> bool:
    return (a.kind, a.ranks, a.dtype) == (b.kind, b.ranks, b.dtype) and 0 < b.bytes < SMALL


def _between(operations: Sequence[Operation], collective: int) -> range:
    start = next(i for i, o in enumerate(operations) if o.starts == collective)
    wait = next((i for i, o in enumerate(operations) if o.waits_for == collective), len(operations))
    return range(start + 1, wait)


def _matmul_beside(operations: Sequence[Operation], collective: int, *, after: bool) -> Operation | None:
    """Matmul right after the wait of a collective or right before its start, ignoring copies and elementwise work."""
    steps = _between(operations, collective)
    behind, before = operations[steps.stop + 1 :], operations[: steps.start - 1]
    for operation in behind[:NEAR] if after else before[: -NEAR - 1 : -1]:
        if operation.name in MATMULS:
            return operation
        if operation.starts is not None or operation.waits_for is not None:
            return None
    return None


def _text(collective: SentCollective) -> str:
    return f"{collective.kind}[{collective.mesh_dim}]"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
