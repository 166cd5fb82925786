"""Peak memory of a training step beyond that of the model: eager, stock and this backend, on real gloo ranks of this
machine.

    python tools/bench/memory.py [--only fully_shard ...] [--variants eager ours ...] [--layers 6] [--repeats 3] [--json
    FILE]

A step is forward and backward of Llama from no gradients, so that sharded gradients are part of it. Parameters
dominate: they are some 12 MiB a layer, activations little. One row for each configuration:

    fully_shard     each block and the whole, 2 ranks
    parametrized    `shard_parameters`: a gather that autograd keeps for backward, 2 ranks
    fully_shard_tp  `fully_shard` over tensor and sequence parallel, 2 x 2 ranks
    checkpointed    `fully_shard`, each block in `torch.utils.checkpoint`, 2 ranks

and of each the variants

    eager, stock, stock_aten    stock: Inductor's backend; stock_aten: ``aot_eager``
    ours, aten                  this backend, with Inductor and with ``kernels="aten"``
    unordered                   ours with ``schedule=False``

Variants follow each other, each in an emptied Dynamo: one that skips a module's code would have the next one skip it.
Two instruments, both the median over repeats, of the rank with the most: resident memory of the process
(what backends copy is part of it, what is allocated and never written is not), and bytes that torch's allocator has
given out, from the profiler. ``predicted`` is what the simulation of the order says of ours. The ratio is that of
resident memory to eager's, for parametrizations to stock's.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dtensor_compile
from dtensor_compile.demo.llama import Block, Llama, LlamaConfig
from dtensor_compile.demo.parallel import shard_parameters, tensor_parallel
from dtensor_compile.testing.ranks import run_on_ranks
from dtensor_compile.testing.step_memory import allocated_peak, resident_peak, return_freed_memory

#: Names of configurations, and the ratio's divisor for each.
BASES = {"fully_shard": "eager", "parametrized": "stock", "fully_shard_tp": "eager", "checkpointed": "eager"}
VARIANTS = ("eager", "stock", "stock_aten", "ours", "aten", "unordered")
MIB = 1 << 20


class CheckpointedBlock(Block):
    """A block that runs again in backward."""

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, rotary, use_reentrant=False)


def build(configuration: str, sizes: LlamaConfig) -> Llama:
    """The model of a configuration, the same on all ranks before it is spread."""
    torch.manual_seed(0)
    model, world = Llama(sizes), dist.get_world_size()
    if configuration == "parametrized":
        return shard_parameters(model, init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    if configuration == "fully_shard_tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in model.blocks:
        if configuration == "checkpointed":
            block.__class__ = CheckpointedBlock
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap(variant: str, model: Llama) -> Callable[..., torch.Tensor]:
    """The model as a variant runs it."""
    if variant == "eager":
        return model
    backends = {"stock": "inductor", "stock_aten": "aot_eager"}
    options = {"aten": {"kernels": "aten"}, "unordered": {"schedule": False}}.get(variant)
    if variant in backends:
        return torch.compile(model, backend=backends[variant])
    return torch.compile(model, backend="dtensor", fullgraph=True, options=options)


class Program:
    """One variant of a configuration on this rank, compiled and warm.

    Attributes:
        predicted: bytes that the simulation says of its graphs at most; None where it says nothing.
    """

    def __init__(self, configuration: str, variant: str, sizes: LlamaConfig) -> None:
        self.model = build(configuration, sizes)
        self.run = wrap(variant, self.model)
        self.tokens = torch.randint(sizes.vocab, (2, sizes.sequence + 1))
        self.predicted: int | None = None
        if variant == "ours":
            with dtensor_compile.record() as recording:
                self.step()
            reasons = [d.reason for d in recording.decisions if d.kind == "schedule_kernels"]
            found = [re.search(r"become .* and ([\d,]+) bytes;", reason) for reason in reasons]
            self.predicted = max((int(match[1].replace(",", "")) for match in found if match), default=None)
        for _ in range(2):
            self.step()
        self.reset()

    def reset(self) -> None:
        self.model.zero_grad()
        gc.collect()
        dist.barrier()

    def step(self) -> None:
        self.model.zero_grad()
        logits = self.run(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()


def measure(configuration: str, variants: list[str], layers: int, repeats: int) -> dict[str, Any]:
    """Peaks by variant on this rank. Called on every rank."""
    return_freed_memory()
    sizes = LlamaConfig(layers=layers, dim=512, ffn_dim=1536, heads=8, kv_heads=4, vocab=1024, sequence=32)
    found: dict[str, Any] = {"resident": {}, "allocated": {}, "predicted": {}, "failed": {}}
    for variant in variants:
        torch._dynamo.reset()
        try:
            program = Program(configuration, variant, sizes)
        except Exception as error:  # noqa: BLE001 - a variant of stock's may not work here, which is a result
            found["failed"][variant] = f"{type(error).__name__}: {error}"[:300]
            continue
        if program.predicted is not None:
            found["predicted"][variant] = program.predicted
        for _ in range(repeats):
            for name, instrument in (("resident", resident_peak), ("allocated", allocated_peak)):
                program.reset()
                found[name].setdefault(variant, []).append(instrument(program.step))
    return found


def row(configuration: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one row, in bytes."""
    world = 4 if configuration == "fully_shard_tp" else 2
    ranks = run_on_ranks(world, measure, configuration, args.variants, args.layers, args.repeats, timeout=args.timeout)

    def most(name: str) -> dict[str, float]:
        return {v: statistics.median(map(max, zip(*(rank[name][v] for rank in ranks)))) for v in ranks[0][name]}

    result: dict[str, Any] = {
        "configuration": configuration,
        "ranks": world,
        "resident": most("resident"),
        "allocated": most("allocated"),
    }
    result["predicted"] = {v: max(rank["predicted"][v] for rank in ranks) for v in ranks[0]["predicted"]}
    result["failed"], result["base"] = ranks[0]["failed"], BASES[configuration]
    base = result["resident"].get(result["base"])
    result["ratio"] = {v: size / base for v, size in result["resident"].items()} if base else {}
    return {**result, "all": ranks}


def table(rows: list[dict[str, Any]], variants: list[str], title: str) -> Table:
    result = Table(title=title)
    for column in ("configuration", "ranks", *variants, "predicted", "ratio to", "ours", "aten"):
        result.add_column(column, justify="right")
    for this in rows:

        def cell(variant: str) -> str:
            if variant not in this["resident"]:  # noqa: B023
                return "fails" if variant in this["failed"] else "-"  # noqa: B023
            return f"{this['resident'][variant] / MIB:.0f} / {this['allocated'][variant] / MIB:.0f}"  # noqa: B023

        predicted = f"{this['predicted']['ours'] / MIB:.0f}" if "ours" in this["predicted"] else "-"
        ratios = [f"{this['ratio'][v]:.2f}" if v in this["ratio"] else "-" for v in ("ours", "aten")]
        result.add_row(
            this["configuration"], str(this["ranks"]), *map(cell, variants), predicted, this["base"], *ratios
        )
    result.caption = "MiB, resident / allocated, beyond what there is before the step; ratios of resident memory"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one row")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    for configuration in args.only:
        rows.append(row(configuration, args))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "all"}), file=sys.stderr)
    Console(width=160).print(
        table(rows, args.variants, f"Llama, {args.layers} layers, a step, torch {torch.__version__}")
    )
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"layers": args.layers, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
