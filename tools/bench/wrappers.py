"""A step of wrapped models on real ranks: eager's wrapper, stock torch.compile with it, and this backend.

    python tools/bench/wrappers.py [--programs ...] [--ranks 2] [--rates 0 1000] [--repeats 15] [--json FILE]

A rate of 0 is loopback, where only latency counts; others (Mbit/s) run on the network lab (`tools/netlab.py`), which
needs root; where that cannot run the exit status is 2. Times are medians over repeats of forward and backward in which
the variants take turns, of the slowest rank; ratios are those of the medians of one run. Collectives are counted by the
profiler, in the last repeat.

    eager    the wrapper alone
    stock    blocks compiled one by one under ``fully_shard`` (``block.compile()``), the whole model under DDP
    blocks   the same with this backend; not under DDP
    ours     the step compiled with this backend, in one graph
    once     the same with equal blocks compiled once (``options={"blocks": "once"}``)

Beside times, of the first step with empty caches the CPU seconds of all ranks, C++ compiler included, less those of a
later one, and the peak of resident memory of a step beyond that before it, of the rank with the most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import third_party
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from compile_time import seconds_of_first_step
from lab import add_arguments, results_of_ranks, show_rows, slowest
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtensor_compile import one_gloo_worker
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.testing.count_collectives import collectives_run
from dtensor_compile.testing.step_memory import resident_peak

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import netlab  # noqa: E402 - tools beside this one

VARIANTS = ("eager", "stock", "blocks", "ours", "once")


class Transformer(nn.Module):
    """A vision transformer: patches of an image, blocks of torch's own, one class."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 8, stride=8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    """A convolution with batch norm, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm(self.conv(x)))


def _convolutions(channels: int, layers: int) -> nn.Module:
    stem, head = nn.Conv2d(3, channels, 7, stride=4), nn.Linear(channels, 10)
    return nn.Sequential(
        stem, *(Residual(channels) for _ in range(layers)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head
    )


def _sharded(model: nn.Module, blocks: Iterable[nn.Module], compile: str | None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in blocks:
        if compile is not None:
            block.compile(backend=compile)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _replicated(model: nn.Module, compile: str | None) -> nn.Module:
    model = DistributedDataParallel(model)
    if compile == "dtensor":
        raise NotImplementedError("the whole model is compiled: as ours")
    return model if compile is None else torch.compile(model, backend=compile)


def _llama(config: LlamaConfig) -> Callable[[str | None], nn.Module]:
    def build(compile: str | None) -> nn.Module:
        model = Llama(config)
        return _sharded(model, model.blocks, compile)

    return build


def _third_party() -> dict[str, Program]:
    def sharded(make: Callable[[], nn.Module]) -> Callable[[str | None], nn.Module]:
        def build(compile: str | None) -> nn.Module:
            model = make()
            return _sharded(model, model.model.layers, compile)

        return build

    def replicated(make: Callable[[], nn.Module]) -> Callable[[str | None], nn.Module]:
        return lambda compile: _replicated(make(), compile)

    found = {name: (sharded(make), x) for name, (make, x) in third_party.SHARDED.items()}
    return found | {name: (replicated(make), x) for name, (make, x) in third_party.REPLICATED.items()}


Program = tuple[Callable[[str | None], nn.Module], Callable[[], torch.Tensor]]
SMALL, LARGE = (
    LlamaConfig(layers=2, dim=64, ffn_dim=192, heads=8, kv_heads=4, vocab=256, sequence=32),
    LlamaConfig(layers=4),
)


def _tokens(config: LlamaConfig) -> torch.Tensor:
    return torch.randint(config.vocab, (2, config.sequence))


#: A model, under its wrapper and compiled by stock where a backend is named; and its input.
PROGRAMS: dict[str, Program] = {
    "fully_shard, small Llama": (_llama(SMALL), lambda: _tokens(SMALL)),
    "fully_shard, Llama": (_llama(LARGE), lambda: _tokens(LARGE)),
    "DDP, small ViT": (lambda c: _replicated(Transformer(64, 4), c), lambda: torch.randn(2, 3, 32, 32)),
    "DDP, small ResNet": (lambda c: _replicated(_convolutions(16, 8), c), lambda: torch.randn(2, 3, 64, 64)),
    "DDP, Llama": (lambda c: _replicated(Llama(LARGE), c), lambda: _tokens(LARGE)),
    "DDP, ViT": (lambda c: _replicated(Transformer(384, 6), c), lambda: torch.randn(8, 3, 64, 64)),
    **_third_party(),
}
#: Those of which only latency counts, and those with enough to send for a slow network.
AT = {True: [name for name in PROGRAMS if "small" in name], False: [name for name in PROGRAMS if "small" not in name]}


def _step(name: str, variant: str) -> Callable[[], None]:
    build, make_input = PROGRAMS[name]
    torch.manual_seed(0)
    model = build({"stock": "inductor", "blocks": "dtensor"}.get(variant))
    torch.manual_seed(1 + dist.get_rank())
    x = make_input()

    def loss(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return getattr(out, "logits", out).square().mean()

    whole = variant in ("ours", "once")
    options = {"blocks": "once"} if variant == "once" else None
    run = torch.compile(loss, backend="dtensor", fullgraph=True, options=options) if whole else loss

    def step() -> None:
        model.zero_grad()
        run(x).backward()

    return step


def child(args: argparse.Namespace) -> None:
    """One rank: writes its measurements to a file."""
    torch.set_num_threads(1)
    one_gloo_worker()
    inductor_config.compile_threads = 1  # in this process, so that its children are counted
    dist.init_process_group("gloo")
    result: dict[str, Any] = {"seconds": {}, "collectives": {}, "failed": {}, "compile": {}, "memory": {}}
    steps = {}
    for variant in VARIANTS:
        try:
            steps[variant] = _step(args.programs[0], variant)
            with fresh_caches():
                _, result["compile"][variant] = seconds_of_first_step(steps[variant])
            steps[variant]()
        except Exception as error:  # noqa: BLE001 - a variant of stock's may not work here, which is a result
            result["failed"][variant] = f"{type(error).__name__}: {error}"[:300]
            steps.pop(variant, None)
    for _ in range(args.repeats):
        for variant, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            result["seconds"].setdefault(variant, []).append(time.perf_counter() - began)
    result["collectives"] = {variant: collectives_run(step) for variant, step in steps.items()}
    result["memory"] = {variant: resident_peak(step) for variant, step in steps.items()}
    dist.destroy_process_group()
    pathlib.Path(f"{args.json}.{os.environ['RANK']}").write_text(json.dumps(result))


def row(args: argparse.Namespace, network: netlab.Network | None, name: str, mbit: float) -> dict[str, Any]:
    """The figures of one program."""
    if network is not None:
        network.set_rate([f"{mbit:g}mbit"])
    given = ["--programs", name, "--repeats", str(args.repeats)]
    ranks = results_of_ranks(network, args.ranks, __file__, given, args.timeout)
    seconds = slowest(ranks, "seconds")
    about = {"program": name, "ranks": args.ranks, "mbit": mbit, "failed": ranks[0]["failed"]}
    return {
        **about,
        "seconds": seconds,
        "collectives": ranks[0]["collectives"],
        "compile": {v: sum(rank["compile"][v] for rank in ranks) for v in seconds},
        "memory": {v: max(rank["memory"][v] for rank in ranks) for v in seconds},
        "all": [rank["seconds"] for rank in ranks],
    }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    result = Table(title=title)
    for column in (
        "program",
        "Mbit/s",
        *(f"{v} (ms)" for v in VARIANTS),
        "ours / eager",
        "ours / stock",
        "blocks / stock",
        "collectives",
        "compile (CPU s)",
        "memory (MiB)",
    ):
        result.add_column(column, justify="left" if column == "program" else "right")
    for this in rows:
        seconds = this["seconds"]
        pairs = (("ours", "eager"), ("ours", "stock"), ("blocks", "stock"))
        ratios = [f"{seconds[a] / seconds[b]:.2f}" if a in seconds and b in seconds else "-" for a, b in pairs]
        cells = [f"{seconds[v] * 1e3:.1f}" if v in seconds else "-" for v in VARIANTS]
        counts = " / ".join(str(this["collectives"].get(v, "-")) for v in VARIANTS)
        compile = " / ".join(f"{this['compile'][v]:.1f}" if v in seconds else "-" for v in VARIANTS)
        memory = " / ".join(f"{this['memory'][v] / 2**20:.0f}" if v in seconds else "-" for v in VARIANTS)
        rate = f"{this['mbit']:g}" if this["mbit"] else "loopback"
        result.add_row(this["program"], rate, *cells, *ratios, counts, compile, memory)
    result.caption = f"collectives, compile, memory: {' / '.join(VARIANTS)}"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", nargs="+", type=float, default=[0, 1000], help="Mbit/s; 0 is loopback")
    add_arguments(parser, 15, 900.0)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0

    def rows() -> Iterator[dict[str, Any]]:
        for mbit in args.rates:
            with netlab.Network(args.ranks) if mbit else contextlib.nullcontext() as network:
                yield from (row(args, network, name, mbit) for name in args.programs or AT[not mbit])

    title = f"forward and backward on {args.ranks} gloo ranks, torch {torch.__version__}"
    return show_rows(rows(), lambda found: table(found, title), 200, args.json)


if __name__ == "__main__":
    sys.exit(main())
