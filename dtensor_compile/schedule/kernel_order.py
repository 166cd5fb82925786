"""Orders Inductor's kernels after fusion by `dtensor_compile.schedule.list_scheduler`.

Inductor makes every collective depend on the one before it, so that their order stays; if a wait is between the two, it
depends on that wait, because the wait renames the buffer. A collective could then never start before the wait of the
one before it. `tie_starts` runs before fusion and makes starts depend on starts only; `rearrange` runs after fusion and
orders the kernels.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.compat.aot.fx import CALL
from dtensor_compile.compat.inductor.kernel_nodes import (
    Nodes,
    block_of,
    called_subgraph,
    is_item,
    names_of_results,
    order_for_memory,
    starts_collective,
    tie_kernels,
    waits_for_collective,
)
from dtensor_compile.graph.arguments import node_arg
from dtensor_compile.graph.inline_subgraph import BLOCK
from dtensor_compile.graph.measured_kernels import measured_seconds
from dtensor_compile.graph.node_costs import (
    Operation,
    SentCollective,
    called_operator,
    collective_of,
    flops_of,
    itemsize_of,
    kind_of,
    module_path,
)
from dtensor_compile.graph.nodes import communicates, is_wait, source_line
from dtensor_compile.ops.groups import REDISTRIBUTES
from dtensor_compile.schedule.found_order import CalledBlock, KernelOrder
from dtensor_compile.schedule.least_time import least_seconds
from dtensor_compile.schedule.list_scheduler import arrange, excess
from dtensor_compile.schedule.schedule_graph import Sending, cost_of, cost_of_block, is_wrapped
from dtensor_compile.schedule.simulated_device import Buffer, Task, simulate
from dtensor_compile.schedule.wrapper_order import wrapper_peak
from dtensor_compile.topology.backends import host_seconds
from dtensor_compile.topology.devices import default_cluster
from dtensor_compile.topology.links import Cluster, compute_seconds


def tie_starts(nodes: Nodes) -> Nodes:
    """Makes each collective, and each synchronous communication, depend on the one before it and on no wait."""
    return tie_kernels(nodes, lambda node: starts_collective(node) or _is_synchronous(node))


def rearrange(
    nodes: Nodes,
    *,
    topology: Cluster | None,
    overlap_memory: float,
    measured: bool,
    recorded: bool,
    on_order: Callable[[KernelOrder], None],
) -> Nodes:
    """The kernels in an order in which collectives overlap with compute.

    Args:
        nodes: scheduler nodes after fusion, in an order in which they may run.
        topology: topology for which seconds are estimated; None for the default of the device.
        overlap_memory: allowed increase of the peak, as a fraction of the peak of Inductor's own order; the peak of
            ``fully_shard``'s own order is always allowed.
        measured: whether kernels that are not generated, matmuls for instance, are measured (`measured_seconds`); fused
            loops are estimated.
        recorded: whether `on_order` receives the kernels of a program without collectives too, in Inductor's order.
        on_order: callback that receives the order found, also of a block; not called for subgraphs of the program.
    """
    nodes, buffers = order_for_memory(nodes)
    called, sends = called_subgraph(), any(map(starts_collective, nodes))
    block = called if called is not None and BLOCK in called.meta else None
    device = next((buffer.node.get_device() for node in nodes for buffer in node.get_outputs()), None)
    alone = not sends and block is None and not any(block_of(node.node) for node in nodes)
    if device is None or alone and (called is not None or not recorded):
        return nodes
    cluster = topology or default_cluster(device.type)
    roles = [_role(node) for node in nodes]
    tasks = _tasks(nodes, roles, buffers, cluster, measured)
    given = len(tasks) - len(nodes)
    before = simulate(tasks, range(len(tasks)))
    each = enumerate(roles, given)
    wrapped = {index: reduces for index, role in each if (reduces := is_wrapped(role.origin)) is not None}
    bound = max(excess(overlap_memory, before.peak), wrapper_peak(tasks, wrapped))
    order = arrange(tasks, bound) if sends else list(range(len(tasks)))
    if called is None or block is not None:
        found = KernelOrder(tasks, order, before, simulate(tasks, order), least_seconds(tasks), {}, wrapped, block)
        on_order(_described(found, nodes, roles))
    return [nodes[index - given] for index in order if index >= given]


def _described(found: KernelOrder, nodes: Nodes, roles: Sequence[_Role]) -> KernelOrder:
    """An order with descriptions of its kernels."""
    tasks, given = found.tasks, len(found.tasks) - len(nodes)
    each = dict(enumerate(roles, given))
    starts = {
        index: collective_of(role.origin) for index, role in each.items() if role.starts and role.origin is not None
    }
    unknown = sum(
        role.starts and role.origin is None or role.waits and tasks[index].waits_for is None
        for index, role in each.items()
    )
    return dataclasses.replace(
        found,
        starts=starts,
        operations=_operations(nodes, given, tasks, found.order, starts),
        own=tuple(index for index in starts if not each[index].redistributes),
        unknown=unknown,
        synchronous=sum(role.stays for role in roles),
    )


def _operations(
    nodes: Nodes, given: int, tasks: list[Task], order: list[int], starts: Mapping[int, SentCollective]
) -> list[Operation | CalledBlock]:
    """Kernels in `order` as a report has them; known collectives are numbered in the order in which they start."""
    numbers = {index: number for number, index in enumerate(index for index in order if index in starts)}
    operations = list[Operation | CalledBlock]()
    for index in order:
        task, node = tasks[index], nodes[index - given] if index >= given else None
        if node is None or task.link is not None and index not in starts:
            continue
        if index in starts:
            this = starts[index]
            operations.append(Operation(this.kind, this.where, this.module, starts=numbers[index]))
        elif task.waits_for is not None:
            if task.waits_for in starts:
                this = starts[task.waits_for]
                operations.append(Operation("wait_tensor", this.where, this.module, waits_for=numbers[task.waits_for]))
        elif (block := block_of(node.node)) is not None:
            call = next((origin for origin in node.node.get_origins() if origin.target is CALL), None)
            operations.append(CalledBlock(block, module_path(call) if call is not None else ""))
        elif task.seconds:
            operations.append(_operation(node))
    return operations


def _operation(node: Any) -> Operation:
    """The work of a kernel that computes."""
    parts = node.get_nodes()
    origins = [
        origin
        for part in parts
        if part.node is not None
        for origin in part.node.get_origins()
        if origin.op == "call_function" and origin.target is not CALL  # of the block that the kernel is in
    ]
    names = dict.fromkeys(origin.target.__name__.split(".")[0] for origin in sorted(origins, key=lambda o: o.name))
    called = _called(parts)
    source = (called or origins or [None])[0]
    library = called_operator(called[0]) if called else None
    return Operation(
        name="fused " + " ".join(names) if library is None else library._schema.name.replace("::", "."),
        where=source_line(source) if source is not None else "",
        module=module_path(source) if source is not None else "",
        flops=sum(map(flops_of, called)),
        bytes=node.get_read_write_buffers_sizes(),
        itemsize=next((itemsize_of(origin) for origin in called or origins), 4),
        kind=_kind(called),
    )


def _kind(called: Sequence[torch.fx.Node]) -> str:
    return next(filter(None, map(kind_of, called)), "")


def _tasks(nodes: Nodes, roles: list[_Role], inputs: Mapping[str, Any], cluster: Cluster, measured: bool) -> list[Task]:
    """One task for each input that can be freed, then one for each kernel."""
    memory = _memory(nodes, inputs)
    tasks = [Task(makes=(memory[name],), given=True) for name in inputs]
    made_by = {
        buffer.get_name(): index for index, node in enumerate(nodes, len(tasks)) for buffer in node.get_outputs()
    }
    started: dict[torch.fx.Node, int] = {}
    # If ranks may run different programs, a wait stays behind the collectives that it follows (`schedule_graph`).
    own_sends = any(role.starts and not role.redistributes for role in roles)
    fixed, last_start, first = -1, -1, len(tasks)
    for index, (node, role) in enumerate(zip(nodes, roles), len(tasks)):
        after = {made_by[dep.name] for dep in node.unmet_dependencies if dep.name in made_by} - {index}
        about: dict[str, Any] = {}
        if fixed >= 0:
            after.add(fixed)
        start = started.get(_start_of(role.origin)) if role.waits and role.origin is not None else None
        if role.stays or role.waits and start is None:
            after.update(range(max(fixed, first), index))
            fixed = index
        if role.starts:
            about["link"], about["seconds"], about["behind"] = _cost(role.origin, cluster)
            about["host"] = host_seconds(cluster.backend)
            if role.origin is not None:
                started[role.origin] = index
            after.update({last_start} if last_start >= 0 else ())
            last_start = index
        elif start is not None:
            about["waits_for"] = start
            after.add(start)
            after.update({last_start} if own_sends else ())
        elif (block := block_of(node.node)) is not None:
            about["seconds"], about["inside"] = cost_of_block(block, cluster, measured)
        elif not role.waits:
            about["seconds"] = _seconds(node, cluster, measured)
        makes = tuple(memory[buffer.get_name()] for buffer in node.get_outputs())
        reads = tuple(memory[buffer.get_name()] for buffer in node.mpi_node.pred_buffers)
        tasks.append(Task(after=tuple(sorted(after)), makes=makes, reads=reads, **about))
    return tasks


def _memory(nodes: Nodes, inputs: Mapping[str, Any]) -> dict[str, Buffer]:
    """The memory of inputs that can be freed and of results of kernels, by name."""
    outputs = names_of_results()
    memory = {name: Buffer(buffer.mpi_buffer.size_free, buffer.mpi_buffer.size_free) for name, buffer in inputs.items()}
    for buffer in (buffer for node in nodes for buffer in node.get_outputs()):
        name, size = buffer.get_name(), buffer.mpi_buffer
        memory[name] = Buffer(size.size_alloc, size.size_free, name in outputs)
    return memory


@dataclasses.dataclass(frozen=True)
class _Role:
    """The role of a kernel in the order.

    Attributes:
        origin: the graph node from which a collective or a wait was lowered; None if unknown.
        starts, waits: whether it starts a collective, or waits for one.
        stays: whether it communicates synchronously, so that nothing moves across it.
    """

    origin: torch.fx.Node | None = None
    starts: bool = False
    waits: bool = False
    stays: bool = False

    @property
    def redistributes(self) -> bool:
        """Whether all ranks of the group run it in the same way."""
        return self.origin is not None and REDISTRIBUTES in self.origin.meta


def _role(node: Any) -> _Role:
    if waits_for_collective(node):
        return _Role(_collective_origin(node), waits=True)
    if starts_collective(node):
        return _Role(_collective_origin(node), starts=True)
    return _Role(stays=_is_synchronous(node))


def _collective_origin(node: Any) -> torch.fx.Node | None:
    """The graph node of the collective that a kernel starts or waits for.

    Inductor may have made a collective in-place, and origins of a kernel include those of its fused input; the lowered
    node itself comes last in the graph.
    """
    operator_name = _functional_name(getattr(node.node, "op_overload", None))
    found = [origin for origin in node.node.get_origins() if _functional_name(origin.target) == operator_name]
    if operator_name is None or not found:
        return None
    if len(found) > 1:
        wanted = set(found)
        found = [origin for origin in found[0].graph.nodes if origin in wanted]
    return found[-1]


def _functional_name(target: Any) -> str | None:
    """``_c10d_functional::all_reduce`` for that operator and its in-place and ``out`` variants; None for others."""
    if not isinstance(target, torch._ops.OpOverload) or not communicates(target):
        return None
    name = target._schema.name
    return name.removesuffix("_").removesuffix("_out") if target._schema.is_mutable else name


def _is_synchronous(node: Any) -> bool:
    """Whether a kernel communicates synchronously, without a separate wait."""
    return (
        communicates(getattr(node.node, "op_overload", None))
        and not starts_collective(node)
        and not waits_for_collective(node)
    )


def _cost(origin: torch.fx.Node | None, cluster: Cluster) -> Sending:
    """What a collective takes of which link; unknown without an origin."""
    return Sending("unknown", 0.0, 0.0) if origin is None else cost_of(cluster, collective_of(origin))


def _start_of(wait: torch.fx.Node) -> torch.fx.Node:
    source = node_arg(wait, 0) if is_wait(wait) else wait
    return node_arg(source, 0) if source.target is operator.getitem else source


def _called(parts: Nodes) -> list[torch.fx.Node]:
    """The graph nodes whose operators run as kernels that are not generated, or made from a template."""
    return [
        origin for part in parts if part.is_extern() or part.is_template() if (origin := _origin(part.node)) is not None
    ]


def _origin(node: Any) -> torch.fx.Node | None:
    """The node of an operator. Inductor does not record it for an operator with several results, and replaces it by the
    wait where the result is reduced in place; then it is the origin that calls the same operator.
    """
    known = node.get_origin_node()
    called = _packet(getattr(node, "op_overload", None))
    if called is None or known is not None and _packet(known.target) is called:
        return known
    return next((origin for origin in sorted(node.get_origins()) if _packet(origin.target) is called), known)


def _packet(target: Any) -> Any:
    """``aten.mm`` of any of its overloads; an operator of higher order as it is."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else None


def _seconds(node: Any, cluster: Cluster, measured: bool) -> float:
    if is_item(node):
        return 0.0
    origins = _called(node.get_nodes())
    found = [measured_seconds(origin) for origin in origins] if measured else []
    known = [seconds for seconds in found if seconds is not None]
    if known and len(known) == len(found):
        return sum(known)
    flops = sum(map(flops_of, origins))
    itemsize = next((itemsize_of(origin) for origin in origins), 4)
    return compute_seconds(cluster.device, flops, node.get_read_write_buffers_sizes(), itemsize, kind=_kind(origins))
