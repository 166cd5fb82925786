"""Random numbers as operators: drawing from a generator whose state is a tensor, and access to torch's own generator.

    draw(Tensor state, Tensor x, str name, float[] numbers) -> (Tensor, Tensor)  x.normal_(generator=g), the next state
    seeded(int seed) -> Tensor                                                   the state after g.manual_seed(seed)
    default_seed(int seed, int order) -> Tensor                                  torch.manual_seed(seed)
    default_state(int order) -> Tensor                                           torch.get_rng_state()
    default_set(Tensor state, int order) -> Tensor                               torch.set_rng_state(state)
    trunc_normal(Tensor x, float[] numbers, int order) -> Tensor                 torch.nn.init.trunc_normal_(x)

The first two are functions of their arguments, so that a pass may move, share or repeat them. The others act on torch's
generator, with which operators like ``aten.rand`` draw, and must not move. ``trunc_normal`` draws until no value is out
of bounds, so that the number of draws depends on data; over a DTensor eager checks each local tensor separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import init

from dtensor_compile.ops.c10d import define

_library = torch.library.Library("dtensor_compile", "FRAGMENT")


def _pure(name: str, schema: str, kernel: Callable[..., object], fake: Callable[..., object]) -> torch._ops.OpOverload:
    """Defines an operator without effects and without a gradient."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _library._register_fake(name, fake)
    return getattr(torch.ops.dtensor_compile, name).default


# ---- generators of the program -------------------------------------------------------------------------------------


def _like(x: torch.Tensor) -> torch.Tensor:
    """New memory with the layout of `x`, since values are drawn in memory order."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


def _filled(x: torch.Tensor, name: str, numbers: Sequence[float], generator: torch.Generator) -> torch.Tensor:
    out = _like(x)
    numbers = [int(number) for number in numbers] if name == "random_" else numbers
    return getattr(out, name)(*numbers, generator=generator)


def _truncated(x: torch.Tensor, name: str, numbers: Sequence[float], generator: torch.Generator | None) -> torch.Tensor:
    mean, std, low, high = numbers
    return init.trunc_normal_(_like(x), mean, std, low, high, generator=generator)


#: Methods that fill a tensor, with the names of their numbers and the defaults of these.
FILLS: dict[str, dict[str, float | None]] = {
    "normal_": {"mean": 0.0, "std": 1.0},
    "uniform_": {"from": 0.0, "to": 1.0},
    "bernoulli_": {"p": 0.5},
    "exponential_": {"lambd": 1.0},
    "geometric_": {"p": None},
    "log_normal_": {"mean": 1.0, "std": 2.0},
    "cauchy_": {"median": 0.0, "sigma": 1.0},
    "trunc_normal_": {"mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0},
}

_KERNELS: dict[str, Callable[[torch.Tensor, str, Sequence[float], torch.Generator], torch.Tensor]] = {
    **{name: _filled for name in (*FILLS, "random_")},
    "trunc_normal_": _truncated,
    "bernoulli": lambda x, _, __, g: torch.bernoulli(x, generator=g),
    "poisson": lambda x, _, __, g: torch.poisson(x, generator=g),
    "multinomial": lambda x, _, numbers, g: torch.multinomial(x, int(numbers[0]), bool(numbers[1]), generator=g),
    "randperm": lambda x, _, __, g: torch.randperm(x.numel(), generator=g, dtype=x.dtype, device=x.device),
}


def _draw(
    state: torch.Tensor, x: torch.Tensor, name: str, numbers: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(x.device)
    generator.set_state(state)
    with torch.no_grad():
        values = _KERNELS[name](x.detach(), name, numbers, generator)
    return values, generator.get_state()


def _fake_draw(
    state: torch.Tensor, x: torch.Tensor, name: str, numbers: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "multinomial":
        values = x.new_empty((*x.shape[:-1], int(numbers[0])), dtype=torch.int64)
    else:
        values = _like(x) if name.endswith("_") else torch.empty_like(x)
    return values, torch.empty_like(state)


def _seeded(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


draw = _pure("draw", "(Tensor state, Tensor x, str name, float[] numbers) -> (Tensor, Tensor)", _draw, _fake_draw)
seeded = _pure("seeded", "(int seed) -> Tensor", _seeded, lambda _: _fake_state())


def _fake_state() -> torch.Tensor:
    return torch.empty(_STATE_SIZE, dtype=torch.uint8)


_STATE_SIZE = torch.Generator().get_state().numel()


# ---- torch's own generator -----------------------------------------------------------------------------------------


def _default_seed(seed: int, order: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.empty(0)


def _default_set(state: torch.Tensor, order: int) -> torch.Tensor:
    torch.set_rng_state(state)
    return torch.empty(0)


def _trunc_normal(x: torch.Tensor, numbers: Sequence[float], order: int) -> torch.Tensor:
    with torch.no_grad():
        return _truncated(x.detach(), "trunc_normal_", numbers, None)


def _effect(
    name: str, arguments: str, kernel: Callable[..., object], fake: Callable[..., object]
) -> torch._ops.OpOverload:
    return define(name, f"({arguments}int order) -> Tensor", kernel, fake, torch.Tag.nondeterministic_seeded)


default_seed = _effect("default_seed", "int seed, ", _default_seed, lambda *_: torch.empty(0))
default_state = _effect("default_state", "", lambda _: torch.get_rng_state(), lambda _: _fake_state())
default_set = _effect("default_set", "Tensor state, ", _default_set, lambda *_: torch.empty(0))
trunc_normal = _effect("trunc_normal", "Tensor x, float[] numbers, ", _trunc_normal, lambda x, *_: _like(x))
#: Operators with their place in the order as their last argument.
EFFECTS = (default_seed, default_state, default_set, trunc_normal)
