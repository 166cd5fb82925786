"""Seconds of operators measured on the device at hand, for ``options={"kernel_costs": "measured"}``.

In: a node. Out: seconds, or None if the estimate of `dtensor_compile.topology.links.compute_seconds` is used: for
operators without a formula of floating-point operations in torch (all but matmuls, convolutions, attention), since
fused loops are bound by memory and are estimated well; for those that draw random numbers, which must not be drawn
twice; and if the device is missing or has no memory left.

An operator runs on tensors with its actual sizes, strides and dtypes; each distinct one takes a few hundredths of a
second. Ranks may measure differently: seconds decide what runs between two starts of collectives, never their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.benchmark import Timer

from dtensor_compile.compat import pytree
from dtensor_compile.compat.aot.fx import without_modes
from dtensor_compile.compat.aot.random_state import draws, takes_random_state
from dtensor_compile.compat.aot.symbolic.shapes import size_hint, size_hints
from dtensor_compile.graph.arguments import fake_arguments, operator_of
from dtensor_compile.graph.node_costs import flops_of

#: Seconds for which one operator is repeated.
REPEATED = 0.02

_measured: dict[str, float | None] = {}


def measured_seconds(node: torch.fx.Node) -> float | None:
    """Seconds of the operator of `node`, measured once in a process; None if it is not measured."""
    if not flops_of(node) or _draws(node):
        return None
    target = node.target
    values = fake_arguments(node)
    key = f"{target} {[_described(leaf) for leaf in pytree.tree_leaves(values)]}"
    if key not in _measured:
        _measured[key] = _measure(target, *values)
    return _measured[key]


def not_measured() -> list[str]:
    """The operators of this process whose kernels could not be run, with their arguments; they are estimated."""
    return [key for key, seconds in _measured.items() if seconds is None]


def _draws(node: torch.fx.Node) -> bool:
    if not draws(node.target):
        return False
    if takes_random_state(node.target):
        return True
    schema = operator_of(node)._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args)) | node.kwargs
    default = next((argument.default_value for argument in schema if argument.name == "dropout_p"), None)
    return bool(given.get("dropout_p", default) != 0.0)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return size_hint(leaf) if isinstance(leaf, torch.SymInt) else leaf
    return size_hints(leaf.shape), size_hints(leaf.stride()), leaf.dtype, leaf.device


def _measure(target: Any, args: Any, kwargs: Any) -> float | None:
    try:
        with without_modes(), torch.no_grad():
            args, kwargs = pytree.tree_map(_real_argument, (args, kwargs))
            timer = Timer(
                "run()", globals={"run": lambda: target(*args, **kwargs)}, num_threads=torch.get_num_threads()
            )
            return timer.blocked_autorange(min_run_time=REPEATED).median
    except (RuntimeError, AssertionError, NotImplementedError):  # no such device, no memory, no kernel for it
        return None


def _real_argument(leaf: Any) -> Any:
    if isinstance(leaf, torch.SymInt):
        return size_hint(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape, strides = size_hints(leaf.shape), size_hints(leaf.stride())
    made = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
    return made.fill_(1) if made.is_floating_point() else made.zero_()  # no denormal numbers, which are slow
