"""Placements of the tangents of a compiled graph.

AOTAutograd traces the backward together with the forward, for tangents placed as the results are (replicated where
those are partial), and redistributes other tangents. The values are right then, but the placements of ``.grad`` differ
from eager's, where every rule follows the placement of the gradient that arrives. So an unexpected tangent is handled
here:

- The backward of that call runs in eager: the traced program, kept by Dynamo, runs once more, and its gradients are
  taken. This requires a repeatable program: one without mutations, random numbers and messages of its own. For others,
  and if the arguments are gone, torch redistributes. (Calls hold their arguments until gradients have arrived as
  expected.) Either is a decision, the first time.
- After the second time, the next call recompiles the graph for such tangents; a guard fails. The recompiled graph is
  kept, whatever arrives later.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd.schemas import OutputType
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_compile.compat.aot.autograd_functions import traces_block
from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.dtensor.creation import compute_local_shape_and_global_offset
from dtensor_compile.compat.dtensor.specs import meta_of, spec_of_parts
from dtensor_compile.compat.dynamo.left_to_python import leave_frames_to_python
from dtensor_compile.compat.dynamo.tracing import of_compilation_on_stack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import constant_source, fact_guard
from dtensor_compile.compat.patches import patch
from dtensor_compile.native.loader import native

#: Placements of the gradients of all results that are DTensors and require a gradient, in order.
Placed = tuple[tuple[Placement, ...], ...]

#: Number of backward passes with the same unexpected tangents after which the graph is recompiled for them.
ENOUGH = 2

#: Per code object of a frame, the placements for which its graphs are to be recompiled.
_learned: weakref.WeakKeyDictionary[Any, list[Placed]] = weakref.WeakKeyDictionary()


def expected_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements that AOTAutograd expects of the gradient of a result."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


class _Arguments:
    """Python version of ``Arguments`` of `native.loader`, if that is missing."""

    def __init__(self, values: tuple[Any, ...], hold: bool) -> None:
        self._versions = {i: _version(value) for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
        refer = (lambda value: lambda: value) if hold else weakref.ref
        self._kept: list[Any] = [refer(value) if i in self._versions else value for i, value in enumerate(values)]

    def __call__(self) -> list[Any] | None:
        values = [kept() if i in self._versions else kept for i, kept in enumerate(self._kept)]
        if any(values[i] is None or _version(values[i]) != version for i, version in self._versions.items()):
            return None
        return values


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class UnexpectedTangents:
    """Gradients of DTensors that arrived with other placements than a graph was compiled for.

    Attributes:
        gradients: those that arrived.
        placed, expected: their placements, and those that the graph was compiled for.
        in_eager: the backward runs in eager; else torch redistributes the gradients.
        learns: the graph is recompiled after `ENOUGH` of them.
    """

    gradients: Sequence[Any]
    placed: Placed
    expected: Placed
    in_eager: bool
    learns: bool


@dataclass
class Tangents:
    """State about the tangents of one compiled graph.

    Attributes:
        code: the code object of its frame.
        assumed: the placements that the graph is compiled for; None for those that AOTAutograd expects.
        repeatable: whether the traced program gives the same when it runs again, as far as is known.
        results: per gradient of a DTensor, the index of the result.
        missed: number of arrivals per unexpected placement.
        learned: the placements that the graph should be recompiled for.
        matched: whether gradients arrived as expected; calls hold their arguments until then.
        places: per input of its autograd function, the index of the argument of the graph (None for non-tensors); empty
            before the first call, None if a tensor is not an argument.
        sends: operators by which a program sends messages of its own.
        on_mismatch: called with unexpected gradients, the first time.
        reported: the mismatches for which it was called.
    """

    code: Any = None
    assumed: Placed | None = None
    repeatable: bool = False
    results: tuple[int, ...] = ()
    missed: dict[Placed, int] = field(default_factory=dict)
    learned: Placed | None = None
    matched: bool = False
    places: list[int | None] | None = field(default_factory=list)
    sends: Collection[Any] = ()
    on_mismatch: Callable[[UnexpectedTangents], None] = lambda tangents: None
    reported: set[tuple[Placed, bool]] = field(default_factory=set)

    @classmethod
    def of_frame(cls) -> Tangents:
        """A new object for the graph that is being compiled on this thread."""
        code = of_compilation_on_stack("code")
        waiting = _learned.get(code) if code is not None else None
        return cls(code, waiting.pop() if waiting else None)

    def guard(self) -> None:
        """Adds a guard: the compiled code is valid until other placements are learned."""
        tx = InstructionTranslator.current_tx()
        _as_learned(constant_source(tx, "tangents", self))

    def are_unexpected(self, values: Sequence[Any], placements: Sequence[Sequence[Placement] | None]) -> bool:
        """Whether gradients have other placements than the graph was compiled for; counts them.

        Args:
            values: gradients of the results; None if the loss does not use a result. A compiled graph takes zeros for
                it with some placement, so such gradients are not counted.
            placements: of the results.
        """
        if not self.results or compiled_autograd.in_compiled_autograd_region or torch.is_grad_enabled():
            return False  # torch refuses a double backward itself
        placed, expected = self._placed(values, placements)
        if placed == expected:
            self.matched = True
            return False
        if all(values[i] is not None for i in self.results):
            self._count(placed)
        return True

    def _placed(self, values: Sequence[Any], placements: Sequence[Sequence[Placement] | None]) -> tuple[Placed, Placed]:
        """The placements of the gradients `values`, and those that the graph was compiled for."""
        expected = self.assumed or tuple(expected_placements(placements[i] or ()) for i in self.results)
        placed = tuple(
            tuple(values[i].placements) if isinstance(values[i], DTensor) else usual
            for i, usual in zip(self.results, expected)
        )
        return placed, expected

    def report_mismatch(
        self, values: Sequence[Any], placements: Sequence[Sequence[Placement] | None], in_eager: bool
    ) -> None:
        """Reports, the first time, how unexpected gradients are handled.

        Args:
            in_eager: the backward runs in eager; else torch redistributes the gradients.
        """
        placed, expected = self._placed(values, placements)
        if (placed, in_eager) in self.reported:
            return
        self.reported.add((placed, in_eager))
        self.on_mismatch(
            UnexpectedTangents([values[i] for i in self.results], placed, expected, in_eager, self.assumed is None)
        )

    def _count(self, placed: Placed) -> None:
        self.missed[placed] = self.missed.get(placed, 0) + 1
        if self.missed[placed] == ENOUGH and self.assumed is None and self.learned is None and self.code is not None:
            self.learned = placed
            _learned.setdefault(self.code, []).append(placed)


_as_learned = fact_guard("GRADIENTS_COME_AS_COMPILED_FOR", lambda tangents: tangents.learned)


class _Current(threading.local):
    """The current call on this thread: its graph, a function that returns its arguments, and the arguments until the
    inputs were found among them."""

    call: tuple[Tangents | None, Callable[[], list[Any] | None] | None, tuple[Any, ...]] = (None, None, ())


_current = _Current()


def remember_arguments(compiled: Callable[..., Any], tangents: Tangents) -> Callable[..., Any]:
    """`compiled`, with the arguments of a call available to its backward if that could run the program again."""
    if not tangents.results or not tangents.repeatable:
        return compiled

    keep = _Arguments if native() is None else native().Arguments

    def run(*args: Any) -> Any:
        before, unfit = _current.call, torch._C._is_any_autocast_enabled()
        kept = None if unfit else keep(args, not tangents.matched)
        _current.call = tangents, kept, () if tangents.places else args
        try:
            return compiled(*args)
        finally:
            _current.call = before

    leave_frames_to_python(run)
    return run


def current_call(tangents: Tangents, inputs: Sequence[Any]) -> Callable[[], list[Any] | None] | None:
    """A function that returns the arguments of the current call on this thread; None if there is none.

    Args:
        inputs: of its autograd function.
    """
    graph, call, arguments = _current.call
    if graph is not tangents or call is None:
        return None
    if not tangents.places and tangents.places is not None:
        tangents.places = _places(arguments, inputs)
    return call if tangents.places is not None else None


def _places(arguments: Sequence[Any], inputs: Sequence[Any]) -> list[int | None] | None:
    found = {id(value): i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)}
    if any(isinstance(value, torch.Tensor) and id(value) not in found for value in inputs):
        return None
    return [found[id(value)] if isinstance(value, torch.Tensor) else None for value in inputs]


def results_with_tangents(metadata: Any) -> tuple[int, ...]:
    """Indices of the DTensor results that get a gradient; none if AOTAutograd adds results of its own."""
    if metadata.num_mutated_inp_runtime_indices or metadata.num_intermediate_bases or metadata.num_outputs_aliased:
        return ()
    kinds = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    return tuple(
        i
        for i, info in enumerate(metadata.output_info)
        if info.requires_grad and info.output_type in kinds and issubclass(info.raw_type, DTensor)
    )


#: Patches of `assumed_tangents`.
TANGENTS = (
    patch("torch.distributed.tensor:DTensor.__coerce_tangent_metadata__", "self"),
    patch("torch._functorch._aot_autograd.collect_metadata_analysis:coerce_tangent_and_suggest_memory_format", "x"),
)


@contextlib.contextmanager
def assumed_tangents(tangents: Tangents) -> Iterator[None]:
    """While active, AOTAutograd traces backward passes on this thread for the assumed tangents.

    If none are assumed, tangents of partial results are replicated. torch redistributes to get these, and reads strided
    shards of the result as a shard order, for which operators have other rules; eager's gradient is strided like the
    result. It also makes the gradient of an expanded result contiguous first, and DTensor shards the partial tensor for
    that.
    """
    asked = 0

    def coerce(stock: Any, self: DTensor) -> DTensor:
        nonlocal asked
        if tangents.assumed is None or traces_block():
            found = _like_in_replicas(self)
            return stock(self) if found is None else found
        placements = tangents.assumed[asked % len(tangents.assumed)]
        asked += 1
        if len(placements) != len(self.placements) or placements == expected_placements(self.placements):
            return stock(self)
        mesh = real_mesh(self.device_mesh)
        shape, _ = compute_local_shape_and_global_offset(self.shape, mesh, placements)
        local = self._local_tensor.new_empty(shape)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=self.shape, stride=self.stride())

    def replicas_first(stock: Any, value: Any) -> Any:
        found = _like_in_replicas(value) if isinstance(value, DTensor) else None
        return stock(value if found is None else found)

    with patched(TANGENTS[0], coerce), patched(TANGENTS[1], replicas_first):
        yield


def _like_in_replicas(tensor: DTensor) -> DTensor | None:
    """A tensor without values, placed as `tensor` is, and replicated where that is partial.

    None if torch's function is right: if strided shards are a shard order, and for an embedding, whose mask torch
    removes from the placement.
    """
    spec = tensor._spec
    sums = [placement for placement in spec.placements if isinstance(placement, Partial)]
    if spec.shard_order is None or not sums or any(type(placement) is not Partial for placement in sums):
        return None
    placements, meta = tuple(expected_placements(spec.placements)), meta_of(spec)
    wanted = spec_of_parts(placements, meta.dtype, spec.shard_order, spec.mesh, meta.shape, meta.stride)
    return DTensor(torch.empty_like(tensor._local_tensor), wanted, requires_grad=False)


class _NotRepeatable(Exception):
    """The program draws random numbers, or sends messages of its own."""


class _Repeatable(TorchDispatchMode):
    """Raises `_NotRepeatable` before the first operator that is random, or by which a program sends messages of its own
    (`sends`).

    Needed because a graph from a cache was not inspected when it was compiled.
    """

    def __init__(self, sends: Collection[Any]) -> None:
        super().__init__()
        self.sends = sends

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func in self.sends:
            raise _NotRepeatable(str(func))
        return func(*args, **(kwargs or {}))


def gradients_in_eager(
    program: Callable[..., Any],
    call: Callable[[], list[Any] | None],
    places: Sequence[int | None],
    tangents: Sequence[torch.Tensor | None],
    sends: Collection[Any],
) -> tuple[torch.Tensor | None, ...] | None:
    """Gradients of the arguments at `places` of the program, run in eager.

    Args:
        call: returns the arguments of the call, None if they have changed.
        places: see `Tangents.places`.
        tangents: gradients of the results.
        sends: operators by which the program sends messages.

    Returns:
        None if the arguments have changed or the program is not repeatable.
    """
    args = call()
    if args is None:
        return None
    with torch.enable_grad(), contextlib.suppress(_NotRepeatable), _Repeatable(sends):
        leaves = [
            arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args
        ]
        pairs = [(result, tangent) for result, tangent in zip(program(*leaves), tangents) if tangent is not None]
        wanted = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        results, gradients = map(list, zip(*pairs))
        found = dict(zip(wanted, torch.autograd.grad(results, list(wanted.values()), gradients, allow_unused=True)))
        return tuple(None if place is None else found.get(place) for place in places)
    return None
