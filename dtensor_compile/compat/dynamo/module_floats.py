"""Floats of modules (``eps``, ``p``, ``norm_type``) are constants until they have changed, even under ``dynamic=True``.

torch treats integers of modules this way. With ``dynamic=True`` it makes any float symbolic: an input of the graph.
After AOTAutograd has traced forward and backward, such a symbol can become a tensor only where it is added or
multiplied; otherwise torch starts over from Dynamo, with a constant. An operator with such a float has no hash either,
so its placements are decided anew in each layer. A float that does change costs one recompilation and is symbolic then,
as without ``dynamic=True``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo import config
from torch._dynamo.variables.builder import VariableBuilder

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.trackers.tracker_tools import VariableTracker
from dtensor_compile.compat.patches import hook, needs, patch


def _of_module(builder: VariableBuilder) -> bool:
    source = builder.source.guard_source
    source = source() if callable(source) else source  # a method in older releases
    return source.is_unspecialized_nn_module() or source.is_fsdp_module()


_WRAP = patch("torch._dynamo.variables.builder:VariableBuilder.wrap_symfloat", "self value")


@needs(
    "constant floats of modules under dynamic=True",
    _WRAP,
    hook("torch._dynamo.config:automatic_dynamic_shapes"),
    hook("torch._dynamo.config:assume_static_by_default"),
    hook("torch._guards:GuardSource.is_unspecialized_nn_module", "self"),
    without="a program with such floats may be traced twice, as in torch",
    upstream="#187882",
    remove_when="Dynamo specializes floats of modules under dynamic=True",
)
@contextlib.contextmanager
def floats_of_modules_are_numbers() -> Iterator[None]:
    """While active, a float of a module is a constant of the graph, under a guard, unless it has changed before."""

    def wrap(stock: Any, self: VariableBuilder, value: float) -> VariableTracker:
        # Without automatic dynamic shapes, each change would recompile.
        if not config.automatic_dynamic_shapes or not _of_module(self):
            return stock(self, value)
        with config.patch(assume_static_by_default=True):
            return stock(self, value)

    with patched(_WRAP, wrap):
        yield
