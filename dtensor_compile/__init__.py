"""``torch.compile(model, backend="dtensor")``: programs over DTensors as one graph, with the same numbers.

The backend is found by its name; nothing has to be imported to use it. Public names:

- `record`: what was captured, decided and sent while programs compiled.
- `explain`: the report of one call of a function or a module.
- `Options`: what ``options={...}`` may say.
- `redistribute`: a DTensor on another mesh.
- `one_gloo_worker`: gloo groups in which two gathers that complete at once do not end the process.
- `export`: the program of one rank as a ``torch.export.ExportedProgram``.
- the errors, all of them `DTensorCompileError`.
"""

from dtensor_compile.compat.distributed.gloo import one_gloo_worker
from dtensor_compile.capture.cross_mesh import redistribute
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
from dtensor_compile.local_program import export
from dtensor_compile.options import Options
from dtensor_compile.report.explain import explain
from dtensor_compile.record.recorder import record

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
    "record",
    "redistribute",
]
