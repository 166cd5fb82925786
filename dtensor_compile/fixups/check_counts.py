"""Adds a check to a ``bincount`` whose length the program assumes to be known.

    before   n: "i64[4]" = torch.bincount(ids, minlength=4)              the program reads the counts as a list of 4
    after    n: "i64[4]" = dtensor_compile.bincount(ids, None, 4)        raises if an id is 4 or more

Results are the same for ids below the length. For others eager's result is longer, and the traced program would leave
counts out, which is an error. (While tracing, the length is assumed to be ``minlength``, see
``compat/dynamo/data_dependent_scalars.py``; torch's own check of that is folded away once the length is a number.)

Upstream: not reported: follows from this package's own assumption on the length; the data-dependent length is the
    matter of https://github.com/pytorch/pytorch/issues/192343 (`torch.bincount` causes `D2H` and potentially breaks
    `cuda graph` and `torch.compile` and `overlap compute`).
Releases: 2.11 to 2.15.
Remove when: the length of bincount(minlength=n) can be assumed to be n with a check at run time that is kept.
"""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dtensor_compile.compat.distributed.functional_collectives import keep_in_place

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_library.define("bincount(Tensor ids, Tensor? weights, int length) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
counts_op = torch.ops.dtensor_compile.bincount.default


def _bincount(ids: torch.Tensor, weights: torch.Tensor | None, length: int) -> torch.Tensor:
    counts = torch.bincount(ids, weights, length)
    if counts.shape[0] != length:
        raise RuntimeError(
            f"torch.bincount(..., minlength={length}) met the value {counts.shape[0] - 1}. The compiled program reads "
            f"the counts as a list of {length}: give a larger minlength, or call it outside of the compiled function."
        )
    return counts


def _fake_bincount(ids: torch.Tensor, weights: torch.Tensor | None, length: int) -> torch.Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return ids.new_empty(length, dtype=dtype)


_library.impl("bincount", _bincount, "CompositeExplicitAutograd")
_library._register_fake("bincount", _fake_bincount)
keep_in_place(counts_op)


def check_counts(gm: torch.fx.GraphModule) -> None:
    """Replaces every ``bincount`` in a Dynamo graph whose length was assumed to be its ``minlength``.

    It runs on this graph because later unused counts are removed, and the assumed length is a number.
    """
    for node in gm.graph.nodes:
        if node.target not in (torch.bincount, "bincount"):
            continue
        given = dict(zip(("input", "weights", "minlength"), node.args)) | node.kwargs
        counts, minlength = node.meta["example_value"], given.get("minlength", 0)
        if isinstance(minlength, int) and statically_known_true(counts.shape[0] == minlength):
            node.op, node.target = "call_function", counts_op
            node.args, node.kwargs = (given["input"], given.get("weights"), minlength), {}
    gm.recompile()
