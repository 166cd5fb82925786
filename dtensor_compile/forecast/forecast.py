"""Makes a plan: runs a training step of a target on a simulated rank and an emulated GPU, and reads its log.

A target and its job, a GPU and a cluster give a `StepPlan`. The program runs twice, as an optimizer makes its states in
its first step: figures are those of the second.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.compat import pytree
from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.compat.emulation.emulated_gpu import reads_values
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.forecast import step_plan as model
from dtensor_compile.forecast.host_costs import HOST_BASIS, issue_seconds
from dtensor_compile.forecast.observed_step import Marks, Observed, Point
from dtensor_compile.forecast.planned_memory import memory_of_step
from dtensor_compile.forecast.script_steps import ScriptLog, run_steps, script_training
from dtensor_compile.forecast.step_log import Allocation, StepLog
from dtensor_compile.forecast.timeline import timeline_of
from dtensor_compile.forecast.training import OnPhase, StepSettings, Training
from dtensor_compile.graph.node_costs import Operation, SentCollective
from dtensor_compile.offline.emulated_device import EmulatedDevice, device
from dtensor_compile.offline.simulated_job import job
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.breaks import graph_breaks
from dtensor_compile.report.run_target import Job, mesh_of
from dtensor_compile.report.schedule import Schedule, schedule
from dtensor_compile.report.target import (
    TargetError,
    TargetProgram,
    call_target,
    function_of,
    is_script,
    program_of,
    users_program,
)
from dtensor_compile.topology.files import find_gpu, topology
from dtensor_compile.topology.gpus import Gpu
from dtensor_compile.topology.links import CLUSTERS, Cluster

#: Names of mesh dims over which a batch is split, by their beginnings.
DATA_DIMS = ("dp", "ddp", "fsdp", "data", "replicate", "shard")
#: Environment variable with a folder for compiled Triton kernels, which plans of a sweep share.
KERNELS = "DTENSOR_COMPILE_PLANNED_KERNELS"
#: The default settings of a step.
DEFAULTS = StepSettings()
#: Changes a training step before it runs.
Prepare = Callable[[Training], Training]


def make_plan(
    target: str,
    this: Job,
    *,
    gpu: str,
    cluster: str | None = None,
    settings: StepSettings = DEFAULTS,
    arguments: Mapping[str, Any] = {},
    script_arguments: Sequence[str] = (),
    prepare: Prepare | None = None,
) -> model.StepPlan:
    """The plan of a target.

    Args:
        target: as `dtensor_compile.report.target` takes it.
        this: the job.
        gpu: name of a preset, or a file.
        cluster: name of a preset, or a file; None: the preset with the GPU's name.
        settings: the rest of the step.
        arguments: of the target's function, by name; script_arguments: of a script. A script makes its steps itself,
            and `settings` do not matter.
        prepare: called with the model and its inputs before the first step; returns what makes the step.

    Raises:
        TargetError: the target is no program that can be trained.
    """
    machine = topology(cluster if cluster is not None else _cluster_of(gpu))
    machine = dataclasses.replace(machine, device=find_gpu(gpu).device)
    with (
        fresh_caches(os.environ.get(KERNELS)),
        job(this.ranks, this.rank),
        device(gpu) as emulated,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        log = ScriptLog(emulated) if is_script(target) else StepLog(emulated)
        emulated.observer = log
        if is_script(target):
            training = script_training()
            with record() as recording:
                marks, owned = _run(
                    training, log, lambda on_phase: run_steps(target, script_arguments, training, on_phase)
                )
        else:
            found = program_of(_called(target, this, arguments))
            if found is None:
                raise TargetError(f"{target} returns neither a model and its inputs nor a step to call")
            with users_program(target), record() as recording:
                training = _training(found, settings)
                if prepare is not None:
                    training = prepare(training)
                marks, owned = _run(training, log, lambda on_phase: _twice(training, on_phase))
        operations, collectives = log.operations(recording, marks.forward.requests, marks.end.requests)
        seen = Observed(training, log, recording, marks, owned, operations, collectives)
        return _plan(target, this, emulated, machine, seen)


def _called(target: str, this: Job, arguments: Mapping[str, Any]) -> Any:
    """The result of the target's function: made on the emulated GPU, where a model takes no memory, or on the host if
    the function reads values."""
    function = function_of(target)

    def call() -> Any:
        return call_target(function, target, lambda: mesh_of(this, "cuda"), arguments)

    try:
        with torch.device("cuda"):
            return call()
    except TargetError as error:
        if not reads_values(error.__cause__):
            raise
    return call()


def _cluster_of(gpu: str) -> str:
    if gpu not in CLUSTERS:
        raise TargetError(f"--cluster is needed for the GPU {gpu}: {', '.join(CLUSTERS)}")
    return gpu


def _training(found: TargetProgram, settings: StepSettings) -> Training:
    if isinstance(found.model, torch.nn.Module):
        found.model.to("cuda")
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("cuda"), (found.args, found.kwargs))
    program = TargetProgram(found.model, args, kwargs)
    training = Training(program, program.model, settings)
    if not training.is_step() and uncompiled(program.model) is program.model:
        training.run = torch.compile(program.model, backend="dtensor", options={"blocks": settings.blocks})
    return training


def _twice(training: Training, on_phase: OnPhase) -> None:
    for _ in range(2):
        training.step(on_phase)


def _run(training: Training, log: StepLog, run: Callable[[OnPhase], None]) -> tuple[Marks, dict[Allocation, str]]:
    """Runs steps; returns the points of the phases of the last one, and the kinds of the allocations that the program's
    objects own."""
    kinds: dict[Allocation, str] = {}
    points: dict[str, Point] = {}

    def own(kind: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if (this := log.allocation_of(tensor)) is not None:
                kinds.setdefault(this, kind)
                if kind == "parameters":
                    this.of_parameters = this.written = True

    def on_phase(phase: str) -> None:
        points[phase] = Point(log.now, len(log.changes))
        if phase in ("forward", "optimizer"):  # in between, a wrapper may have gathered ones in their place
            own("parameters", training.parameters())
        own("optimizer states", training.states())
        if phase in ("rest", "optimizer", "end"):
            own("gradients", [p.grad for p in training.parameters() if p.grad is not None])
        own("inputs", training.inputs())

    with training.optimizers_watched(on_phase):
        run(on_phase)
    if training.is_step():
        inside = range(points["forward"].requests, points["end"].requests)
        backward = [number for number in inside if log.is_backward(number)]
        begin, end = (backward[0], backward[-1] + 1) if backward else (inside.stop, inside.stop)
        points["backward"], points["rest"] = Point(begin, 0), Point(end, 0)  # changes are asked for the step alone
    known = ("forward", "loss", "backward", "rest", "optimizer", "end")
    return Marks(**{phase: points[phase] for phase in known if phase in points}), kinds


def _plan(target: str, this: Job, emulated: EmulatedDevice, cluster: Cluster, seen: Observed) -> model.StepPlan:
    marks, operations, gpu = seen.marks, seen.operations, emulated.gpu
    requests = seen.log.requests[marks.forward.requests : marks.end.requests]
    issue = [issue_seconds(before, request) for before, request in zip([None, *requests], requests)]
    timing = schedule(operations, seen.collectives, cluster, lambda sent: sent.mesh_dim, issue)
    starts = _starts(timing, len(operations))
    forward = marks.backward.requests - marks.forward.requests
    forward_flops, flops = (sum(this.flops for this in part) for part in (operations[:forward], operations))
    model_flops = (3 if flops > forward_flops else 1) * forward_flops
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    peak = gpu.device.operations_per_second(_itemsize(operations), tf32)
    settings = seen.training.settings
    return model.StepPlan(
        version=model.VERSION,
        target=target,
        torch=torch.__version__,
        mesh=",".join(f"{name}={size}" for name, size in this.mesh)
        or ("its own mesh" if is_script(target) else f"tp={this.ranks}"),
        world=this.ranks,
        gpu=gpu.name,
        cluster=cluster.name,
        loss=settings.loss,
        optimizer=settings.optimizer,
        clip=settings.clip,
        memory=memory_of_step(seen, starts, gpu),
        time=_time(timing, starts, marks, sum(issue)),
        communication=_communication(timing, seen.collectives),
        flops=flops,
        model_flops=model_flops,
        model_flops_fraction=model_flops / peak / timing.seconds if timing.seconds else 0.0,
        tokens=_tokens(seen.training, this),
        graphs=len(seen.recording.graphs),
        breaks=len(graph_breaks(seen.recording)),
        kernels=len(emulated.kernels),
        spills=sum(kernel.binary.spills > 0 for kernel in emulated.kernels),
        made_up=tuple(seen.log.read_at) if isinstance(seen.log, ScriptLog) else (),
        timeline=timeline_of(timing, operations, seen.collectives),
        rests_on=_rests_on(gpu, cluster),
    )


#: Relative errors to expect of kernels, by how their rates are known. Measured rates: large programs on an H100 were
#: within 8% on random data, and within 14% on zeros (docs/planning.md); the others are assumed.
_ERRORS = {"measured": 0.15, "guess": 0.25, "vendor's figures": 0.5}


def _rests_on(gpu: Gpu, cluster: Cluster) -> tuple[model.Basis, ...]:
    memory = (
        "what the generated code and eager ask for, and cuBLAS's workspaces; segments by the rules of torch's "
        "allocator, within a tenth; without NCCL's buffers and the CUDA context"
    )
    return (
        model.Basis("memory", memory, "simulated", 0.01),
        model.Basis("kernels", gpu.device.basis, gpu.device.quality, _ERRORS[gpu.device.quality]),
        _basis_of_links(cluster),
        model.Basis("host", HOST_BASIS, "guess", 0.5),
    )


def _basis_of_links(cluster: Cluster) -> model.Basis:
    """Published: nine of ten figures that the presets were not made from are within 17% (docs/planning.md)."""
    preset, text = CLUSTERS.get(cluster.name), f"links of {cluster.name}"
    if preset is None or (preset.inside, preset.between) != (cluster.inside, cluster.between):
        return model.Basis("collectives", text, "measured", 0.15)
    if not preset.inside.collectives:
        return model.Basis("collectives", text, "vendor's figures", 0.3)
    return model.Basis("collectives", f"{text}, NCCL's model, published runs of nccl-tests", "published", 0.2)


def _time(timing: Schedule, starts: Sequence[float], marks: Marks, host: float) -> model.StepTime:
    compute = sum(timed.seconds for timed in timing.compute)
    exposed = sum(timing.exposed)
    sent = sum(timed.seconds for timed in timing.communication)
    forward, backward = (starts[point.requests - marks.forward.requests] for point in (marks.backward, marks.rest))
    return model.StepTime(
        step=timing.seconds,
        compute=compute,
        exposed=exposed,
        idle=max(0.0, timing.seconds - compute - exposed),
        hidden=max(0.0, sent - exposed),
        host=host,
        forward=forward,
        backward=backward - forward,
        rest=timing.seconds - backward,
    )


def _starts(timing: Schedule, requests: int) -> list[float]:
    """For each request, and after the last, the seconds at which compute reaches it."""
    starts = [timing.seconds] * (requests + 1)
    for timed in timing.compute:
        starts[timed.index] = timed.start
    for index in range(requests - 1, -1, -1):
        starts[index] = min(starts[index], starts[index + 1])
    return starts


def _communication(timing: Schedule, collectives: Sequence[SentCollective]) -> tuple[model.Communication, ...]:
    sums: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0, 0.0, 0.0])
    for timed in timing.communication:
        this, entry = collectives[timed.index], sums[collectives[timed.index].mesh_dim, collectives[timed.index].kind]
        for i, value in enumerate((1, this.bytes, timed.seconds, timing.exposed[timed.index])):
            entry[i] += value
    rows = [model.Communication(*key, int(value[0]), int(value[1]), value[2], value[3]) for key, value in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _itemsize(operations: Sequence[Operation]) -> int:
    """Bytes of an element of the matmuls that compute most."""
    work: collections.Counter[int] = collections.Counter()
    for operation in operations:
        work[operation.itemsize] += operation.flops
    return work.most_common(1)[0][0] if work else 4


def _tokens(training: Training, this: Job) -> int:
    """Tokens of the job in a step: of inputs that are whole numbers; those of a rank count for each part of a mesh dim
    over which data is split."""
    for tensor in training.inputs():
        if not tensor.dtype.is_floating_point and tensor.dim() >= 2:
            parts = 1
            if not hasattr(tensor, "placements"):
                for name, size in this.mesh:
                    parts *= size if name.startswith(DATA_DIMS) else 1
            return tensor.numel() * parts
    return 0
