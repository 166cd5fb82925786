"""When operators and collectives run, what of a collective is exposed, and what is said of those that are."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_compile.graph.node_costs import Operation, SentCollective
from dtensor_compile.recording.recorder import GraphRecord
from dtensor_compile.report.missed_overlap import missed
from dtensor_compile.report.schedule import schedule
from dtensor_compile.topology.links import CLUSTERS, Cluster, Device, Link, collective_seconds, compute_seconds

#: One byte a second, one operation a second, and nothing takes time to start: seconds are the bytes and operations of
#: an operation.
UNIT = Cluster("unit", 1, Link(0.0, 1.0), Link(0.0, 1.0), Device(((4, 1.0),), 1.0, 0.0))


def gather(seconds, **about):
    return SentCollective(
        "all_gather", seconds, "/user/m.py:3: y = gather(x)", "m", "tp", (0, 1), (4,), "float32", **about
    )


def starts(i):
    return Operation("all_gather", "", "", starts=i)


def waits(i):
    return Operation("wait_tensor", "", "", waits_for=i)


def computes(seconds, name="aten.mul"):
    return Operation(name, "", "", flops=seconds)


def exposed(operations, *seconds):
    timing = schedule(operations, [gather(s) for s in seconds], UNIT)
    return timing.exposed, timing.seconds


def test_waited_for_at_once_is_exposed():
    assert exposed([computes(1), starts(0), waits(0), computes(2)], 5) == ((5,), 8)


def test_hidden_behind_compute():
    assert exposed([starts(0), computes(7), waits(0)], 5) == ((0,), 7)


def test_partly_hidden():
    assert exposed([starts(0), computes(3), waits(0), computes(1)], 5) == ((2,), 6)


def test_collectives_follow_each_other_on_their_stream():
    assert exposed([starts(0), starts(1), computes(3), waits(0), waits(1)], 2, 4) == ((0, 3), 6)


def test_never_waited_for():
    assert exposed([computes(1), starts(0), computes(1)], 5) == ((0,), 6)


def test_spans():
    timing = schedule([computes(1), starts(0), computes(2), waits(0), computes(4)], [gather(5)], UNIT)
    assert [(t.index, t.start, t.seconds) for t in timing.compute] == [(0, 0, 1), (2, 1, 2), (4, 6, 4)]
    assert [(t.index, t.start, t.seconds) for t in timing.communication] == [(0, 1, 5)]


@pytest.mark.parametrize(
    "seconds, compute, end",
    [
        ((8,), 4, 8),  # all of it beside the collective, at half the speed
        ((2,), 4, 5),  # 2 seconds at half the speed, 3 at all of it
        ((0,), 4, 4),
        ((2, 2), 4, 6),  # one after the other
    ],
)
def test_compute_beside_collectives_is_slower(seconds, compute, end):
    half = dataclasses.replace(UNIT, device=dataclasses.replace(UNIT.device, contention=0.5))
    operations = [*map(starts, range(len(seconds))), computes(compute)]
    timing = schedule(operations, [gather(s) for s in seconds], half)
    assert timing.compute[0].seconds == end


def test_compute_after_collectives_has_all_of_its_speed():
    half = dataclasses.replace(UNIT, device=dataclasses.replace(UNIT.device, contention=0.5))
    timing = schedule([starts(0), waits(0), computes(3), starts(1), computes(1)], [gather(2), gather(9)], half)
    assert [t.seconds for t in timing.compute] == [3, 2]


@pytest.mark.parametrize("backend, end", [("gloo", 12 + 10), ("nccl", 12 + 12), ("", 12 + 12)])
def test_latency_of_a_queued_collective_is_over_where_several_are_under_way(backend, end):
    slow = Link(2.0, 1.0)  # two seconds of latency for each message, a byte a second
    cluster = dataclasses.replace(UNIT, inside=slow, between=slow, backend=backend)
    timing = schedule([starts(0), starts(1), waits(0), waits(1)], [gather(10), gather(10)], cluster)
    one = collective_seconds(cluster, "all_gather", 10, (0, 1))  # NCCL's own model has other latencies and rates
    end = 2 * one if backend == "nccl" else end
    assert timing.seconds == pytest.approx(end, abs=1e-3)  # and what the host takes to start them
    assert sum(timing.exposed) == pytest.approx(timing.seconds, abs=1e-3)
    apart = schedule([starts(0), waits(0), starts(1), waits(1)], [gather(10), gather(10)], cluster)
    assert apart.seconds == pytest.approx(2 * one, abs=1e-3)


@given(
    st.lists(st.floats(0.01, 5), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 3), min_size=1, max_size=8),
    st.floats(0.05, 0.9),
)
def test_contention_takes_its_part_of_the_speed_and_no_more(sent, computed, contention):
    """Also where a kernel ends within a rounding error of its work, while other collectives are queued."""
    device = dataclasses.replace(UNIT.device, contention=contention)
    operations = [*map(starts, range(len(sent))), *map(computes, computed)]
    timing = schedule(operations, list(map(gather, sent)), dataclasses.replace(UNIT, device=device))
    work, beside = sum(computed), sum(sent) * (1 - contention)
    end = work / (1 - contention) if work <= beside else sum(sent) + work - beside
    assert sum(timed.seconds for timed in timing.compute) == pytest.approx(end)
    for timed, alone in zip(timing.compute, computed, strict=True):
        assert alone <= timed.seconds * (1 + 1e-9) and timed.seconds <= alone / (1 - contention) * (1 + 1e-9)


# ---- what did not happen -------------------------------------------------------------------------------------------


def missed_in(operations, *collectives):
    graph = GraphRecord("forward", list(collectives), list(operations))
    return [(d.kind, d.reason) for d in missed(graph, schedule(graph.operations, graph.collectives, UNIT))]


def test_why_it_is_not_hidden():
    ((kind, reason),) = missed_in([starts(0), waits(0)], gather(5))
    assert (
        kind == "overlap"
        and "nothing stands between its start and its wait" in reason
        and "5000.00 ms exposed" in reason
    )
    ((kind, reason),) = missed_in([starts(0), computes(3), waits(0)], gather(5))
    assert (
        kind == "overlap" and reason.startswith("3000.00 ms of compute stand between") and "2000.00 ms more" in reason
    )


def test_hidden_needs_no_reason():
    assert missed_in([starts(0), computes(6, "aten.mm"), waits(0), computes(1, "aten.mm")], gather(5)) == []


def test_matmul_beside_it_is_not_decomposed():
    kinds = [
        kind
        for kind, _ in missed_in([starts(0), waits(0), computes(0, "aten.clone"), computes(4, "aten.mm")], gather(5))
    ]
    assert kinds == ["overlap", "decompose_matmul"]
    far = [starts(0), waits(0), *(computes(1) for _ in range(9)), computes(4, "aten.mm")]
    assert [kind for kind, _ in missed_in(far, gather(5))] == ["overlap"]


def test_small_ones_that_follow_each_other_are_not_bucketed():
    operations = [starts(0), waits(0), computes(1), starts(1), waits(1)]
    ((kind, reason),) = [row for row in missed_in(operations, gather(5), gather(7)) if row[0] == "bucket"]
    assert "send 12 bytes together" in reason
    assert "bucket" not in [kind for kind, _ in missed_in(operations, gather(5), gather(2 << 20))]


# ---- times ---------------------------------------------------------------------------------------------------------


def test_collective_times():
    cluster = Cluster("two hosts of two", 2, Link(1.0, 10.0), Link(4.0, 5.0), Device(((4, 1.0),), 1.0, 0.0))
    assert collective_seconds(cluster, "all_gather", 100, (0, 1)) == 1 * 1.0 + 100 / 10
    assert collective_seconds(cluster, "all_gather", 100, (0, 2)) == 1 * 4.0 + 100 / 5
    # a ring leaves each host once, and two ranks have two links; in an all_to_all two of three parts leave over one
    assert collective_seconds(cluster, "all_gather", 100, (0, 1, 2, 3)) == 2 * 4.0 + 100 / 10
    assert collective_seconds(cluster, "all_reduce", 100, (0, 1, 2, 3)) == 4 * 4.0 + 100 / 10
    assert collective_seconds(cluster, "all_to_all", 90, (0, 1, 2, 3)) == 3 * 4.0 + 60 / 5
    assert collective_seconds(cluster, "all_to_all", 100, (1, 2, 3)) == 2 * 4.0 + 100 / 5
    shared = dataclasses.replace(cluster, between=Link(4.0, 5.0, shared=True))
    assert collective_seconds(shared, "all_gather", 100, (0, 1, 2, 3)) == 2 * 4.0 + 100 / 5
    assert collective_seconds(shared, "all_gather", 100, (0, 2), job=4) == 1 * 4.0 + 100 / 2.5
    assert collective_seconds(cluster, "all_gather", 0, (1,)) == 0


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_more_bytes_never_take_less(name):
    cluster, sizes = CLUSTERS[name], [0, *(1 << power for power in range(10, 33))]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for n in (2, 4, 8, 16, 48, 512):
            times = [collective_seconds(cluster, kind, size, range(n)) for size in sizes]
            assert times == sorted(times)


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_by_the_formula_more_ranks_never_take_less(name):
    cluster = CLUSTERS[name]
    inside, between = (dataclasses.replace(link, collectives=()) for link in (cluster.inside, cluster.between))
    cluster = dataclasses.replace(cluster, inside=inside, between=between)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        times = [[collective_seconds(cluster, kind, b, range(n)) for b in (0, 1 << 10, 1 << 20)] for n in (2, 4, 8, 16)]
        assert all(row == sorted(row) for row in times) and all(list(col) == sorted(col) for col in zip(*times))


def test_operator_times():
    device = Device(((2, 200.0), (4, 100.0)), 10.0, 0.5)
    assert compute_seconds(device, 1000, 10, 4) == 10 + 0.5
    assert compute_seconds(device, 1000, 10, 2) == 5 + 0.5
    assert compute_seconds(device, 1000, 10, 1) == 5 + 0.5  # no rate of its own: that of the next larger element
    assert compute_seconds(device, 0, 100, 4, fused=True) == 10
    assert compute_seconds(device, 1000, 10, 8) == 10 + 0.5
