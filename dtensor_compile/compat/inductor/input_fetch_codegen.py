"""Generates code that reads all inputs of a graph in one walk, in C++ (`native.loader`).

    torch:  a chain of Python instructions for each input; ``state[key]`` calls ``Tensor.__hash__``, a Python function
    here:   tmp_1, tmp_2, ... = fetch(optimizer, parameters)

The same attributes and items are read, each once, before the first graph of the compiled code runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch._dynamo.bytecode_transformation import create_call_function, create_instruction
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.source import (
    AttrSource,
    ChainedSource,
    ConstDictKeySource,
    DictGetItemSource,
    GetItemSource,
    GradSource,
    NNModuleSource,
    OptimizerSource,
)

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Source, constant_source
from dtensor_compile.compat.patches import needs, patch
from dtensor_compile.native.loader import READS, native

#: With fewer inputs, the call costs more than it saves.
FEWEST = 8


_CALL = patch("torch._dynamo.codegen:PyCodegen.make_call_generated_code", "self fn_name")


@needs(
    "inputs of a graph read in one walk in C++",
    _CALL,
    without="calls are as slow as under torch",
    upstream="#161783",
    remove_when="Dynamo reads the inputs of a graph in one C++ walk",
)
@contextlib.contextmanager
def inputs_in_one_walk() -> Iterator[None]:
    """While active, code that Dynamo generates for our backend reads inputs of graphs in one walk."""

    def call_graph(stock: Any, self: PyCodegen, name: str) -> None:
        if not self.tx.export and native() is not None:
            _fetch(self, [arg.source for arg in self.tx.output.graphargs if arg.source is not None])
        stock(self, name)

    with patched(_CALL, call_graph):
        yield


def _fetch(codegen: PyCodegen, sources: Sequence[Source]) -> None:
    """Emits code that reads `sources`, and registers the resulting variables with `codegen`."""
    wanted = [source for source in dict.fromkeys(sources) if _last_read(source) is not None]
    if len(wanted) < FEWEST:
        return
    plan = Plan(wanted)
    fetch = native().Fetch(len(plan.roots), plan.reads())
    codegen.add_push_null(lambda: codegen(constant_source(codegen.tx, "fetch", fetch)))
    codegen.foreach(plan.roots)
    codegen.extend_output(create_call_function(len(plan.roots), False))
    codegen.append_output(create_instruction("UNPACK_SEQUENCE", arg=len(wanted)))
    for source in plan.order():
        codegen.add_cache(source)
    codegen.clear_tos()


class Plan:
    """Reads that lead to `wanted`, each done once.

    Attributes:
        roots: sources to start from; the given ones, and others as needed.
    """

    def __init__(self, wanted: Sequence[Source], roots: Sequence[Source] = ()) -> None:
        self.roots = list(map(without_wrappers, roots))
        self._wanted = set(wanted)
        self._depth: dict[Source, int] = {}
        for source in wanted:
            self._add(source)
        # Reads by position from one dict are adjacent and in order, so that the dict is walked once.
        dicts = {base: i for i, base in enumerate(dict.fromkeys(_read(source)[0] for source in self._depth))}

        def order(source: Source) -> tuple[int, int, int]:
            base, step, key = _read(source)
            return (
                (self._depth[source], dicts[base], key)
                if step in ("value_at", "key_at")
                else (self._depth[source], -1, -1)
            )

        self._reads = sorted(self._depth, key=order)

    def order(self) -> list[Source]:
        """`wanted`, in the order of the results."""
        return [source for source in self._reads if source in self._wanted]

    def reads(self) -> list[tuple[int, int, Any, bool]]:
        """The plan for ``Fetch``."""
        places, plan = self.places(), []
        for source in self._reads:
            base, step, key = _read(source)
            plan.append((places[base], READS[step], key, source in self._wanted))
        return plan

    def places(self) -> dict[Source, int]:
        """Index of each root and read."""
        return {root: -1 - i for i, root in enumerate(self.roots)} | {source: i for i, source in enumerate(self._reads)}

    def _add(self, source: Source) -> int:
        """Adds the reads that lead to `source`; returns their number from a root."""
        if source in self.roots:
            return 0
        last = _last_read(source)
        if last is None:
            self.roots.append(source)
            return 0
        if source not in self._depth:
            self._depth[source] = self._add(last[0]) + 1
        return self._depth[source]


def _last_read(source: Source) -> tuple[Source, str, Any] | None:
    """The base, kind and key of the last read that leads to `source`; None if it is no attribute, item or gradient."""
    if not isinstance(source, ChainedSource):
        return None
    base = without_wrappers(source.base)
    written_by = type(source).reconstruct  # subclasses differ in their guards
    if isinstance(source, (AttrSource, GradSource)) and written_by in (AttrSource.reconstruct, GradSource.reconstruct):
        return base, "gradient" if source.member == "grad" else "attribute", source.member
    if isinstance(source, GetItemSource) and written_by is GetItemSource.reconstruct and not source.index_is_slice:
        return base, "item", source.index
    if isinstance(source, DictGetItemSource) and written_by is DictGetItemSource.reconstruct:
        if not isinstance(source.index, ConstDictKeySource):
            return base, "item", source.index
        if source.index.base == source.base:
            return base, "value_at", source.index.index
    if isinstance(source, ConstDictKeySource):
        return base, "key_at", source.index
    return None


def _read(source: Source) -> tuple[Source, str, Any]:
    """`_last_read` of a source that is not a root."""
    last = _last_read(source)
    assert last is not None
    return last


def without_wrappers(source: Source) -> Source:
    """The source without torch's markers for modules and optimizers, which read nothing."""
    while getattr(type(source), "reconstruct", None) in _TRANSPARENT:
        source = cast("ChainedSource", source).base
    return source


_TRANSPARENT = (NNModuleSource.reconstruct, OptimizerSource.reconstruct)
