"""`GraphLog`: reports one compilation to the recordings that are active at its start."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dtensor_compile.compat.aot.symbolic.shapes import size_hints
from dtensor_compile.compat.distributed.functional_collectives import traced_in_backward
from dtensor_compile.compat.dynamo.observers.observe import FrameCompilation, current_compilation
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import MemoryBudgetError
from dtensor_compile.graph.arguments import const_arg, list_arg, sizes_of, value_of
from dtensor_compile.graph.inline_subgraph import with_blocks
from dtensor_compile.graph.node_costs import module_path
from dtensor_compile.graph.nodes import (
    FORCED_BY,
    RECORDED_AS,
    across,
    describe,
    redistribution_of,
    redistributions,
    source_line,
)
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ops.redistribute import plan_of
from dtensor_compile.ops.redistribute_across import across_plan_of, redistribute_across_op
from dtensor_compile.planner.search import bytes_sent
from dtensor_compile.recording.recorder import CapturedRedistribution, recordings, show_graph

if TYPE_CHECKING:
    from dtensor_compile.schedule.found_order import KernelOrder
    from dtensor_compile.topology.links import Cluster

log = logging.getLogger("dtensor_compile")


class GraphLog:
    """Reports one compilation to the recordings active at its start (the backward may be compiled later)."""

    def __init__(self, topology: Cluster | None = None) -> None:
        self.recordings = recordings()
        self.compilation = current_compilation()
        self.calls = 1
        if topology is not None:
            for recording_ in self.recordings:
                recording_.topologies.append(topology)

    def of_calls(self, calls: int) -> GraphLog:
        """The log for the graph of a block, with its number of calls."""
        made = copy.copy(self)
        made.calls = calls
        return made

    def mark(self) -> list[tuple[int, ...]]:
        """The lengths of the recordings, for `forget_since`."""
        return [tuple(map(len, this.of_graphs)) for this in self.recordings]

    def forget_since(self, mark: list[tuple[int, ...]]) -> None:
        """Discards records of graphs since a mark, as these are compiled in another way."""
        for this, lengths in zip(self.recordings, mark, strict=True):
            for rows, length in zip(this.of_graphs, lengths, strict=True):
                del rows[length:]

    def counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled program, with its calls counted if anything is recorded."""
        return self.compilation.counted(run) if self.recordings and self.compilation is not None else run

    def captured(self, graph: torch.fx.Graph) -> None:
        show_graph("captured", graph)
        if not self.recordings:
            return
        for node in (*redistributions(graph), *across(graph)):
            this = replace(_captured(node, self.compilation), calls=self.calls)
            node.meta[RECORDED_AS] = this.number
            for recording_ in self.recordings:
                recording_.captured.append(_text(node))
                recording_.redistributions.append(this)

    def planned(self, graph: torch.fx.Graph) -> None:
        show_graph("planned", graph)
        for node in (*redistributions(graph), *across(graph)) if self.recordings else ():
            for recording_ in self.recordings:
                recording_.planned.append(_text(node))
                recording_.kept.add(node.meta.get(RECORDED_AS, -1))

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """While active, the step of that name runs on a graph; adds its seconds."""
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            for recording_ in self.recordings:
                if recording_.profile is not None:
                    stack.enter_context(recording_.profile.step(name))
            try:
                yield
            finally:
                seconds = time.perf_counter() - began
                for recording_ in self.recordings:
                    recording_.step_seconds[name] = recording_.step_seconds.get(name, 0.0) + seconds

    def decided(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            log.info("%s", decision)
        for recording_ in self.recordings:
            recording_.decisions.extend(decisions)

    def ordered(self, order: KernelOrder) -> None:
        """Records the kernels of the graph that was lowered last, or of a block that it calls, in execution order."""
        for recording_ in self.recordings:
            this = next((graph for graph in reversed(recording_.graphs) if graph.compilation is self.compilation), None)
            if this is not None:
                this.order = this.order if order.block is not None and this.order is not None else order
                this.collectives, this.operations = this.order.with_blocks()

    def lowered(self, graph: torch.fx.Graph) -> None:
        show_graph("lowered", graph)
        for recording_ in self.recordings:
            recording_.observe(with_blocks(graph))
            recording_.graphs[-1].compilation = self.compilation


class QuietLog(GraphLog):
    """The log of a compilation that is not the program's: it reports nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings = []

    def captured(self, graph: torch.fx.Graph) -> None: ...

    def planned(self, graph: torch.fx.Graph) -> None: ...

    def decided(self, decisions: list[Decision]) -> None: ...

    def lowered(self, graph: torch.fx.Graph) -> None: ...


def _text(node: torch.fx.Node) -> str:
    return f"{describe(node)} {source_line(node)}".strip()


_numbers = iter(range(1, 1 << 62))


def _planned(plan: Callable[..., Any], *args: Any) -> Any:
    """A plan within the memory limit; if there is none, passes may still find another redistribution."""
    try:
        return plan(*args)
    except MemoryBudgetError:
        return plan(*args, bounded=False)


def _captured(node: torch.fx.Node, compilation: FrameCompilation | None) -> CapturedRedistribution:
    value = value_of(node)
    if node.target is redistribute_across_op:
        source, target, mesh, other = (const_arg(node, place, str) for place in (1, 2, 3, 4))
        shape = sizes_of(list_arg(node, 5))
        this = _planned(across_plan_of, source, target, mesh, other, shape, value.element_size())
        text, plan, sent = f"{mesh}->{other}", this.texts(parse_mesh(mesh)), this.elements * value.element_size()
        mesh_dims = tuple(dict.fromkeys(f"{mesh}->{other}" for _ in range(this.collectives)))
    else:
        _, source, target, text, given = redistribution_of(node)
        shape = sizes_of(given)
        layout = parse_mesh(text)
        steps = _planned(plan_of, source, target, layout, shape, value.element_size())
        names = [layout.dim_name(dim) for dim in range(len(layout.dims))]
        plan, sent = tuple(step.text(names) for step in steps), bytes_sent(steps, value.element_size())
        mesh_dims = tuple(dict.fromkeys(names[dim] for step in steps if step.sends for dim in step.mesh_dims))
    return CapturedRedistribution(
        number=next(_numbers),
        where=source_line(node),
        module=module_path(node),
        forced_by=node.meta.get(FORCED_BY, ""),
        source=source,
        target=target,
        mesh=text,
        shape=size_hints(shape),
        dtype=str(value.dtype).removeprefix("torch."),
        plan=plan,
        mesh_dims=mesh_dims,
        bytes=sent,
        backward=traced_in_backward(node),
        compilation=compilation,
    )
