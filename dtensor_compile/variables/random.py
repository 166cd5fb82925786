"""Random numbers from a generator of the program, and changes of torch's own generator by the program.

A generator is a value of the graph: its state is an input tensor, every draw computes the next state, and after the
graph has run the generator is set to the last one. Its numbers and its final state are those of eager. All other
draws are from torch's own generator; their effects on it stay in the order of the program.

DTensors on a CPU draw from torch's generator in eager, whatever generator is passed; so they do here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from dtensor_compile.compat.dynamo.trackers.calls import emit_call, handle_calls, handle_construction
from dtensor_compile.compat.dynamo.trackers.generator_trackers import (
    DRAWS_TOGETHER,
    GeneratorVariable,
    handle_draws,
    handle_generator_methods,
    trunc_normal_function,
)
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack, TrackGiven
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build,
    build_unguarded,
    constant_argument,
    constant_source,
    graph_break,
    items_of,
)
from dtensor_compile.ops import random_ops as ops

Arguments = tuple[list[VariableTracker], dict[str, VariableTracker]]


# ---- draws from a generator ----------------------------------------------------------------------------------------


def _draw(
    tx: Translator, generator: GeneratorVariable, x: VariableTracker, name: str, numbers: Sequence[float]
) -> VariableTracker:
    """Result of a drawing operator; advances the generator."""
    drawn = emit_call(tx, ops.draw, generator.read(tx), x, name, tuple(map(float, numbers)))
    values, state = items_of(drawn)
    generator.write(tx, state)
    return values


def _numbers(name: str, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]) -> list[float]:
    """Arguments of a method that fills a tensor, in order.

    Raises:
        NotImplementedError: one of them is only known at run time.
    """
    if name == "random_":  # random_(to), random_(from, to)
        return [constant_argument(arg) for arg in (*args, *(kwargs[key] for key in ("from", "to") if key in kwargs))]
    names: Mapping[str, Any] = ops.FILLS[name]
    given = dict(zip(names, args)) | kwargs
    return [constant_argument(given[key]) if key in given else default for key, default in names.items()]


def _draw_method(
    tx: Translator, tensor: VariableTracker, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker | None:
    """``tensor.normal_(..., generator=g)`` and the like."""
    generator, rest = _take_generator(kwargs)
    if generator is None:
        return None
    if _ignores_generators(tensor) or generator.is_default():
        return tensor.call_method(tx, name, args, rest)
    if name in ops.FILLS or name == "random_":
        values = _draw(tx, generator, tensor, name, _numbers(name, args, rest))
        return tensor.call_method(tx, "copy_", [values], {})
    call = _OUT_OF_PLACE.get(name)
    return call(tx, generator, [tensor, *args], rest) if call is not None else None


def _take_generator(kwargs: dict[str, VariableTracker]) -> tuple[GeneratorVariable | None, dict[str, VariableTracker]]:
    """The generator among the arguments (None if there is none), and the other arguments."""
    rest = dict(kwargs)
    generator = rest.pop("generator").realize() if "generator" in rest else None
    return (generator, rest) if isinstance(generator, GeneratorVariable) else (None, kwargs)


def _ignores_generators(tensor: VariableTracker) -> bool:
    """Whether eager ignores a generator for this tensor."""
    if tensor.python_type() is not DTensor:
        return False
    if _example(tensor).device.type != "cpu":
        graph_break("generator-of-device", str(tensor))
    return True


def _example(tensor: VariableTracker) -> torch.Tensor:
    return tensor.as_proxy().node.meta["example_value"]


def _bernoulli(
    tx: Translator, generator: GeneratorVariable, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker | None:
    return _draw(tx, generator, args[0], "bernoulli", ()) if len(args) == 1 and not kwargs else None


def _poisson(
    tx: Translator, generator: GeneratorVariable, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker | None:
    return _draw(tx, generator, args[0], "poisson", ()) if len(args) == 1 and not kwargs else None


def _multinomial(
    tx: Translator, generator: GeneratorVariable, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker | None:
    named = dict(zip(("input", "num_samples", "replacement"), args)) | kwargs
    numbers = [
        constant_argument(named["num_samples"]),
        constant_argument(named["replacement"]) if "replacement" in named else 0,
    ]
    return _draw(tx, generator, named["input"], "multinomial", numbers)


#: Functions of a tensor, by the name of the in-place method that they correspond to.
_OUT_OF_PLACE: dict[str, Callable[..., VariableTracker | None]] = {
    "bernoulli": _bernoulli,
    "poisson": _poisson,
    "multinomial": _multinomial,
}


def _handle_function(name: str) -> Retrack:
    """``torch.bernoulli(x, generator=g)``"""

    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> Any:
        generator, rest = _take_generator(kwargs)
        if generator is not None and args and args[0].is_tensor():
            result = _draw_method(tx, args[0].realize(), name, args[1:], kwargs)
            if result is not None:
                return result
        return stock.call_function(tx, args, rest if generator is not None and generator.is_default() else kwargs)

    return handle_calls(call)


# ---- new tensors ---------------------------------------------------------------------------------------------------


def _handle_factory(split: Callable[[Translator, Arguments], tuple[str, Sequence[float], Arguments]]) -> Retrack:
    """``torch.rand(..., generator=g)``: an empty tensor and the method that fills it.

    `split` returns the name of that method, its numbers, and the arguments of ``torch.empty``.
    """

    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        generator, rest = _take_generator(kwargs)
        if generator is None:
            return stock.call_function(tx, args, kwargs)
        if generator.is_default():
            return stock.call_function(tx, args, rest)
        name, numbers, (shape, options) = split(tx, (args, rest))
        return _draw(tx, generator, build(tx, torch.empty).call_function(tx, shape, options), name, numbers)

    return handle_calls(call)


def _integers(tx: Translator, arguments: Arguments) -> tuple[str, Sequence[float], Arguments]:
    """``torch.randint(high, size)``, ``torch.randint(low, high, size)``"""
    args, kwargs = arguments
    rest = dict(kwargs)
    has_low = len(args) == 3 or (len(args) == 2 and "size" in kwargs) or "low" in kwargs
    names = ("low", "high", "size") if has_low else ("high", "size")
    named = dict(zip(names, args)) | {key: rest.pop(key) for key in ("low", "high", "size") if key in rest}
    low = constant_argument(named["low"]) if "low" in named else 0
    rest.setdefault("dtype", build(tx, torch.int64))
    return "random_", (low, constant_argument(named["high"])), ([named["size"]], rest)


def _permutation(tx: Translator, arguments: Arguments) -> tuple[str, Sequence[float], Arguments]:
    args, kwargs = arguments
    return "randperm", (), (args, {"dtype": build(tx, torch.int64), **kwargs})


def _seed_generator(
    tx: Translator, generator: GeneratorVariable, args: list[VariableTracker], kwargs: Any
) -> VariableTracker:
    (seed,) = (constant_argument(arg) for arg in (*args, *kwargs.values()))
    if generator.is_default():
        emit_call(tx, ops.default_seed, _seed(seed), 0)
    else:
        generator.write(tx, emit_call(tx, ops.seeded, _seed(seed)))
    return generator


def _seed(seed: int) -> int:
    """Seed as a signed 64-bit integer, as operators take it; negative seeds wrap around."""
    return (int(seed) + 2**63) % 2**64 - 2**63


def _state_of_generator(tx: Translator, generator: GeneratorVariable, args: Any, kwargs: Any) -> VariableTracker:
    if generator.is_default():
        return emit_call(tx, ops.default_state, 0)
    return generator.read(tx).call_method(tx, "clone", [], {})


def _set_state_of_generator(
    tx: Translator, generator: GeneratorVariable, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    (state,) = (*args, *kwargs.values())
    if generator.is_default():
        emit_call(tx, ops.default_set, state, 0)
    else:
        generator.write(tx, state.realize().call_method(tx, "clone", [], {}))
    return generator


handle_generator_methods(
    {"manual_seed": _seed_generator, "get_state": _state_of_generator, "set_state": _set_state_of_generator}
)


def _make_generator(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``torch.Generator()``"""
    given = [constant_argument(arg) for arg in (*args, *kwargs.values())]
    device = torch.device(*given) if given else torch.device("cpu")
    if device.type != "cpu":
        graph_break("generator-of-device", f"torch.Generator({device})")
    made = torch.Generator()
    return GeneratorVariable(made, emit_call(tx, ops.seeded, _seed(made.initial_seed())))


# ---- torch's own generator -----------------------------------------------------------------------------------------


def _default(method: Callable[..., VariableTracker]) -> Retrack:
    """Handler of a function that does to torch's generator what `method` does to one of the program."""

    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        generator = build_unguarded(
            tx, torch.default_generator, constant_source(tx, "generator", torch.default_generator)
        )
        result = method(tx, generator, args, kwargs)
        return build(tx, None) if method is _set_state_of_generator else result

    return handle_calls(call)


def _trunc_normal(x: torch.Tensor, mean: float, std: float, a: float, b: float) -> torch.Tensor:
    """``nn.init.trunc_normal_`` as an operator that contains its loop, which draws until all values are within
    bounds.
    """
    with torch.no_grad():
        if not isinstance(x, DTensor):
            return x.copy_(ops.trunc_normal(x, [mean, std, a, b], 0))
        local = ops.trunc_normal(x.to_local(), [mean, std, a, b], 0)
        values = DTensor.from_local(
            local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
        return x.copy_(values)


def _handle_trunc_normal(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    named = dict(zip(("tensor", "mean", "std", "a", "b", "generator"), args)) | kwargs
    tensor, generator = named.pop("tensor").realize(), named.pop("generator", None)
    numbers = [float(constant_argument(named[key])) for key in ("mean", "std", "a", "b")]
    generator = generator.realize() if generator is not None else None
    if isinstance(generator, GeneratorVariable) and not generator.is_default() and not _ignores_generators(tensor):
        values = _draw(tx, generator, tensor, "trunc_normal_", numbers)
        return build(tx, _overwrite).call_function(tx, [tensor, values], {})
    example = _example(tensor)
    placements = example.placements if isinstance(example, DTensor) else ()
    if example.device.type != "cpu" or any(
        isinstance(p, Partial) or DRAWS_TOGETHER and not p.is_replicate() for p in placements
    ):
        return stock.call_function(tx, args, kwargs)
    return emit_call(tx, _trunc_normal, tensor, *numbers)


def _overwrite(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.copy_(values)


# ---- the tables ----------------------------------------------------------------------------------------------------

#: Classes of objects passed to the program, with the factory of their tracker.
TYPES: Mapping[type, TrackGiven] = {torch.Generator: GeneratorVariable.track}

#: Functions whose calls are handled here.
OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    (torch.manual_seed, _default(_seed_generator)),
    (torch.get_rng_state, _default(_state_of_generator)),
    (torch.set_rng_state, _default(_set_state_of_generator)),
    (torch.Generator, handle_construction(_make_generator)),
    (trunc_normal_function, handle_calls(_handle_trunc_normal)),
    (torch.rand, _handle_factory(lambda tx, arguments: ("uniform_", (0, 1), arguments))),
    (torch.randn, _handle_factory(lambda tx, arguments: ("normal_", (0, 1), arguments))),
    (torch.randint, _handle_factory(_integers)),
    (torch.randperm, _handle_factory(_permutation)),
    *((getattr(torch, name), _handle_function(name)) for name in _OUT_OF_PLACE),
)


def _draws() -> AbstractContextManager[None]:
    return handle_draws(_draw_method)


#: Contexts that are entered while Dynamo traces.
CONTEXTS: tuple[Callable[[], AbstractContextManager[None]], ...] = (_draws,)
