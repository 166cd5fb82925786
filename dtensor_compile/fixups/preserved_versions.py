"""Preserves the versions of inputs that are written to only in ``torch.autograd._unsafe_preserve_version_counter``.

    with torch.autograd._unsafe_preserve_version_counter(x):
        x.mul_(2)                                             # eager: x._version is what it was

A compiled call copies the new values into `x` once, after its graph has run, which increments the version.

Upstream: not reported: _unsafe_preserve_version_counter is private, and FSDP is its one user; Dynamo's support is
    https://github.com/pytorch/pytorch/pull/121086 ([dynamo] Support _unsafe_set_version_counter; closed).
Releases: 2.11 to 2.15.
Remove when: AOTAutograd's copy into a mutated input leaves its version where all traced writes did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dtensor_compile.compat.dynamo.trackers.version_counters import memory_named, preserved_by, set_versions
from dtensor_compile.fixups.aliased_inputs import writes_in_place


def keep_versions(gm: torch.fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, the code of `gm`, which preserves versions of inputs if all writes of `gm` do."""
    preserved: set[int | None] = set()
    counted: set[int | None] = {None}
    for node in filter(writes_in_place, gm.graph.nodes):
        memory = {memory_named(argument.meta.get("example_value")) for argument in node.all_input_nodes}
        preserved |= memory & preserved_by(node)
        counted |= memory - preserved_by(node)
    inputs = gm.graph.find_nodes(op="placeholder")
    kept = [i for i, node in enumerate(inputs) if memory_named(node.meta.get("example_value")) in preserved - counted]
    if not kept:
        return compiled

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        tensors = [args[i] for i in kept if not args[i].is_inference()]
        versions = [tensor._version for tensor in tensors]
        results = compiled(*args)
        set_versions(tensors, versions)
        return results

    return run
