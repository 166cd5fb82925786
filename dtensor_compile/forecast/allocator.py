"""Simulates torch's caching allocator: memory as ``nvidia-smi`` shows it, and allocations that fail by fragmentation.

Sizes and rules are those of torch's native allocator (``c10/cuda/CUDACachingAllocator.cpp``), for one stream:

    a size is rounded up to 512 bytes
    up to 1 MiB comes from segments of 2 MiB; below 10 MiB from segments of 20 MiB; larger ones from segments of their
    own, rounded up to 2 MiB
    the smallest free block that is large enough is taken, and split if more than 512 bytes (small ones) or 1 MiB (large
    ones) are left
    freed blocks are merged with free neighbours of their segment; segments are kept
    where a new segment does not fit into the device, those without a block in use are given back to it first
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIN_BLOCK = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT, LARGE_ROUND = 10 << 20, 20 << 20, 2 << 20


@dataclass(eq=False)
class _Block:
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Simulates the allocator.

    Attributes:
        allocated, peak_allocated: bytes of blocks in use, now and at most.
        reserved, peak_reserved: bytes of all segments.
        releases: how often segments were given back to the device.

    Args:
        capacity: bytes of the device; None: as many as are asked for. What does not fit is reserved nevertheless.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.allocated = self.peak_allocated = self.reserved = self.peak_reserved = self.releases = 0
        self._capacity = capacity
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._number = 0
        self._numbers: dict[_Block, int] = {}

    def allocate(self, size: int) -> _Block:
        """A block of at least `size` bytes."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            block = free.pop(place)[2]
            del self._numbers[block]
            block.free = False
        else:
            block = _Block(_segment(size), small)
            if self._capacity is not None and self.reserved + block.size > self._capacity:
                self._give_back()
            self.reserved += block.size
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL:
            remaining = _Block(rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remaining
            block.after, block.size = remaining, size
            self._give(remaining)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: _Block) -> None:
        """Frees a block."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                other.free = False
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
                block.size += other.size
        self._give(block)

    def _give_back(self) -> None:
        """Gives the segments without a block in use back to the device."""
        whole = [
            block for free in self._free.values() for *_, block in free if block.before is None and block.after is None
        ]
        for block in whole:
            self._take(block)
            self.reserved -= block.size
        self.releases += bool(whole)

    def _give(self, block: _Block) -> None:
        block.free, self._number = True, self._number + 1
        self._numbers[block] = self._number
        bisect.insort(self._free[block.small], (block.size, self._number, block))

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, self._numbers.pop(block)))]


def _segment(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // LARGE_ROUND) * LARGE_ROUND


class Reserved(NamedTuple):
    """Peak bytes in use, peak bytes of the allocator's segments, and how often it gave segments back."""

    allocated: int
    segments: int
    releases: int


def reserved_by(sizes: Iterable[tuple[int, int]], capacity: int | None = None) -> Reserved:
    """What the allocator makes of allocations.

    Args:
        sizes: events in order: number and size of an allocation, or its number and 0 where it is freed.
        capacity: as `CachingAllocator` takes it.
    """
    allocator, blocks = CachingAllocator(capacity), dict[int, _Block]()
    for number, size in sizes:
        if size:
            blocks[number] = allocator.allocate(size)
        elif number in blocks:
            allocator.release(blocks.pop(number))
    return Reserved(allocator.peak_allocated, allocator.peak_reserved, allocator.releases)
