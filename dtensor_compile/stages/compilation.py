"""`Compilation`: what is known of one program while it is compiled. Every step of every stage is given it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor_compile.compat.aot.tangents import Tangents
from dtensor_compile.compat.inductor.kernel_nodes import orders_kernels
from dtensor_compile.decisions import Decision
from dtensor_compile.options import Options
from dtensor_compile.recording.recorder import GraphLog
from dtensor_compile.runtime.collective_agreement import Agreement
from dtensor_compile.schedule.schedule_graph import ORDERED


@dataclass
class Compilation:
    """One program on its way through the stages.

    Attributes:
        program, inputs: the Dynamo graph, and fake inputs of it.
        options, agreement: of the user, and of the ranks about collectives.
        log: of what is captured, decided and lowered, for recordings.
        tangents: what is known of the gradients that come in.
        sends: the program calls collectives itself.
        writes: it may write to inputs.
        bases: number of results that were added: the bases of views.
        merged: the process groups over several mesh dims that plans may use are there.
        even: shards are of the same size on all ranks, so that these may decide by the seconds of compute.
        between_meshes: ranks of other meshes have other graphs, and would decide otherwise.
        communication: estimated seconds of the collectives of the graphs lowered so far.
        order: what was decided about the order of the graph that was lowered last, where Inductor's kernels are ordered
            again.
    """

    program: torch.fx.GraphModule
    inputs: Sequence[Any]
    options: Options
    agreement: Agreement
    log: GraphLog
    tangents: Tangents = field(default_factory=Tangents.of_frame)
    sends: bool = False
    writes: bool = False
    bases: int = 0
    merged: bool = True
    even: bool = False
    between_meshes: bool = False
    communication: float = 0.0
    order: list[Decision] = field(default_factory=list)

    @property
    def aten(self) -> bool:
        """Whether graphs run operator by operator, without Inductor."""
        return self.options.kernels == "aten"

    @property
    def measured(self) -> bool:
        """Whether kernels are measured for the order."""
        return self.options.kernel_costs == "measured"

    @property
    def orders_kernels(self) -> bool:
        """Whether Inductor's kernels are put in order again."""
        return self.options.schedule and not self.aten and orders_kernels()

    def decided(self, decisions: list[Decision]) -> None:
        """Logs decisions. Those about the order of a graph are kept back where its kernels are ordered again, which
        says more.
        """
        for decision in decisions:
            if decision.kind == ORDERED and self.orders_kernels:
                self.order.append(decision)
            else:
                self.log.decided([decision])

    def timed(self, name: str, seconds: float) -> None:
        """Logs the seconds of a step."""
        self.log.timed(name, seconds)
