"""Checks the sizes and strides of all inputs of a graph at once; called by code that Inductor generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dtensor_compile.native.loader import native

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layouts(expected: Sequence[Layout], complain: Callable[..., None]) -> Callable[[tuple[torch.Tensor, ...]], None]:
    """A function that checks a tuple of tensors; raises what `complain` raises for a mismatch.

    Args:
        expected: sizes and strides of each tensor, in elements.
        complain: ``complain(tensor, sizes, strides, "input")`` raises if the tensor has another layout.
    """
    if native() is not None:
        return native().Layouts(tuple(expected), complain)

    def check(tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor, (sizes, strides) in zip(tensors, expected):
            complain(tensor, sizes, strides, "input")

    return check
