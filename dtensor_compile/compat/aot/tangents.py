"""Placements of the gradients that come into a compiled graph.

AOTAutograd traces the backward with the forward, for gradients that are placed as the results are (replicated where
those are partial), and redistributes what comes otherwise. The values are right then, but ``.grad`` is placed otherwise
than in eager, where every rule follows the placement that came. So a gradient that comes otherwise is dealt with here:

- The backward of that call is eager's: the traced program, which Dynamo left, runs once more, and its gradients are
  taken. That asks for a program that gives the same again: one that writes to nothing, draws no random numbers and
  sends no messages of its own. For others, and where the arguments are gone, torch's redistribution stands. (Calls hold
  their arguments until gradients have come as expected.) Either is a decision, the first time.
- When it has happened twice, the graph is compiled again for such gradients, at the next call; a guard holds it until
  then. The graph that is compiled so is not given up again.
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

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.dtensor.creation import compute_local_shape_and_global_offset
from dtensor_compile.compat.dtensor.specs import meta_of, spec_of_parts
from dtensor_compile.compat.dynamo.left_to_python import leave_frames_to_python
from dtensor_compile.compat.dynamo.tracing import of_compilation_on_stack
from dtensor_compile.compat.dynamo.tracker_tools import constant_source, fact_guard
from dtensor_compile.compat.patches import patch
from dtensor_compile.native.loader import native

#: Placements of the gradients of all results that are DTensors and require a gradient, in order.
Placed = tuple[tuple[Placement, ...], ...]

#: How many backward passes with other gradients make a graph that is compiled for them worth its time.
ENOUGH = 2

#: What graphs of a frame (by its code) wait for, when they are compiled again.
_learned: weakref.WeakKeyDictionary[Any, list[Placed]] = weakref.WeakKeyDictionary()


def expected_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Those of the gradient of a result, as AOTAutograd takes them to be."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


class _Arguments:
    """``Arguments`` of `native.loader`, where that is not there."""

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
class Otherwise:
    """Gradients of DTensors that came placed otherwise than a graph was compiled for.

    Attributes:
        gradients: those that came.
        placed, expected: their placements, and those that the graph was compiled for.
        in_eager: the backward pass runs in eager; else torch redistributes the gradients.
        learns: after `ENOUGH` of them the graph is compiled for such gradients.
    """

    gradients: Sequence[Any]
    placed: Placed
    expected: Placed
    in_eager: bool
    learns: bool


@dataclass
class Tangents:
    """What is known of the gradients that come into one compiled graph.

    Attributes:
        assumed: what the graph is compiled for; None for what AOTAutograd expects.
        repeatable: whether the traced program gives the same when it runs again, as far as is known.
        results: per gradient of a DTensor the index of the result.
        missed: how often which other gradients came.
        learned: what the graph should be compiled for instead.
        matched: whether gradients came as expected so far; calls hold their arguments until then.
        places: which argument of the graph each input of its autograd function is (None for what is no tensor); empty
            before the first call, None where a tensor is no argument.
        sends: operators by which a program sends messages of its own.
        told: is told of gradients that come otherwise, the first time.
        said: what was told already.
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
    told: Callable[[Otherwise], None] = lambda otherwise: None
    said: set[tuple[Placed, bool]] = field(default_factory=set)

    @classmethod
    def of_frame(cls) -> Tangents:
        """Those of the graph that is being compiled on this thread."""
        code = of_compilation_on_stack("code")
        waiting = _learned.get(code) if code is not None else None
        return cls(code, waiting.pop() if waiting else None)

    def guard(self) -> None:
        """The compiled code holds until something else was learned."""
        tx = InstructionTranslator.current_tx()
        _as_learned(constant_source(tx, "tangents", self))

    def come_otherwise(self, values: Sequence[Any], placements: Sequence[Sequence[Placement] | None]) -> bool:
        """Whether `values`, gradients of the results that have these placements, are not placed as the graph was
        compiled for.

        None where the loss does not use a result. A compiled graph takes zeros for it, which are placed somehow, so
        that none is compiled for such gradients.
        """
        if not self.results or compiled_autograd.in_compiled_autograd_region or torch.is_grad_enabled():
            return False  # in a backward of a backward torch says itself that it cannot
        placed, expected = self._placed(values, placements)
        if placed == expected:
            self.matched = True
            return False
        if all(values[i] is not None for i in self.results):
            self._count(placed)
        return True

    def _placed(self, values: Sequence[Any], placements: Sequence[Sequence[Placement] | None]) -> tuple[Placed, Placed]:
        """How the gradients `values` are placed, and how the graph was compiled for them to be."""
        expected = self.assumed or tuple(expected_placements(placements[i] or ()) for i in self.results)
        placed = tuple(
            tuple(values[i].placements) if isinstance(values[i], DTensor) else usual
            for i, usual in zip(self.results, expected)
        )
        return placed, expected

    def say_otherwise(
        self, values: Sequence[Any], placements: Sequence[Sequence[Placement] | None], in_eager: bool
    ) -> None:
        """Tells, the first time, what becomes of gradients that come otherwise.

        Args:
            in_eager: the backward pass runs in eager; else torch redistributes the gradients.
        """
        placed, expected = self._placed(values, placements)
        if (placed, in_eager) in self.said:
            return
        self.said.add((placed, in_eager))
        self.told(Otherwise([values[i] for i in self.results], placed, expected, in_eager, self.assumed is None))

    def _count(self, placed: Placed) -> None:
        self.missed[placed] = self.missed.get(placed, 0) + 1
        if self.missed[placed] == ENOUGH and self.assumed is None and self.learned is None and self.code is not None:
            self.learned = placed
            _learned.setdefault(self.code, []).append(placed)


_as_learned = fact_guard("GRADIENTS_COME_AS_COMPILED_FOR", lambda tangents: tangents.learned)


class _Current(threading.local):
    """The call that this thread is in: of which graph, what gives its arguments, and these until inputs were found
    among them.
    """

    call: tuple[Tangents | None, Callable[[], list[Any] | None] | None, tuple[Any, ...]] = (None, None, ())


_current = _Current()


def remember_arguments(compiled: Callable[..., Any], tangents: Tangents) -> Callable[..., Any]:
    """`compiled`, and the backward of a call can find its arguments, where it could run the program again."""
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
    """What gives the arguments of the call that this thread is in; None where nothing does.

    `inputs` are those of its autograd function.
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
    """Indices of the results that are DTensors and get a gradient; none where AOTAutograd adds results of its own."""
    if metadata.num_mutated_inp_runtime_indices or metadata.num_intermediate_bases or metadata.num_outputs_aliased:
        return ()
    kinds = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    return tuple(
        i
        for i, info in enumerate(metadata.output_info)
        if info.requires_grad and info.output_type in kinds and issubclass(info.raw_type, DTensor)
    )


#: What `assumed_tangents` replaces.
TANGENTS = (
    patch("torch.distributed.tensor:DTensor.__coerce_tangent_metadata__", "self"),
    patch("torch._functorch._aot_autograd.collect_metadata_analysis:coerce_tangent_and_suggest_memory_format", "x"),
)


@contextlib.contextmanager
def assumed_tangents(tangents: Tangents) -> Iterator[None]:
    """While active, AOTAutograd traces backward passes on this thread for the gradients that are assumed.

    Where nothing is, those of sums not yet added up are for replicas. torch redistributes for that, and takes strided
    shards of the result for an order of shards, for which operators have other rules: eager's gradient is like the
    result in that too. And it makes the gradient of an expanded result contiguous first, for which DTensor shards what
    is not added up yet."""
    asked = 0

    def coerce(stock: Any, self: DTensor) -> DTensor:
        nonlocal asked
        if tangents.assumed is None:
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
    """A tensor placed as this one is, and as replicas where it is sums not yet added up; without values. None where
    torch's does: where strided shards are an order of shards, and for a lookup, whose mask torch takes out of its
    placement."""
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
    """With the operators by which programs send messages of their own. Raises `_NotRepeatable` before the first
    operator that does not give the same again.

    A graph that comes from a cache was not looked at when it was compiled.
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
    """Gradients of the arguments at `places` for gradients of the results of the program, which sends messages by
    operators of `sends`.

    None where the arguments are not what they were any more, or where the program turns out not to give the same again.
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
