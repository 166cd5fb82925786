"""How many graph breaks of the catalogue of programs, under stock torch, get a cause from our catalogue of causes.

    python tools/cause_coverage.py [RUN.json] [--save FILE]

RUN.json is a run of the catalogue (``run_corpus.py --compile-backend inductor --json RUN.json``); without it one is
made, with graphs up to AOTAutograd only, since breaks come before that. `--save` writes the breaks for
``tests/report/stock_breaks.json``."""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import sys

from corpus import ROOT, run
from rich.console import Console
from rich.table import Table

from dtensor_compile.report.stock_causes import classify


def breaks_of(rows: list[dict]) -> list[dict[str, str]]:
    """Program, kind and message of every break of a run, without paths and addresses of the machine."""
    found = []
    for row in rows:
        for text in row.get("break_full") or ():
            message = re.sub(r"0x[0-9a-f]+", "0x..", re.sub(r"[\w./-]*/(site-packages|corpus)/", "", text.strip()))
            found.append({"program": row["name"], "kind": message.splitlines()[0], "message": message[:1000]})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", nargs="?", type=pathlib.Path)
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT.parent / "shared" / "corpus")
    parser.add_argument("--save", type=pathlib.Path)
    args = parser.parse_args()
    found = breaks_of(json.loads(args.run.read_text()) if args.run else run(args.corpus, "aot_eager", None))
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n")
    causes = collections.Counter(classify(row["kind"], row["message"]).code for row in found)
    table = Table("cause", "breaks")
    for code, count in causes.most_common():
        table.add_row(code, str(count))
    Console().print(table)
    known = len(found) - causes["unknown"]
    print(f"{known} of {len(found)} graph breaks have a cause: {known / max(1, len(found)):.1%}")
    return 0 if known >= 0.95 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
