"""A training step of a program: forward, loss, backward, clipping of gradients, optimizer.

Input: the result of a target (`dtensor_compile.report.target`), and the settings of the rest of the step. Output: a
step to call any number of times, which reports its phases. A target that is a step itself does all of this on its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dtensor_compile.compat import pytree
from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.report.target import TargetError, TargetProgram, function_of

OPTIMIZERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "none": None,
}
LOSSES = ("sum", "mean", "cross_entropy")

#: Called with the name of a phase that begins: ``"forward"``, ``"loss"``, ``"backward"``, ``"rest"``, ``"optimizer"``,
#: ``"end"``.
OnPhase = Callable[[str], None]


@dataclass(frozen=True)
class StepSettings:
    """The parts of a step besides the model.

    Attributes:
        loss: one of `LOSSES`, or a function as a target is named, which takes the model's result and its inputs.
            A result that is a scalar is the loss itself.
        optimizer: one of `OPTIMIZERS`.
        clip: norm to which gradients are clipped; 0: they are not.
        blocks: the option of the backend that compiles the model: once for equal blocks takes half the time for 32
            layers. Kernels are not fused across the ends of blocks then, which real sizes hardly show
            (``docs/planning.md``).
    """

    loss: str = "sum"
    optimizer: str = "adamw"
    clip: float = 0.0
    blocks: str = "once"


@dataclass
class Training:
    """A program and its step.

    Attributes:
        program: the model and its inputs, or a step to call.
        run: calls the model compiled.
        settings: of the step.
        optimizers: those whose ``step`` runs in it.
    """

    program: TargetProgram
    run: Callable[..., Any]
    settings: StepSettings
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def parameters(self) -> list[torch.Tensor]:
        """Parameters and buffers: of the model, and those that optimizers have."""
        model = uncompiled(self.program.model)
        own = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
        return [*own, *(p for o in self.optimizers for group in o.param_groups for p in group["params"])]

    def inputs(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.program.args, self.program.kwargs))
        return [x for x in leaves if isinstance(x, torch.Tensor)]

    def states(self) -> list[torch.Tensor]:
        """States of the optimizers."""
        leaves = pytree.tree_leaves([list(o.state.values()) for o in self.optimizers])
        return [x for x in leaves if isinstance(x, torch.Tensor)]

    @contextlib.contextmanager
    def optimizers_watched(self, on_phase: OnPhase) -> Iterator[None]:
        """While active, every optimizer that steps is recorded, and ``on_phase("optimizer")`` is called before its
        step."""

        def steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if all(optimizer is not known for known in self.optimizers):
                self.optimizers.append(optimizer)
            on_phase("optimizer")

        handle = register_optimizer_step_pre_hook(steps)
        try:
            yield
        finally:
            handle.remove()

    def is_step(self) -> bool:
        """Whether the program makes its steps itself."""
        return not (self.program.args or self.program.kwargs or isinstance(self.program.model, torch.nn.Module))

    def step(self, on_phase: OnPhase) -> None:
        """Makes one step."""
        on_phase("forward")
        if self.is_step():
            self.run()
            on_phase("end")
            return
        parameters = [p for p in self.parameters() if isinstance(p, torch.nn.Parameter) and p.requires_grad]
        result = self.program.call(self.run)
        on_phase("loss")
        loss = self.loss(result)
        del result
        on_phase("backward")
        loss.backward()
        del loss
        on_phase("rest")
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip)
        if not self.optimizers and (make := OPTIMIZERS[self.settings.optimizer]) is not None and parameters:
            self.optimizers.append(make(parameters))
        for optimizer in self.optimizers:
            optimizer.step()
        on_phase("end")
        for parameter in parameters:
            parameter.grad = None

    @functools.cached_property
    def _own_loss(self) -> Callable[..., torch.Tensor]:
        return function_of(self.settings.loss)  # runs its file, so that it is looked up once

    def loss(self, out: Any) -> torch.Tensor:
        """The loss of the model's result.

        Raises:
            TargetError: no gradient can come from it.
        """
        name = self.settings.loss
        leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not leaves:
            raise TargetError("the model's result needs no gradient: there is nothing to train")
        if ":" in name:
            value: torch.Tensor = self._own_loss(out, *self.program.args, **(self.program.kwargs or {}))
            return value
        if len(leaves) == 1 and leaves[0].dim() == 0:
            return leaves[0]
        if name == "cross_entropy":
            logits = leaves[0].flatten(0, -2)
            targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
            return torch.nn.functional.cross_entropy(logits, targets)
        return sum(x.sum() if name == "sum" else x.mean() for x in leaves)  # type: ignore[return-value]
