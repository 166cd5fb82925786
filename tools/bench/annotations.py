"""The numbers of annotations: what a marked Llama sends, and what finding placements and laying out a mesh take.

    python tools/bench/annotations.py [--repeats 5] [--layers 32]

Bytes of one rank in a forward and backward pass on a simulated 2x2 mesh: the Llama with three marks a block
(`tests/spmd/llama.py`), its parameters in shards, and with whole ones; and the plan by hand, with the all-reduces that
average its gradients and its loss over dp. What whole parameters send more is the part of their gradients that a rank
does not have with `shard_module`. Seconds are CPU time, the median of the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from dtensor_compile import record
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.spmd import Mesh
from dtensor_compile.spmd.hybrid_mesh import HybridMesh
from dtensor_compile.spmd.shard_module import find_shardings
from dtensor_compile.testing import make_mesh
from tests.spmd.llama import annotated, build, by_hand, data, mark


def cpu_seconds(run: Callable[[], Any], repeats: int) -> float:
    """CPU seconds of a call, the median of the repeats."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def bytes_sent(module: nn.Module, inputs: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes and collectives of one forward and backward pass."""
    torch.compiler.reset()
    with record() as recording:
        torch.compile(module, backend="dtensor_aten", fullgraph=True)(*inputs).backward()
    total = recording.report().ours.totals.all
    return total.bytes, total.count


def llama() -> None:
    with simulated_job(4, 0):
        mesh = make_mesh((2, 2), ("dp", "tp"))
        hand, inputs = by_hand(mesh)
        sent, collectives = bytes_sent(hand, inputs)
        held = [p.to_local() if hasattr(p, "to_local") else p for p in hand.parameters()]
        averages = sum(p.numel() * p.element_size() for p in held) + 4
        print(f"by hand                 {sent + averages:>9,} bytes in {collectives + len(held) + 1} collectives")
        module, inputs, _ = annotated()
        print("marked, shard_module    {:>9,} bytes in {} collectives".format(*bytes_sent(module, inputs)))
        lacks = sum(p.numel() * p.element_size() for p in build().parameters()) - _bytes_of_parameters(module)
        module, inputs, _ = annotated(store=False)
        sent_whole, collectives = bytes_sent(module, inputs)
        print(f"marked                  {sent_whole:>9,} bytes in {collectives} collectives")
        print(f"  gradients that ranks lack with shard_module: {lacks:,} bytes")


def _bytes_of_parameters(module: nn.Module) -> int:
    return sum(p.to_local().numel() * p.element_size() for p in module.parameters())  # type: ignore[operator]


def propagation(layers: int, repeats: int) -> None:
    config = LlamaConfig(layers=layers)
    with simulated_job(4, 0):
        module, inputs = build(config), data(config)
        mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
        mark(module, mesh)
        seconds = cpu_seconds(lambda: find_shardings(module, inputs, mesh), repeats)
    print(f"propagation, {layers} layers  {seconds:.2f} s")


def layout(repeats: int) -> None:
    places = itertools.product(range(16), range(4), range(4))
    torus = [{"coords": (x, y, z), "core_on_chip": 0, "name": str(i)} for i, (z, y, x) in enumerate(places)]
    seconds = cpu_seconds(lambda: HybridMesh(ici_mesh_shape=(16, 16), device_attributes=torus), repeats)
    print(f"16x16 onto 4x4x16       {seconds * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    layout(args.repeats)
    propagation(args.layers, args.repeats)
    llama()


if __name__ == "__main__":
    main()
