"""Runs the gallery: each program of `examples/*/train.py` in eager, with stock torch.compile and with this backend;
writes docs/gallery.md.

    python tools/gallery.py [NAME ...] [--repeats 9] [--json FILE] [--write]

A program is a file with a function ``build(backend)``, which gives a model and a training step; its docstring names the
ranks that it runs on. Where a package owns the loop, it gives a model and ``loop(after_step)`` instead, which trains
until ``after_step(loss)``, called at the end of each step, returns True; the loop runs in a thread of its own, one step
at a time. The three variants of it take turns in one job, from equal parameters and with equal batches:

    eager    build(None)
    stock    build("inductor")
    ours     build("dtensor")

What is compared: losses of all steps and all parameters after them; graphs and graph breaks that Dynamo counted;
collectives, by the profiler, and bytes that the process wrote to its sockets (Linux counts them), of one step; the
median of a step's seconds on the slowest rank. The report of each program is written beside it (``report.txt``). Ends
with 1 where a program differs from eager, sends more than eager or stock, takes longer than eager, or breaks where
stock does not."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import pathlib
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch._dynamo.utils import counters

from dtensor_compile import one_gloo_worker
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.build import build_report
from dtensor_compile.report.table import print_report
from dtensor_compile.testing.count_collectives import collectives_run, counted_collectives

ROOT = pathlib.Path(__file__).parents[1]
VARIANTS = {"eager": None, "stock": "inductor", "ours": "dtensor"}
#: Steps before times are taken: the first compiles, the second may once more (hooks that programs register in their
#: first step).
WARM = 3
#: Largest difference of losses from eager's, and of parameters, both relative to the largest value. Kernels of float32
#: that sum in another order differ by 1e-7 a step; a missing or doubled term of a gradient by 1e-3 and more.
TOLERANCE = 2e-5
#: Bytes of a step that are none of its collectives: messages to the store of the job.
STORE = 4096
#: Times of two cores differ by this much from run to run.
SLOWER = 1.1


def programs() -> dict[str, pathlib.Path]:
    """Programs of the gallery by name."""
    return {path.parent.name: path for path in sorted((ROOT / "examples").glob("*/train.py"))}


def ranks_of(path: pathlib.Path) -> int:
    """How many ranks the docstring of a program starts it on."""
    found = re.search(r"--nproc-per-node (\d+)", path.read_text())
    if found is None:
        raise SystemExit(f"gallery: the docstring of {path} does not say on how many ranks it runs (--nproc-per-node)")
    return int(found[1])


def _load(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gallery_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _written() -> int:
    """Bytes that this process has written, to sockets too."""
    return int(re.search(r"wchar: (\d+)", pathlib.Path("/proc/self/io").read_text())[1])


def _difference(found: torch.Tensor, expected: torch.Tensor, floor: float = 1e-12) -> float:
    """The largest difference, relative to the largest value expected or to `floor`."""
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(floor)).item()


class OwnLoop:
    """A loop that a package owns, as a step function: a call goes on with it, and returns when the next step has ended.

    Threads take turns: while a caller waits for its step the loop runs, and at the end of the step the loop waits for
    the next call.

    Args:
        loop: trains until its argument, which it calls at the end of each step with the loss, returns True.
    """

    def __init__(self, loop: Callable[[Callable[[torch.Tensor], bool]], None]) -> None:
        self._calls: queue.SimpleQueue[contextlib.AbstractContextManager[Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()
        self._scope = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)

    def __call__(self, scope: contextlib.AbstractContextManager[Any] | None = None) -> torch.Tensor:
        """The loss of the next step, which runs in `scope`, entered and left by the thread of the loop."""
        self._calls.put(scope or contextlib.nullcontext())
        if self._thread.ident is None:
            self._thread.start()
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self) -> None:
        """Ends the loop behind the last step."""
        self._calls.put(None)
        self._thread.join()

    def _run(self, loop: Callable[[Callable[[torch.Tensor], bool]], None]) -> None:
        try:
            self._scope.enter_context(self._calls.get())
            loop(self._after_step)
            self._results.put(RuntimeError("the loop of the program ended before the gallery did"))
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self._results.put(error)

    def _after_step(self, loss: torch.Tensor) -> bool:
        self._scope.close()
        self._results.put(loss)
        scope = self._calls.get()
        if scope is not None:
            self._scope.enter_context(scope)
        return scope is None


def _collectives(step: Callable[..., torch.Tensor], losses: list[torch.Tensor]) -> int:
    """How many collectives the next step runs; adds its loss to `losses`."""
    if not isinstance(step, OwnLoop):
        return collectives_run(lambda: losses.append(step()))
    counted = counted_collectives()
    found: list[list[int]] = []

    @contextlib.contextmanager
    def scope() -> Any:
        with counted as count:
            found.append(count)
            yield

    losses.append(step(scope()))
    return found[0][0]


def child(path: pathlib.Path, repeats: int, out: pathlib.Path, report: pathlib.Path) -> None:
    """One rank: writes its figures to ``out.RANK``, and the first rank the report."""
    torch.set_num_threads(1)
    one_gloo_worker()
    dist.init_process_group("gloo")
    variants = Variants(_load(path))
    for variant, backend in VARIANTS.items():
        with record() if variant == "ours" else contextlib.nullcontext() as recording:
            variants.start(variant, backend)
        if variant == "ours" and dist.get_rank() == 0:
            text, target = io.StringIO(), f"examples/{path.parent.name}/train.py"
            print_report(build_report(recording, target=target), Console(file=text, width=160, color_system=None))
            report.write_text("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))
    for _ in range(repeats):
        variants.take_time()
    variants.count_traffic()
    variants.end()
    variants.compare()
    pathlib.Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(variants.found))
    dist.barrier()
    dist.destroy_process_group()


class Variants:
    """The variants of one program on this rank, and the figures that are found of them.

    Attributes:
        found: figures by variant and name; ``failed`` alone where stock does not run the program.
        models, steps, losses: by variant; of those that run.
    """

    def __init__(self, program: ModuleType) -> None:
        self.program = program
        self.found: dict[str, dict[str, Any]] = {}
        self.models: dict[str, torch.nn.Module] = {}
        self.steps: dict[str, Callable[..., torch.Tensor]] = {}
        self.losses: dict[str, list[torch.Tensor]] = {}

    def start(self, variant: str, backend: str | None) -> None:
        """Builds a variant and runs its first steps, in which it is compiled."""
        if "accelerate" in sys.modules:  # it has one state a process, backend included
            sys.modules["accelerate"].state.AcceleratorState._reset_state()
        breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
        try:
            self.models[variant], step = self.program.build(backend)
            self.steps[variant] = OwnLoop(step) if inspect.signature(step).parameters else step
            began = time.perf_counter()
            self.losses[variant] = [self.steps[variant]()]
            first = time.perf_counter() - began
            self.losses[variant] += [self.steps[variant]() for _ in range(WARM - 1)]
        except Exception as error:  # noqa: BLE001 - stock may not run a program, which is a result
            if variant != "stock":
                raise
            self.steps.pop(variant, None)
            self.found[variant] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            return
        self.found[variant] = {
            "breaks": sum(counters["graph_break"].values()) - breaks,
            "graphs": counters["stats"]["unique_graphs"] - graphs,
            "first_seconds": first,
            "seconds": [],
        }

    def take_time(self) -> None:
        """Takes the time of one step of each variant."""
        for variant, step in self.steps.items():
            dist.barrier()
            began = time.perf_counter()
            self.losses[variant].append(step())
            self.found[variant]["seconds"].append(time.perf_counter() - began)

    def count_traffic(self) -> None:
        """Counts bytes and collectives of a step of each variant."""
        for variant, step in self.steps.items():
            dist.barrier()
            before = _written()
            self.losses[variant].append(step())
            self.found[variant]["bytes"] = _written() - before
            self.found[variant]["collectives"] = _collectives(step, self.losses[variant])

    def end(self) -> None:
        """Ends the loops of those that own theirs."""
        for step in self.steps.values():
            if isinstance(step, OwnLoop):
                step.end()

    def compare(self) -> None:
        """Compares losses and parameters of each variant with those of eager."""
        losses = {variant: torch.stack(self.losses[variant]) for variant in self.steps}
        whole = {
            v: [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
            for v, model in self.models.items()
            if v in self.steps
        }
        # A parameter whose gradient is zero (the bias of keys) holds nothing but rounding, if it began as zeros.
        floor = 1e-3 * max(p.abs().max().item() for p in whole["eager"])
        for variant in self.steps:
            self.found[variant]["loss_difference"] = _difference(losses[variant], losses["eager"])
            self.found[variant]["parameter_difference"] = max(
                _difference(*pair, floor) for pair in zip(whole[variant], whole["eager"])
            )


def _title(path: pathlib.Path) -> str:
    """The first paragraph of a program's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def run(name: str, path: pathlib.Path, repeats: int, timeout: float) -> dict[str, Any]:
    """The figures of one program."""
    ranks = ranks_of(path)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "rank")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        given = [__file__, "--child", str(path), "--repeats", str(repeats), "--json", str(out)]
        done = subprocess.run([*launch, *given], timeout=timeout, capture_output=True, text=True, check=False)
        if done.returncode:
            message = (
                re.findall(r"^\[rank\d+\]: (\S*(?:Error|Exception)\b.*)$", done.stderr, re.MULTILINE)
                or done.stderr.splitlines()[-1:]
            )
            print(done.stderr, file=sys.stderr)
            return {"program": name, "ranks": ranks, "failed": message[0]}
        each = [json.loads(pathlib.Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    row: dict[str, Any] = {"program": name, "ranks": ranks, "title": _title(path)}
    for variant, first in each[0].items():
        if "failed" in first:
            row[variant] = first
            continue
        of_ranks = [rank[variant] for rank in each]
        row[variant] = {key: max(this[key] for this in of_ranks) for key in first if key != "seconds"}
        row[variant]["seconds"] = statistics.median(map(max, zip(*(this["seconds"] for this in of_ranks))))
    return row


def faults(row: dict[str, Any]) -> list[str]:
    """What a row shows that the gallery promises not to happen."""
    if "failed" in row:
        return [f"{row['program']}: fails: {row['failed']}"]
    ours, stock, eager = row["ours"], row["stock"], row["eager"]
    says = []
    for what in ("loss_difference", "parameter_difference"):
        if not ours[what] <= TOLERANCE:
            says.append(f"{what} from eager {ours[what]:.1e}")
    if ours["breaks"] and not stock.get("breaks", 1):
        says.append(f"{ours['breaks']} graph breaks, stock none")
    for name, other in (("eager", eager), ("stock", stock)):
        if "failed" in other:
            continue
        if ours["bytes"] > other["bytes"] + STORE:
            says.append(f"bytes: {ours['bytes']:,}, {name} {other['bytes']:,}")
        # A bucket of DDP is split where sending a part earlier pays; where it does not, this is a fault.
        if ours["collectives"] > other["collectives"] and ours["seconds"] > SLOWER * other["seconds"]:
            says.append(f"collectives: {ours['collectives']}, {name} {other['collectives']}, and a slower step")
    if ours["seconds"] > SLOWER * eager["seconds"]:
        says.append(f"step {ours['seconds'] / eager['seconds']:.2f} of eager's")
    return [f"{row['program']}: {message}" for message in says]


def _cell(row: dict[str, Any], variant: str, what: str) -> str:
    figures = row[variant]
    if "failed" in figures:
        return "fails"
    value = figures[what]
    return f"{value * 1e3:.1f}" if what == "seconds" else f"{value / 1e6:.2f}" if what == "bytes" else f"{value}"


def page(rows: list[dict[str, Any]]) -> str:
    """docs/gallery.md."""
    lines = [
        "# Gallery",
        "",
        "Programs of other packages, as their users write them, made from configurations without weights: "
        "`examples/NAME/train.py`, each with",
        "its report beside it. `make gallery` makes an environment of pinned versions, runs all of them and writes "
        "this page. Columns give",
        "eager / stock `torch.compile` / this backend, for one training step on a rank: collectives, MB that the "
        "process wrote to its sockets,",
        "median milliseconds on gloo ranks over loopback; *eager* is the ratio of this backend's step to eager's in "
        "the same run.",
        "",
        f"torch {torch.__version__}, {_versions()}; {os.cpu_count()} cores. Differences are from eager after all "
        "steps, of losses and of parameters,",
        "relative to the largest value.",
        "",
        "| program | ranks | graphs (breaks), stock | ours | collectives | MB | ms | eager | losses | parameters |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(
                f"| [{row['program']}](../examples/{row['program']}/train.py) | {row['ranks']} | | fails | | | | | | |"
            )
            continue
        ours, stock = row["ours"], row["stock"]
        cells = [
            " / ".join(_cell(row, variant, what) for variant in VARIANTS)
            for what in ("collectives", "bytes", "seconds")
        ]
        graphs = ["fails" if "failed" in side else f"{side['graphs']} ({side['breaks']})" for side in (stock, ours)]
        ratio = f"{ours['seconds'] / row['eager']['seconds']:.2f}"
        differences = [f"{ours[what]:.0e}" for what in ("loss_difference", "parameter_difference")]
        name = f"[{row['program']}](../examples/{row['program']}/train.py)"
        lines.append("| " + " | ".join([name, str(row["ranks"]), *graphs, *cells, ratio, *differences]) + " |")
    lines += ["", "What each is:", ""]
    lines += [f"- {row['program']}: {row['title']}" for row in rows if "title" in row]
    lines += [
        f"- stock, {row['program']}: {row['stock']['failed']}" for row in rows if "failed" in row.get("stock", {})
    ]
    return "\n".join(lines) + "\n"


def _versions() -> str:
    names = ("transformers", "torchtitan", "ai2-olmo-core", "lightning-fabric", "accelerate", "peft")
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (all)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one program")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--write", action="store_true", help="write docs/gallery.md")
    parser.add_argument("--child", metavar="PROGRAM", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        path = pathlib.Path(args.child)
        child(path, args.repeats, pathlib.Path(args.json), path.parent / "report.txt")
        return 0
    known = programs()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such program: {', '.join(unknown)}; there are {', '.join(known)}")
    rows = []
    for name in args.names or known:
        try:
            rows.append(run(name, known[name], args.repeats, args.timeout))
        except subprocess.TimeoutExpired:
            rows.append({"program": name, "ranks": ranks_of(known[name]), "failed": f"no end in {args.timeout:g} s"})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    text = page(rows)
    if args.write:
        (ROOT / "docs" / "gallery.md").write_text(text)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))
    print(text)
    wrong = [message for row in rows for message in faults(row)]
    for message in wrong:
        print(message, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
