"""Records the operators that a program runs on fake tensors of global shape, without computation or communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dtensor_compile.compat.dtensor.rules.factors import tensor_leaves
from dtensor_compile.compat.dtensor.specs import with_local


@dataclass(frozen=True)
class Operator:
    """One call of an operator; its tensors are fake ones of global shape."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...]


@dataclass
class RecordedProgram:
    """The operators in order. Tensors are distinguished by identity; the list keeps all of them alive."""

    operators: list[Operator] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    def __init__(self, program: RecordedProgram) -> None:
        super().__init__()
        self.program = program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = tuple(tensor_leaves(out))
        if results:
            self.program.operators.append(Operator(func, tuple(args), dict(kwargs or {}), results))
        return out


def fake_mode() -> FakeTensorMode:
    """A new fake mode."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def global_fake(mode: FakeTensorMode, value: Any, device: torch.device | None = None) -> Any:
    """A fake tensor with the global shape of a tensor or DTensor, plain and without gradient; other values as they are.

    Symbolic sizes count as their hints. It is on the device of `value`, or on `device`.
    """
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        shape, stride = ([int(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=device or value.device)


@contextmanager
def recording_operators(mode: FakeTensorMode) -> Iterator[RecordedProgram]:
    """While active, operators that this thread runs are recorded; new tensors belong to `mode`."""
    program = RecordedProgram()
    with torch.no_grad(), mode, _Recorder(program):
        yield program


def record_module(
    module: torch.nn.Module, inputs: Sequence[Any], given: Callable[[torch.Tensor, torch.Tensor], None]
) -> tuple[RecordedProgram, Mapping[str, torch.Tensor]]:
    """Records a call of a module.

    Args:
        given: called with each tensor of the module and each tensor input, and with its fake.

    Returns:
        The recorded operators, and the fake tensor of each parameter and buffer by name.
    """
    mode, fakes = fake_mode(), {}
    state = {
        **dict(module.named_parameters(remove_duplicate=True)),
        **dict(module.named_buffers(remove_duplicate=True)),
    }

    def fake(value: Any) -> Any:
        made = global_fake(mode, value)
        if isinstance(value, torch.Tensor):
            given(value, made)
        return made

    for name, value in state.items():
        fakes[name] = fake(value)
    arguments = tree_map(fake, tuple(inputs))
    with recording_operators(mode) as program:
        functional_call(module, fakes, arguments, tie_weights=True)
    return program, fakes


@contextmanager
def tracing_mode() -> Iterator[FakeTensorMode]:
    """Enters the fake mode that the backend traces with, gradients enabled; restores the grad mode at the end.

    Unbacked symbols that arise here are ignored: the program makes its own when it is traced.
    """
    mode = detect_fake_mode() or fake_mode()
    symbols = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else nullcontext()
    with torch.enable_grad(), symbols, mode:
        before = torch.is_grad_enabled()
        try:
            yield mode
        finally:
            torch.set_grad_enabled(before)


def fake_like(mode: FakeTensorMode, value: Any) -> Any:
    """A leaf of `mode` with the metadata of a tensor of another mode; other values as they are."""
    made: torch.Tensor
    if isinstance(value, DTensor):
        made = with_local(fake_like(mode, value._local_tensor), value._spec)
    elif isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    else:
        return value
    return made.requires_grad_(value.requires_grad)


def checkpointed(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """The graph of the checkpointed region that a node of a Dynamo graph runs on ``node.args[1:]``; None for other
    nodes."""
    if node.op != "call_function" or node.target is not tag_activation_checkpoint:
        return None
    held, owner = node.args[0], node.graph.owning_module
    assert isinstance(held, torch.fx.Node) and owner is not None  # as Dynamo writes it
    graph = owner.get_submodule(str(held.target))
    assert isinstance(graph, torch.fx.GraphModule)
    return graph


def graphs_in(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A Dynamo graph, followed by the graphs of its checkpointed regions, at any depth."""
    yield gm
    for node in gm.graph.nodes:
        inside = checkpointed(node)
        if inside is not None:
            yield from graphs_in(inside)


class DrawsOnShards(Exception):
    """A random operator was given a DTensor: it would draw the numbers of one shard."""


class _Draws(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and any(
            isinstance(x, DTensor) for x in tensor_leaves((args, kwargs))
        ):
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args)) | (kwargs or {})
            if "dropout_p" not in names or given.get("dropout_p", 0.0) > 0:  # attention without dropout draws nothing
                raise DrawsOnShards(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def refusing_draws() -> Iterator[None]:
    """While active, a random operator on a DTensor raises `DrawsOnShards` instead of drawing."""
    with _Draws():
        yield


def run_node(gm: torch.fx.GraphModule, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    """The result of one node, computed from the values of the nodes before it."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda used: values[used])
    return getattr(torch.fx.Interpreter(gm), node.op)(node.target, args, kwargs)


__all__ = [
    "DrawsOnShards", "Operator", "RecordedProgram", "checkpointed", "fake_like", "fake_mode", "global_fake",
    "graphs_in", "record_module",
    "recording_operators", "refusing_draws", "run_node", "tag_activation_checkpoint", "tracing_mode",
]  # fmt: skip
