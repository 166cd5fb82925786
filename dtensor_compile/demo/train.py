"""Trains `Llama` in eager, with stock Inductor and with this backend, from equal states on the ranks of one job, and
compares the results.

    torchrun --nproc-per-node 2 -m dtensor_compile.demo.train --layout tp

Tests and benchmarks use `compare`; `table` prints its result.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.distributed.gloo import one_gloo_worker
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.demo import llama
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import fully_sharded, shard_parameters, tensor_parallel, two_dim
from dtensor_compile.recording.recorder import Recording, observe_stock, record

BATCH = 4
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Layout:
    """A way to parallelize the model: how it is built on a mesh of which dims.

    Attributes:
        averages: whether gradients are averaged over ``dp`` without a division of the loss.
    """

    apply: Callable[[Llama, DeviceMesh], Llama]
    dims: tuple[str, ...]
    title: str
    averages: bool = False

    def mesh_shape(self, world: int) -> tuple[int, ...]:
        """Shape of the mesh for a job of `world` ranks."""
        outer = min(2, world)
        return (outer, world // outer) if len(self.dims) == 2 else (world,)


LAYOUTS = {
    "tp": Layout(tensor_parallel, ("tp",), "tensor + sequence parallel"),
    "fsdp": Layout(shard_parameters, ("dp",), "sharded parameters (FSDP-like)"),
    "2d": Layout(two_dim, ("dp", "tp"), "2-D: sharded parameters x tensor parallel"),
    "fully_shard": Layout(fully_sharded, ("dp",), "fully_shard", averages=True),
    "fully_shard_tp": Layout(fully_sharded, ("dp", "tp"), "2-D: fully_shard x tensor parallel", averages=True),
}


@dataclass
class Run:
    """One variant (eager, stock, ours) on this rank.

    Attributes:
        losses: this rank's loss of each step.
        gradients: full gradients of the first step, by parameter.
        graph_breaks, graphs: as counted by Dynamo.
        redistributions: redistribute nodes before the passes (0 if there is no such node).
        collectives, bytes_sent: of the graphs of one forward and backward, per rank.
        compile_seconds: excess of the first step over a later one.
        step_seconds: median of forward + backward + optimizer.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    graph_breaks: int = 0
    graphs: int = 0
    redistributions: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    compile_seconds: float = 0.0
    step_seconds: float = 0.0


def batches(config: LlamaConfig, mesh: DeviceMesh, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of each step for this rank: the same global batch on all ranks, sharded over the mesh dim
    ``dp``.
    """
    generator = torch.Generator().manual_seed(1)
    names = mesh.mesh_dim_names or ()
    parts, mine = (mesh.size(names.index("dp")), mesh.get_local_rank("dp")) if "dp" in names else (1, 0)
    result = []
    for _ in range(steps):
        tokens = torch.randint(config.vocab, (BATCH, config.sequence + 1), generator=generator).to(mesh.device_type)
        local = tokens.chunk(parts)[mine]
        result.append((local[:, :-1].contiguous(), local[:, 1:].contiguous()))
    return result


class Trainer:
    """A model, its optimizer and its batches; `step` is one training step."""

    def __init__(
        self, layout: Layout, mesh: DeviceMesh, config: LlamaConfig, steps: int, wrap: Callable[[Any], Any]
    ) -> None:
        torch.manual_seed(0)
        self.model = layout.apply(_llama_of_its_own()(config).to(mesh.device_type), mesh)
        self.run = wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=False)
        self.batches = batches(config, mesh, steps)
        self.parts = mesh.size(0) if "dp" in layout.dims and not layout.averages else 1

    def loss(self, index: int) -> torch.Tensor:
        tokens, targets = self.batches[index % len(self.batches)]
        return F.cross_entropy(self.run(tokens).flatten(0, 1), targets.flatten()) / self.parts

    def step(self, index: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(index)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients; a collective call."""
        return {name: _whole(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}


def _llama_of_its_own() -> type[Llama]:
    """`Llama` with functions that nothing was compiled for.

    Dynamo keeps its state of a function by the code, for all backends. Where stock breaks the graph it marks the
    function as not to be compiled, and whoever compiles it later compiles the functions that it calls one by one.
    """
    spec = importlib.util.spec_from_file_location(llama.__name__, llama.__file__)
    if spec is None or spec.loader is None:
        raise ImportError(f"{llama.__name__} has no file to load it from")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Llama  # type: ignore[no-any-return]


def _whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def compare(
    layout: Layout,
    mesh: DeviceMesh,
    config: LlamaConfig,
    *,
    steps: int = 10,
    timed: int = 5,
    stock: bool = True,
    empty_caches: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Run]:
    """Trains each variant for `steps` steps and times `timed` further ones, interleaved; leaves stock out if it cannot
    compile the model. Called on every rank.

    Args:
        on_progress: called with progress messages.
        stock: whether stock Inductor runs too.
        empty_caches: compile each variant with empty on-disk caches, so that compile times are comparable.
    """
    recordings = {"stock": Recording(), "ours": Recording()}
    wraps = _wraps(recordings["stock"])
    if not stock:
        del wraps["stock"]
    runs, trainers = [], {}
    for name, wrap in wraps.items():
        run = Run(name)
        trainer = trainers[name] = Trainer(layout, mesh, config, steps, wrap)
        counters.reset()
        on_progress(f"{name}: first step" + (" (compiles)" if name != "eager" else ""))
        began = time.perf_counter()
        with fresh_caches() if empty_caches else contextlib.nullcontext(), _recorded(name, recordings):
            trainer.optimizer.zero_grad()
            try:
                loss = trainer.loss(0)
                loss.backward()
            except Exception as error:
                if name != "stock":
                    raise
                on_progress(f"stock: fails, and is left out ({' '.join(str(error).split())[:150]})")
                del trainers[name]
                continue
        first = time.perf_counter() - began
        run.losses.append(loss.item())
        run.gradients = trainer.gradients()
        trainer.optimizer.step()
        on_progress(f"{name}: {steps - 1} more steps")
        began = time.perf_counter()
        run.losses += [trainer.step(i) for i in range(1, steps)]
        later = (time.perf_counter() - began) / max(1, steps - 1)
        run.compile_seconds = first - later if name != "eager" else 0.0
        run.graph_breaks, run.graphs = counters.graph_breaks(), counters.graphs()
        if name in recordings:
            recording = recordings[name]
            run.redistributions = len(recording.captured)
            run.collectives, run.bytes_sent = len(recording.collectives), recording.bytes_sent
        runs.append(run)

    on_progress(f"timing: {timed} steps each, interleaved")
    _take_times(runs, trainers, timed)
    return runs


def _wraps(recording: Recording) -> dict[str, Callable[[Any], Any]]:
    """Compile functions by variant; the collectives of stock are counted into `recording`."""
    return {
        "eager": lambda model: model,
        "stock": lambda model: torch.compile(model, backend="inductor", options=observe_stock(recording)),
        "ours": lambda model: torch.compile(model, backend="dtensor", fullgraph=True),
    }


def _take_times(runs: list[Run], trainers: dict[str, Trainer], timed: int) -> None:
    """Sets the median time of `timed` steps of each variant, which take turns."""
    seconds: dict[str, list[float]] = {run.name: [] for run in runs}
    for index in range(timed):
        for name, trainer in trainers.items():
            dist.barrier()
            began = time.perf_counter()
            trainer.step(index)
            seconds[name].append(time.perf_counter() - began)
    for run in runs:
        run.step_seconds = statistics.median(seconds[run.name]) if timed else 0.0


@contextlib.contextmanager
def _recorded(name: str, recordings: dict[str, Recording]) -> Iterator[None]:
    if name != "ours":
        yield
        return
    with record() as recording:
        yield
    recordings[name] = recording


def loss_difference(run: Run, eager: Run) -> float:
    """Largest relative difference of a loss over the steps."""
    return max(abs(a - b) / abs(a) for a, b in zip(eager.losses, run.losses))


def gradient_difference(run: Run, eager: Run) -> float:
    """Largest difference of a gradient of the first step, relative to the largest value of that gradient."""
    return max(
        ((run.gradients[name] - g).abs().max() / g.abs().max().clamp_min(1e-12)).item()
        for name, g in eager.gradients.items()
    )


def table(runs: list[Run], title: str) -> Table:
    """The comparison as a table, one column a variant."""
    eager = runs[0]
    compiled = [run for run in runs if run is not eager]

    def row(name: str, of: Callable[[Run], str]) -> None:
        result.add_row(name, *("-" if run is eager and name not in _EAGER_TOO else of(run) for run in runs))

    result = Table(title=title, title_justify="left")
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    row("graph breaks", lambda r: str(r.graph_breaks))
    row("redistribute nodes", lambda r: str(r.redistributions) if r.name == "ours" else "-")
    # What stock leaves to Python, such as the hooks of fully_shard, is in none of its graphs.
    row("collectives of its graphs per step", lambda r: str(r.collectives))
    row("bytes sent by its graphs per rank and step", lambda r: f"{r.bytes_sent:,}")
    row("loss, first step", lambda r: f"{r.losses[0]:.6f}")
    row("loss, last step", lambda r: f"{r.losses[-1]:.6f}")
    row(f"largest difference of {len(eager.losses)} losses", lambda r: f"{loss_difference(r, eager):.1e}")
    row("largest difference of a gradient", lambda r: f"{gradient_difference(r, eager):.1e}")
    row("compile time", lambda r: f"{r.compile_seconds:.1f} s")
    row("step time (median)", lambda r: f"{r.step_seconds * 1e3:.1f} ms")
    if compiled:
        result.caption = "differences are relative to eager; bytes by ring algorithms"
    return result


_EAGER_TOO = frozenset({"loss, first step", "loss, last step", "step time (median)"})


def to_json(runs: list[Run], **facts: Any) -> str:
    """The figures of `table` as JSON."""
    eager = runs[0]
    rows = []
    for run in runs:
        figures = asdict(run)
        del figures["gradients"]
        figures["loss_difference"] = loss_difference(run, eager)
        figures["gradient_difference"] = gradient_difference(run, eager)
        rows.append(figures)
    return json.dumps({**facts, "runs": rows}, indent=2)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dtensor_compile.demo.train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--layers", type=int, default=LlamaConfig.layers)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timed", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        one_gloo_worker()
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        layout, world = LAYOUTS[args.layout], dist.get_world_size()
        mesh = init_device_mesh(device, layout.mesh_shape(world), mesh_dim_names=layout.dims)
        config = LlamaConfig(layers=args.layers)
        console = Console(stderr=True)
        first = dist.get_rank() == 0
        with console.status("starting") if first and console.is_terminal else contextlib.nullcontext() as status:

            def on_progress(text: str) -> None:
                if status is not None:
                    status.update(text)
                elif first:
                    print(text, file=sys.stderr, flush=True)

            runs = compare(
                layout, mesh, config, steps=args.steps, timed=args.timed, empty_caches=True, on_progress=on_progress
            )
        if first:
            title = f"Llama, {layout.title}, {world} ranks, {config.layers} layers, torch {torch.__version__}"
            Console().print(table(runs, title))
            if args.json:
                with open(args.json, "w") as file:
                    file.write(
                        to_json(runs, layout=args.layout, world=world, layers=config.layers, torch=torch.__version__)
                    )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
