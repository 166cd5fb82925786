"""A call of a block whose graph is compiled once, as one operator in the graph of the program.

    call_block(Tensor[] inputs, str block) -> Tensor[]
    call_drawing_block(Tensor[] inputs, str block) -> Tensor[]     where the graph draws random numbers

The operators have no kernel: they stand for their graphs while AOTAutograd traces the program, and become calls of
these (``invoke_subgraph``) in the joint graph (`dtensor_compile.lowering.call_blocks`). Their results are new tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_library = torch.library.Library("dtensor_compile", "FRAGMENT")


@dataclass(frozen=True)
class BlockGraph:
    """The graph of a block over local tensors, of its forward or of its backward pass.

    Attributes:
        module: of the graph; takes tensors, returns a tuple of tensors, none of which aliases another or an input.
        results: the fake values of these.
        draws: whether it draws random numbers.
        of: Dynamo's name of the module of the first call.
    """

    module: torch.fx.GraphModule
    results: tuple[torch.Tensor, ...]
    draws: bool
    of: str


#: The graphs by name, for each program that is being traced; the last one counts.
_known: list[dict[str, BlockGraph]] = []


@contextlib.contextmanager
def block_graphs() -> Iterator[dict[str, BlockGraph]]:
    """While active, the graphs by the names in calls; add to it."""
    _known.append({})
    try:
        yield _known[-1]
    finally:
        _known.pop()


def graph_of_block(name: str) -> BlockGraph:
    """The graph of that name."""
    return _known[-1][name]


def call_graph_of_block(inputs: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """The results of the graph of that name, as one operator."""
    return (call_drawing_block_op if graph_of_block(name).draws else call_block_op)(list(inputs), name)


def _results(inputs: list[torch.Tensor], block: str) -> list[torch.Tensor]:
    return [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        for value in graph_of_block(block).results
    ]


def _kernel(inputs: list[torch.Tensor], block: str) -> list[torch.Tensor]:
    raise NotImplementedError("a call of a block has no kernel")


def _define(name: str, *tags: torch.Tag) -> torch._ops.OpOverload:
    schema = f"{name}(Tensor[] inputs, str block) -> Tensor[]"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, _kernel, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _library._register_fake(name, _results)
    return getattr(torch.ops.dtensor_compile, name).default


call_block_op = _define("call_block")
call_drawing_block_op = _define("call_drawing_block", torch.Tag.nondeterministic_seeded)
#: Both.
CALLS_OF_BLOCKS = (call_block_op, call_drawing_block_op)
