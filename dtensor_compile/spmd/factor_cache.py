"""Factors of operators, computed by DTensor once for each operator, shapes and mesh axis size, since layers of a model
share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.capture.sharding_rules import rules_anywhere
from dtensor_compile.compat.dtensor.record import Operator
from dtensor_compile.compat.dtensor.rules.factors import Factor, facts, operator_factors
from dtensor_compile.spmd.constraint import agree
from dtensor_compile.spmd.recurrent import batch_factor, recurrent_op


class FactorCache:
    """``cache(operator, size)``: the factors that an axis of `size` devices can shard.

    Args:
        mesh: the mesh with the axes; factors of each size are computed over one of its dims.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names
        assert names is not None  # meshes of `spmd.logical_mesh.Mesh` have names
        self._meshes = {mesh.size(dim): mesh[name] for dim, name in enumerate(names)}
        self._found: dict[Any, Sequence[Factor]] = {}

    def __call__(self, operator: Operator, size: int) -> Sequence[Factor]:
        if operator.op is agree:
            n = len(operator.args)
            return [Factor((dim,) * n, (dim,) * n, False) for dim in range(operator.args[0].ndim)]
        if operator.op is recurrent_op:
            return batch_factor(operator.args)
        key = (operator.op, size, facts(operator.args), facts(operator.kwargs))
        if key not in self._found:
            with rules_anywhere():
                self._found[key] = operator_factors(
                    operator.op, operator.args, operator.kwargs, operator.results, self._meshes[size]
                )
        return self._found[key]
