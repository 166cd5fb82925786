"""Reports local tensors of DTensors and their specs while AOTAutograd traces."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dtensor.rules.sharding_decisions import forget_decisions
from dtensor_compile.compat.patches import needs, patch

_BEGIN = patch("torch.fx.experimental.proxy_tensor:ProxyTorchDispatchMode.__enter__", "self")
_UNWRAP = patch("torch.distributed.tensor._dispatch:OpDispatcher.unwrap_to_op_info", "self op_call args kwargs")
_FLATTEN = patch("torch.distributed.tensor:DTensor.__tensor_flatten__", "self")
_UNFLATTEN = patch(
    "torch.distributed.tensor:DTensor.__tensor_unflatten__", "inner_tensors flatten_spec outer_size outer_stride"
)
_TO_LOCAL = patch("torch.distributed.tensor._api:_ToTorchTensor.forward", "ctx input grad_placements ...")


@needs(
    "specs of local tensors between redistributions",
    _BEGIN,
    _UNWRAP,
    _FLATTEN,
    _UNFLATTEN,
    _TO_LOCAL,
    without="passes move fewer redistributions, and more bytes are sent",
    upstream="not reported: an extension point that only a backend which moves redistributions needs",
    remove_when="nodes of DTensor operators carry the specs of their local tensors",
)
@contextlib.contextmanager
def locals_hook(on_local: Callable[[torch.Tensor, DTensorSpec], None]) -> Iterator[None]:
    """While active, calls ``on_local(local, spec)`` for DTensors that this thread passes to operators or unwraps.

    Arguments of an operator are reported when torch decides on a sharding, which it does once for equal specs: the
    first time after a trace begins, because torch's cache of decisions is cleared then. So all ranks report the same,
    whatever ran on them before.
    """
    begun: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(stock: Any, self: ProxyTorchDispatchMode) -> Any:
        if self.tracer not in begun:  # the mode of a trace may be entered again
            begun.add(self.tracer)
            forget_decisions()
        return stock(self)

    def unwrap(stock: Any, self: OpDispatcher, op_call: Any, args: Any, kwargs: Any) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, DTensor):
                on_local(value._local_tensor, value._spec)
        return stock(self, op_call, args, kwargs)

    def to_local(stock: Any, ctx: Any, value: DTensor, *rest: Any) -> torch.Tensor:
        local = stock(ctx, value, *rest)
        on_local(value._local_tensor, value._spec)
        on_local(local, value._spec)
        return local

    def flatten(stock: Any, self: DTensor) -> Any:
        on_local(self._local_tensor, self._spec)
        return stock(self)

    def unflatten(stock: Any, *args: Any) -> DTensor:
        made = stock(*args)
        on_local(made._local_tensor, made._spec)
        return made

    with (
        patched(_BEGIN, begin),
        patched(_UNWRAP, unwrap),
        patched(_FLATTEN, flatten),
        patched(_UNFLATTEN, unflatten),
        patched(_TO_LOCAL, to_local),
    ):
        yield
