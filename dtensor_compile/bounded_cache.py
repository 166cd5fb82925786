"""A dict with a limit, for what is found out once in a process."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that forgets all it has before an item would be one too many.

    What is kept is found again at the price of the first time; which items go is no matter where the limit is never met
    but by programs that make new ones all the time. Items are set one by one (``cache[key] = value``): `update` and
    `setdefault` do not ask for the limit.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)
