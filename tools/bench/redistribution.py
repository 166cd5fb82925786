"""What one forward and backward pass sends, stock torch against this backend, on small models of many layouts.

    python tools/bench/redistribution.py [--only REGEX] [--json FILE] [--disable PASS,...]

Per model and for one rank: collectives, bytes sent, their estimated time, and the bytes that copies of what collectives
take and give write in kernels of their own (`graph/extra_copies.py`). Columns: stock with its default planner of
redistributions (greedy), stock with its other one (min-cost), and this backend. The job is simulated in this process;
the graphs are those that Inductor would get. On a CPU stock makes an all-gather where it makes an all-to-all on a GPU,
and sends what that sends.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))
from models import CASES, Case  # noqa: E402

from dtensor_compile.compat.dtensor.specs import min_cost_plans
from dtensor_compile.report.build import build_side
from dtensor_compile.report.recorded import recorded, recorded_stock, run_backward
from dtensor_compile.report.run_target import Job, running
from dtensor_compile.topology.links import CLUSTERS

VARIANTS = ("stock greedy", "stock min-cost", "ours")
CLUSTER = "h100"
RANKS = 4


@dataclass(frozen=True)
class Sent:
    """What one rank sends in a forward and a backward pass, and copies for it in kernels of their own; seconds are
    estimated.
    """

    collectives: int
    bytes: int
    seconds: float
    extra_copies: int


def measure(case: Case, variant: str, disabled: tuple[str, ...] = ()) -> Sent | None:
    """Compiles a fresh model of the case, in a job of `RANKS` ranks, and counts what its graphs send.

    Returns None where stock's min-cost planner fails on the model (it knows no masked partial, which a row-wise lookup
    makes)."""
    torch.manual_seed(0)
    model, inputs = case.build(init_device_mesh("cpu", case.shape, mesh_dim_names=case.dims))

    def run(compiled: Any) -> None:
        with case.around():
            run_backward(compiled(*inputs))

    if variant == "ours":
        recording = recorded(model, run, kernels="aten", options={"disable_passes": disabled})
    elif variant == "stock greedy":
        recording = recorded_stock(model, run)
    else:
        with min_cost_plans():
            recording = recorded_stock(model, run)
        if recording.breaks:
            return None
    if recording.breaks:
        raise RuntimeError(f"{case.name}, {variant}: {recording.breaks[0].message}")
    totals = build_side(recording, CLUSTERS[CLUSTER], "").totals.all
    return Sent(totals.count, totals.bytes, totals.seconds, sum(graph.extra_copies for graph in recording.graphs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--disable", default="", metavar="PASS,...", help="passes that do not run")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    disabled = tuple(filter(None, args.disable.split(",")))
    table = Table(title=f"one forward and backward, one rank; times estimated for {CLUSTER}")
    table.add_column("")
    for title in ("collectives", "bytes sent", "time", "extra copies"):
        for variant in ("greedy", "min-cost", "ours"):
            table.add_column(f"{title}\n{variant}", justify="right")
    table.add_column("bytes\nsaved", justify="right")
    results: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings(), running(Job(world=RANKS)):
        warnings.simplefilter("ignore")
        for case in (case for case in CASES if re.search(args.only, case.name)):
            sent = [measure(case, variant, disabled) for variant in VARIANTS]
            results[case.name] = {variant: this and asdict(this) for variant, this in zip(VARIANTS, sent)}
            table.add_row(case.name, *_row(sent))
            print(case.name, flush=True)
    Console(width=200).print(table)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


def _row(sent: Sequence[Sent | None]) -> list[str]:
    texts = [
        ("fails", "", "", "")
        if s is None
        else (f"{s.collectives}", f"{s.bytes:,}", f"{s.seconds * 1e6:.0f} us", f"{s.extra_copies:,}")
        for s in sent
    ]
    *stock, ours = sent
    least = min(this.bytes for this in stock if this is not None)
    assert ours is not None
    return [text for column in zip(*texts) for text in column] + [f"{1 - ours.bytes / least:.0%}" if least else ""]


if __name__ == "__main__":
    main()
