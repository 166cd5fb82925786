"""What the benchmarks on the network lab share: their ranks, their rows, and how these are shown and saved."""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import netlab  # noqa: E402 - a tool beside this folder

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser, repeats: int, timeout: float) -> None:
    """Adds the arguments of all of them, with these defaults."""
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for one run of all ranks")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def results_of_ranks(
    network: netlab.Network | None, ranks: int, script: str, given: Sequence[str], timeout: float
) -> list[Row]:
    """What each rank of a script writes to the file ``--json``.rank, run with ``--child``.

    Args:
        network: on which it runs; None for loopback.
        given: its other arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [script, "--child", *given, "--json", f"{folder}/rank"]
        if network is None:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            subprocess.run([sys.executable, *launch, *command], check=True, timeout=timeout)
        else:
            network.run([sys.executable, *command], timeout=timeout)
        return [json.loads(pathlib.Path(f"{folder}/rank.{rank}").read_text()) for rank in range(ranks)]


def slowest(ranks: Sequence[Row], kind: str) -> dict[str, float]:
    """By variant the median over repeats of the most over ranks."""
    return {name: statistics.median(map(max, zip(*(rank[kind][name] for rank in ranks)))) for name in ranks[0][kind]}


def show_rows(
    rows: Iterable[Row],
    table: Callable[[list[Row]], Table],
    width: int,
    file: str | None,
    about: Mapping[str, Any] | None = None,
) -> int:
    """Prints each row as it is measured and the table of all, and saves them; the exit status.

    Args:
        file: to save to, if any.
        about: what is saved beside the rows; None for the rows alone.
    """
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "all"}), file=sys.stderr, flush=True)
    except netlab.UnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    Console(width=width).print(table(found))
    if file:
        saved = found if about is None else {**about, "rows": found}
        pathlib.Path(file).write_text(json.dumps(saved, indent=1))
    return 0
