"""Profile of compile time: by stage of the compilation, and by layer of the model.

Every interval counts for the innermost phase that is under way, so that the times of all stages add up to that of the
compilation. Phases of torch come from its events (`compat.dynamo.observers.phases`), those of this package from its
steps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtensor_compile.compat.dynamo.observers.observe import name_in_program
from dtensor_compile.graph.node_costs import path_of

#: Stages by the phases of torch that begin them; other phases belong to the stage that they are inside of.
_STAGES = {
    "dynamo": "Dynamo",
    "entire_frame_compile": "Dynamo",
    "build_guards": "guards",
    "backend_compile": "joint trace",
    "create_aot_dispatcher_function": "joint trace",
    "entire_backward_compile": "joint trace",
    "_recursive_joint_graph_passes": "Inductor's passes",
    "min_cut_rematerialization_partition": "partition",
    "compile_fx_inner": "Inductor's passes",
    "fx_codegen_and_compile": "Inductor's passes",
    "_recursive_post_grad_passes": "Inductor's passes",
    "GraphLowering.run": "Inductor's lowering",
    "Scheduler.__init__": "Inductor's scheduler",
    "GraphLowering.codegen": "code generation",
    "Scheduler.codegen": "code generation",
    "PythonWrapperCodegen.generate": "code generation",
    "compile_file": "compiler of the kernels",
    "async_compile.wait": "compiler of the kernels",
    "async_compile.precompile": "compiler of the kernels",
    "PyCodeCache.load_by_key_path": "compiler of the kernels",
}
#: Stage of the steps of this package.
OURS = "dtensor_compile"
#: All stages, in the order in which a program passes through them.
STAGES = tuple(dict.fromkeys((*list(_STAGES.values())[:3], OURS, *list(_STAGES.values())[3:])))


@dataclass
class PhaseTime:
    """Seconds of a phase, and number of its intervals.

    Attributes:
        seconds: measured wall time, without nested phases.
        count: number of phases.
    """

    seconds: float = 0.0
    count: int = 0


@dataclass
class _Phase:
    name: str
    stage: str
    part: str
    layer: str
    began: float
    inside: float = 0.0


@dataclass
class Profile:
    """Measured compile time.

    Attributes:
        parts: by stage and part of it: the phase, as torch calls it, or the step of this package.
        layers: by layer and stage: the share of one layer in a stage. Layers are the members of lists of modules
            (``blocks.3``), and the other members of the model; time that belongs to no module is left out.
    """

    parts: dict[tuple[str, str], PhaseTime] = field(default_factory=dict)
    layers: dict[tuple[str, str], PhaseTime] = field(default_factory=dict)
    _local: threading.local = field(default_factory=threading.local, repr=False)

    @property
    def _under_way(self) -> list[_Phase]:
        found: list[_Phase] = self._local.__dict__.setdefault("under_way", [])
        return found

    def begin(self, phase: str) -> None:
        """A phase of torch begins."""
        outer = self._under_way[-1] if self._under_way else _Phase("", "other", "", "", 0.0)
        stage = _STAGES.get(phase, outer.stage)
        # A phase of another stage does not belong to the layer in which it begins: the compiler starts with the first
        # kernel that is written.
        self._begin(phase, stage, phase, outer.layer if stage == outer.stage else "")

    def begin_module(self, name: str) -> None:
        """From here on, the phase handles the module of this name in Dynamo's graphs."""
        if self._under_way:
            outer = self._under_way[-1]
            layer = layer_of(path_of(name_in_program(name)))
            self._begin(name, outer.stage, outer.part, layer or outer.layer)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """While active, a step of this package runs."""
        self._begin(name, OURS, name)
        try:
            yield
        finally:
            self.end(name)

    def _begin(self, name: str, stage: str, part: str, layer: str = "") -> None:
        self._under_way.append(_Phase(name, stage, part, layer, time.perf_counter()))

    def end(self, name: str) -> None:
        """Ends the phase that began last under this name, and all phases nested in it."""
        if not any(phase.name == name for phase in self._under_way):
            return  # it began before the profile
        now, ended = time.perf_counter(), None
        while ended != name:
            phase = self._under_way.pop()
            ended, seconds = phase.name, now - phase.began
            for table, key in ((self.parts, (phase.stage, phase.part)), (self.layers, (phase.layer, phase.stage))):
                if key[0]:
                    time_of = table.setdefault(key, PhaseTime())
                    time_of.seconds += seconds - phase.inside
                    time_of.count += 1
            if self._under_way:
                self._under_way[-1].inside += seconds


def layer_of(path: str) -> str:
    """The layer of a module: ``blocks.3`` for ``blocks.3.attention.wq``, ``head`` for ``head``."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
