"""A forecast as data: memory over time, and a breakdown of the time of a step.

`StepPlan` is the root. Everything in it is text, numbers and tuples, so that it survives a round trip through JSON.
Bytes and seconds are those of one rank; all of them are estimates.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.forecast.timeline import Timeline
from dtensor_compile.report.dataclass_forms import read_as

VERSION = "1.2"


class PlanFormatError(DTensorCompileError, ValueError):
    """A file is not a plan, or has another version."""


@dataclass(frozen=True)
class Holder:
    """Allocations of one kind and line at the peak of memory.

    Attributes:
        kind: one of `StepMemory.kinds`.
        where: the user's line, ``file:line: code``; empty for what the model, its inputs or the optimizer own.
        module: path of the module.
        bytes, count: of the allocations of that kind that this line made.
    """

    kind: str
    where: str
    module: str
    bytes: int
    count: int


@dataclass(frozen=True)
class MemoryAt:
    """Memory at one point of the step: seconds from its begin, and bytes of each of `StepMemory.kinds`."""

    seconds: float
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class StepMemory:
    """Memory of one rank over a step, once the optimizer has its states.

    Attributes:
        kinds: by which memory is broken down.
        over_time: at the points where it changes.
        peak: bytes that are allocated at most; `peak_of_kinds` are those of each kind at that point.
        peak_where, peak_module: the user's line, or what runs in eager, and the module of the request at that point.
        holders: the allocations that hold it, the largest first.
        reserved: bytes of the caching allocator's segments at most.
        fixed: bytes that the device needs besides: libraries' workspaces.
        capacity: of the device.
        fits: whether segments and fixed bytes are within the capacity.
        releases: how often the allocator gives segments back to the device, because another one would not fit: each
            time the device has to be idle.
    """

    kinds: tuple[str, ...]
    over_time: tuple[MemoryAt, ...]
    peak: int
    peak_of_kinds: tuple[int, ...]
    peak_where: str
    peak_module: str
    holders: tuple[Holder, ...]
    reserved: int
    fixed: int
    capacity: int
    fits: bool
    releases: int = 0

    @property
    def needed(self) -> int:
        """Bytes of the segments and fixed ones."""
        return self.reserved + self.fixed


@dataclass(frozen=True)
class Communication:
    """Collectives of one kind over one mesh dim: number, bytes that a rank sends, seconds, and those of them in which
    nothing computes."""

    mesh_dim: str
    kind: str
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class StepTime:
    """Breakdown of the time of a step, in seconds; the first three add up to `step`.

    Attributes:
        compute: seconds in which kernels run.
        exposed: seconds in which compute waits for collectives.
        idle: seconds in which compute waits for the host.
        hidden: seconds of collectives while kernels run.
        host: seconds that the host needs to issue the step.
        forward, backward, rest: parts of the step: the rest is clipping and the optimizer.
    """

    step: float
    compute: float
    exposed: float
    idle: float
    hidden: float
    host: float
    forward: float
    backward: float
    rest: float


@dataclass(frozen=True)
class Basis:
    """The source of figures, and its quality.

    Attributes:
        figures: ``"memory"``, ``"kernels"``, ``"collectives"``, ``"host"``.
        text: their source.
        quality: ``"simulated"``, ``"measured"``, ``"published"``, ``"vendor's figures"`` or ``"guess"``.
        error: relative error that is to be expected (`docs/planning.md` says what was seen).
    """

    figures: str
    text: str
    quality: str
    error: float

    def __str__(self) -> str:
        return f"{self.figures}: {self.text} ({self.quality}, ±{self.error:.0%})"


@dataclass(frozen=True)
class StepPlan:
    """The forecast of one training step.

    Attributes:
        version: of this form, `VERSION`.
        target: the program, as the user named it.
        torch: release of torch.
        mesh: sizes and names of its dims, as text; world: number of ranks.
        gpu, cluster: the GPU for which code was generated, and the cluster for which times are estimated.
        optimizer, clip, loss: of the step.
        memory, time, communication: see there.
        flops: of one rank in a step, and of the model without recomputation (three times the forward pass; A. Chowdhery
            et al.: PaLM, 2022, appendix B).
        model_flops_fraction: of the device's peak, for the dtype of most matmuls.
        tokens: of the job in a step; 0 if the program's inputs are no tokens.
        graphs: compiled graphs, and graph breaks.
        kernels: Triton kernels that were compiled to machine code; spills: those of them that spill registers.
        made_up: the lines of a script that read values of tensors on the GPU, and got 0 or False.
        timeline: of the step.
        rests_on: sources of the figures.
    """

    version: str
    target: str
    torch: str
    mesh: str
    world: int
    gpu: str
    cluster: str
    loss: str
    optimizer: str
    clip: float
    memory: StepMemory
    time: StepTime
    communication: tuple[Communication, ...]
    flops: int
    model_flops: int
    model_flops_fraction: float
    tokens: int
    graphs: int
    breaks: int
    kernels: int
    spills: int
    made_up: tuple[str, ...]
    timeline: Timeline
    rests_on: tuple[Basis, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of the job."""
        return self.tokens / self.time.step if self.time.step else 0.0

    @property
    def step_error(self) -> float:
        """Seconds by which the step may be longer or shorter, if errors of its parts add up."""
        parts = {"kernels": self.time.compute, "collectives": self.time.exposed, "host": self.time.idle}
        return sum(basis.error * parts.get(basis.figures, 0.0) for basis in self.rests_on)


def to_json(plan: StepPlan) -> str:
    """The plan as JSON text."""
    return json.dumps(dataclasses.asdict(plan), indent=1)


def from_json(text: str) -> StepPlan:
    """Reads a plan that `to_json` wrote.

    Raises:
        PlanFormatError: the text is not a plan, or has an unsupported version.
    """
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise PlanFormatError(f"a plan of version {data['version']}, and this release reads {VERSION}")
        plan: StepPlan = read_as(StepPlan, data)
        return plan
    except (KeyError, TypeError, ValueError) as error:
        raise PlanFormatError(f"not a plan: {type(error).__name__}: {error}") from None
