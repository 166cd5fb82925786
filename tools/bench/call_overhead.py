"""Host time of a compiled call over DTensor parameters against the same model over plain local tensors, in one run.

    python tools/bench/call_overhead.py [--parameters 10 100 300 1000] [--repeats 15] [--json FILE]

Models are tiny, so that the host is what is measured; collectives go to a fake process group and cost nothing. Compared
are this backend and stock Inductor over DTensors with Inductor over plain tensors that make the same collectives by
hand. Each figure is the median CPU time of one call over interleaved repeats. A training step is forward, backward and
the gradients set to None."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.dynamo.observers.host_time import checks_of_guards

WORLD = 2
VARIANTS = {"plain": "inductor", "stock": "inductor", "ours": "dtensor"}


class Layout:
    """Makes parameters and moves activations: as DTensors, or as the local tensors that a rank would hold."""

    def __init__(self, mesh: DeviceMesh, distributed: bool) -> None:
        self.mesh, self.distributed = mesh, distributed

    def parameter(self, local_shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
        local = torch.full(local_shape, 0.5)
        if not self.distributed:
            return nn.Parameter(local)
        return nn.Parameter(DTensor.from_local(local, self.mesh, [placement], run_check=False))

    def enter(self, x: torch.Tensor, placement: Placement) -> torch.Tensor:
        return DTensor.from_local(x, self.mesh, [placement], run_check=False) if self.distributed else x

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.distributed:
            return x.redistribute(placements=[Replicate()])
        return (
            funcol.all_reduce(x, "sum", (self.mesh, 0))
            if not torch.is_grad_enabled()
            else _AllReduce.apply(x, self.mesh)
        )

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if self.distributed else x


class _AllReduce(torch.autograd.Function):
    """What a partial sum becomes when it is replicated; its gradient is replicated already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", (mesh, 0))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Scales(nn.Module):
    """As many parameters as wanted, next to no work for each."""

    def __init__(self, layout: Layout, parameters: int) -> None:
        super().__init__()
        self.layout = layout
        self.scales = nn.ParameterList(layout.parameter((4,), Shard(0)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layout.enter(x, Shard(0))
        for scale in self.scales:
            x = x + scale * scale
        return self.layout.leave(self.layout.all_reduce(x.sum()))


class Layer(nn.Module):
    """A transformer layer with tensor parallelism, for one token that attends to itself."""

    def __init__(self, layout: Layout, dim: int) -> None:
        super().__init__()
        self.layout = layout
        self.norm1, self.norm2 = (layout.parameter((dim,), Replicate()) for _ in range(2))
        self.q, self.k, self.v = (layout.parameter((dim // WORLD, dim), Shard(0)) for _ in range(3))
        self.o = layout.parameter((dim, dim // WORLD), Shard(1))
        self.gate, self.up = (layout.parameter((2 * dim // WORLD, dim), Shard(0)) for _ in range(2))
        self.down = layout.parameter((dim, 2 * dim // WORLD), Shard(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.norm1
        h = (h @ self.q.t()) * (h @ self.k.t()) * (h @ self.v.t())
        x = x + self.layout.all_reduce(h @ self.o.t())
        h = x * self.norm2
        h = torch.relu(h @ self.gate.t()) * (h @ self.up.t())
        return x + self.layout.all_reduce(h @ self.down.t())


class Decoder(nn.Module):
    """The shape of a decoding step: batch 1, 9 parameters a layer and 3 beside them."""

    def __init__(self, layout: Layout, layers: int, dim: int = 8) -> None:
        super().__init__()
        self.layout = layout
        self.embedding, self.norm = (layout.parameter((dim,), Replicate()) for _ in range(2))
        self.output = layout.parameter((dim, dim), Replicate())
        self.layers = nn.ModuleList(Layer(layout, dim) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layout.enter(x, Replicate()) * self.embedding
        for layer in self.layers:
            x = layer(x)
        return self.layout.leave((x * self.norm) @ self.output.t())


Call = Callable[[], Any]
#: Compiles for a backend what is measured: ``(model, x, backend)``.
Prepare = Callable[[nn.Module, torch.Tensor, str], Call]


def inference(model: nn.Module, x: torch.Tensor, backend: str) -> Call:
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def call() -> None:
        with torch.no_grad():
            compiled(x)

    return call


def training(model: nn.Module, x: torch.Tensor, backend: str) -> Call:
    compiled, parameters = torch.compile(model, backend=backend, fullgraph=True), list(model.parameters())

    def call() -> None:
        compiled(x).backward()
        for parameter in parameters:
            parameter.grad = None

    return call


def guards(model: nn.Module, x: torch.Tensor, backend: str) -> Call:
    torch.compile(model, backend=backend, fullgraph=True)(x)
    return checks_of_guards(type(model).forward, {"self": model, "x": x})


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def step_of(name: str, make: Make, *, clip: bool = False, scale: bool = False) -> Prepare:
    """A compiled step of an optimizer, and what programs do to gradients before it."""

    def prepare(model: nn.Module, x: torch.Tensor, backend: str) -> Call:
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer, scaler = make(parameters), torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scale)
        scaler.scale(torch.ones(()))  # makes its state

        def step() -> None:
            if scale:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer) if scale else optimizer.step()
            if scale:
                scaler.update()

        return torch.compile(step, backend=backend)

    prepare.__name__ = name
    return prepare


STEPS = [
    step_of("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)),
    step_of("adam", lambda parameters: torch.optim.Adam(parameters, foreach=True)),
    step_of("adamw", lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
    step_of("adamw fused", lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    step_of("clip and adamw", lambda parameters: torch.optim.AdamW(parameters, foreach=True), clip=True),
    step_of("scaler and adamw", lambda parameters: torch.optim.AdamW(parameters, foreach=True), scale=True),
]


def cpu_seconds(call: Call, calls: int) -> float:
    """CPU time of one call, seconds, averaged over `calls`."""
    began = time.process_time_ns()
    for _ in range(calls):
        call()
    return (time.process_time_ns() - began) / calls / 1e9


def measure(calls: dict[str, Call], repeats: int, seconds: float) -> dict[str, list[float]]:
    """CPU seconds per call of each, `repeats` times in turn; each time as many calls as take about `seconds`."""
    for call in calls.values():
        for _ in range(3):
            call()
    count = max(1, int(seconds / max(cpu_seconds(calls["plain"], 3), 1e-7)))
    measured: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        for name, call in calls.items():
            measured[name].append(cpu_seconds(call, count))
    gc.unfreeze()
    return measured


def compare(build: Callable[[Layout], nn.Module], prepare: Prepare, x: torch.Tensor, args: Any) -> dict[str, Any]:
    """One row of the table."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    calls = {
        name: prepare(build(Layout(mesh, distributed=name != "plain")), x, VARIANTS[name]) for name in args.variants
    }
    samples = measure(calls, args.repeats, args.seconds)
    return {"medians": {name: statistics.median(values) for name, values in samples.items()}, "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="*", default=[10, 100, 300, 1000])
    parser.add_argument("--layers", type=int, default=80, help="of the decoding model; 0 leaves it out")
    parser.add_argument("--optimizer", type=int, nargs="*", default=[100], help="parameters of the optimizers' steps")
    parser.add_argument("--steps", nargs="*", default=[step.__name__ for step in STEPS], help="of which optimizers")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.05, help="of one measurement")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}

    def row(name: str, build: Callable[[Layout], nn.Module], prepare: Prepare, x: torch.Tensor) -> None:
        began = time.perf_counter()
        rows[f"{name}, {prepare.__name__}"] = found = compare(build, prepare, x, args)
        medians = {variant: f"{value * 1e6:.1f}" for variant, value in found["medians"].items()}
        print(f"{name}, {prepare.__name__}: {medians} us (after {time.perf_counter() - began:.0f} s)", flush=True)

    with simulated_job(WORLD, 0):
        for count in args.parameters:
            for prepare in (guards, inference, training):
                row(f"{count} parameters", functools.partial(Scales, parameters=count), prepare, torch.ones(4))
        for prepare in (guards, inference) if args.layers else ():
            name = f"{9 * args.layers + 3} parameters, decoding"
            row(name, lambda layout: Decoder(layout, args.layers), prepare, torch.ones(1, 8))
        for count in args.optimizer:
            for prepare in (step for step in STEPS if step.__name__ in args.steps):
                row(f"{count} parameters", functools.partial(Scales, parameters=count), prepare, torch.ones(4))
    table = Table(title=f"host time of a compiled call, median of {args.repeats}, microseconds")
    for column in ("", *args.variants, *(f"{name} / plain" for name in args.variants if name != "plain")):
        table.add_column(column, justify="right")
    for name, found in rows.items():
        medians = found["medians"]
        ratios = [f"{value / medians['plain']:.2f}" for variant, value in medians.items() if variant != "plain"]
        table.add_row(name, *(f"{value * 1e6:.0f}" for value in medians.values()), *ratios)
    Console(width=120).print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
