"""The calls of a recorded program (`program_calls`), made with other placements of their inputs.

While AOTAutograd traces the graph, each run of it begins with a node that starts the count of the calls again. A call
that is not the one recorded, that DTensor refuses with what is planned for it, or that does not make what its strategy
says, is a `PlacementsLost`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils._pytree import tree_map

from dtensor_compile.compat.aot.symbolic.shapes import size_hints
from dtensor_compile.compat.dtensor.program_calls import Calls, is_backward, placements_of
from dtensor_compile.compat.dtensor.rules.factors import tensor_leaves
from dtensor_compile.compat.dtensor.specs import (
    MaskPartial,
    Spec,
    apply_mask,
    meta_of,
    redistribute_local,
    spec_as_of_views,
    with_local,
)
from dtensor_compile.compat.dtensor.step_record import (
    BACKWARD,
    FORWARD,
    Placements,
    RecordedStep,
    StepCall,
    Strategy,
    makes_alias,
)
from dtensor_compile.compat.dynamo.tracing import restarts_analysis
from dtensor_compile.errors import DTensorCompileError


class PlacementsLost(DTensorCompileError):
    """A call of a program cannot be made as it was recorded and placed."""


@dataclass
class _Planned:
    """What is planned for a call: its strategy, placements in which other calls have its tensors too and from which it
    takes them, whether it reads tensors as they come, and the placements of results that are pinned."""

    call: StepCall
    strategy: Strategy
    shared: tuple[Placements | None, ...]
    stays: bool
    pinned: Mapping[int, Placements] = field(default_factory=dict)


class PlannedCalls(Calls):
    """While active, calls are made with planned placements of their inputs."""

    def __init__(
        self,
        mesh: DeviceMesh,
        step: RecordedStep,
        strategies: Sequence[Strategy],
        shared: Sequence[tuple[Placements | None, ...]],
    ) -> None:
        super().__init__(mesh)
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
        try:
            return self._made(planned, func, args, kwargs)
        except PlacementsLost:
            raise
        except Exception as error:  # whatever a rule or a redistribution raises that refuses what was planned
            if restarts_analysis(error):
                raise
            raise PlacementsLost(f"{func} with planned placements: {type(error).__name__}: {error}") from error

    def _made(self, planned: _Planned, func: Any, args: Any, kwargs: Any) -> Any:
        ways = iter(zip(planned.shared, planned.strategy.inputs))
        mesh = self.mesh
        args, kwargs = tree_map(
            lambda x: _taken(x, mesh, *next(ways)) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        if makes_alias(func) and not planned.stays:
            args = tree_map(_in_global_order, args)
        result = func(*args, **kwargs)
        made = tuple(placements_of(x, mesh) for x in tensor_leaves(result))
        if list(map(_as_sums, made)) != list(map(_as_sums, planned.strategy.outputs)):
            raise PlacementsLost(f"{func} made {made}, where {planned.strategy.outputs} were expected")
        places = iter(range(len(planned.call.outputs)))
        return tree_map(lambda x: _left(x, planned.pinned.get(next(places))) if isinstance(x, DTensor) else x, result)

    def _next(self, func: Any, args: Any, kwargs: Any) -> _Planned | None:
        phase = BACKWARD if is_backward() else FORWARD
        if not _makes_tensors(func):
            return None
        place = self._at[phase]
        if place == len(self._planned[phase]):
            return None  # AOTAutograd copies results that share memory, after the program
        planned = self._planned[phase][place]
        shapes = [size_hints(x.shape) for x in tensor_leaves((args, kwargs))]
        if planned.call.op is not func or shapes != _shapes(planned.call):
            raise PlacementsLost(f"{func} came in the {phase} pass, where {planned.call.op} was expected")
        self._at[phase] += 1
        return planned


def _shapes(call: StepCall) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in tensor_leaves((call.args, call.kwargs))]


def _makes_tensors(func: Any) -> bool:
    return any("Tensor" in str(result.type) for result in func._schema.returns)


def _moved(tensor: DTensor, placements: Placements) -> DTensor:
    if tuple(tensor.placements) == placements:
        return tensor
    source = tensor._spec
    target = spec_as_of_views(source.mesh, placements, meta_of(source))
    return with_local(redistribute_local(tensor._local_tensor, source, target), target)


def _before_masks(tensor: DTensor, placements: Placements) -> Placements:
    """Placements in which a call takes a tensor: a lookup masks its indices itself, and what one made is a sum."""
    return tuple(
        (Partial() if now.is_partial() else Replicate()) if isinstance(placement, MaskPartial) else placement
        for now, placement in zip(tensor.placements, placements)
    )


def _masked(tensor: DTensor) -> DTensor:
    """What a lookup made, with its mask applied. A mask can be used once; the calls that take it may be several."""
    masks = [placement for placement in tensor.placements if isinstance(placement, MaskPartial)]
    if not masks:
        return tensor
    local = functools.reduce(lambda local, mask: apply_mask(mask, local), masks, tensor._local_tensor)
    return with_local(local, Spec(tensor.device_mesh, _as_sums(tensor.placements), meta_of(tensor._spec)))


def _as_sums(placements: Placements) -> Placements:
    """Placements in which what a lookup masks is a partial sum: masks of two lookups are not equal."""
    return tuple(Partial() if isinstance(placement, MaskPartial) else placement for placement in placements)


def _taken(tensor: torch.Tensor, mesh: DeviceMesh, shared: Placements | None, placements: Placements) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        if placements == placements_of(tensor, mesh):
            return tensor
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        tensor = with_local(tensor, Spec(mesh, placements_of(tensor, mesh), meta))
    placements = _before_masks(tensor, placements)
    if shared is not None and tuple(tensor.placements) != placements:
        tensor = _moved(tensor, shared)
    return _moved(tensor, placements)


def _in_global_order(value: Any) -> Any:
    """A DTensor whose local tensor has its dims in memory in the order of the global one, as views take for granted: a
    redistribution may have changed it."""
    if not isinstance(value, DTensor):
        return value
    strides = size_hints(value.stride())
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
    local = value._local_tensor.permute(order)
    if local.is_contiguous():
        return value
    back = sorted(range(value.dim()), key=order.__getitem__)
    return with_local(local.contiguous().permute(back), value._spec)


def _left(tensor: DTensor, pinned: Placements | None) -> DTensor:
    """A result as code outside of the calls reads it, or as the calls after this one take it."""
    if pinned is None:
        return _masked(tensor)
    return tensor if _as_sums(pinned) == _as_sums(tensor.placements) else _moved(tensor, pinned)


@contextlib.contextmanager
def calls_planned(program: torch.fx.GraphModule, planned: Sequence[PlannedCalls]) -> Iterator[None]:
    """While active, runs of the program on this thread make their calls as planned, over each mesh. Adds nodes to the
    program."""
    first = next(iter(node for node in program.graph.nodes if node.op != "placeholder"))
    with program.graph.inserting_before(first):
        for calls in planned:
            program.graph.call_function(calls.begin)
    program.recompile()
    with contextlib.ExitStack() as stack:
        for calls in planned:
            stack.enter_context(calls)
        yield


__all__ = ["PlacementsLost", "PlannedCalls", "calls_planned"]
