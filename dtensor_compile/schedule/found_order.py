"""`KernelOrder`: the order in which the kernels of a graph run, those of the blocks that it calls included."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from dtensor_compile.graph.inline_subgraph import MODULE
from dtensor_compile.graph.node_costs import Operation, SentCollective, path_of
from dtensor_compile.schedule.simulated_device import Simulation, Task

#: A record with the path of a module.
Described = TypeVar("Described", Operation, SentCollective)
#: Key of the order of a block's kernels in the metadata of its graph.
ORDER = "dtensor_compile_order"


@dataclasses.dataclass(frozen=True)
class CalledBlock:
    """A call of the graph of a block, and the path of the module for which it is called."""

    graph: torch.fx.GraphModule
    module: str

    def kernels(self) -> tuple[list[SentCollective], list[Operation]]:
        """Collectives and operations of the block, for this module; none until its kernels are ordered."""
        order: KernelOrder | None = self.graph.meta.get(ORDER)
        if order is None:
            return [], []
        first = path_of(self.graph.meta.get(MODULE, ""))

        def own(this: Described) -> Described:
            inside = this.module.startswith(first)
            return dataclasses.replace(this, module=self.module + this.module[len(first) :] if inside else this.module)

        collectives, operations = order.with_blocks()
        return list(map(own, collectives)), list(map(own, operations))


@dataclasses.dataclass(frozen=True)
class KernelOrder:
    """The order in which the kernels of a graph run.

    Attributes:
        tasks, order: the tasks, including inputs that can be freed, and their order.
        before, after: simulations of Inductor's order and of this one.
        least: lower bound on the seconds of any order (`dtensor_compile.schedule.least_time`).
        starts: the known collectives, by task.
        wrapped: collectives of a wrapper of the program, by task, and whether they reduce.
        block: the block whose kernels these are; None if they are those of the graph that calls blocks.
        operations: the kernels, starts and waits in order, for the report; in place of a call of a block, that block.
        own: tasks that start collectives of the program itself.
        unknown: number of kernels that start or wait for a collective whose graph node is unknown.
        synchronous: number of kernels that communicate synchronously.
    """

    tasks: list[Task]
    order: list[int]
    before: Simulation
    after: Simulation
    least: float
    starts: dict[int, SentCollective]
    wrapped: dict[int, bool]
    block: torch.fx.GraphModule | None = None
    operations: list[Operation | CalledBlock] = dataclasses.field(default_factory=list)
    own: tuple[int, ...] = ()
    unknown: int = 0
    synchronous: int = 0

    @property
    def ordered(self) -> bool:
        """Whether there was anything to order: without collectives and blocks, Inductor's order stays."""
        blocks = any(isinstance(operation, CalledBlock) for operation in self.operations)
        return self.block is not None or blocks or any(task.link is not None for task in self.tasks)

    @property
    def collectives(self) -> list[SentCollective]:
        """The collectives in the order in which they start, without those of blocks."""
        return [self.starts[index] for index in self.order if index in self.starts]

    def with_blocks(self) -> tuple[list[SentCollective], list[Operation]]:
        """Collectives and operations in order, those of each call of a block in its place.

        The kernels of a block are ordered after those of the graph that calls it; until then a call counts as nothing.
        """
        collectives, operations = list[SentCollective](), list[Operation]()
        numbers: dict[int | None, int] = {}
        for operation in self.operations:
            if isinstance(operation, CalledBlock):
                sent, inside = operation.kernels()
                operations += [one.renumbered(len(collectives).__add__) for one in inside]
                collectives += sent
                continue
            if operation.starts is not None:
                numbers[operation.starts] = len(collectives)
                collectives.append(self.collectives[operation.starts])
            operations.append(operation.renumbered(numbers.__getitem__))
        return collectives, operations
