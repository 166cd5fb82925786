"""Lines of ours at the head of the code that Inductor generates, which run when it is loaded, in any process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

if TYPE_CHECKING:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

#: Python statements that the code of a graph needs before it runs.
Header = Callable[[torch.fx.GraphModule], Sequence[str]]

_HEADER = patch("torch._inductor.codegen.wrapper:PythonWrapperCodegen.write_header", "self")


@needs(
    "process groups of rank-free graphs",
    _HEADER,
    without="compiled rank-free graphs cannot be loaded in another process",
    upstream="not reported: torch reads process groups from the meshes of the program",
    remove_when="a process group has a name that is the same on every rank and in every job",
)
@contextlib.contextmanager
def begins_with(header: Header) -> Iterator[None]:
    """While active, code that Inductor generates on this thread begins with these statements."""

    def write(stock: Any, self: PythonWrapperCodegen) -> None:
        from torch._inductor.virtualized import V

        stock(self)
        for line in header(cast("torch.fx.GraphModule", V.graph.module)):
            self.header.writeline(line)

    with patched(_HEADER, write):
        yield
