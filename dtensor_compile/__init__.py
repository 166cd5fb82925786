"""``torch.compile(model, backend="dtensor")``: programs over DTensors as one graph, with the same numbers.

The backend is found by its name; nothing has to be imported to use it. Public names:

- `record`: collects captured redistributions, decisions and collectives while programs compile.
- `explain`: the report of one call of a function or a module.
- `Options`: the keys of ``options={...}``.
- `place`: placements of parameters and inputs for a training step over a mesh.
- `redistribute`: moves a DTensor to another mesh.
- `one_gloo_worker`: gloo groups in which two gathers that complete at once do not end the process.
- `export`: the program of one rank as a ``torch.export.ExportedProgram``.
- the errors, all of them `DTensorCompileError`.

Each is imported on first access: importing the package is free, and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtensor_compile.capture.cross_mesh import redistribute
    from dtensor_compile.compat.distributed.gloo import one_gloo_worker
    from dtensor_compile.errors import (
        AgreementError,
        DTensorCompileError,
        ManualRegionError,
        MeshError,
        NoProcessGroupError,
        OptionError,
        PlacementError,
        PlanError,
        UnsupportedTorchError,
    )
    from dtensor_compile.global_plan.place import place
    from dtensor_compile.local_program import export
    from dtensor_compile.options import Options
    from dtensor_compile.recording.recorder import record
    from dtensor_compile.report.explain import explain

__version__ = "0.1.0"
__all__ = [
    "AgreementError",
    "DTensorCompileError",
    "ManualRegionError",
    "MeshError",
    "NoProcessGroupError",
    "OptionError",
    "Options",
    "PlacementError",
    "PlanError",
    "UnsupportedTorchError",
    "explain",
    "export",
    "one_gloo_worker",
    "place",
    "record",
    "redistribute",
]

#: Modules of the public names other than errors.
_MODULES = {
    "Options": "options",
    "explain": "report.explain",
    "export": "local_program",
    "one_gloo_worker": "compat.distributed.gloo",
    "place": "global_plan.place",
    "record": "report",
    "redistribute": "capture.cross_mesh",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
