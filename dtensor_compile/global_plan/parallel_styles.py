"""A plan as `parallelize_module` styles over the last mesh dim, and `fully_shard` over the one before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard

from dtensor_compile.compat.dtensor.step_record import FORWARD, StepCall
from dtensor_compile.errors import PlacementError
from dtensor_compile.global_plan.equal_calls import by_pattern
from dtensor_compile.global_plan.place import PlacementPlan

#: Imports of the code, as far as it uses them.
_IMPORTS = {
    "torch": ("nn",),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed.fsdp": ("fully_shard",),
    "torch.distributed.tensor": ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor.parallel": ("ColwiseParallel", "ParallelStyle", "RowwiseParallel", "parallelize_module"),
}

_BODY = '''\
class Placed(ParallelStyle):
    """Parameters and buffers of a module by name, and the placements in which it reads its arguments."""

    def __init__(self, *reads, **placements):
        self.reads, self.placements = reads, placements

    def _apply(self, module, device_mesh):
        if self.reads:
            module.register_forward_pre_hook(self._read)
        for name, placement in self.placements.items():
            tensor = getattr(module, name)
            placed = distribute_tensor(tensor.detach(), device_mesh, [placement], src_data_rank=None)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(placed, tensor.requires_grad) if is_parameter else placed)
        return module

    def _read(self, module, args):
        moved = (
            x.redistribute(placements=[p]) if p is not None and isinstance(x, DTensor) else x
            for x, p in zip(args, self.reads)
        )
        return (*moved, *args[len(self.reads) :])


#: Over {inner}.
STYLES = {{
{rows}
}}
INPUTS = ({inputs})


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Makes parameters and buffers DTensors; every rank holds the same full ones before."""
    {inner_mesh}
    for path, style in STYLES.items():
        parallelize_module(model, tp, {{path: style}} if path else style)
{outer}    return model


def distribute_inputs(inputs: tuple, mesh: DeviceMesh) -> tuple:
    """The tensors among the inputs{of_rank} as DTensors."""
    {inner_mesh}
    return tuple(distribute_tensor(x, tp, [p], src_data_rank=None) for x, p in zip(inputs, INPUTS))
'''

_OUTER = """\
    for path in ({blocks}):
        fully_shard(model.get_submodule(path) if path else model, mesh=mesh["{outer}"]{options})
"""


@dataclass(frozen=True)
class _Module:
    """A module with tensors of its own: the name of its class, and the placements of its tensors."""

    path: str
    kind: str
    tensors: dict[str, Placement]


def check_dims(mesh_dims: int) -> None:
    """Checks that styles can be written for a mesh of so many dims.

    Raises:
        PlacementError: they cannot.
    """
    if mesh_dims > 2:
        raise PlacementError(f"styles are for meshes of one or two dims, not {mesh_dims}: write tensors or marks")


def styles_code(plan: PlacementPlan) -> str:
    """Python code that makes a plan with `parallelize_module` and `fully_shard`.

    A linear layer or an embedding whose weight is used in the shards in which it is stored becomes a `ColwiseParallel`
    or `RowwiseParallel` with the layouts of the plan; other tensors are placed. What operators between these modules
    read, DTensor chooses, or the option ``"plan": "global"``.

    Raises:
        PlacementError: the mesh has more than two dims.
    """
    names = plan.mesh.mesh_dim_names or ()
    check_dims(len(names))
    styles = by_pattern({module.path: _style(plan, module) for module in _modules(plan)})
    rows = "\n".join(f'    "{path}": {style},' for path, style in styles.items())
    inputs = "".join(f"{placement_word(placements[-1])}, " for placements in plan.inputs).rstrip(" ")
    body = _BODY.format(
        inner=names[-1],
        rows=rows,
        inputs=inputs,
        inner_mesh=f'tp = mesh["{names[-1]}"]' if len(names) > 1 else "tp = mesh",
        outer=_outer_code(plan, names[0]) if len(names) > 1 else "",
        of_rank=f" (their part of this rank over {names[0]})" if len(names) > 1 else "",
    )
    used = {module: [name for name in names if re.search(rf"\b{name}\b", body)] for module, names in _IMPORTS.items()}
    imports = (f"from {module} import {', '.join(names)}\n" for module, names in used.items() if names)
    return f"{''.join(imports)}\n\n{body}"


def _outer_code(plan: PlacementPlan, outer: str) -> str:
    blocks = sorted({found[1] for name in plan.parameters if (found := re.match(r"(.*?\.\d+)\.", name))}, key=_natural)
    cut = any(placements[0].is_shard() for placements in plan.parameters.values())
    options = "" if cut else ", reshard_after_forward=False"
    return _OUTER.format(
        outer=outer, blocks=", ".join(f'"{path}"' for path in (*blocks, "")) + ("" if blocks else ","), options=options
    )


def _natural(path: str) -> list[object]:
    return [int(part) if part.isdigit() else part for part in path.split(".")]


def _modules(plan: PlacementPlan) -> Iterator[_Module]:
    tensors: dict[str, dict[str, Placement]] = {}
    for name, placements in {**plan.parameters, **plan.buffers}.items():
        path, _, leaf = name.rpartition(".")
        tensors.setdefault(path, {})[leaf] = placements[-1]
    for path, own in tensors.items():
        yield _Module(path, plan.modules.get(path, ""), own)


def _style(plan: PlacementPlan, module: _Module) -> str:
    used = _weight_in_use(plan, module)
    stored = module.tensors.get("weight")
    if used is not None and used == stored and isinstance(stored, Shard):
        columns = (stored.dim == 0) == (module.kind == "Linear")
        name = "ColwiseParallel" if columns else "RowwiseParallel"
        given, made = _layouts(plan, module.path)
        return f"{name}(input_layouts={given}, output_layouts={made}, use_local_output=False)"
    reads = [placement_word(p[-1]) if p else "None" for p in plan.arguments.get(module.path, ())] if module.path else []
    words = (f"{name}={placement_word(placement)}" for name, placement in module.tensors.items())
    return f"Placed({', '.join([*reads, *words])})"


def _weight_in_use(plan: PlacementPlan, module: _Module) -> Placement | None:
    """The placement over the last mesh dim in which a linear layer or an embedding uses its weight, along the dims that
    the weight is stored with; None for other modules."""
    for number, call in enumerate(plan.step.calls):
        if call.module == module.path and call.phase == FORWARD:
            wanted = plan.variables.strategy(plan.choice.choice, number).inputs
            if module.kind == "Embedding" and call.name == "aten.embedding":
                return wanted[0][-1]
            if module.kind == "Linear" and call.name in ("aten.mm", "aten.addmm"):
                used = wanted[-1][-1]  # transposed
                return Shard(1 - used.dim) if isinstance(used, Shard) else used
    return None


def _layouts(plan: PlacementPlan, path: str) -> tuple[str, str]:
    """How a module's input comes and its result is made, over the last mesh dim."""
    variables, choice = plan.variables, plan.choice.choice
    calls = [call for call in plan.step.calls if call.module == path and call.phase == FORWARD]
    given = next(x for call in calls for x in _activations(plan, call))
    return tuple(
        placement_word(variables.placements_of(choice, number)[-1]) for number in (given, plan.step.results[path][0])
    )  # type: ignore[return-value]


def _activations(plan: PlacementPlan, call: StepCall) -> list[int]:
    return [x for x in call.inputs if x not in plan.variables.only_parameters]


def placement_word(placement: Placement) -> str:
    """A placement as Python code."""
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if placement.is_partial():
        return "Partial()"
    assert isinstance(placement, Replicate)  # parameters, inputs and results of modules have no other
    return "Replicate()"
