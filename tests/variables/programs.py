"""What the tests of trackers share: programs that are one expression, and their comparison with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtensor_compile.testing import make_mesh
from dtensor_compile.testing.parity import compare_values

NAMES = {
    "dist": dist, "torch": torch, "DeviceMesh": DeviceMesh, "DTensor": DTensor, "Partial": Partial,
    "Placement": Placement, "Replicate": Replicate, "Shard": Shard,
}  # fmt: skip


def assert_like_eager(
    function: Callable[..., Any],
    *argument_sets: Sequence[Any],
    graphs: int | None = None,
    fullgraph: bool = True,
    backend: Any = "dtensor",
    **options: Any,
) -> None:
    """Calls `function` eager and compiled, once per set of arguments, compares, and counts the graphs that this
    took.
    """
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(function, backend=backend, fullgraph=fullgraph, **options)
    for arguments in argument_sets:
        differences = compare_values("result", function(*arguments), run(*arguments))
        assert not differences, "\n".join(map(str, differences))
    if graphs is not None:
        assert counters["stats"]["unique_graphs"] == graphs


def assert_expression_like_eager(expression: str) -> None:
    """`expression` over a mesh (dims dp, tp), a group, a placement and a DTensor, in a program with a matrix
    product.
    """
    mesh = make_mesh((1, 2), ("dp", "tp"))
    group, placement = mesh.get_group("tp"), Shard(0)
    x = torch.arange(16.0).reshape(4, 4)
    d = DTensor.from_local(x + 1, mesh, [Shard(0), Replicate()])
    assert_like_eager(program(expression), (x, mesh, group, placement, d))


def program(expression: str) -> Callable[..., Any]:
    """The function that returns a product (so that there is a graph) and the expression."""
    names = dict(NAMES)
    exec(f"def f(x, mesh=None, group=None, placement=None, d=None):\n    return x @ x, {expression}", names)
    return names["f"]
