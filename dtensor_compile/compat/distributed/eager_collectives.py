"""Observes collectives outside of compiled graphs: in eager code between graphs, in hooks, in a reducer.

`watch_eager_collectives` sees operators that c10d and the functional collectives dispatch on this thread (and in the
backward passes that it starts), except those in compiled graphs and during tracing.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch._aot_autograd.utils import call_func_at_runtime_with_args
from torch._guards import TracingContext
from torch._inductor.output_code import CompiledFxGraph
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.patches import hook, needs

_NAMESPACES = ("c10d", "_c10d_functional")
#: Operators on a process group that send no tensor.
_SENDS_NOTHING = frozenset({"barrier", "monitored_barrier_", "recv_", "recv_any_source_", "irecv"})
#: Names of parameters of operators for the process group.
_GROUPS = frozenset({"process_group", "group_name"})
#: Names of parameters of operators for the tensors that they send.
_INPUTS = frozenset({"input", "inputs", "input_tensor", "input_tensors", "tensor", "tensors", "self"})
_SPLITS = frozenset({"input_split_sizes"})


@dataclass(frozen=True)
class EagerCollective:
    """A collective as it is dispatched.

    Attributes:
        name: of the operator (``_allgather_base_``).
        inputs: the tensors that it sends.
        splits: the number of rows for each rank, if given.
        group: its process group; None if unknown.
        backward: whether autograd runs a backward pass.
        stack: ``(file, line, code)`` of the frames, outermost first.
    """

    name: str
    inputs: tuple[torch.Tensor, ...]
    splits: tuple[int, ...]
    group: dist.ProcessGroup | None
    backward: bool
    stack: tuple[tuple[str, int, str], ...]


class _Collectives(TorchDispatchMode):
    """Reports each collective, without changing it."""

    supports_higher_order_operators = True

    def __init__(self, on_collective: Callable[[EagerCollective], None]) -> None:
        super().__init__()
        self.on_collective = on_collective

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # Dynamo skips frames under modes that do not declare this
        return True

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor dispatches its collectives again, on local tensors, under this mode
        if getattr(func, "namespace", "") in _NAMESPACES and not _traced_or_compiled():
            found = collective_of_call(func, args)
            if found is not None:
                self.on_collective(found)
        return func(*args, **(kwargs or {}))


def collective_of_call(func: Any, args: Sequence[Any]) -> EagerCollective | None:
    """The collective that a call of an operator starts; None if it starts none."""
    if getattr(func, "namespace", "") not in _NAMESPACES:
        return None
    name = func._schema.name.split("::")[1]
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args)}
    group = next((value for argument, value in given.items() if argument in _GROUPS), None)
    if group is None or name in _SENDS_NOTHING:
        return None
    inputs = next((value for argument, value in given.items() if argument in _INPUTS), ())
    tensors = tuple(value for value in pytree.tree_leaves(inputs) if isinstance(value, torch.Tensor))
    splits = next((tuple(value) for argument, value in given.items() if argument in _SPLITS), ())
    backward = torch._C._current_graph_task_id() != -1
    frames = traceback.extract_stack(sys._getframe(1))
    stack = tuple((frame.filename, frame.lineno or 0, frame.line or "") for frame in frames)
    return EagerCollective(name, tensors, splits, _group(group), backward, stack)


def _group(given: Any) -> dist.ProcessGroup | None:
    """The group that an operator is given as an object, boxed, or by name."""
    if isinstance(given, torch.ScriptObject):
        return dist.ProcessGroup.unbox(given)
    return given if isinstance(given, dist.ProcessGroup) else compat_mesh.group_named(str(given))


#: Code of the functions through which compiled graphs are called: AOTAutograd's and Inductor's.
_CALLS_GRAPH = frozenset({call_func_at_runtime_with_args.__code__, CompiledFxGraph.__call__.__code__})


def _traced_or_compiled() -> bool:
    """Whether this thread is tracing a graph or running a compiled one."""
    if TracingContext.try_get() is not None:
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS_GRAPH or frame.f_code.co_filename.startswith("<eval_with_key>"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@needs(
    "collectives outside of graphs, in the report",
    hook("torch.utils._python_dispatch:TorchDispatchMode.ignore_compile_internals", "cls"),
    hook("torch.utils._python_dispatch:TorchDispatchMode.is_infra_mode", "cls"),
    hook("torch.utils._python_dispatch:is_traceable_wrapper_subclass_type"),
    hook("torch._functorch._aot_autograd.utils:call_func_at_runtime_with_args"),
    hook("torch._inductor.output_code:CompiledFxGraph.__call__"),
    hook("torch._guards:TracingContext.try_get"),
    without="the report lacks the collectives of eager code, between graphs and in hooks",
)
@contextlib.contextmanager
def watch_eager_collectives(
    on_collective: Callable[[EagerCollective], None], watched: Callable[[], None]
) -> Iterator[None]:
    """While active, `on_collective` is called with each collective that runs outside of compiled graphs.

    Args:
        watched: called on entry; not called if the installed torch lacks a hook that this needs.
    """
    watched()
    with _Collectives(on_collective):
        yield
