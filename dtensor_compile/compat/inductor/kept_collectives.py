"""Text about the collectives of a compiled graph, kept with it in Inductor's cache for the process that finds it.

A rank that finds its graph does not lower it, and could not announce its collectives to other ranks, which may have to
compile it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

_SAVE = patch("torch._inductor.codecache:FxGraphCache._save_graph", "key compiled_graph ...")
_FINISH = patch("torch._inductor.output_code:CompiledFxGraph.post_compile", "self ...")
#: Attribute of a graph in the cache.
_TEXT = "_dtensor_compile_collectives"


@needs(
    "collectives of cached graphs",
    _SAVE,
    _FINISH,
    without="a rank that finds its graph in a cache does not compare it with those that others compile",
    upstream="not reported: torch compares hits of ranks, but not graphs",
    remove_when="cached graphs can hold data of the backend",
)
@contextlib.contextmanager
def collectives_kept(text: Callable[[], str], found: Callable[[str], None]) -> Iterator[None]:
    """While active, graphs that this thread saves in Inductor's cache are kept with a text. The scope may be nested.

    Args:
        text: returns that of the graph that was lowered last.
        found: called with the text of a graph that comes from the cache and will run.
    """

    def save(stock: Any, key: str, compiled_graph: Any, *args: Any) -> Any:
        if _TEXT in vars(compiled_graph):
            return stock(key, compiled_graph, *args)
        setattr(compiled_graph, _TEXT, text())  # it is copied to disk with its attributes
        try:
            return stock(key, compiled_graph, *args)
        finally:
            delattr(compiled_graph, _TEXT)

    def finish(stock: Any, self: Any, *args: Any) -> Any:
        kept = vars(self).pop(_TEXT, None)
        if kept is not None:
            found(kept)
        return stock(self, *args)

    with patched(_SAVE, save), patched(_FINISH, finish):
        yield
