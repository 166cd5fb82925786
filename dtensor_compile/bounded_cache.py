"""A dict with a size limit, for values that are computed once per process."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that is cleared before it would exceed its limit.

    Cleared values are recomputed. Which items are dropped does not matter, since only programs that keep creating new
    ones reach the limit. Set items one by one (``cache[key] = value``): `update` and `setdefault` do not enforce the
    limit.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)
