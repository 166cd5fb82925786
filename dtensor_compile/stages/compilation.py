"""`Compilation`: the state of one program while it is compiled, passed to every step of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor_compile.compat.aot.tangents import Tangents
from dtensor_compile.compat.dtensor.planned_calls import PlannedCalls
from dtensor_compile.compat.dynamo.settings import compiles_on_one_rank
from dtensor_compile.compat.inductor.kernel_nodes import orders_kernels
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.repeated_blocks import repeated_traces
from dtensor_compile.ops.call_block import BlockGraph
from dtensor_compile.options import Options
from dtensor_compile.recording.graph_log import GraphLog
from dtensor_compile.recording.recorder import watching
from dtensor_compile.runtime.collective_agreement import Agreement
from dtensor_compile.schedule.schedule_graph import ORDERED


@dataclass
class Compilation:
    """State of one program in the stages.

    Attributes:
        program, inputs: the Dynamo graph, and fake inputs of it.
        options, agreement: options of the user, and the agreement of the ranks about collectives.
        log: log of captured, decided and lowered items, for recordings.
        tangents: facts about the tangents.
        sends: whether the program calls collectives itself.
        writes: whether it may write to inputs.
        bases: number of view bases that were added to the outputs.
        merged: whether the process groups over several mesh dims that plans may use exist.
        even: whether shards have the same size on all ranks, so that decisions may depend on the seconds of compute.
        between_meshes: whether ranks of other meshes have other graphs, and would decide differently.
        communication: estimated seconds of the collectives of the graphs lowered so far.
        digest: identifies the program in artifacts that were compiled in advance; empty without them.
        shares: the rank whose graphs in these artifacts this rank shares; None if they do not have the program.
        blocks: graphs of blocks that are compiled once, by their names.
        apart: numbers of blocks whose calls are compiled separately, because they cannot share a graph.
        placed: whether placements may be chosen for the whole program.
        calls: the calls of the program over each mesh with placements that forecasts decided for; None before that.
        negative: whether an input has the negative bit, which Inductor ignores.
        order: decisions about the order of the graph that was lowered last, kept if Inductor's kernels are reordered.
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
    digest: str = ""
    shares: int | None = None
    blocks: dict[str, BlockGraph] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)
    placed: bool = True
    calls: Sequence[PlannedCalls] | None = None
    negative: bool = False
    order: list[Decision] = field(default_factory=list)

    @property
    def aten(self) -> bool:
        """Whether graphs run operator by operator, without Inductor."""
        return self.options.kernels == "aten" or self.negative

    @property
    def rank_free(self) -> bool:
        """Whether graphs are the same on every rank, as far as they can be."""
        return self.options.artifacts is not None or compiles_on_one_rank()

    @property
    def measured(self) -> bool:
        """Whether kernels are measured for the order."""
        return self.options.kernel_costs == "measured"

    @property
    def shares_blocks(self) -> bool:
        """Whether equal blocks are compiled once: all, or those that the program marks. Each is compiled separately
        while graphs are watched, as watchers get whole graphs."""
        marked = self.options.blocks == "traced" and bool(repeated_traces(self.program, marked=True))
        return (self.options.blocks == "once" or marked) and not watching()

    @property
    def plans_placements(self) -> bool:
        """Whether placements are chosen for the whole program."""
        return self.options.plan == "global" and self.placed

    @property
    def orders_kernels(self) -> bool:
        """Whether Inductor's kernels are reordered."""
        return self.options.schedule and not self.aten and orders_kernels()

    def decided(self, decisions: list[Decision]) -> None:
        """Logs decisions. Those about the order of a graph are held back if its kernels are reordered: decisions about
        kernels are more precise.
        """
        for decision in decisions:
            if decision.kind == ORDERED and self.orders_kernels:
                self.order.append(decision)
            else:
                self.log.decided([decision])

    def timing(self, name: str) -> AbstractContextManager[None]:
        """While active, the step of that name runs; logs its seconds."""
        return self.log.timing(name)
