"""The operators that a program runs, recorded on fake tensors of global shape: nothing is computed, nothing is sent."""

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

from dtensor_compile.compat.dtensor.factors import tensor_leaves
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
    """The operators in order. A tensor is known by its identity; the list keeps all of them alive."""

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
    """A mode of fake tensors of their own."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def global_fake(mode: FakeTensorMode, value: Any) -> Any:
    """A fake tensor with the global shape of a tensor or DTensor, plain and without gradient; other values as they are.

    Sizes that are symbolic count with their hints.
    """
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        shape, stride = ([int(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


@contextmanager
def recording_operators(mode: FakeTensorMode) -> Iterator[RecordedProgram]:
    """While it is entered, what this thread runs is recorded; tensors are those of `mode`."""
    program = RecordedProgram()
    with torch.no_grad(), mode, _Recorder(program):
        yield program


def record_module(
    module: torch.nn.Module, inputs: Sequence[Any], given: Callable[[torch.Tensor, torch.Tensor], None]
) -> tuple[RecordedProgram, Mapping[str, torch.Tensor]]:
    """What a call of a module runs, and the fake tensor of each parameter and buffer by its name.

    Args:
        given: told of each tensor of the module and each input, with its fake.
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
    """The mode of fake tensors that a backend traces with, entered, with gradients; they are left as they were.

    Sizes that only the data decides are no sizes of the program: it makes its own when it is traced.
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
    """A leaf of `mode` that looks as a tensor of another one does; other values as they are."""
    made: torch.Tensor
    if isinstance(value, DTensor):
        made = with_local(fake_like(mode, value._local_tensor), value._spec)
    elif isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    else:
        return value
    return made.requires_grad_(value.requires_grad)


def checkpointed(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """The graph that a node of a Dynamo graph runs as a checkpointed region, on ``node.args[1:]``; None for other
    nodes.
    """
    if node.op != "call_function" or node.target is not tag_activation_checkpoint:
        return None
    held, owner = node.args[0], node.graph.owning_module
    assert isinstance(held, torch.fx.Node) and owner is not None  # as Dynamo writes it
    graph = owner.get_submodule(str(held.target))
    assert isinstance(graph, torch.fx.GraphModule)
    return graph


def graphs_in(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A Dynamo graph, and behind it those of its checkpointed regions, in any depth."""
    yield gm
    for node in gm.graph.nodes:
        inside = checkpointed(node)
        if inside is not None:
            yield from graphs_in(inside)


class DrawsOnShards(Exception):
    """An operator that draws random numbers was given a DTensor: it would draw those of a shard."""


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
    """While it is entered, an operator that draws for a DTensor raises `DrawsOnShards` before it does."""
    with _Draws():
        yield


def run_node(gm: torch.fx.GraphModule, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    """What one node gives for the values of the nodes before it."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda used: values[used])
    return getattr(torch.fx.Interpreter(gm), node.op)(node.target, args, kwargs)


__all__ = [
    "DrawsOnShards", "Operator", "RecordedProgram", "checkpointed", "fake_like", "fake_mode", "global_fake",
    "graphs_in", "record_module",
    "recording_operators", "refusing_draws", "run_node", "tag_activation_checkpoint", "tracing_mode",
]  # fmt: skip
