"""Forecast seconds of collectives on the preset clusters against published runs of nccl-tests that the presets were not
made from.

    python tools/bench/published.py [--json FILE]

``published_collectives.json`` has them from 4 MiB on, with their sources: a process for each GPU or one for all of a
host, networks without reported faults, whatever algorithm NCCL chose but one that was told to use rings.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics

from rich.console import Console
from rich.table import Table

from dtensor_compile.topology import CLUSTERS, collective_seconds

TABLES = pathlib.Path(__file__).with_suffix("").with_name("published_collectives.json")


def errors() -> list[tuple[dict[str, str], list[float]]]:
    """For each published table the relative errors of the forecasts, by size."""
    found = []
    for table in json.loads(TABLES.read_text()):
        kind, n = table["kind"], table["ranks"]
        share = (2 if kind == "all_reduce" else 1) * (n - 1) / n
        cluster = CLUSTERS[table["cluster"]]
        rows = table["microseconds"].items()
        seconds = [(collective_seconds(cluster, kind, share * 2 ** int(size), range(n)), took) for size, took in rows]
        found.append((table, [forecast * 1e6 / took - 1 for forecast, took in seconds]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = errors()
    shown = Table(title="error of the forecast, by published table")
    for column in ("source", "hosts x ranks", "kind", "sizes", "least", "median", "most"):
        shown.add_column(column)
    for table, by_size in found:
        figures = (min(by_size), statistics.median(by_size), max(by_size))
        ranks = f"{table['hosts']} x {int(table['ranks']) // int(table['hosts'])}"
        of_all = (table["source"], ranks, table["kind"], str(len(by_size)))
        shown.add_row(*of_all, *(f"{figure:+.0%}" for figure in figures))
    Console(width=150).print(shown)
    sizes = sorted(abs(error) for _, by_size in found for error in by_size)
    within = sum(error <= 0.15 for error in sizes) / len(sizes)
    print(f"{len(sizes)} figures: median {statistics.median(sizes):.1%}, {within:.0%} of them within 15%")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps([[table["source"], by_size] for table, by_size in found]))


if __name__ == "__main__":
    main()
