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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

#: Mesh dims: {names}.
STATE = {{
{rows}
}}
INPUTS = ({inputs})


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    \"\"\"Makes parameters and buffers DTensors; every rank holds the same full ones before.\"\"\"
    made = {{}}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        placements = STATE[name if name in STATE else re.sub(r"\\.\\d+(?=\\.|$)", ".*", name)]
        placed = distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)
        made[tensor] = nn.Parameter(placed, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else placed
    for module in model.modules():  # tied parameters stay tied
        for held in (module._parameters, module._buffers):
            held.update({{name: made[tensor] for name, tensor in held.items() if tensor is not None}})
    return model
"""


def placement_code(plan: PlacementPlan) -> str:
    """Python code with the placements of a plan, and a function that distributes a model's state by them."""
    names = ", ".join(plan.mesh.mesh_dim_names or ())
    rows = "\n".join(
        f'    "{name}": {_code(p)},' for name, p in by_pattern({**plan.parameters, **plan.buffers}).items()
    )
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
