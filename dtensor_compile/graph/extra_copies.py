"""Copies that are kernels of their own: bytes that are written only to change a layout.

In: a lowered graph. Out: the nodes that copy (``clone``, ``cat``, ``constant_pad_nd``) and that a compiler cannot fuse:
their operand comes from outside of generated code (a matmul, a collective, an input) or is written for such a reader
anyway, and their readers are outside of it too (or outputs). A copy beside an elementwise operator or a reduction is
fused into that operator's kernel and costs nothing more.

    wait_tensor -> permute -> clone -> mm      a kernel of its own
    wait_tensor -> permute -> clone -> mul     part of the multiplication
    mul -> permute -> clone -> all_gather      the same
    mul -> mm, mul -> permute -> clone -> mm   a kernel of its own: its result is in memory in another order
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dtensor_compile.compat.aot.symbolic.shapes import size_hints
from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.nodes import communicates, is_redistribution, redistribution_of
from dtensor_compile.graph.operator_traits import LAYOUT_COPIES, LIBRARY_KERNELS, VIEWS
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ops.redistribute import plan_of

aten = torch.ops.aten


def is_outside(node: torch.fx.Node) -> bool:
    """Whether a node runs outside of generated kernels."""
    if node.op != "call_function":
        return True
    if node.target in VIEWS or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if is_redistribution(node):
        return sends(node)  # else it is a copy of a slice
    namespace, name = node.target._schema.name.split("::")
    return namespace not in ("aten", "prims") or name.startswith(LIBRARY_KERNELS)


def sends(node: torch.fx.Node) -> bool:
    """Whether a redistribute node turns into a collective."""
    this, itemsize = redistribution_of(node), value_of(node).element_size()
    return any(step.sends for step in plan_of(this.source, this.target, parse_mesh(this.mesh), this.sizes, itemsize))


def sources(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes that wrote the memory that a node reads, behind views and behind clones that only it reads, which are
    one copy.
    """
    for source in node.all_input_nodes:
        if source.target in VIEWS or source.target is aten.clone.default and not _is_read_outside(source, node):
            yield from sources(source)
        elif isinstance(source.meta.get("val"), (torch.Tensor, list, tuple)):
            yield source


def _is_read_outside(node: torch.fx.Node, but: torch.fx.Node) -> bool:
    """Whether a reader other than `but`, outside of generated kernels, needs the node's result in memory."""
    return any(reader is not but and is_outside(reader) for reader in readers(node))


def readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The readers of the memory that a node writes, behind views."""
    for user in node.users:
        if user.target in VIEWS:
            yield from readers(user)
        else:
            yield user


def is_standalone(node: torch.fx.Node) -> bool:
    """Whether a node copies in a kernel of its own."""
    if node.target not in LAYOUT_COPIES or not any(map(is_outside, readers(node))):
        return False
    return all(is_outside(source) or _is_read_outside(source, node) for source in sources(node))


def standalone_copies(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that copy in a kernel of their own."""
    return list(filter(is_standalone, graph.nodes))


def touches_collective(node: torch.fx.Node) -> bool:
    """Whether a node copies an input or an output of a collective."""
    return any(communicates(other.target) for other in (*sources(node), *readers(node)))


def extra_copies(graph: torch.fx.Graph) -> int:
    """Bytes written by copies of inputs and outputs of collectives that are a kernel of their own."""
    return sum(bytes_of(node) for node in standalone_copies(graph) if touches_collective(node))


def bytes_of(node: torch.fx.Node) -> int:
    value = value_of(node)
    return math.prod(size_hints(value.shape)) * value.element_size()
