"""Graphs over symbolic sizes are kept in AOTAutograd's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

_SUBCLASS = patch("torch._functorch._aot_autograd.schemas:SubclassCreationMeta.make_runtime_safe", "self")
_GRAPH = patch("torch._functorch._aot_autograd.schemas:ViewAndMutationMeta.make_runtime_safe", "self")


@needs(
    "graphs over DTensors with symbolic sizes are cached",
    _SUBCLASS,
    _GRAPH,
    without="such graphs are compiled anew in each process",
    upstream="not reported: an entry of the cache has symbols in what __tensor_flatten__ says of a DTensor",
    remove_when="make_runtime_safe removes symbols from the metadata of a subclass as from its outer sizes",
)
@contextlib.contextmanager
def sizes_can_be_saved() -> Iterator[None]:
    """While active, what AOTAutograd keeps of a DTensor for run time has no symbols.

    torch removes those of the outer sizes, which are arguments at run time, and leaves the same ones in the tensor's
    metadata, of which DTensor then reads placements, shard order and dtype alone, and in that of traced tangents, which
    nothing reads. A symbol holds its ShapeEnv, which cannot be pickled: AOTAutograd's cache warns, and keeps nothing.
    """

    def subclass(stock: Any, meta: Any) -> None:
        stock(meta)
        if issubclass(meta.original_subclass_type, DTensor):  # others may read theirs
            meta.meta = _without_symbols(meta.meta)

    def graph(stock: Any, meta: Any) -> None:
        stock(meta)
        meta.traced_tangent_metas = [_without_symbols(tangent) for tangent in meta.traced_tangent_metas]

    with patched(_SUBCLASS, subclass), patched(_GRAPH, graph):
        yield


def _without_symbols(value: Any) -> Any:
    """The value with None for each symbolic size in its tuples, as torch has for outer sizes.

    A ``torch.Size`` that has one becomes a tuple; named tuples keep their types.
    """
    if isinstance(value, torch.SymInt):
        return None
    if not isinstance(value, tuple):
        return value
    parts = [_without_symbols(part) for part in value]
    if all(part is old for part, old in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
