"""The calls of operators on DTensors that a Dynamo graph makes, forward and backward, recorded.

A recording stands in front of DTensor's own dispatch and runs the graph on fake DTensors. `planned_calls` sees the same
calls in the same order while AOTAutograd traces the graph, so that a call is known by its number in its phase. An
operator takes DTensors of one mesh alone, so that the calls over each mesh are a step of their own.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.compat.aot.symbolic.shapes import size_hint, size_hints
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.dtensor.record import checkpointed, fake_like, graphs_in
from dtensor_compile.compat.dtensor.rules.factors import tensor_leaves
from dtensor_compile.compat.dtensor.rules.operator_strategies import ask_rule
from dtensor_compile.compat.dtensor.specs import Spec, meta_of, with_local
from dtensor_compile.compat.dtensor.step_record import (
    BACKWARD,
    FORWARD,
    TRANSPARENT,
    Placements,
    RecordedStep,
    StepCall,
    Strategy,
    makes_alias,
    parts_of,
)


class ProgramError(Exception):
    """The calls of a program cannot be placed together; the message gives the reason."""


def dtensors_in(value: Any) -> list[DTensor]:
    """The DTensors among the leaves of a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, DTensor)]


def placements_of(tensor: torch.Tensor, mesh: DeviceMesh) -> Placements:
    """Placements of a DTensor; a plain tensor beside DTensors counts as replicated, as DTensor takes it if the program
    allows that."""
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else (Replicate(),) * mesh.ndim


def is_backward() -> bool:
    """Whether this thread runs a node of autograd's graph."""
    return torch._C._current_autograd_node() is not None


class Calls(TorchDispatchMode):
    """Sees calls of operators on DTensors over one mesh.

    Attributes:
        mesh: the mesh.
        in_parts: names of operators that it saw as their parts.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.in_parts: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in TRANSPARENT or not self.dtensors((args, kwargs)):
            return func(*args, **kwargs)
        if (parts := parts_of(func)) is not None:
            self.in_parts.add(func._schema.name)
            with self:
                return parts(*args, **kwargs)
        return self.call(func, args, kwargs)

    def dtensors(self, value: Any) -> list[DTensor]:
        """The DTensors over the mesh among the leaves of a value."""
        return [x for x in dtensors_in(value) if real_mesh(x.device_mesh) == self.mesh]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Recorder(Calls):
    def __init__(self, mesh: DeviceMesh, fakes: FakeTensorMode) -> None:
        super().__init__(mesh)
        self.step, self.fakes = RecordedStep(), fakes
        self.module = ""
        self.known: dict[Any, int] = {}
        self._views: dict[Any, tuple[int, ...]] = {}
        self._modules: dict[int, str] = {}
        self._held: list[Any] = []

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor; one that no call made comes from elsewhere."""
        key = _key(tensor)
        if key not in self.known:
            self._new(key, tensor)
            self.step.came[self.known[key]] = placements_of(tensor, self.mesh)
        return self.known[key]

    def _new(self, key: Any, tensor: torch.Tensor) -> int:
        sizes, strides = size_hints(tensor.shape), size_hints(tensor.stride())
        with self.fakes:
            made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        self.known[key] = len(self.step.tensors)
        if varying := frozenset(dim for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)):
            self.step.varying[self.known[key]] = varying
        self.step.tensors.append(made)
        self.step.memory.append(key[0])
        self.step.placements[self.known[key]] = placements_of(tensor, self.mesh)
        self._held.append(_local(tensor))
        return self.known[key]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not self.dtensors(result):
            return result
        mesh, given, made = self.mesh, tensor_leaves((args, kwargs)), tensor_leaves(result)
        inputs = tuple(map(self.number, given))
        keys = tuple(map(_key, made))
        outputs = self._views.get((func, inputs, keys)) or tuple(self._new(key, x) for key, x in zip(keys, made))
        if makes_alias(func):  # autograd may hand out either of two equal views for what it saved
            self._views[func, inputs, keys] = outputs
        phase = BACKWARD if is_backward() else FORWARD
        plain_args, plain_kwargs = tree_map(_numbered(inputs, self.step.tensors), (tuple(args), dict(kwargs)))
        plain_result = tree_map(_numbered(outputs, self.step.tensors), result)
        call = StepCall(func, plain_args, plain_kwargs, plain_result, inputs, outputs, phase, self._module(phase))
        placed = Strategy(tuple(placements_of(x, mesh) for x in given), tuple(placements_of(x, mesh) for x in made))
        taken = ask_rule(call, mesh, placed.inputs)
        if not isinstance(taken, Strategy) or taken.outputs != placed.outputs:
            taken = placed
        self.step.taken[len(self.step.calls)] = taken
        if torch.Tag.nondeterministic_seeded in func.tags:  # what is drawn depends on the shards
            self.step.kept[len(self.step.calls)] = taken
        self.step.calls.append(call)
        return result

    def _module(self, phase: str) -> str:
        if phase == FORWARD:
            sequence = torch.autograd._get_sequence_nr() - 1
            self._modules.setdefault(sequence, self.module)  # later calls may make no node
            return self.module
        node = torch._C._current_autograd_node()
        return "" if node is None else self._modules.get(node._sequence_nr(), "")

    def pin(self, value: Any) -> None:
        """The DTensors in `value` are read outside of the calls: they are made as they are now."""
        for tensor in self.dtensors(value):
            self.step.pinned[self.number(tensor)] = tuple(tensor.placements)

    def pin_leaf_gradient(self, gradient: Any, leaf: Any) -> None:
        """The gradient of a leaf is read by an optimizer, which wants it placed as the leaf."""
        if self.dtensors(gradient) and self.dtensors(leaf):
            number = self.number(gradient)
            self.step.pinned[number] = tuple(leaf.placements)
            self.step.leaf_gradients.add(number)


def _numbered(numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> Callable[[Any], Any]:
    """Replaces tensors, in order, by the plain ones of these numbers, and symbolic sizes by those of the trace."""
    left = iter(numbers)

    def numbered(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tensors[next(left)]
        return size_hint(value) if isinstance(value, torch.SymInt) else value

    return numbered


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(tensor: torch.Tensor) -> Any:
    local = getattr(_local(tensor), "elem", _local(tensor))
    placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
    storage = local.untyped_storage()._cdata
    memory = storage, size_hint(local.storage_offset()), size_hints(local.stride())
    return *memory, size_hints(tensor.shape), placements, tensor.dtype


class _Interpreter(torch.fx.Interpreter):
    """Runs a Dynamo graph; what other nodes than operators read is pinned."""

    def __init__(
        self, program: torch.fx.GraphModule, recorders: Sequence[_Recorder], module_of: Callable[[Any], str]
    ) -> None:
        super().__init__(program)
        self.recorders, self.module_of = recorders, module_of

    def run_node(self, n: torch.fx.Node) -> Any:
        region = checkpointed(n)
        if region is not None and not _has_policy(region):  # traced operator by operator, as the rest of the program
            args, _ = self.fetch_args_kwargs_from_env(n)
            return _Interpreter(region, self.recorders, self.module_of).run(*args[1:])
        for recorder in self.recorders:
            recorder.module = self.module_of(n)
        if n.op not in ("call_function", "call_method") or not _reads_placements(n):
            return super().run_node(n)
        self.pin([self.env[used] for used in n.all_input_nodes])
        result = super().run_node(n)
        for tensor in dtensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(self.pin)  # its backward reads the placements of the gradient
        return result

    def pin(self, value: Any) -> None:
        """Pins the DTensors in a value, over whatever mesh."""
        for recorder in self.recorders:
            recorder.pin(value)


def _has_policy(region: torch.fx.GraphModule) -> bool:
    """Whether a policy decides which operators of a checkpointed region are recomputed: it runs again in backward."""
    return "_checkpoint_context_fn" in region.meta


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
    program: torch.fx.GraphModule,
    inputs: Sequence[Any],
    meshes: Sequence[DeviceMesh],
    module_of: Callable[[Any], str],
) -> list[RecordedStep]:
    """Records the calls of a Dynamo graph and of its backward pass; a step for each mesh.

    Args:
        program: the graph.
        inputs: fake inputs of it.
        meshes: of its DTensors.
        module_of: the path of the module of a node.

    Raises:
        ProgramError: its calls cannot be placed together.
    """
    for graph in graphs_in(program):
        calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        if graph is not program and _has_policy(graph) and any(map(_reads_placements, calls)):
            raise ProgramError("a region that is checkpointed by a policy redistributes")
    mode = detect_fake_mode(inputs)
    if not isinstance(mode, FakeTensorMode):
        raise ProgramError("its inputs are not fake")
    with mode:
        # Inputs have the sizes of a call; where those are symbolic, the graph knows.
        traced = (node.meta["example_value"] for node in program.graph.nodes if node.op == "placeholder")
        values = [fake_like(mode, value) for value in traced]
    fakes = FakeTensorMode()
    recorders = [_Recorder(mesh, fakes) for mesh in meshes]
    for recorder in recorders:
        recorder.step.inputs = [recorder.number(value) for value in recorder.dtensors(values)]
        recorder.step.came.clear()
    interpreter = _Interpreter(program, recorders, module_of)
    # As AOTAutograd traces: composite operators are decomposed in Python.
    decomposed = enable_python_dispatcher() if mode.shape_env is not None else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        for scope in (torch.enable_grad(), mode, decomposed, *recorders):
            stack.enter_context(scope)
        results = interpreter.run(*values)
        interpreter.pin(results)
        ends = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
        trained = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        if ends and trained:
            starts = [_tangent(x) for x in ends]
            gradients = torch.autograd.grad(ends, trained, starts, allow_unused=True)
            leaves = [x.is_leaf for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
            for value, gradient, is_leaf in zip(trained, gradients, leaves):
                interpreter.pin(gradient)
                for recorder in recorders if is_leaf else ():
                    recorder.pin_leaf_gradient(gradient, value)
    for recorder in recorders:
        recorder.step.in_parts |= recorder.in_parts
    return [recorder.step for recorder in recorders]


def _tangent(result: torch.Tensor) -> torch.Tensor:
    """A gradient of a result as AOTAutograd expects it: placed as the result, replicated where that is partial."""
    if not isinstance(result, DTensor):
        return torch.ones_like(result)
    spec = result._spec
    placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    local = torch.ones_like(result._local_tensor)
    return with_local(local, Spec(spec.mesh, placements, meta_of(spec)))


__all__ = ["Calls", "ProgramError", "dtensors_in", "is_backward", "placements_of", "record_program"]
