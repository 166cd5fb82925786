"""The caching allocator, by its rules."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_compile.forecast.allocator import CachingAllocator, reserved_by
from dtensor_compile.forecast.memory_use import use_of_step
from dtensor_compile.forecast.step_log import Allocation

MIB = 1 << 20


def test_segments_by_size():
    for size, reserved in (
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ):
        allocator = CachingAllocator()
        allocator.allocate(size)
        assert allocator.reserved == reserved


def test_sizes_are_rounded_to_512_bytes():
    allocator = CachingAllocator()
    allocator.allocate(513)
    assert allocator.allocated == 1024


def test_small_blocks_share_a_segment_and_merge_when_freed():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(512 * 1024) for _ in range(4)]
    assert allocator.reserved == 2 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.release(block)
    allocator.allocate(MIB)
    assert allocator.reserved == 2 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_a_mebibyte():
    allocator = CachingAllocator()
    block = allocator.allocate(12 * MIB)
    allocator.release(block)
    allocator.allocate(11 * MIB)  # the rest is not split off
    assert (allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB)
    allocator.allocate(512 * 1024)  # of another pool
    assert allocator.reserved == 14 * MIB


def test_where_the_device_is_full_unused_segments_are_given_back():
    events = [(1, 30 * MIB), (1, 0), (2, 40 * MIB), (3, 30 * MIB), (2, 0), (4, 50 * MIB)]
    assert reserved_by(events) == (80 * MIB, 120 * MIB, 0)
    assert reserved_by(events, 120 * MIB) == (80 * MIB, 120 * MIB, 0)
    assert reserved_by(events, 90 * MIB) == (80 * MIB, 80 * MIB, 1)  # the one of 40 MiB
    assert reserved_by(events, 60 * MIB) == (80 * MIB, 80 * MIB, 2)  # the one of 30 MiB too: it does not fit even so


def test_a_segment_with_a_block_in_use_stays():
    events = [(1, 6 * MIB), (2, 6 * MIB), (1, 0), (3, 30 * MIB)]
    assert reserved_by(events, 40 * MIB) == (36 * MIB, 50 * MIB, 0)


def test_fragments_make_a_new_segment_although_there_is_room():
    allocator = CachingAllocator()
    first, middle, last = (allocator.allocate(6 * MIB) for _ in range(3))
    assert allocator.reserved == 20 * MIB
    allocator.release(first)
    allocator.release(last)
    assert allocator.allocated == 6 * MIB
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 40 * MIB


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB), st.integers(0, 1 << 30)), max_size=40))
def test_blocks_are_within_segments_and_all_memory_comes_back(steps):
    allocator, live, most = CachingAllocator(), [], 0
    for frees, size, which in steps:
        if frees and live:
            block, _ = live.pop(which % len(live))
            allocator.release(block)
        else:
            block = allocator.allocate(size)
            assert block.size >= size
            live.append((block, size))
        assert allocator.allocated == sum(block.size for block, _ in live) <= allocator.reserved
        most = max(most, allocator.allocated)
    assert allocator.peak_allocated == most
    reserved = allocator.reserved
    for block, _ in live:
        allocator.release(block)
    assert allocator.allocated == 0
    free = [size for blocks in allocator._free.values() for size, *_ in blocks]
    assert sum(free) == reserved


def test_reserved_by_events():
    assert reserved_by([(0, 6 * MIB), (1, 6 * MIB), (0, 0), (2, 5 * MIB)]) == (12 * MIB, 20 * MIB, 0)


def test_memory_that_is_reused_is_freed_once():
    first = Allocation(100, 0, "a", "", reused=True)
    second = Allocation(100, 1, "b", "", reuses=True)
    changes = [(0, first, True), (1, first, False), (1, second, True), (2, second, False)]
    assert use_of_step(changes, lambda this: "temporaries", 0, len(changes)).blocks == [(0, 100), (0, 0)]
