"""Inductor's kernels before and after fusion: passes over them, dependencies between them, and queries."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._inductor import custom_graph_pass

from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import feature, hook, needs, patch

Nodes = list[Any]

ORDER = feature(
    "an order of Inductor's kernels that overlaps collectives with compute",
    hook("torch._inductor.custom_graph_pass:CustomSchedulerPass"),
    hook("torch._inductor.config:_pre_fusion_custom_pass"),
    hook("torch._inductor.config:_post_fusion_custom_pass"),
    hook("torch._inductor.config:reorder_for_peak_memory"),
    hook("torch._inductor.dependencies:WeakDep", "name mutating_buf is_fake"),
    hook(
        "torch._inductor.memory:reorder_for_peak_memory",
        "nodes name_to_buf name_to_fused_node graph_inputs graph_outputs ...",
    ),
    hook(
        "torch._inductor.memory:prepare_planning_info",
        "nodes name_to_buf name_to_fused_node graph_inputs graph_outputs",
    ),
    hook("torch._inductor.scheduler:Scheduler.compute_ancestors", "self"),
    hook("torch._inductor.utils:contains_collective", "snode ..."),
    hook("torch._inductor.utils:contains_wait", "snode"),
    without="Inductor's own order stays",
)

TIES = feature(
    "random numbers in the order of the program, with unused ones among them",
    hook("torch._inductor.config:_pre_fusion_custom_pass"),
    hook("torch._inductor.dependencies:WeakDep", "name mutating_buf is_fake"),
    hook("torch._inductor.scheduler:Scheduler.compute_ancestors", "self"),
    without="numbers drawn after a random value that is unused can differ from eager",
)


#: Methods that recompute the dependencies of a kernel; the second since 2.13, on GPUs.
_AGAIN = (
    patch("torch._inductor.scheduler:SchedulerNode.recompute_size_and_body", "self ..."),
    patch("torch._inductor.scheduler:SchedulerNode.cancel_reduction_split", "self ...", optional=True),
)


@needs(
    "fused kernels that wait for all that they read",
    *_AGAIN,
    hook("torch._inductor.scheduler:SchedulerNode.set_read_writes", "self ..."),
    hook("torch._inductor.dependencies:StarDep"),
    hook("torch._inductor.dependencies:WeakDep", "name mutating_buf is_fake"),
    without="one could run before the wait for a collective whose result it reads",
    essential=True,
    upstream="#185873, #178486, #177816",
    remove_when="2.13 is no longer supported: 2.14 keeps the dependency",
)
@contextlib.contextmanager
def waits_are_kept() -> Iterator[None]:
    """While active, kernels that Inductor schedules on this thread depend on the last write to what they read.

    A collective and its wait write to an existing buffer, and a later reader refers to that write by name. Before 2.14
    Inductor loses the name when it reshapes the loops of two kernels in order to fuse them. The fused kernel then runs
    as soon as the buffer exists, with this rank's own values in it.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    def compute_again(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        tied = OrderedSet(dep for dep in self.read_writes.reads if isinstance(dep, (StarDep, WeakDep)))  # lost on 2.11
        stock(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(tied).rename(self.mutation_renames))

    with patched(_AGAIN[0], compute_again), patched(_AGAIN[1], compute_again):
        yield


class SchedulerPass(getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)):  # type: ignore[misc]
    """A function on scheduler nodes that Inductor calls. Before 2.13, its caches accept it only as a subclass of graph
    passes.

    Args:
        run: returns the nodes in another order.
        key: everything besides the graph that determines what `run` does; None keeps the graph out of the caches.
        then: the user's own pass for the same place, which runs after ours.
    """

    def __init__(self, run: Callable[[Nodes], Nodes], key: Any, then: Any = None) -> None:
        self.run, self.key, self.then = run, key, then

    def __call__(self, nodes: Nodes) -> Nodes:
        nodes = self.run(nodes)
        return nodes if self.then is None else self.then(nodes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the key: cache keys are pickled settings, and the functions called are not part of a key."""
        return SchedulerPass, (None, self.uuid())

    def __deepcopy__(self, memo: dict[int, Any]) -> SchedulerPass:
        return self

    def uuid(self) -> Any:
        follower = self.then.uuid() if hasattr(self.then, "uuid") else None
        return None if self.key is None or self.then is not None and follower is None else (self.key, follower)


def tie_draws(nodes: Nodes) -> Nodes:
    """Makes each kernel that draws from torch's generator depend on the one before it.

    Inductor ties them by their results (since 2.13), but drops each part of a result that nothing reads, together with
    the tie. A draw without any reader was then tied to nothing after it. Kernels that unpack the result of a draw share
    its origin, but do not draw.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.virtualized import V

    drawing = [node for node in nodes if _draws(node.node)]
    for before, node in itertools.pairwise(drawing):
        own = next(iter(node.get_buffer_names()))
        node.add_fake_dep(WeakDep(next(iter(before.get_buffer_names())), mutating_buf=own, is_fake=True))
    if len(drawing) > 1:
        V.graph.scheduler.compute_ancestors()
    return nodes


def _draws(kernel: Any) -> bool:
    block = block_of(kernel)
    if block is not None:
        return any(draws(node.target) for node in block.graph.nodes)
    return draws(getattr(kernel, "op_overload", None))


def block_of(kernel: Any) -> torch.fx.GraphModule | None:
    """The graph of the block that a kernel calls; None if it calls none."""
    called = getattr(kernel, "subgraph", None)
    return getattr(called, "graph_module", None)


def tie_kernels(nodes: Nodes, is_tied: Callable[[Any], bool]) -> Nodes:
    """Makes each kernel that satisfies `is_tied` depend on the one before it, instead of on Inductor's own fake
    dependencies."""
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    starts = [node for node in nodes if is_tied(node)]
    for before, node in itertools.pairwise(starts):
        own = next(iter(node.get_buffer_names()))
        if any(buffer.get_name() == own and buffer.get_mutations() for buffer in node.get_outputs()):
            continue  # its fake dependencies also express what it overwrites
        kept = OrderedSet(
            dep
            for dep in node.read_writes.reads
            if not (isinstance(dep, WeakDep) and dep.is_fake and dep.mutating_buf == own)
        )
        node.set_read_writes(dataclasses.replace(node.read_writes, reads=kept))
        node.add_fake_dep(WeakDep(next(iter(before.get_buffer_names())), mutating_buf=own, is_fake=True))
    if len(starts) > 1:
        V.graph.scheduler.compute_ancestors()
    return nodes


def orders_kernels() -> bool:
    """Whether the installed torch supports reordering of kernels."""
    return ORDER.works()


def starts_collective(node: Any) -> bool:
    """Whether a kernel starts a collective."""
    from torch._inductor.utils import contains_collective

    return contains_collective(node)


def waits_for_collective(node: Any) -> bool:
    """Whether a kernel waits for a collective."""
    from torch._inductor.utils import contains_wait

    return contains_wait(node)


def called_subgraph() -> torch.fx.GraphModule | None:
    """The subgraph that Inductor is compiling; None if it is compiling the graph that calls it."""
    from torch._inductor.graph import SubgraphLowering
    from torch._inductor.virtualized import V

    found = V.graph.module if isinstance(V.graph, SubgraphLowering) else None
    return found if isinstance(found, torch.fx.GraphModule) else None


def names_of_results() -> set[str]:
    """Names of the buffers that the graph returns."""
    from torch._inductor.virtualized import V

    return set(V.graph.get_output_names())


def is_item(node: Any) -> bool:
    """Whether a kernel only takes an item of a list."""
    from torch._inductor.ir import MultiOutput

    return all(isinstance(part.node, MultiOutput) for part in node.get_nodes())


def order_for_memory(nodes: Nodes) -> tuple[Nodes, Mapping[str, Any]]:
    """Runs Inductor's own last pass, which would otherwise run after ours.

    Returns:
        The nodes in the new order, and the pass's facts about inputs that can be freed.
    """
    from torch._inductor import memory
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    scheduler = V.graph.scheduler
    inputs = OrderedSet(V.graph.graph_inputs.keys())
    outputs = OrderedSet(V.graph.get_output_names())
    named = {
        name: node for node in nodes for name in (node.get_name(), *(part.get_name() for part in node.get_nodes()))
    }
    nodes = memory.reorder_for_peak_memory(nodes, scheduler.name_to_buf, named, inputs, outputs)
    _, freeable = memory.prepare_planning_info(nodes, scheduler.name_to_buf, named, inputs, outputs)
    return nodes, freeable
