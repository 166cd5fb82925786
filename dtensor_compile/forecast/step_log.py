"""Log of a training step on an emulated GPU: requests in order, and allocations.

Input: a program that runs under `dtensor_compile.offline.device` while a `StepLog` is the device's observer. Output:
operations as the cost model takes them (`dtensor_compile.graph.node_costs`), in the order in which the host issues
them, and every allocation with the requests between which it lives.

A request is a Triton kernel, an operator of a library, or the start of a collective or the wait for one. Each is
counted from its arguments: bytes of what it reads and writes, operations by torch's formulas. Where the compilation
recorded the kernels of a graph in the order in which they run, as it does where there are collectives among them, that
record is taken instead, which has lines and modules, and reads of parts of tensors.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtensor_compile.compat import pytree
from dtensor_compile.compat.aot.random_state import without_state
from dtensor_compile.compat.distributed.eager_collectives import collective_of_call
from dtensor_compile.graph.node_costs import Operation, SentCollective, flops_of_call, kind_of_call
from dtensor_compile.graph.operator_traits import is_view
from dtensor_compile.offline.emulated_device import EmulatedDevice, EmulatedGraph, IssuedStep, Observer
from dtensor_compile.recording.recorder import Recording
from dtensor_compile.report.outside import collective_outside
from dtensor_compile.report.sources import is_users


@dataclass(eq=False)
class Allocation:
    """Memory of the device.

    Attributes:
        bytes: requested size.
        born, died: number of requests made before it was allocated, and before it was freed; None: never.
        operator: the one that allocated it.
        where: the user's line, ``file:line: code``; empty for one of compiled code, whose next request has it.
        of_parameters: whether it holds parameters, or was computed from them alone (gathered, cast).
        of_collective: whether a collective reads or writes it.
        written: whether something was written to it.
        reuses: whether it is memory of an earlier one, whose content was overwritten.
        reused: whether a later one is.
        storages: number of storages that represent it.
    """

    bytes: int
    born: int
    operator: str
    where: str
    died: int | None = None
    of_parameters: bool = False
    of_collective: bool = False
    written: bool = False
    reuses: bool = False
    reused: bool = False
    storages: int = 1


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        operation: counted from its arguments; `starts` and `waits_for` are numbers of collectives of the log.
        graph, step: number of the compiled graph, and of the step in it; -1 in eager.
        listed: tensors in lists among its arguments.
        dispatches: operators over DTensors that led to it, and to no request before it.
        dispatched: DTensors in lists among their arguments.
    """

    operation: Operation
    graph: int = -1
    step: int = -1
    listed: int = 0
    dispatches: int = 0
    dispatched: int = 0


#: Operators that only make metadata or memory.
_NO_WORK = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.alias.default,
    torch.ops.aten._unsafe_view.default,
}


class StepLog(Observer):
    """The log of everything that `device` is given while this is its observer.

    Attributes:
        requests: in order; collectives: those that they start.
        changes: of memory, in order: the number of requests before it, an allocation, and whether it begins.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self.requests: list[Request] = []
        self.collectives: list[SentCollective] = []
        self.changes: list[tuple[int, Allocation, bool]] = []
        self._device, self._live = device, dict[int, tuple[Allocation, Any]]()
        self._graph: EmulatedGraph | None = None  # the one that runs, and its number
        self._number = -1
        self._called: list[Operation] = []  # what the last operator of compiled code is; tensors are not kept alive
        self._started: dict[int, int] = {}  # by the memory of its result, the collective that was started last
        self._dispatches = self._dispatched = 0  # since the last request

    # ---- the observer ----

    def operator(self, func: Any, args: Sequence[Any], result: Any) -> None:
        func, args, result, _ = without_state(func, args, result)
        namespace = getattr(func, "namespace", "")
        if namespace == "prim":
            return
        if _name(func) == "_c10d_functional.wait_tensor":
            self._same_memory(args, result)
        self._allocate(func, result)
        if func not in _NO_WORK and not (isinstance(func, torch._ops.OpOverload) and is_view(func)):
            self._compute(() if _ignores_values(func) else args, result)
            self._called = list(self._counted(func, args, result))
            if self._graph is None:
                for called in self._called:
                    self._request(called, listed=_listed(args))
        if namespace in ("_c10d_functional", "c10d"):
            for this in self._of((args, result)):
                this.of_collective = True

    def step(self, step: IssuedStep, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> None:
        if step.kind == "kernel":
            self._compute(reads, writes)
            moved = [*_tensors(reads), *_tensors(writes)]
            self._called = [Operation(step.name, "", "", 0, *_moved(moved))]
        assert self._graph is not None
        place = len(self._graph.steps) - 1
        for this in self._called[:1]:
            self._request(this, self._number, place)

    def dispatch(self, func: Any, args: Sequence[Any]) -> None:
        # autograd detaches a gradient that it keeps; compiled code keeps gradients by itself where there is a GPU
        if func is not torch.ops.aten.detach.default:
            self._dispatches += 1
            self._dispatched += _listed(args)

    def resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is None or entry[0].bytes == storage.nbytes():
            return
        old = entry[0]
        new = Allocation(storage.nbytes(), self.now, old.operator, old.where, of_parameters=old.of_parameters)
        self._replaced(old, new)

    def begins(self, graph: EmulatedGraph) -> None:
        self._graph = graph
        self._number = next(number for number, known in enumerate(self._device.graphs) if known is graph)

    def ends(self, graph: EmulatedGraph) -> None:
        self._graph = None

    # ---- use ----

    @property
    def now(self) -> int:
        """Number of requests so far."""
        return len(self.requests)

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation that holds a tensor (of a DTensor its local tensor); None for one on another device."""
        for local in _tensors(tensor):
            entry = self._live.get(_key(local))
            if entry is not None:
                return entry[0]
        return None

    def operations(self, recording: Recording, first: int, last: int) -> tuple[list[Operation], list[SentCollective]]:
        """Operations and collectives of the requests from `first` to before `last`, one for each request; a start or a
        wait names its collective by its index in the second list."""
        operations: list[Operation] = []
        collectives: list[SentCollective] = []
        numbers: dict[int, int] = {}
        known = _recorded(self._device.graphs, recording)
        for request in self.requests[first:last]:
            this, recorded = request.operation, known[request.graph][request.step] if request.graph >= 0 else None
            if recorded is not None:
                this = replace(recorded, starts=this.starts, waits_for=this.waits_for)
            if this.starts is not None:
                sent = self.collectives[this.starts]
                if recorded is not None and recorded.starts is not None:
                    sent = recording.graphs[request.graph].collectives[recorded.starts]
                numbers[this.starts] = len(collectives)
                collectives.append(sent)
                this = replace(this, starts=numbers[this.starts])
            elif this.waits_for is not None:
                this = replace(this, waits_for=numbers.get(this.waits_for))
            operations.append(this)
        return operations, collectives

    def is_backward(self, number: int) -> bool:
        """Whether a request is one of a compiled backward graph."""
        request = self.requests[number]
        return request.graph >= 0 and self._device.graphs[request.graph].direction == "backward"

    # ---- memory ----

    def _of(self, values: Any) -> Iterator[Allocation]:
        for tensor in _tensors(values):
            entry = self._live.get(_key(tensor))
            if entry is not None:
                yield entry[0]

    def _allocate(self, func: Any, result: Any) -> None:
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if tensor.device.type != "cuda" or (key := storage._cdata) in self._live:
                continue
            where = users_line() if self._graph is None else ""
            this = Allocation(storage.nbytes(), self.now, _name(func), where)
            self._begins(this)
            self._live[key] = this, weakref.ref(storage, functools.partial(self._freed, key))

    def _freed(self, key: int, reference: Any) -> None:
        this, _ = self._live.pop(key)
        this.storages -= 1
        if not this.storages:
            self._ends(this)

    def _replaced(self, old: Allocation, new: Allocation) -> Allocation:
        """Ends one allocation and begins another in the same storages."""
        new.storages = old.storages
        self._ends(old)
        self._begins(new)
        for key, (this, reference) in self._live.items():
            if this is old:
                self._live[key] = new, reference
        return new

    def _same_memory(self, given: Any, result: Any) -> None:
        """Notes that a result has the memory of its argument: a fake wait returns a new tensor."""
        for tensor, waited in zip(_tensors(given), _tensors(result)):
            entry, key = self._live.get(_key(tensor)), _key(waited)
            if entry is not None and key not in self._live:
                entry[0].storages += 1
                self._live[key] = entry[0], weakref.ref(waited.untyped_storage(), functools.partial(self._freed, key))

    def _begins(self, this: Allocation) -> None:
        self.changes.append((self.now, this, True))

    def _ends(self, this: Allocation) -> None:
        this.died = self.now
        self.changes.append((self.now, this, False))

    def _compute(self, reads: Any, writes: Any) -> None:
        """Notes new content of memory: new content in the same memory is an allocation of its own."""
        given = list(self._of(reads))
        of_parameters = bool(given) and all(this.of_parameters for this in given)
        for tensor in _tensors(writes):
            entry = self._live.get(_key(tensor))
            if entry is None:
                continue
            this, _ = entry
            if this.written and all(this is not other for other in given):
                this.reused = True
                this = self._replaced(this, Allocation(this.bytes, self.now, this.operator, this.where, reuses=True))
            if not this.written:
                this.written, this.of_parameters = True, of_parameters

    # ---- requests ----

    def _request(self, operation: Operation, graph: int = -1, step: int = -1, listed: int = 0) -> None:
        self.requests.append(Request(operation, graph, step, listed, self._dispatches, self._dispatched))
        self._dispatches = self._dispatched = 0

    def _counted(self, func: Any, args: Sequence[Any], result: Any) -> Iterator[Operation]:
        """The requests of an operator."""
        name, namespace = _name(func), getattr(func, "namespace", "")
        where = users_line() if self._graph is None else ""
        if (sent := collective_of_call(func, args)) is not None:
            self.collectives.append(replace(collective_outside(sent), where=where))
            number = len(self.collectives) - 1
            self._started.update({_key(tensor): number for tensor in _tensors(result)})
            yield Operation(name, where, "", starts=number)
            if namespace == "c10d" and self._graph is None:  # whoever called it waits, or the next operator does
                yield Operation(name, where, "", waits_for=number)
        elif name == "_c10d_functional.wait_tensor":
            waited = next((self._started.get(_key(tensor)) for tensor in _tensors(args)), None)
            if waited is not None or self._graph is not None:
                yield Operation(name, where, "", waits_for=waited)
        elif self._graph is not None or namespace == "aten":
            yield _operation(func, args, result, where)


def _operation(func: Any, args: Sequence[Any], result: Any, where: str) -> Operation:
    """An operator that is no collective."""
    reads = {id(tensor): tensor for tensor in _tensors(args)}  # one that is given twice is read once
    moved = _moved([*reads.values(), *_written_only(func, args), *_tensors(result)])
    flops = flops_of_call(func, args, result)
    return Operation(_name(func), where, "", flops, *moved, kind=kind_of_call(func, args))


def _recorded(graphs: Sequence[EmulatedGraph], recording: Recording) -> list[list[Operation | None]]:
    """For each step of each graph the operation that was recorded for it, where the order of kernels was."""
    return [
        matched(graph.steps, record.operations) if record.order is not None else [None] * len(graph.steps)
        for graph, record in zip(graphs, recording.graphs)
    ]


#: Number of recorded operations that may have no step of their own, one after the other.
_AHEAD = 4


def matched(steps: Sequence[IssuedStep], recorded: Sequence[Operation]) -> list[Operation | None]:
    """For each step of a graph the operation that was recorded for it; None for one without.

    Both are in the order of the kernels. Inductor may leave out a kernel when it writes the code, after it is recorded.
    """
    found: list[Operation | None] = []
    place = 0
    for step in steps:
        ahead = range(place, min(place + _AHEAD + 1, len(recorded)))
        here = next((index for index in ahead if _is_of(step, recorded[index])), None)
        found.append(recorded[here] if here is not None else None)
        place = here + 1 if here is not None else place
    return found


def _is_of(step: IssuedStep, operation: Operation) -> bool:
    if step.kind in {"start", "wait"}:
        return (operation.starts if step.kind == "start" else operation.waits_for) is not None
    if operation.starts is not None or operation.waits_for is not None:
        return False
    return step.kind == "kernel" or operation.name.partition(".")[2] == step.name


def _moved(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Bytes of tensors, and bytes of an element of the last one."""
    return sum(x.numel() * x.element_size() for x in tensors), tensors[-1].element_size() if tensors else 4


def _listed(args: Sequence[Any]) -> int:
    """How many values are in the lists among some arguments."""
    return sum(len(this) for this in args if isinstance(this, (list, tuple)))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in `values`; of a DTensor its local tensor."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)
            yield getattr(local, "elem", local)


def _written_only(func: Any, args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Tensors that an operator writes, and does not return: those of ``_foreach_mul_``."""
    if isinstance(func, torch._ops.OpOverload) and not func._schema.returns:
        for argument, given in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _tensors(given)


def _ignores_values(func: Any) -> bool:
    """Whether an operator takes no more than sizes and dtype from its arguments (``zeros_like``, ``new_full``)."""
    name = _name(func)
    return name.endswith("_like") or name.startswith("aten.new_")


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _name(func: Any) -> str:
    name: str = func._schema.name if hasattr(func, "_schema") else str(func)
    return name.replace("::", ".")


def users_line() -> str:
    """The innermost line of the program that runs, ``file:line: code``; empty if this package calls."""
    frames = traceback.extract_stack(sys._getframe(2))
    begin = max((i for i, frame in enumerate(frames) if frame.filename.endswith(_CALLERS)), default=-1)
    own = [frame for frame in frames[begin + 1 :] if is_users(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


#: The modules that call the program: their frames are further out than those of its lines.
_CALLERS = (
    os.path.join("dtensor_compile", "forecast", "training.py"),
    os.path.join("dtensor_compile", "report", "target.py"),
)
