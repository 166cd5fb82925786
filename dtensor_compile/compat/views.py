"""Results that are views of an input or of another result, as AOTAutograd makes them anew when the graph has run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd import runtime_wrappers
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def views_of_dtensors() -> Iterator[None]:
    """While it is entered, code that AOTAutograd builds on this thread can return a view of a DTensor whose sizes are symbolic.

    Where sizes are numbers torch runs the view again on the base; otherwise it asks for ``as_strided`` of the base, which DTensor
    does not have. The function stays with the compiled code; torch's own is as it was.
    """
    owner, build = threading.get_ident(), runtime_wrappers._create_runtime_wrapper
    ours = functools.partial(_alias, runtime_wrappers.gen_alias_from_base)

    def build_ours(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        if threading.get_ident() != owner:
            return build(*args, **kwargs)
        with mock.patch.object(runtime_wrappers, "gen_alias_from_base", ours):
            return build(*args, **kwargs)

    with mock.patch.object(runtime_wrappers, "_create_runtime_wrapper", build_ours):
        yield


def _alias(
    stock: Callable[..., torch.Tensor],
    base: torch.Tensor,
    result: torch.Tensor,
    requires_grad: bool,
    views: Any = None,
    *,
    replay_views: bool,
) -> torch.Tensor:
    """The view of `base` that has the layout of `result`, which the graph returned."""
    again = replay_views and views is not None and not any(view.has_symbolic_inputs for view in views.sequence)
    if again or result._base is not None or not (isinstance(base, DTensor) and isinstance(result, DTensor)):
        return stock(base, result, requires_grad, views, replay_views=replay_views)
    like = result._local_tensor
    local = base.to_local() if requires_grad else base._local_tensor
    view = local.as_strided(like.shape, like.stride(), like.storage_offset())
    spec = result._spec
    return DTensor.from_local(view, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)
