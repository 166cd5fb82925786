"""Placements for a Llama of 8B shapes on 64 simulated H100s as 8 x 8: time of the search, its gap, and plans.

The plan that is found, the one where no communication is hidden, and a person's (`fully_shard` over dp, tensor and
sequence parallel over tp), for which operators' inputs are chosen in the same way.

    python tools/bench/global_plan.py --layers 2 8 32
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dtensor_compile.compat.dtensor.step_record import RecordedStep, record_step
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.global_plan.choose_placements import Choice, choose_placements
from dtensor_compile.global_plan.place import build_variables, sum_of_results
from dtensor_compile.offline import job
from dtensor_compile.topology.links import CLUSTERS

BATCH, SEQUENCE = 16, 8192
_8B = dataclasses.replace(LlamaConfig(), dim=4096, heads=32, kv_heads=8, ffn_dim=14336, sequence=SEQUENCE, vocab=128256)


def persons_plan(names: list[str]) -> dict[str, tuple[Placement, ...]]:
    """Placements of parameters as `fully_shard` and `parallelize_module` make them, and of the tokens."""
    rows, columns = (Shard(0), Shard(1)), (Shard(0), Shard(0))
    placed: dict[str, tuple[Placement, ...]] = {"0": (Shard(0), Replicate())}
    for name in names:
        if "norm" in name:
            placed[name] = (Shard(0), Replicate())
        else:
            placed[name] = rows if name.split(".")[-2] in ("wo", "w2") else columns
    return placed


def recorded(layers: int) -> tuple[RecordedStep, float]:
    """The step of a model of so many layers in bfloat16, and the seconds to record it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model, tokens = (
                Llama(dataclasses.replace(_8B, layers=layers)),
                torch.zeros(BATCH, SEQUENCE, dtype=torch.long),
            )
    finally:
        torch.set_default_dtype(torch.float32)
    began = time.perf_counter()
    return record_step(model, (tokens,), {}, sum_of_results, torch.device("cpu")), time.perf_counter() - began


def measure(layers: int, mesh: DeviceMesh, memory: float | None) -> dict[str, object]:
    """Seconds of each part, and both plans."""
    cluster = CLUSTERS["h100"]
    step, record_s = recorded(layers)
    began = time.perf_counter()
    variables, _ = build_variables(step, mesh, cluster)
    model_s = time.perf_counter() - began
    began = time.perf_counter()
    found = choose_placements(variables.model, memory)
    solve_s = time.perf_counter() - began
    by_hand, _ = build_variables(step, mesh, cluster, fixed=persons_plan(list(step.parameters)))
    person = choose_placements(by_hand.model, memory)
    return {
        "layers": layers,
        "record_s": record_s,
        "model_s": model_s,
        "solve_s": solve_s,
        "gap": found.gap,
        "found": _figures(found),
        "nothing hidden": _figures(choose_placements(variables.model, memory, overlaps=False)),
        "person": _figures(person),
    }


def _figures(choice: Choice) -> dict[str, float]:
    return {
        "step_ms": choice.seconds * 1e3,
        "exposed_ms": choice.exposed * 1e3,
        "hidden_ms": choice.hidden * 1e3,
        "sent_gib": choice.sent / 2**30,
        "memory_gib": choice.memory / 2**30,
    }


def main() -> None:
    """Prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--memory", type=float, help="GiB that a rank may hold")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    table = Table(
        "layers", "record s", "model s", "solve s", "gap", "plan", "step ms", "exposed ms", "sent GiB", "memory GiB"
    )
    rows = []
    with job(64):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
        for layers in args.layers:
            row = measure(layers, mesh, args.memory and args.memory * 2**30)
            rows.append(row)
            for name in ("found", "nothing hidden", "person"):
                of = row[name]
                took = [f"{row[key]:.2f}" for key in ("record_s", "model_s", "solve_s")] + [f"{row['gap']:.2%}"]
                assert isinstance(of, dict)
                figures = [f"{of[key]:.2f}" for key in ("step_ms", "exposed_ms", "sent_gib", "memory_gib")]
                table.add_row(str(layers), *(took if name == "found" else [""] * 4), name, *figures)
    Console(width=140).print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
