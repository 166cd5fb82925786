"""The calls of operators on DTensors that a Dynamo graph makes, forward and backward: recorded, and made with other
placements of their inputs.

Both stand in front of DTensor's own dispatch and see the same calls in the same order, so that a call is known by its
number in its phase. A recording runs the graph on fake DTensors. While AOTAutograd traces the graph, each run of it
begins with a node that starts the count again; a call that is not the one recorded, or does not make what its strategy
says, is a `PlacementsLost`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.compat.dtensor.factors import tensor_leaves
from dtensor_compile.compat.dtensor.operator_strategies import ask
from dtensor_compile.compat.dtensor.record import fake_like, graphs_in
from dtensor_compile.compat.dtensor.specs import (
    MaskPartial,
    Spec,
    meta_of,
    redistribute_local,
    spec_as_of_views,
    with_local,
)
from dtensor_compile.compat.dtensor.step_record import (
    BACKWARD,
    FORWARD,
    TRANSPARENT,
    Placements,
    RecordedStep,
    StepCall,
    Strategy,
    makes_alias,
)
from dtensor_compile.errors import DTensorCompileError


class ProgramError(Exception):
    """The calls of a program cannot be placed together; the message gives the reason."""


class PlacementsLost(DTensorCompileError):
    """A call of a program is not the one that was recorded and placed."""


def _dtensors(value: Any) -> list[DTensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, DTensor)]


def _placements(tensor: torch.Tensor, mesh: DeviceMesh) -> Placements:
    """Placements of a DTensor; a plain tensor beside DTensors counts as replicated, as DTensor takes it if the program
    allows that."""
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else (Replicate(),) * mesh.ndim


def _is_backward() -> bool:
    return torch._C._current_autograd_node() is not None


class _Calls(TorchDispatchMode):
    """Sees calls of operators on DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in TRANSPARENT or not _dtensors((args, kwargs)):
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Recorder(_Calls):
    def __init__(self, step: RecordedStep, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.step, self.fakes = step, fakes
        self.module = ""
        self.known: dict[Any, int] = {}
        self._modules: dict[int, str] = {}
        self._held: list[Any] = []

    def number(self, tensor: torch.Tensor, mesh: DeviceMesh) -> int:
        """The number of a tensor; one that no call made comes from elsewhere."""
        key = _key(tensor)
        if key not in self.known:
            self._new(key, tensor, mesh)
            self.step.came[self.known[key]] = _placements(tensor, mesh)
        return self.known[key]

    def _new(self, key: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> int:
        with self.fakes:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self.known[key] = len(self.step.tensors)
        self.step.tensors.append(made)
        self.step.memory.append(key[0])
        self.step.placements[self.known[key]] = _placements(tensor, mesh)
        self._held.append(_local(tensor))
        return self.known[key]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not _dtensors(result):
            return result
        given, made = tensor_leaves((args, kwargs)), tensor_leaves(result)
        mesh = _dtensors(result)[0].device_mesh
        inputs = tuple(self.number(x, mesh) for x in given)
        outputs = tuple(self._new(_key(x), x, mesh) for x in made)
        phase = BACKWARD if _is_backward() else FORWARD
        plain_args, plain_kwargs = tree_map(_numbered(inputs, self.step.tensors), (tuple(args), dict(kwargs)))
        plain_result = tree_map(_numbered(outputs, self.step.tensors), result)
        call = StepCall(func, plain_args, plain_kwargs, plain_result, inputs, outputs, phase, self._module(phase))
        placed = Strategy(tuple(_placements(x, mesh) for x in given), tuple(_placements(x, mesh) for x in made))
        taken = ask(call, mesh, placed.inputs)
        if taken is None or taken.outputs != placed.outputs:
            taken = placed
        self.step.taken[len(self.step.calls)] = taken
        if torch.Tag.nondeterministic_seeded in func.tags:  # what is drawn depends on the shards
            self.step.kept[len(self.step.calls)] = taken
        self.step.calls.append(call)
        return result

    def _module(self, phase: str) -> str:
        if phase == FORWARD:
            sequence = torch.autograd._get_sequence_nr() - 1
            self._modules[sequence] = self.module
            return self.module
        node = torch._C._current_autograd_node()
        return "" if node is None else self._modules.get(node._sequence_nr(), "")

    def pin(self, value: Any) -> None:
        """The DTensors in `value` are read outside of the calls: they are made as they are now."""
        for tensor in _dtensors(value):
            self.step.pinned[self.number(tensor, tensor.device_mesh)] = tuple(tensor.placements)


def _numbered(numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> Callable[[Any], Any]:
    """Replaces tensors, in order, by the plain ones of these numbers."""
    left = iter(numbers)
    return lambda value: tensors[next(left)] if isinstance(value, torch.Tensor) else value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(tensor: torch.Tensor) -> Any:
    local = getattr(_local(tensor), "elem", _local(tensor))
    placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), local.stride(), tuple(tensor.shape), placements, tensor.dtype


class _Interpreter(torch.fx.Interpreter):
    """Runs a Dynamo graph; what other nodes than operators read is pinned."""

    def __init__(self, program: torch.fx.GraphModule, recorder: _Recorder, module_of: Callable[[Any], str]) -> None:
        super().__init__(program)
        self.recorder, self.module_of = recorder, module_of

    def run_node(self, n: torch.fx.Node) -> Any:
        self.recorder.module = self.module_of(n)
        if n.op in ("call_function", "call_method") and _reads_placements(n):
            self.recorder.pin([self.env[used] for used in n.all_input_nodes])
        return super().run_node(n)


#: Methods of DTensors that are no operators.
_METHODS = frozenset({"to_local", "redistribute", "full_tensor"})


def _reads_placements(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph depends on the placements of its DTensors: it is no operator of torch's."""
    if node.op == "call_method":
        return node.target in _METHODS
    target = node.target
    module = getattr(target, "__module__", "") or ""
    return isinstance(target, types.FunctionType) and not module.startswith(("torch.nn.functional", "torch.functional"))


def record_program(
    program: torch.fx.GraphModule, inputs: Sequence[Any], module_of: Callable[[Any], str]
) -> RecordedStep:
    """Records the calls of a Dynamo graph and of its backward pass.

    Args:
        program: the graph.
        inputs: fake inputs of it.
        module_of: the path of the module of a node.

    Raises:
        ProgramError: its calls cannot be placed together.
    """
    for graph in graphs_in(program):
        calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        if graph is not program and any(map(_reads_placements, calls)):
            raise ProgramError("a checkpointed region redistributes")
    mode = detect_fake_mode(inputs)
    if not isinstance(mode, FakeTensorMode):
        raise ProgramError("its inputs are not fake")
    step = RecordedStep()
    with mode:
        values = [fake_like(mode, value) for value in inputs]
    recorder = _Recorder(step, FakeTensorMode())
    step.inputs = [recorder.number(value, value.device_mesh) for value in _dtensors(values)]
    step.came.clear()
    with torch.enable_grad(), mode, recorder:
        results = _Interpreter(program, recorder, module_of).run(*values)
        recorder.pin(results)
        ends = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
        trained = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        if ends and trained:
            starts = [_tangent(x) for x in ends]
            gradients = torch.autograd.grad(ends, trained, starts, allow_unused=True)
            recorder.pin([g for g in gradients if g is not None])
    return step


def has_symbols(inputs: Sequence[Any]) -> bool:
    """Whether an input is a symbolic number, or a tensor with a symbolic size."""
    sizes = [size for x in inputs for size in (x.shape if isinstance(x, torch.Tensor) else (x,))]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _tangent(result: torch.Tensor) -> torch.Tensor:
    """A gradient of a result as AOTAutograd expects it: placed as the result, replicated where that is partial."""
    if not isinstance(result, DTensor):
        return torch.ones_like(result)
    spec = result._spec
    placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    local = torch.ones_like(result._local_tensor)
    return with_local(local, Spec(spec.mesh, placements, meta_of(spec)))


@dataclass
class _Planned:
    """What is planned for a call: its strategy, placements in which other calls have its tensors too and from which it
    takes them, whether it reads tensors as they come, and the placements of results that are pinned."""

    call: StepCall
    strategy: Strategy
    shared: tuple[Placements | None, ...]
    stays: bool
    pinned: Mapping[int, Placements] = field(default_factory=dict)


class PlannedCalls(_Calls):
    """While active, calls are made with planned placements of their inputs."""

    def __init__(
        self, step: RecordedStep, strategies: Sequence[Strategy], shared: Sequence[tuple[Placements | None, ...]]
    ) -> None:
        super().__init__()
        self._planned: dict[str, list[_Planned]] = {FORWARD: [], BACKWARD: []}
        stays = {call for call, _ in step.stays()}
        for number, (call, strategy, taken_from) in enumerate(zip(step.calls, strategies, shared)):
            pinned = {i: step.pinned[x] for i, x in enumerate(call.outputs) if x in step.pinned}
            self._planned[call.phase].append(_Planned(call, strategy, taken_from, number in stays, pinned))
        self._at = {FORWARD: 0, BACKWARD: 0}

    def begin(self) -> None:
        """A run of the program begins."""
        self._at = {FORWARD: 0, BACKWARD: 0}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        planned = self._next(func, args, kwargs)
        if planned is None:
            return func(*args, **kwargs)
        ways = iter(zip(planned.shared, map(_before_masks, planned.strategy.inputs)))
        mesh = _dtensors((args, kwargs))[0].device_mesh
        args, kwargs = tree_map(
            lambda x: _taken(x, mesh, *next(ways)) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        if makes_alias(func) and not planned.stays:
            args = tree_map(_in_global_order, args)
        result = func(*args, **kwargs)
        made = tuple(_placements(x, mesh) for x in tensor_leaves(result))
        if list(map(_as_sums, made)) != list(map(_as_sums, planned.strategy.outputs)):
            raise PlacementsLost(f"{func} made {made}, where {planned.strategy.outputs} were expected")
        if not planned.pinned:
            return result
        places = iter(range(len(planned.call.outputs)))
        return tree_map(lambda x: _pinned(x, next(places), planned.pinned) if isinstance(x, DTensor) else x, result)

    def _next(self, func: Any, args: Any, kwargs: Any) -> _Planned | None:
        phase = BACKWARD if _is_backward() else FORWARD
        if not _makes_dtensors(func):
            return None
        place = self._at[phase]
        if place == len(self._planned[phase]):
            return None  # AOTAutograd copies results that share memory, after the program
        planned = self._planned[phase][place]
        shapes = [tuple(x.shape) for x in tensor_leaves((args, kwargs))]
        if planned.call.op is not func or shapes != _shapes(planned.call):
            raise PlacementsLost(f"{func} came in the {phase} pass, where {planned.call.op} was expected")
        self._at[phase] += 1
        return planned


def _shapes(call: StepCall) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in tensor_leaves((call.args, call.kwargs))]


def _makes_dtensors(func: Any) -> bool:
    return any("Tensor" in str(result.type) for result in func._schema.returns)


def _moved(tensor: DTensor, placements: Placements) -> DTensor:
    if tuple(tensor.placements) == placements:
        return tensor
    source = tensor._spec
    target = spec_as_of_views(source.mesh, placements, meta_of(source))
    return with_local(redistribute_local(tensor._local_tensor, source, target), target)


def _before_masks(placements: Placements) -> Placements:
    """Placements from which a lookup masks its indices itself."""
    return tuple(Replicate() if isinstance(placement, MaskPartial) else placement for placement in placements)


def _as_sums(placements: Placements) -> Placements:
    """Placements in which what a lookup masks is a partial sum: masks of two lookups are not equal."""
    return tuple(Partial() if isinstance(placement, MaskPartial) else placement for placement in placements)


def _taken(tensor: torch.Tensor, mesh: DeviceMesh, shared: Placements | None, placements: Placements) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        if placements == _placements(tensor, mesh):
            return tensor
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        tensor = with_local(tensor, Spec(mesh, _placements(tensor, mesh), meta))
    if shared is not None and tuple(tensor.placements) != placements:
        tensor = _moved(tensor, shared)
    return _moved(tensor, placements)


def _in_global_order(value: Any) -> Any:
    """A DTensor whose local tensor has its dims in memory in the order of the global one, as views take for granted: a
    redistribution may have changed it."""
    if not isinstance(value, DTensor):
        return value
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
    local = value._local_tensor.permute(order)
    if local.is_contiguous():
        return value
    back = sorted(range(value.dim()), key=order.__getitem__)
    return with_local(local.contiguous().permute(back), value._spec)


def _pinned(tensor: DTensor, place: int, pinned: Mapping[int, Placements]) -> DTensor:
    return _moved(tensor, pinned[place]) if place in pinned else tensor


@contextlib.contextmanager
def calls_planned(program: torch.fx.GraphModule, planned: PlannedCalls) -> Iterator[None]:
    """While active, runs of the program on this thread make their calls as planned. Adds a node to the program."""
    first = next(iter(node for node in program.graph.nodes if node.op != "placeholder"))
    with program.graph.inserting_before(first):
        program.graph.call_function(planned.begin)
    program.recompile()
    with planned:
        yield


__all__ = ["PlacementsLost", "PlannedCalls", "ProgramError", "calls_planned", "has_symbols", "record_program"]
