"""Steps with planned placements on a slow network: what ``options={"plan": "global"}`` and `place` are worth on ranks.

    python tools/bench/planned_steps.py [--ranks 4] [--rate 1000] [--layers 4] [--repeats 7] [--json FILE]

Runs on the network lab (`tools/netlab.py`), which needs root; where it cannot run the exit status is 2. A Llama is
trained over dp x tp = 2 x (ranks / 2), with these programs:

    weights      Megatron's columns and rows over tp and the batch over dp as DTensors, nothing said of activations
    fully_shard  the same weights over tp inside of ``fully_shard`` over dp, nothing said of activations
    person       ``fully_shard`` over dp, tensor and sequence parallel over tp by ``parallelize_module``
    placed       what ``dtensor_compile.place`` chooses, given the model, the mesh, the inputs, and three quarters of
                 the memory that its choice without a limit holds (on a slow network that may be to send nothing)

Columns, medians over repeats in which the variants take turns, of forward, backward, and what reduces gradients to the
placements of their parameters: eager; ours with DTensor's own choice of placements (``greedy``); ours with
``"plan": "global"``; bytes of both and what their forecasts said.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab import add_arguments, results_of_ranks, show_rows, slowest
from overlap import cluster
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import dtensor_compile
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import columns_and_rows, fully_sharded
from dtensor_compile.topology.links import Cluster

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import netlab  # noqa: E402 - a tool beside this one

BATCH = 8
VARIANTS = ("eager", "greedy", "global")


class Step(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


Batch = tuple[torch.Tensor, torch.Tensor]


def _weights(model: Llama, mesh: DeviceMesh, batch: Batch, topology: Cluster) -> tuple[nn.Module, Any]:
    given = [distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None) for x in batch]
    return Step(columns_and_rows(model, mesh)), given


def _local(mesh: DeviceMesh, batch: Batch) -> list[torch.Tensor]:
    """The rows of this rank."""
    return [x.chunk(mesh.size(0))[mesh.get_local_rank("dp")] for x in batch]


def _fully_shard(model: Llama, mesh: DeviceMesh, batch: Batch, topology: Cluster) -> tuple[nn.Module, Any]:
    columns_and_rows(model, mesh["tp"])
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"])
    given = [distribute_tensor(x, mesh["tp"], [Replicate()], src_data_rank=None) for x in _local(mesh, batch)]
    return Step(model), given


def _person(model: Llama, mesh: DeviceMesh, batch: Batch, topology: Cluster) -> tuple[nn.Module, Any]:
    return Step(fully_sharded(model, mesh)), _local(mesh, batch)


def _placed(model: Llama, mesh: DeviceMesh, batch: Batch, topology: Cluster) -> tuple[nn.Module, Any]:
    step = Step(model)
    held = dtensor_compile.place(step, mesh, batch, topology=topology).choice.memory
    plan = dtensor_compile.place(step, mesh, batch, topology=topology, memory=0.75 * held)
    return plan.apply(step), plan.distribute_inputs(batch)


PROGRAMS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "weights": _weights,
    "fully_shard": _fully_shard,
    "person": _person,
    "placed": _placed,
}


class Variant:
    """One program, in eager or compiled."""

    def __init__(self, program: str, name: str, mesh: DeviceMesh, config: LlamaConfig, topology: Cluster) -> None:
        torch.manual_seed(0)
        model = Llama(config)
        tokens = torch.randint(config.vocab, (BATCH, config.sequence + 1))
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.step, self.given = PROGRAMS[program](model, mesh, batch, topology)
        options = {"topology": topology, "plan": name}
        self.run = torch.compile(self.step, backend="dtensor", options=options) if name != "eager" else self.step
        self.averages = program in ("fully_shard", "person")

    def __call__(self) -> float:
        """Forward, backward, and gradients as the optimizer wants them; the loss of the whole batch."""
        self.step.zero_grad()
        with implicit_replication():
            loss = self.run(*self.given)
            loss.backward()
        for parameter in self.step.parameters():
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        value = loss.detach()
        if self.averages:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value.item()


def measure(program: str, layers: int, topology: Cluster, repeats: int) -> dict[str, Any]:
    """Seconds of the steps of each variant, their losses, bytes and forecasts. On every rank."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    result: dict[str, Any] = {"seconds": {}, "bytes": {}, "loss": {}, "forecast": "", "failed": {}}
    variants = {}
    for name in VARIANTS:
        with dtensor_compile.record() as recording:
            variant = Variant(program, name, mesh, LlamaConfig(layers=layers), topology)
            try:
                result["loss"][name] = variant()
            except NotImplementedError as error:
                if name != "eager":  # where torch has no rule for an operator, which is a result
                    raise
                result["failed"][name] = f"{type(error).__name__}: {error}"[:300]
                continue
            variants[name] = variant
        if name != "eager":
            result["bytes"][name] = recording.bytes_sent
        reasons = [d.reason for d in recording.decisions if d.kind == "global_plan"]
        result["forecast"] = "; ".join(reasons) or result["forecast"]
    order = list(variants)
    for _ in range(repeats):
        order = [*order[1:], order[0]]  # none is always the one after eager
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            variants[name]()
            result["seconds"].setdefault(name, []).append(time.perf_counter() - began)
    return result


def child(args: argparse.Namespace) -> None:
    """One rank: writes its measurements to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = measure(args.programs[0], args.layers, cluster(args.rate), args.repeats)
    finally:
        dist.destroy_process_group()
    pathlib.Path(f"{args.json}.{os.environ['RANK']}").write_text(json.dumps(result))


def row(network: netlab.Network, args: argparse.Namespace, program: str) -> dict[str, Any]:
    """The figures of one program."""
    given = ["--programs", program, "--rate", str(args.rate), "--layers", str(args.layers)]
    given += ["--repeats", str(args.repeats)]
    ranks = results_of_ranks(network, network.ranks, __file__, given, args.timeout)
    losses = ranks[0]["loss"]
    return {
        "program": program,
        "seconds": slowest(ranks, "seconds"),
        "failed": ranks[0]["failed"],
        "bytes": {name: max(rank["bytes"][name] for rank in ranks) for name in ranks[0]["bytes"]},
        "loss": losses,
        "difference": (max(losses.values()) - min(losses.values())) / abs(losses["greedy"]),
        "forecast": ranks[0]["forecast"],
    }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    result = Table(title=title)
    for column in ("program", *VARIANTS, "sent: greedy", "global", "by forecast: greedy", "global", "loss differs"):
        result.add_column(column, justify="left" if column == "program" else "right")
    for this in rows:
        forecast = re.search(r"together: ([\d.]+) ms.*instead of ([\d.]+) ms", this["forecast"])
        result.add_row(
            this["program"],
            *(f"{this['seconds'][name] * 1e3:.0f} ms" if name in this["seconds"] else "fails" for name in VARIANTS),
            *(f"{this['bytes'][name] / 2**20:.1f} MiB" for name in VARIANTS[1:]),
            *((f"{forecast[2]} ms", f"{forecast[1]} ms") if forecast else ("-", "kept")),
            f"{this['difference']:.0e}",
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s")
    parser.add_argument("--layers", type=int, default=4)
    add_arguments(parser, 7, 1200.0)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0

    def rows() -> Iterator[dict[str, Any]]:
        with netlab.Network(args.ranks, [f"{args.rate:g}mbit"]) as network:
            yield from (row(network, args, program) for program in args.programs)

    title = f"Llama, {args.layers} layers, {args.ranks} ranks, {args.rate:g} Mbit/s, torch {torch.__version__}"
    return show_rows(rows(), lambda found: table(found, title), 160, args.json, {"layers": args.layers})


if __name__ == "__main__":
    sys.exit(main())
