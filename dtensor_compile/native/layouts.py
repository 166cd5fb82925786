"""What the code that Inductor writes for us asks of the inputs of a graph, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dtensor_compile.native.loader import native

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layouts(expected: Sequence[Layout], complain: Callable[..., None]) -> Callable[[tuple[torch.Tensor, ...]], None]:
    """A function of a tuple of tensors; it asks `complain` about each that has other sizes and strides than `expected`
    says.
    """
    if native() is not None:
        return native().Layouts(tuple(expected), complain)

    def check(tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor, (sizes, strides) in zip(tensors, expected):
            complain(tensor, sizes, strides, "input")

    return check
