"""Who hears of the local tensors of DTensors, and of what they are globally, while AOTAutograd traces."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _ToTorchTensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_compile.compat.dtensor.sharding import forget_decisions
from dtensor_compile.compat.hooks import hook, needs


@needs(
    "what local tensors are globally, between redistributions",
    hook("torch.fx.experimental.proxy_tensor:ProxyTorchDispatchMode.__enter__", "self"),
    hook("torch.distributed.tensor._dispatch:OpDispatcher.unwrap_to_op_info", "self op_call args kwargs"),
    hook("torch.distributed.tensor:DTensor.__tensor_flatten__", "self"),
    hook("torch.distributed.tensor:DTensor.__tensor_unflatten__", "inner_tensors flatten_spec outer_size outer_stride"),
    hook("torch.distributed.tensor._api:_ToTorchTensor.forward", "ctx input grad_placements ..."),
    without="passes move fewer redistributions, and more bytes are sent",
)
@contextlib.contextmanager
def locals_hook(tell: Callable[[torch.Tensor, DTensorSpec], None]) -> Iterator[None]:
    """While it is entered, ``tell(local, spec)`` hears of DTensors that this thread hands to operators or takes apart.

    Of the arguments of an operator it hears where torch decides on a sharding, which it does once for equal specs: the
    first time after a trace begins, as torch's cache of decisions is empty then. So all ranks hear the same, whatever
    ran before on each."""
    owner, unwrap, flatten = threading.get_ident(), OpDispatcher.unwrap_to_op_info, DTensor.__tensor_flatten__
    unflatten = DTensor.__tensor_unflatten__
    to_local, enter = _ToTorchTensor.forward, ProxyTorchDispatchMode.__enter__
    begun: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self: ProxyTorchDispatchMode) -> Any:
        if threading.get_ident() == owner and self.tracer not in begun:  # a trace is left and entered again
            begun.add(self.tracer)
            forget_decisions()
        return enter(self)

    def unwrap_to_op_info(self: OpDispatcher, op_call: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == owner:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, DTensor):
                    tell(value._local_tensor, value._spec)
        return unwrap(self, op_call, args, kwargs)

    def forward(ctx: Any, value: DTensor, *rest: Any) -> torch.Tensor:
        local = to_local(ctx, value, *rest)
        if threading.get_ident() == owner:
            tell(value._local_tensor, value._spec)
            tell(local, value._spec)
        return local

    def tensor_flatten(self: DTensor) -> Any:
        if threading.get_ident() == owner:
            tell(self._local_tensor, self._spec)
        return flatten(self)

    def tensor_unflatten(*args: Any) -> DTensor:
        made = unflatten(*args)
        if threading.get_ident() == owner:
            tell(made._local_tensor, made._spec)
        return made

    with (
        mock.patch.object(ProxyTorchDispatchMode, "__enter__", begin),
        mock.patch.object(OpDispatcher, "unwrap_to_op_info", unwrap_to_op_info),
        mock.patch.object(DTensor, "__tensor_flatten__", tensor_flatten),
        mock.patch.object(DTensor, "__tensor_unflatten__", staticmethod(tensor_unflatten)),
        mock.patch.object(_ToTorchTensor, "forward", staticmethod(forward)),
    ):
        yield
