"""A plan as code that its user can paste."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Placement

from dtensor_compile.compat.dtensor.operator_strategies import Placements
from dtensor_compile.global_plan.equal_calls import pattern
from dtensor_compile.global_plan.place import PlacementPlan

_HEAD = """\
import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

#: Mesh dims: {names}.
PARAMETERS = {{
{rows}
}}
INPUTS = ({inputs})


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    \"\"\"Makes the parameters DTensors; every rank holds the same full ones before.\"\"\"
    for name, parameter in list(model.named_parameters()):
        placements = PARAMETERS[name if name in PARAMETERS else re.sub(r"\\.\\d+(?=\\.|$)", ".*", name)]
        owner, _, leaf = name.rpartition(".")
        placed = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(placed, parameter.requires_grad))
    return model
"""


def placement_code(plan: PlacementPlan) -> str:
    """Python code with the placements of a plan, and a function that distributes a model's parameters by them."""
    names = ", ".join(plan.mesh.mesh_dim_names or ())
    rows = "\n".join(f'    "{name}": {_code(p)},' for name, p in by_pattern(plan.parameters).items())
    inputs = "".join(f"{_code(p)}, " for p in plan.inputs).rstrip(" ")
    return _HEAD.format(names=names, rows=rows, inputs=inputs)


def by_pattern(placements: Mapping[str, Placements]) -> dict[str, Placements]:
    """Placements with one row for equal blocks (``blocks.*.wq``) where all of them have the same."""
    kinds: dict[str, set[Placements]] = {}
    for name, of_name in placements.items():
        kinds.setdefault(pattern(name), set()).add(of_name)
    found: dict[str, Placements] = {}
    for name, of_name in placements.items():
        found[pattern(name) if len(kinds[pattern(name)]) == 1 else name] = of_name
    return found


def _code(placements: Placements) -> str:
    return f"({''.join(f'{_word(p)}, ' for p in placements).rstrip(' ')})"


def _word(placement: Placement) -> str:
    return f"Shard({placement.dim})" if placement.is_shard() else "Replicate()"  # type: ignore[attr-defined]
