"""Collectives of the presets: NCCL's model and published measurements."""

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_compile.topology import nccl
from dtensor_compile.topology.links import CLUSTERS, collective_seconds, startup_seconds
from tests.tools import load_tool

H100 = CLUSTERS["h100"]
KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])


def test_published_figures_that_the_presets_were_not_made_from():
    """Of clusters whose networks their owners did not complain of, from 4 MiB on (`tools/bench/published.py`)."""
    found = [abs(error) for _, by_size in load_tool("bench/published").errors() for error in by_size]
    assert len(found) > 200 and statistics.median(found) < 0.05
    assert sum(error <= 0.15 for error in found) / len(found) > 0.85


def test_measured_sizes_take_what_they_took():
    """512 ranks on 64 hosts, all-gathers of 1 MiB and 8 GiB: 1,108 us and 31,145."""
    part = 511 / 512
    assert collective_seconds(H100, "all_gather", 2**20 * part, range(512)) == pytest.approx(1108e-6)
    assert collective_seconds(H100, "all_gather", 2**33 * part, range(512)) == pytest.approx(31145e-6)


def test_all_ranks_of_a_host_leave_it_over_as_many_cards():
    """One rank on each of eight hosts has one card, all of them have eight, up to what NVLink carries."""
    size = 1 << 32
    alone = collective_seconds(H100, "all_gather", size, range(0, 64, 8))
    whole = collective_seconds(H100, "all_gather", size, range(64))
    assert size / alone == pytest.approx(0.92 * 50e9, rel=0.01) and 6 < alone / whole < 8
    half = collective_seconds(H100, "all_gather", size, range(0, 64, 2))
    assert whole < half < alone


def test_an_all_to_all_leaves_over_the_card_of_each_rank():
    size = 1 << 30
    crossing = size * 8 / 15 / (0.92 * 50e9)  # of the 15 others eight are on the other host
    assert collective_seconds(H100, "all_to_all", size, range(16)) == pytest.approx(crossing, rel=0.01)


def test_latency_grows_with_the_ring():
    """64 hosts with one rank each: PAT, whose messages are logarithmic in number, and 2.8 us for each rank."""
    assert startup_seconds(H100, "all_gather", range(0, 512, 8)) == pytest.approx(
        (8 + 6 * 4 + 64 * 2.8) * 1e-6, rel=0.01
    )
    assert startup_seconds(H100, "all_gather", range(512)) > 3 * startup_seconds(H100, "all_gather", range(16))


@given(KINDS, st.floats(1, 2**34), st.integers(1, 64), st.integers(1, 8))
def test_more_bytes_and_slower_links_never_take_less(kind, sent, hosts, per_host):
    if hosts * per_host == 1:
        return
    group = nccl.Hops(hosts * per_host, hosts, 3e-6, 450e9, 8e-6, 50e9 if hosts > 1 else 450e9)
    seconds = nccl.seconds(kind, sent, group)
    assert 0 < seconds < math.inf and seconds <= nccl.seconds(kind, 2 * sent, group)
    assert seconds <= nccl.seconds(kind, sent, group._replace(bandwidth=group.bandwidth / 2)) * (1 + 1e-9)
    slower = group._replace(inside=2 * group.inside, between=2 * group.between)
    assert seconds <= nccl.seconds(kind, sent, slower)


def test_a_ring_that_was_not_measured_is_between_those_that_were():
    sent = 1 << 28
    by_ranks = [collective_seconds(H100, "all_gather", sent, range(n)) for n in (16, 24, 48, 96, 200, 512)]
    assert by_ranks == sorted(by_ranks)


def test_one_rank_on_each_host_is_not_scaled_by_whole_hosts():
    plain = dataclasses.replace(H100.between, collectives=())
    unmeasured, ranks = dataclasses.replace(H100, between=plain), range(0, 512, 8)
    both = [collective_seconds(cluster, "all_reduce", 1 << 26, ranks) for cluster in (H100, unmeasured)]
    assert both[0] == both[1]
