"""Modules of a model that are compiled by themselves, by ``module.compile()`` or ``torch.compile(module)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from dtensor_compile.compat.patches import feature, hook

_PARTS = feature(
    "models whose parts are compiled one by one, in the report",
    hook("torch.nn.modules.module:Module._compiled_call_impl"),
    hook("torch._dynamo.eval_frame:OptimizedModule._initialize"),
    without="the report is of the whole model",
)

#: Call a module that ``torch.compile`` wrapped, and read an attribute that it has from the wrapped one.
CALL_WRAPPED, READ_WRAPPED = OptimizedModule.__call__, OptimizedModule.__getattr__


def compiled_parts(model: Callable[..., Any]) -> dict[str, torch.nn.Module]:
    """The modules inside of `model` that are compiled by themselves, and not inside of another one, by name."""
    if not isinstance(model, torch.nn.Module) or not _PARTS.works():
        return {}
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{part}.") for part in found)
        if name and not inside and (isinstance(module, OptimizedModule) or module._compiled_call_impl is not None):
            found[name] = module
    return found


@contextlib.contextmanager
def parts_compiled(model: Callable[..., Any], how: Mapping[str, Any] | None) -> Iterator[None]:
    """While active, the parts of `model` that are compiled by themselves are compiled in another way.

    Args:
        how: arguments for ``torch.compile``; None: they are compiled with their callers (Dynamo inlines wrapped ones).
    """
    parts = compiled_parts(model).values()
    before = [part.forward if isinstance(part, OptimizedModule) else part._compiled_call_impl for part in parts]
    for part in parts:
        if isinstance(part, OptimizedModule):
            part.forward = torch.compile(part._orig_mod.__call__, **how) if how is not None else part.forward
        elif how is not None:
            part.compile(**how)
        else:
            part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, compiled in zip(parts, before, strict=True):
            setattr(part, "forward" if isinstance(part, OptimizedModule) else "_compiled_call_impl", compiled)
