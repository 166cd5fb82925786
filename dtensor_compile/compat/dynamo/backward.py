"""A backward pass inside a region, as Dynamo sees it while it traces for our backend.

torch can trace ``tensor.backward()`` (as ``torch.autograd.grad``, and an accumulation per leaf) and leaves it off. It
does not run the hooks of leaf tensors then, it gives gradients the placements of their leaves, and it refuses where
compiled autograd is on, which has nothing to do in a backward pass that is part of the graph already.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import compiled_autograd, config, polyfills
from torch._dynamo.output_graph import OutputGraph, collect_reachable_grad_fns
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.apply_patches import patched, patched_value
from dtensor_compile.compat.dynamo.opaque_trackers import METHODS, tensor_methods
from dtensor_compile.compat.dynamo.tracker_tools import READ, Translator, fact_guard, graph_break
from dtensor_compile.compat.patches import needs, patch

_stock_accumulate_grad = polyfills.accumulate_grad

#: Key of the ``meta`` of a detached value that stands for a result whose autograd graph is used up
#: (`fixups.freed_autograd_graphs`).
USED_UP = "dtensor_compile_spent"


def _hooks(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether a leaf has hooks on its gradient, and hooks that run after it was accumulated."""
    return bool(tensor._backward_hooks), bool(tensor._post_accumulate_grad_hooks)


_same_hooks = fact_guard("LEAF_HOOKS_MATCH", _hooks)


def leaves_of_a_reducer(tx: Translator) -> dict[int, torch.Tensor]:
    """Leaves, by identity, whose gradients torch's reducer of data-parallel modules averages when autograd accumulates
    them.
    """
    return vars(tx.output).setdefault("dtensor_compile_reducer", {})


def _check_hooks(leaves: Sequence[VariableTracker]) -> None:
    """A graph break where a leaf has hooks, or a reducer waits for it; a guard that it has none where it has none."""
    tx = InstructionTranslator.current_tx()
    reducer = leaves_of_a_reducer(tx)
    for leaf in leaves:
        node = leaf.as_proxy().node
        argument = node.meta.get("grapharg")
        # a leaf that is an attribute of the graph is no argument, and has hooks all the same
        real = argument.example if argument is not None else tx.output.nn_modules.get(node.target)
        if leaf.source is None or not isinstance(real, torch.Tensor):
            continue
        if id(real) in reducer:
            graph_break("data-parallel-setting", f"backward() in the region: DDP's reducer averages {leaf.source.name}")
        if any(_hooks(real)):
            graph_break("leaf-hooks", f"{leaf.source.name}")
        _same_hooks(leaf.source)


def _attributes() -> Iterator[VariableTracker]:
    """Tensors that are attributes of the graph: another backend marks parameters so when it compiles a step of an
    optimizer.
    """
    for variable in InstructionTranslator.current_tx().output.side_effects.id_to_variable.values():
        if isinstance(variable, TensorVariable) and variable.as_proxy().node.op == "get_attr":
            yield variable


def _accumulate_grad(
    x: torch.Tensor, variable_grad: torch.Tensor | None, new_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """``.grad`` of a leaf after a backward pass, which is traced, as autograd's AccumulateGrad makes it of a DTensor.

    torch copies the gradient into a tensor like the leaf: a partial gradient would be reduced, which eager leaves to
    the program.

    Args:
        x: the leaf.
        variable_grad: its ``.grad`` before.
        new_grad: what the backward pass computed.
    """
    if new_grad is None:
        return variable_grad
    if not isinstance(new_grad, DTensor):
        return _stock_accumulate_grad(x, variable_grad, new_grad)
    if variable_grad is not None:
        variable_grad.add_(new_grad)
        return variable_grad
    if new_grad.stride() != x.stride():
        return new_grad.new_empty_strided(x.size(), x.stride()).copy_(new_grad)
    if not any(placement.is_partial() for placement in new_grad.placements):
        return new_grad.clone()
    local = new_grad.to_local().clone()  # `clone` of the DTensor would reduce it
    return DTensor.from_local(
        local,
        new_grad.device_mesh,
        new_grad.placements,
        run_check=False,
        shape=new_grad.shape,
        stride=new_grad.stride(),
    )


@contextlib.contextmanager
def _traceable() -> Iterator[None]:
    with config.patch(trace_autograd_ops=True), compiled_autograd._disable():
        yield


class TracedGrad(TorchInGraphFunctionVariable):
    """``torch.autograd.grad``."""

    @classmethod
    def retrack(cls, stock: VariableTracker) -> VariableTracker:
        return cls(stock.value, source=stock.source) if isinstance(stock, TorchInGraphFunctionVariable) else stock

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        with _traceable():
            return super().call_function(tx, list(args), kwargs)


_COLLECT = patch("torch._dynamo.variables.tensor:TensorVariable._collect_backward_inputs", "self vars_iter ...")
_READ = patch(f"torch._dynamo.variables.tensor:TensorVariable.{READ}", "self tx name")
_ACCUMULATE = patch("torch._dynamo.polyfills:accumulate_grad", "x variable_grad new_grad")
_VALIDATE = patch("torch._dynamo.output_graph:OutputGraph._validate_outputs_safe_for_autograd_nodes", "self rv tx")


@needs(
    "backward passes inside of the region",
    METHODS,
    patch("torch._dynamo.variables.tensor:TensorVariable.method_backward", "self tx ..."),
    _COLLECT,
    _READ,
    _ACCUMULATE,
    _VALIDATE,
    without="backward() breaks the graph, as in torch",
    upstream="#138217, #169415",
    remove_when="Dynamo traces backward() by default, with DTensor gradients placed as in eager",
)
@contextlib.contextmanager
def backward_in_the_region() -> Iterator[None]:
    """While active, frames that are compiled for our backend trace ``tensor.backward()``.

    And a gradient that it made stays what it is when the program reads it: torch would take it for the one that was
    there before, and lose it at the end of the region.
    """

    def method_backward(
        stock: Any, self: TensorVariable, tx: Translator, *args: Any, **kwargs: Any
    ) -> VariableTracker | None:
        with _traceable(), patched_value(_ACCUMULATE, _accumulate_grad):  # Dynamo traces the function that is there
            return stock(self, tx, *args, **kwargs)

    def collect(
        stock: Any, self: TensorVariable, variables: Iterable[VariableTracker], *args: Any, **kwargs: Any
    ) -> Any:
        if not args and not kwargs:  # all leaves, and not only a list that the program gave
            variables = itertools.chain(variables, _attributes())
        leaves = stock(self, variables, *args, **kwargs)
        _check_hooks(leaves)
        return leaves

    def read(stock: Any, self: TensorVariable, tx: Translator, name: str) -> VariableTracker:
        if name == "grad" and tx.output.side_effects.has_pending_mutation_of_attr(self, name):
            return tx.output.side_effects.load_attr(self, name)
        return stock(self, tx, name)

    def validate(_: Any, self: OutputGraph, results: list[VariableTracker], tx: Translator) -> None:
        return _detach_used_up(self, results, tx)

    with (
        tensor_methods(backward=method_backward),
        patched(_COLLECT, collect),
        patched(_READ, read),
        patched(_VALIDATE, validate),
    ):
        yield


def _detach_used_up(graph: OutputGraph, results: list[VariableTracker], tx: Translator) -> None:
    """Lets results whose autograd graph a backward pass of the region used up leave `graph` detached, marked as such.

    torch gives up the trace of that backward pass for them, and expects that no result is a DTensor.
    """
    used_up = graph.autograd_grad_consumed_grad_fns
    for i, result in enumerate(results if used_up else ()):
        if isinstance(result, TensorVariable) and result.requires_grad:
            value = result.as_proxy().node.meta["example_value"]
            if used_up & collect_reachable_grad_fns([(value, None)]):
                results[i] = result.call_method(tx, "detach", [], {})
                results[i].as_proxy().node.meta[USED_UP] = True
