"""torch's private ``torch.utils._pytree``: flattens, maps and rebuilds nested containers; and tensors in tensors."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tensor_and_inner", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]


def tensor_and_inner(value: Any) -> Iterator[torch.Tensor]:
    """A tensor and, of a subclass that wraps tensors (a DTensor), those that it wraps; nothing for another value."""
    if isinstance(value, torch.Tensor):
        yield value
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from tensor_and_inner(getattr(value, name))
