"""A ``bincount`` whose length the program took for known checks it.

    before   n: "i64[4]" = aten.bincount(ids, None, 4)                   the program read the counts as a list of 4
    after    n: "i64[4]" = dtensor_compile.bincount(ids, None, 4)        raises where an id is 4 or more

The same for ids below the length. For others eager's result is longer, and the program that was traced would leave counts out: an
error says so. (While it is traced, a length that the program asks for is ``minlength``, see ``compat/data_dependent.py``; torch's
own check of that is folded away as soon as the length is a number.)
"""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_library.define("bincount(Tensor ids, Tensor? weights, int length) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
counts_op = torch.ops.dtensor_compile.bincount.default


def _bincount(ids: torch.Tensor, weights: torch.Tensor | None, length: int) -> torch.Tensor:
    counts = torch.bincount(ids, weights, length)
    if counts.shape[0] != length:
        raise RuntimeError(
            f"torch.bincount(..., minlength={length}) met the value {counts.shape[0] - 1}. The compiled program reads the counts "
            f"as a list of {length}: give a larger minlength, or call it outside of the compiled function."
        )
    return counts


def _fake_bincount(ids: torch.Tensor, weights: torch.Tensor | None, length: int) -> torch.Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return ids.new_empty(length, dtype=dtype)


_library.impl("bincount", _bincount, "CompositeExplicitAutograd")
_library._register_fake("bincount", _fake_bincount)


def check_counts(graph: torch.fx.Graph) -> None:
    """Replaces every ``bincount`` whose length was taken for its ``minlength``."""
    for node in graph.find_nodes(op="call_function", target=aten.bincount.default):
        ids, weights, minlength = (*node.args, *(None, 0)[len(node.args) - 1 :])
        counts = node.meta["val"]
        if statically_known_true(counts.shape[0] == minlength):
            node.target, node.args, node.kwargs = counts_op, (ids, weights, minlength), {}
            node.meta["val"] = counts.new_empty(minlength)
            node.meta.pop("unbacked_bindings", None)  # it binds no symbol any more
