"""Seconds that ranks spend on comparing their collectives, as a part of a cold compile in the same run.

    python tools/bench/agreement.py [--layers 2] [--world 2] [--layout tp]

Counted are all functions that write, announce and read, without the time in which a rank sleeps until another has
compiled: it would wait for that one in the first collective, too. After it, whether a call has any code of the
agreement around it.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dtensor_compile import backend
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.runtime import collective_agreement
from dtensor_compile.runtime.collective_agreement import Agreement
from dtensor_compile.testing import make_mesh, run_on_ranks


class Clock:
    """Seconds in the outermost of some functions, and seconds of sleep in them."""

    def __init__(self) -> None:
        self.seconds = self.slept = 0.0
        self.depth = 0

    def around(self, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began, self.depth = time.perf_counter(), self.depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.perf_counter() - began

        return run

    def sleep(self, seconds: float) -> None:
        began = time.perf_counter()
        _sleep(seconds)
        if self.depth:
            self.slept += time.perf_counter() - began


_sleep = time.sleep


@contextlib.contextmanager
def timed(clock: Clock) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in ("note", "found", "reach", "reach_backward", "begin_again"):
            stack.enter_context(mock.patch.object(Agreement, name, clock.around(getattr(Agreement, name))))
        of_frame = clock.around(Agreement.of_frame)  # bound to the class
        stack.enter_context(mock.patch.object(Agreement, "of_frame", staticmethod(of_frame)))
        stack.enter_context(mock.patch.object(collective_agreement.time, "sleep", clock.sleep))
        yield


def first_step(layout_name: str, layers: int) -> tuple[float, float, float, bool]:
    """Seconds of the first step, those of the agreement, those it slept; whether calls have a wrapper for it."""
    layout, wrapped = LAYOUTS[layout_name], []
    mesh = make_mesh(layout.mesh_shape(dist.get_world_size()), layout.dims)
    stock = backend.watched

    def watched(compiled: Any, agreement: Agreement) -> Any:
        run = stock(compiled, agreement)
        wrapped.append(run is not compiled)
        return run

    clock = Clock()
    with fresh_caches(), timed(clock), mock.patch.object(backend, "watched", watched):
        trainer = Trainer(
            layout, mesh, LlamaConfig(layers=layers), 1, lambda model: torch.compile(model, backend="dtensor")
        )
        dist.barrier()
        began = time.perf_counter()
        trainer.loss(0).backward()
        return time.perf_counter() - began, clock.seconds - clock.slept, clock.slept, any(wrapped)


def main() -> None:
    """Prints the figures of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layout", default="tp", choices=sorted(LAYOUTS))
    args = parser.parse_args()
    found = run_on_ranks(args.world, first_step, args.layout, args.layers, timeout=900)
    for rank, (step, agreement, slept, wrapped) in enumerate(found):
        print(
            f"rank {rank}: first step {step:.2f} s, agreement {1000 * agreement:.1f} ms ({agreement / step:.2%}), "
            f"waited for others {slept:.2f} s, wrapper around calls: {'yes' if wrapped else 'no'}"
        )


if __name__ == "__main__":
    main()
