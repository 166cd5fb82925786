"""The smallest part of a program that still differs from eager, as a script of one file.

The program is taken as Dynamo captured it: a graph of torch functions over DTensors, whose inputs are described by
shape, dtype, placements and mesh and recreated from random numbers. The graph is cut after the first value that
differs, and then before the last value from which the difference can still be reproduced. The rest is written as a
module and a function with `@parity` on it.

    before   400 nodes that end in a loss
    after    def forward(self, l_x_): return torch.nn.functional.rms_norm(l_x_, (8,))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from dtensor_compile.compat.aot.symbolic.shapes import size_hints
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.testing.compare_values import Allowed
from dtensor_compile.testing.parity import Case, Settings, compare_case, of_all_ranks, sum_of_squares
from dtensor_compile.testing.ranks import make_mesh
from dtensor_compile.variables import install_trackers

#: Limit on the number of compiled programs.
TRIES = 40


class MinifyError(Exception):
    """No smaller program that differs was found, or it cannot be written as a script; the message gives the reason."""


_taken: list[tuple[torch.fx.GraphModule, list[Any]]] = []


def _take(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        _taken.append((gm, list(inputs)))
        return gm(*inputs)

    return run


install_trackers(_take)


def minified_script(case: Case, settings: Settings, mesh: Sequence[int], names: Sequence[str]) -> str:
    """The script for a case that differs; call it on every rank.

    Args:
        settings: settings under which it differs.
        mesh, names: shape and names of the mesh of the program.

    Raises:
        MinifyError: there is none.
    """
    _taken.clear()
    Case(case.make, calls=1).run(Settings(_take, fullgraph=False))
    small, texts = None, _Texts(make_mesh(tuple(mesh), tuple(names)))
    for gm, inputs in _taken:
        program = _Program(gm, [texts.describe(value) for value in inputs], texts)
        if _differs(program, settings, case.allowed):
            small = program
            break
    if small is None:
        raise MinifyError(
            "with random inputs the captured graphs give eager's numbers: the difference depends on the values"
        )
    small = _shrink(small, lambda program: _differs(program, settings, case.allowed))
    return _script(small, settings, mesh, names)


class _Program:
    """A graph, with the expression of each of its inputs."""

    def __init__(self, gm: torch.fx.GraphModule, inputs: list[str], texts: _Texts) -> None:
        self.gm, self.inputs, self.texts = gm, inputs, texts

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The nodes that compute."""
        return [n for n in self.gm.graph.nodes if n.op in ("call_function", "call_method", "call_module")]

    def cut_behind(self, index: int) -> _Program | None:
        """The program that returns the value of that node; None if that is not a tensor."""
        return self._changed(index, _return)

    def cut_before(self, index: int) -> _Program | None:
        """The program that takes the value of that node as an input."""
        node = self.nodes[index]
        value = _example(node)
        if value is None:
            return None
        described = self.texts.describe(value)

        def replace(graph: torch.fx.Graph, inner: torch.fx.Node) -> None:
            first = next(iter(graph.nodes))
            with graph.inserting_before(first):
                given = graph.placeholder(f"given_{inner.name}")
            given.meta = dict(inner.meta)
            inner.replace_all_uses_with(given)

        return self._changed(index, replace, [described])

    def _changed(
        self, index: int, change: Callable[[torch.fx.Graph, torch.fx.Node], None], new: Sequence[str] = ()
    ) -> _Program | None:
        if _example(self.nodes[index]) is None:
            return None
        gm = copy.copy(self.gm)
        gm.graph, inputs = torch.fx.Graph(), [*new, *self.inputs]
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        result = gm.graph.graph_copy(self.gm.graph, copies)
        gm.graph.output(result)
        change(gm.graph, copies[self.nodes[index]])
        gm.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or _writes(n))
        placeholders = gm.graph.find_nodes(op="placeholder")
        kept = [i for i, p in enumerate(placeholders) if p.users]
        for i, placeholder in enumerate(placeholders):
            if i not in kept:
                gm.graph.erase_node(placeholder)
        gm = torch.fx.GraphModule(gm, gm.graph)
        return _Program(gm, [inputs[i] for i in kept], self.texts)


def _writes(node: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _return(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    graph.output_node().args = ((node,),)


def _example(node: torch.fx.Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _shrink(program: _Program, differs: Callable[[_Program], bool]) -> _Program:
    tries = TRIES
    low, high = 0, len(program.nodes) - 1
    while low < high and tries > 0:  # the first node whose value differs, assuming that what follows differs too
        middle, tries = (low + high) // 2, tries - 1
        cut = program.cut_behind(middle)
        if cut is not None and differs(cut):
            high = middle
        else:
            low = middle + 1
    cut = program.cut_behind(high) if program.nodes else None
    if cut is not None and differs(cut):
        program = cut
    index = len(program.nodes) - 2
    while index >= 0 and tries > 0:  # from the end: nodes that need not be computed any more
        tries -= 1
        cut = program.cut_before(index)
        if cut is not None and differs(cut):
            program = cut
            index = min(index, len(program.nodes) - 1)
        index -= 1
    return program


def _differs(program: _Program, settings: Settings, allowed: Allowed) -> bool:
    def make() -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
        return program.gm, [program.texts.evaluate(text) for text in program.inputs], {}

    case = Case(make, loss=sum_of_squares, calls=1, allowed=allowed)
    try:
        found = compare_case(case, settings).differences
    except Exception:  # noqa: BLE001 - a part that does not run is no smaller program
        found = []
    return bool(of_all_ranks(found))


# ---- inputs as text ------------------------------------------------------------------------------------------------


class _Texts:
    """Expressions of inputs.

    Args:
        mesh: that of the program, called ``mesh`` in the expressions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def describe(self, value: Any) -> str:
        """An expression for a value like this one."""
        if isinstance(value, (bool, int, float, str, type(None))):
            return repr(value)
        if isinstance(value, DTensor):
            placements = ", ".join(_placement(p) for p in value.placements)
            mesh = self._mesh(real_mesh(value.device_mesh))
            return (
                f"random_dtensor({mesh}, [{placements}], {_shape(value)}, {value.dtype}, "
                f"requires_grad={value.requires_grad})"
            )
        if isinstance(value, torch.Tensor):
            return f"random_tensor({_shape(value)}, {value.dtype}, requires_grad={value.requires_grad})"
        if isinstance(value, DeviceMesh):
            return self._mesh(value)
        raise MinifyError(f"an input of the graph is of type {type(value).__name__}")

    def _mesh(self, mesh: DeviceMesh) -> str:
        if mesh == self.mesh:
            return "mesh"
        names = mesh.mesh_dim_names
        if names and set(names) <= set(self.mesh.mesh_dim_names or ()) and self.mesh[names] == mesh:
            return f"mesh[{names!r}]"
        raise MinifyError(f"an input is on {mesh}, which is not a part of the mesh of the program")

    def evaluate(self, text: str) -> Any:
        names = {"Partial": Partial, "Replicate": Replicate, "Shard": Shard, "torch": torch, "mesh": self.mesh}
        return eval(text, {**names, "random_tensor": random_tensor, "random_dtensor": random_dtensor})


def _shape(value: torch.Tensor) -> list[int]:
    return list(size_hints(value.shape))


def _placement(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    if type(placement) is Partial:
        return f"Partial({placement.reduce_op!r})"
    if isinstance(placement, Replicate):
        return "Replicate()"
    raise MinifyError(f"an input has an unsupported placement {placement}")


def random_tensor(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> torch.Tensor:
    """Random values of any dtype, the same on every rank for the same shape; integers are 0 or 1, so that they may be
    indices.
    """
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad)
    return torch.randint(2, tuple(shape), generator=generator).to(dtype)


def random_dtensor(
    mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False
) -> DTensor:
    """`random_tensor` as a DTensor; on a partial mesh dim the ranks hold terms."""
    full = random_tensor(shape, dtype)
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(full, mesh, whole, src_data_rank=None).to_local()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    return cast("DTensor", made.detach().requires_grad_(requires_grad))


# ---- the script ----------------------------------------------------------------------------------------------------

_SCRIPT = '''\
"""Compiled differs from eager here. Run it with python, or with pytest."""

import torch
import torch.distributed.tensor
from torch import device, inf, nan
from torch.distributed.tensor import Partial, Replicate, Shard

from dtensor_compile.testing import parity
from dtensor_compile.testing.minify import random_dtensor, random_tensor


class Program(torch.nn.Module):
{forward}

@parity(mesh={mesh}, names={names}, backend={backend!r}, fullgraph={fullgraph}, dynamic={dynamic}, \
options={options!r}, calls=1)
def test_program(mesh):
    return Program(), [
{inputs}
    ]


if __name__ == "__main__":
    test_program()
'''


def _script(program: _Program, settings: Settings, mesh: Sequence[int], names: Sequence[str]) -> str:
    if program.gm.graph.find_nodes(op="get_attr") or program.gm.graph.find_nodes(op="call_module"):
        raise MinifyError("the remaining program contains tensors or other graphs, which cannot be written as a script")
    code = program.gm.graph.python_code("self").src.replace("\n\n", "\n").strip("\n")
    return _SCRIPT.format(
        forward="".join(f"    {line}\n" for line in code.splitlines()), mesh=tuple(mesh), names=tuple(names),
        backend=settings.backend, fullgraph=settings.fullgraph, dynamic=settings.dynamic,
        options=dict(settings.options) if settings.options else None,
        inputs="\n".join(f"        {text}," for text in program.inputs),
    )  # fmt: skip
