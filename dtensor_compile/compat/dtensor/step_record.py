"""Records the operators of a training step, forward and backward, on fake tensors of global shape.

Nothing is computed or sent, and no process group is needed. A tensor is told from others by its memory, sizes and
strides: autograd hands out new Python objects for what it saves. Views that are made twice of the same tensor are one.

Each call has the module in which it was made. A call of the backward pass has the module of the forward operator that
it differentiates, which the sequence number of its autograd node names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.distributed.tensor import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.compat.dtensor.record import fake_mode, global_fake
from dtensor_compile.compat.dtensor.rules.factors import tensor_leaves

FORWARD, BACKWARD = "forward", "backward"

#: Placements over the dims of a mesh.
Placements = tuple[Placement, ...]

#: Operators that DTensor runs on the local tensors of weights as they are stored, whatever its rule says, and the
#: places of these weights among their tensors: convolutions (`torch.distributed.tensor._tp_conv`).
_AS_STORED = {"aten::convolution": (1, 2), "aten::convolution_backward": (2,)}

#: Gradients of losses that divide by the number of elements of the tensor that they are given, which of a shard is not
#: that of the whole: DTensor finds no rule for them, takes that of their parts, and runs them on shards. The gradient
#: of a mean over n shards is n times too large then, also in eager (2.11 to 2.15). They are recorded as their parts.
_DIVIDES_BY_ELEMENTS = frozenset({
    "aten::binary_cross_entropy_backward", "aten::huber_loss_backward", "aten::mse_loss_backward",
    "aten::smooth_l1_loss_backward", "aten::soft_margin_loss_backward",
})  # fmt: skip

#: Operators that return their argument, or something that is no tensor.
TRANSPARENT = frozenset({"aten::detach", "aten::alias", "prim::device", "aten::lift_fresh"})


@dataclass(frozen=True)
class Strategy:
    """Placements of an operator's tensor inputs and of its results, one tuple over the mesh dims for each tensor."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]


@dataclass(frozen=True)
class StepCall:
    """One call of an operator.

    Attributes:
        op, args, kwargs, result: of the call; tensors are fake, of global shape.
        inputs, outputs: numbers of its tensors, in the order of their leaves.
        phase: `FORWARD` or `BACKWARD`.
        module: path of the module in which it is made; of a backward call, in which its forward was.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: str
    module: str

    @property
    def name(self) -> str:
        """As ``aten.mm``."""
        return self.op._schema.name.replace("::", ".")

    @property
    def cuts_once(self) -> bool:
        """Whether DTensor cannot run it on a tensor of which one dim is sharded over several mesh dims, though its rule
        takes them: the implementation of convolutions reads `DTensorSpec.dim_map`."""
        return self.op._schema.name in _AS_STORED

    @property
    def written(self) -> frozenset[int]:
        """Places among its tensors of those that it writes to; all of them where it takes lists of tensors."""
        if not self.op._schema.is_mutable:
            return frozenset()
        arguments = self.op._schema.arguments
        if any(isinstance(value, (list, tuple)) and tensor_leaves(value) for value in self.args):
            return frozenset(range(len(self.inputs)))
        given = [*zip(arguments, self.args), *((a, self.kwargs[a.name]) for a in arguments if a.name in self.kwargs)]
        tensors = [argument for argument, value in given if isinstance(value, torch.Tensor)]
        return frozenset(
            i for i, argument in enumerate(tensors) if argument.alias_info is not None and argument.alias_info.is_write
        )


@dataclass
class RecordedStep:
    """The calls of a step in order.

    Attributes:
        calls: the calls.
        tensors: the fake of each numbered tensor.
        memory: identifies the memory of each; views of one tensor have the same.
        parameters, buffers: number by name.
        inputs: numbers of the tensors among the arguments.
        gradients: number of the gradient of each parameter that has one, by name.
        results: numbers of what each module returned last, by its path.
        arguments: numbers of the tensors that each module was called with last, by its path.
        came: placements of tensors that come from elsewhere than a call of the step, or a parameter or input.
        pinned: placements in which tensors are made whatever their call makes, as code outside of the calls reads them.
        leaf_gradients: those of `pinned` that are gradients of leaves: made in the placements of their leaves.
        as_stored: weights that calls must read as they come, as pairs of a call and a place among its tensors.
        in_parts: operators that were recorded as their parts.
        kept: by number of a call, the strategy that it keeps.
        placements: of DTensors, those that they had.
        taken: by number of a call, the strategy with which it ran.
        varying: dims of tensors with symbolic sizes, of those that have some; fakes have the sizes of the traced call.
    """

    calls: list[StepCall] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    gradients: dict[str, int] = field(default_factory=dict)
    results: dict[str, tuple[int, ...]] = field(default_factory=dict)
    arguments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    came: dict[int, Placements] = field(default_factory=dict)
    pinned: dict[int, Placements] = field(default_factory=dict)
    leaf_gradients: set[int] = field(default_factory=set)
    as_stored: set[tuple[int, int]] = field(default_factory=set)
    in_parts: set[str] = field(default_factory=set)
    kept: dict[int, Strategy] = field(default_factory=dict)
    placements: dict[int, Placements] = field(default_factory=dict)
    taken: dict[int, Strategy] = field(default_factory=dict)
    varying: dict[int, frozenset[int]] = field(default_factory=dict)

    def makers(self) -> dict[int, tuple[int, int]]:
        """For each tensor that a call makes, the number of the call and the place among its results."""
        return {x: (number, place) for number, call in enumerate(self.calls) for place, x in enumerate(call.outputs)}

    def stays(self) -> Set[tuple[int, int]]:
        """Tensors that calls must read as they come, as pairs of a call and a place among its tensors: those that it
        writes to, and those of which it makes a view if their memory is written to; a redistributed tensor is a copy.
        So are weights in `as_stored`.
        """
        written = {self.memory[call.inputs[place]] for call in self.calls for place in call.written}
        return self.as_stored | frozenset(
            (number, place)
            for number, call in enumerate(self.calls)
            for place, tensor in enumerate(call.inputs)
            if place in call.written or makes_alias(call.op) and self.memory[tensor] in written
        )


def makes_alias(op: torch._ops.OpOverload) -> bool:
    """Whether an operator returns a view of its input and writes to nothing."""
    return not op._schema.is_mutable and any(result.alias_info is not None for result in op._schema.returns)


def parts_of(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The operator in terms of others, if it has to be placed so; None for most."""
    return decomposition_table[op] if op._schema.name in _DIVIDES_BY_ELEMENTS and op in decomposition_table else None


class _Recorder(TorchDispatchMode):
    def __init__(self, step: RecordedStep) -> None:
        super().__init__()
        self.step, self.path, self.phase = step, [""], FORWARD
        self._numbers: dict[Any, int] = {}
        self._views: dict[Any, tuple[int, ...]] = {}
        self._modules: dict[int, str] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor, a new one if it was not seen before."""
        key = _key(tensor)
        return self._numbers[key] if key in self._numbers else self._new(key, tensor)

    def _new(self, key: Any, tensor: torch.Tensor) -> int:
        self._numbers[key] = len(self.step.tensors)
        self.step.tensors.append(tensor)
        self.step.memory.append(tensor.untyped_storage()._cdata)
        return self._numbers[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (parts := parts_of(func)) is not None:
            self.step.in_parts.add(func._schema.name)
            with self:
                return parts(*args, **kwargs)
        out = func(*args, **kwargs)
        results = tensor_leaves(out)
        module = self._module()
        if func._schema.name in TRANSPARENT or not results:
            return out
        inputs = tuple(self.number(tensor) for tensor in tensor_leaves((args, kwargs)))
        is_view = makes_alias(func)
        made = tuple(map(_key, results))
        if is_view and self._views.get((func, inputs, made)) == tuple(self._numbers.get(key) for key in made):
            return out
        outputs = tuple(self._new(key, tensor) for key, tensor in zip(made, results))
        if is_view:
            self._views[func, inputs, made] = outputs
        weights = _AS_STORED.get(func._schema.name, ())
        self.step.as_stored.update((len(self.step.calls), place) for place in weights if place < len(inputs))
        self.step.calls.append(StepCall(func, tuple(args), kwargs, out, inputs, outputs, self.phase, module))
        return out

    def _module(self) -> str:
        if self.phase == FORWARD:
            sequence = torch.autograd._get_sequence_nr() - 1
            self._modules.setdefault(sequence, self.path[-1])  # later calls may make no node
            return self.path[-1]
        node = torch._C._current_autograd_node()
        return "" if node is None else self._modules.get(node._sequence_nr(), "")


def _key(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@contextlib.contextmanager
def _paths_followed(model: torch.nn.Module, recorder: _Recorder) -> Iterator[None]:
    paths = {id(module): path for path, module in model.named_modules()}

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        path = paths[id(module)]
        recorder.path.append(path)
        recorder.step.arguments[path] = tuple(recorder.number(tensor) for tensor in tensor_leaves((args, kwargs)))

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        path = recorder.path.pop()
        recorder.step.results[path] = tuple(recorder.number(tensor) for tensor in tensor_leaves(result))

    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(leave),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record_step(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    device: torch.device | None = None,
) -> RecordedStep:
    """Records one forward pass, and the backward pass of its loss.

    Args:
        model: on any device; DTensors among its parameters count as their global tensors.
        args, kwargs: of the call.
        loss: what the backward pass starts from, of the result of the model; None for no backward pass.
        device: of the fakes, which selects kernels of attention; that of each tensor if None.
    """
    step, mode = RecordedStep(), fake_mode()

    def fake(value: Any) -> Any:
        return global_fake(mode, value, device)

    state: dict[str, torch.Tensor] = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        state[name] = fake(value).requires_grad_(value.requires_grad)
    call_args, call_kwargs = tree_map(fake, tuple(args)), tree_map(fake, dict(kwargs))
    recorder = _Recorder(step)
    step.parameters = {name: recorder.number(state[name]) for name, _ in model.named_parameters()}
    step.buffers = {name: recorder.number(state[name]) for name, _ in model.named_buffers()}
    step.inputs = [recorder.number(x) for x in tree_leaves((call_args, call_kwargs)) if isinstance(x, torch.Tensor)]
    with torch.enable_grad(), mode, recorder, _paths_followed(model, recorder):
        result = torch.func.functional_call(model, state, call_args, call_kwargs, tie_weights=True)
        if loss is not None:
            trained = {name: state[name] for name in step.parameters if state[name].requires_grad}
            value = loss(result)
            recorder.phase = BACKWARD
            gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            step.gradients = {name: recorder.number(g) for name, g in zip(trained, gradients) if g is not None}
    return step


__all__ = [
    "BACKWARD",
    "FORWARD",
    "TRANSPARENT",
    "Placements",
    "RecordedStep",
    "StepCall",
    "Strategy",
    "makes_alias",
    "parts_of",
    "record_step",
]
