"""A plan as code that its user can paste."""

from __future__ import annotations

from collections.abc import Callable

from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements
from dtensor_compile.global_plan.equal_calls import by_pattern, pattern
from dtensor_compile.global_plan.parallel_styles import placement_word, styles_code
from dtensor_compile.global_plan.place import PlacementPlan

_TENSORS = """\
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


_MARKS = """\
import re

from torch import nn

from dtensor_compile.spmd import Mesh, mark_sharding, shard_module

#: Mesh axes of each dim; use with Mesh(range({ranks}), {shape}, {axes}).
STATE = {{
{rows}
}}
INPUTS = ({inputs})


def mark(model: nn.Module, mesh: Mesh, *inputs) -> None:
    \"\"\"Marks parameters, buffers and inputs; every rank holds the same full ones.\"\"\"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        mark_sharding(tensor, mesh, STATE[name if name in STATE else re.sub(r"\\.\\d+(?=\\.|$)", ".*", name)])
    for x, axes in zip(inputs, INPUTS):
        mark_sharding(x, mesh, axes)
    shard_module(model, *inputs)  # stores parameters in shards; without it the computation alone is sharded
"""


def placement_code(plan: PlacementPlan, form: str = "tensors") -> str:
    """Python code that places a model by a plan.

    Args:
        form: ``"tensors"``, with `distribute_tensor`; ``"styles"``, with `parallelize_module` and `fully_shard`;
            ``"marks"``, with `mark_sharding`.

    Raises:
        PlacementError: the form cannot express the plan.
    """
    return FORMS[form](plan)


def _tensors_code(plan: PlacementPlan) -> str:
    names = ", ".join(plan.mesh.mesh_dim_names or ())
    rows = "\n".join(
        f'    "{name}": {_code(p)},' for name, p in by_pattern({**plan.parameters, **plan.buffers}).items()
    )
    inputs = "".join(f"{_code(p)}, " for p in plan.inputs).rstrip(" ")
    return _TENSORS.format(names=names, rows=rows, inputs=inputs)


def _marks_code(plan: PlacementPlan) -> str:
    state = by_pattern({**plan.parameters, **plan.buffers})
    numbers = {**plan.step.parameters, **plan.step.buffers}
    ndims = {pattern(name): plan.step.tensors[number].ndim for name, number in numbers.items()}
    rows = "\n".join(f'    "{name}": {_axes(plan, p, ndims[pattern(name)])!r},' for name, p in state.items())
    given = [_axes(plan, p, plan.step.tensors[number].ndim) for number, p in zip(plan.step.inputs, plan.inputs)]
    shape, axes = tuple(plan.mesh.shape), tuple(plan.mesh.mesh_dim_names or ())
    inputs = "".join(f"{of_input!r}, " for of_input in given).rstrip(" ")
    return _MARKS.format(ranks=plan.mesh.size(), shape=shape, axes=axes, rows=rows, inputs=inputs)


def _axes(plan: PlacementPlan, placements: Placements, ndim: int) -> tuple[str | tuple[str, ...] | None, ...]:
    """The mesh axes of each dim of a tensor."""
    names = plan.mesh.mesh_dim_names or ()
    by_dim = [tuple(n for n, p in zip(names, placements) if p.is_shard(dim)) for dim in range(ndim)]
    return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in by_dim)


#: Forms of code by name.
FORMS: dict[str, Callable[[PlacementPlan], str]] = {
    "tensors": _tensors_code,
    "styles": styles_code,
    "marks": _marks_code,
}


def _code(placements: Placements) -> str:
    return f"({''.join(f'{placement_word(p)}, ' for p in placements).rstrip(' ')})"
