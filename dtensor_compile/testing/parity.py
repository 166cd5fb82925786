"""Compares one eager and one compiled step from equal states, value by value.

Both start from copies of the same model and inputs and from the same seed. These are compared: results of every call,
inputs (which may be written to), gradients, parameters and buffers (after the optimizer's steps, if there is an
optimizer), random numbers and the final state of torch's generator; for tensors also type, dtype, shape, stride,
placements and mesh.

Steps of an optimizer start from equal numbers. Adam divides a gradient by its own size, so that a gradient that is only
rounding becomes a full step, in either direction: no tolerance for parameters would be small enough to detect an error.
Therefore the gradients of each call are compared, and if they agree the compiled run steps with eager's: rounding is
not passed on to a step or to the next call. A gradient that does not agree is kept, and affects all that follows.

    eager:     parameters -> gradients g  -------------------> step(g) -> parameters, compared like everything else
    compiled:  parameters -> gradients g' (compared with g) -> step(g if they agree, else g') -> parameters
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtensor_compile.compat import pytree
from dtensor_compile.compat.distributed.rank_threads import is_rank_thread
from dtensor_compile.compat.dtensor.specs import copy_of
from dtensor_compile.testing.compare_values import TOLERANCE, Allowed, Difference, compare_values

__all__ = [
    "TOLERANCE", "Allowed", "Case", "Comparison", "Difference", "Settings", "assert_parity", "case_of", "compare_case",
    "compare_steps", "compare_values", "of_all_ranks", "sum_of_squares",
]  # fmt: skip

_GRADIENT = "grad."
Loss = Callable[[Any], torch.Tensor | None]


@dataclass(frozen=True)
class Settings:
    """Arguments of ``torch.compile`` for the compiled run.

    Attributes:
        eager: do not compile at all.
    """

    backend: str | Callable[..., Any] = "dtensor"
    fullgraph: bool = True
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    eager: bool = False

    def with_options(self, **options: Any) -> Settings:
        """These settings with additional `options`, which take precedence."""
        return replace(self, options={**(self.options or {}), **options})

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.eager:
            return function
        if not is_rank_thread():  # the others have compiled code too
            torch.compiler.reset()
        options = dict(self.options) if self.options else None
        return torch.compile(
            function, backend=self.backend, fullgraph=self.fullgraph, dynamic=self.dynamic, options=options
        )


@dataclass(frozen=True)
class Case:
    """A program to compare, which creates its state anew for each run.

    Attributes:
        make: returns the model, and positional and keyword arguments; called once for each run, after the seed is set.
        loss: returns a scalar from the output (or None), whose backward is compared too; None compares only the
            forward.
        optimizer: creates an optimizer of the parameters, which steps after each backward.
        calls: number of runs of the step, on the same inputs; without an optimizer gradients accumulate.
        backwards: number of backward passes of each call but the first; all but the last retain the graph.
        allowed: allowed difference of numbers.
    """

    make: Callable[[], tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]]
    loss: Loss | None = None
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    calls: int = 2
    backwards: int = 1
    allowed: Allowed = field(default_factory=Allowed)

    def run(self, settings: Settings, reference: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All results of one run, by name, in the order in which they should be examined.

        Args:
            reference: results of eager, with local tensors at least for gradients, for a run that is compared with it;
                its gradients are those of the optimizer's steps (see the module docstring).
        """
        torch.manual_seed(0)
        model, args, kwargs = self.make()
        module = model if isinstance(model, torch.nn.Module) else None
        parameters = dict(module.named_parameters()) if module is not None else {}
        optimizer = self.optimizer(module.parameters()) if self.optimizer and module is not None else None
        function = settings.compile(model)
        outputs: list[Any] = []
        gradients: dict[str, Any] = {}
        for call in range(self.calls):
            torch.manual_seed(1 + call)
            out = function(*args, **kwargs)
            outputs.append(
                out if optimizer is None else pytree.tree_map(_kept, out)
            )  # parameters change under their views
            loss = self.loss(out) if self.loss is not None else None
            backwards = 0 if loss is None else self.backwards if call else 1
            for left in reversed(range(backwards)):
                assert loss is not None
                loss.backward(retain_graph=left > 0)
            last = call + 1 == self.calls
            if optimizer is not None or last:
                names = {name: _GRADIENT + name + ("" if last else f" of call {call + 1}") for name in parameters}
                gradients |= {names[name]: _kept(p.grad) for name, p in parameters.items()}
            if optimizer is not None and reference is not None:
                self._take_gradients({names[name]: p for name, p in parameters.items()}, reference)
            if optimizer is not None and not last:
                optimizer.step()
                optimizer.zero_grad()
        found: dict[str, Any] = {
            "output": outputs,
            "input": (args, dict(kwargs)),
            "input.grad": [
                x.grad for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor) and x.is_leaf
            ],
            **gradients,
        }
        if optimizer is not None:
            optimizer.step()
            found["optimizer state"] = optimizer.state_dict()["state"]
        if module is not None:
            found |= {f"state.{name}": value for name, value in module.state_dict(keep_vars=True).items()}
        found["random state"] = torch.get_rng_state()
        return found

    def _take_gradients(self, parameters: Mapping[str, torch.nn.Parameter], reference: Mapping[str, Any]) -> None:
        allowed = allowed_for_gradients(self.allowed, reference)
        for name, p in parameters.items():
            wanted, own = local_part(reference.get(name)), local_part(p.grad)
            if (
                wanted is None
                or own is None
                or compare_values(name, wanted, own, allowed=allowed)
                or torch.equal(wanted, own)
            ):
                continue
            assert p.grad is not None  # `own` is its local tensor
            p.grad = copy_of(p.grad)  # other tensors may share the memory of what the program returned
            local_part(p.grad).copy_(wanted)


def local_part(value: Any) -> Any:
    """The local tensor of a DTensor; other values unchanged."""
    return cast("DTensor", value.detach()).to_local() if isinstance(value, DTensor) else value


def gradients_of(found: Mapping[str, Any]) -> list[tuple[str, torch.Tensor | None]]:
    """Names and gradients of parameters in the results of a run, for all calls followed by an optimizer step."""
    return [(name, value) for name, value in found.items() if name.startswith(_GRADIENT)]


def allowed_for_gradients(allowed: Allowed, eager: Mapping[str, Any]) -> Allowed:
    """`allowed`, with the rounding that gradients of a program have in common.

    A gradient is a sum of terms; if they cancel, only their rounding is left: the gradient of the bias of keys in
    attention is zero except for rounding. The terms are unknown; since all of them come from one gradient of the loss,
    they are assumed to be as large as the largest gradient of the program.
    """
    found = [local_part(value) for _, value in gradients_of(eager)]
    sizes = [x.detach().abs().nan_to_num(0, 0, 0).max().item() for x in found if x is not None and x.numel()]
    return replace(allowed, terms=max(sizes, default=0.0))


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two runs.

    Attributes:
        differences: in the order of `Case.run`, rank by rank.
        tensors: number of tensors compared on this rank.
        reference: the run with which compiled was compared.
    """

    differences: list[Difference]
    tensors: int
    reference: str = "eager"


def compare_runs(case: Case, eager: dict[str, Any], compiled: dict[str, Any]) -> tuple[list[Difference], int]:
    """Differences between the results of two runs of a case on this rank, and the number of compared tensors."""
    gradients = allowed_for_gradients(case.allowed, eager)
    allowed = {key: gradients if key.startswith(_GRADIENT) else case.allowed for key in eager}
    found = [d for key in eager for d in compare_values(key, eager[key], compiled[key], allowed=allowed[key])]
    kept = [eager[key] for key in eager if key != "random state"]
    return found, sum(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(kept))


def compare_case(case: Case, settings: Settings, *, everywhere: bool = False) -> Comparison:
    """Runs a case in eager and compiled and compares the results.

    Args:
        everywhere: return the differences of all ranks, on every rank (a collective: call it on every rank).
    """
    eager = case.run(replace(settings, eager=True))
    found, tensors = compare_runs(case, eager, case.run(settings, eager))
    return Comparison(of_all_ranks(found) if everywhere else found, tensors)


def of_all_ranks(found: list[Difference]) -> list[Difference]:
    """The differences found on all ranks, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    plain = [replace(d, eager=str(d.eager), compiled=str(d.compiled)) for d in found]  # meshes do not pickle
    of_ranks: list[list[Difference]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, plain)
    return [d for of_rank in of_ranks for d in of_rank]


def sum_of_squares(out: Any) -> torch.Tensor | None:
    """A loss for any result of a program: the sum of squares of all tensors that require gradients; None if there are
    none.
    """
    total = None
    for x in pytree.tree_leaves(out):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x = x.full_tensor() if isinstance(x, DTensor) else x
            squares = x.abs().square().sum()
            total = squares if total is None else total + squares
    return total


def case_of(
    model: torch.nn.Module | Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Case:
    """A case that copies `model` and `inputs` for each run; values captured by a function are shared."""

    def make() -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
        args, named = _fresh((list(inputs), dict(kwargs or {})))
        return copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model, args, named

    return Case(make, **settings)


def compare_steps(  # noqa: PLR0913 - options that are documented, by keyword only
    model: torch.nn.Module | Callable[..., Any],
    inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str | Callable[..., Any] = "dtensor",
    fullgraph: bool = True,
    dynamic: bool | None = None,
    calls: int = 2,
    computed_in: torch.dtype | None = None,
    tolerance: float | None = None,
) -> list[Difference]:
    """Runs `model` on `inputs` in eager and compiled and compares the results (see the module docstring).

    Args:
        model: a module or a function over tensors and DTensors.
        inputs: positional arguments; copied for each run.
        kwargs: arguments by name; copied for each run.
        loss: as in `Case`.
        optimizer: as in `Case`.
        options: for ``torch.compile``.
        backend: for ``torch.compile``.
        fullgraph: for ``torch.compile``.
        dynamic: for ``torch.compile``.
        calls: as in `Case`.
        computed_in: dtype in which the program computes, if that is coarser than the dtypes of its results (autocast).
        tolerance: largest relative difference allowed, instead of `TOLERANCE`.
    """
    case = case_of(
        model, inputs, kwargs, loss=loss, optimizer=optimizer, calls=calls, allowed=Allowed(computed_in, tolerance)
    )  # fmt: skip
    return compare_case(case, Settings(backend, fullgraph, dynamic, options)).differences


def assert_parity(model: Any, inputs: Sequence[Any], **kwargs: Any) -> None:
    """`compare_steps`; raises an AssertionError that lists the differences if there are any."""
    differences = compare_steps(model, inputs, **kwargs)
    if differences:
        raise AssertionError("compiled differs from eager:\n" + "\n".join(f"  {d}" for d in differences[:20]))


def _kept(value: Any) -> Any:
    """A copy of a value that later steps may write to."""
    return copy_of(value) if isinstance(value, torch.Tensor) else value


def _fresh(values: Any) -> Any:
    """Copies of all tensors; aliases of one tensor stay one tensor."""
    made: dict[int, torch.Tensor] = {}

    def copied(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in made:
            made[id(x)] = copy_of(x).requires_grad_(x.requires_grad)
        return made[id(x)]

    return pytree.tree_map_only(torch.Tensor, copied, values)
