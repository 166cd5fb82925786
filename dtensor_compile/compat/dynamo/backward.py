"""Traces a backward pass inside the region for our backend.

torch can trace ``tensor.backward()`` (as ``torch.autograd.grad`` and an accumulation per leaf), but disables that by
default. It then skips the hooks of leaf tensors, gives gradients the placements of their leaves, and refuses under
compiled autograd, which is not needed for a backward pass that is part of the graph already.
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
from dtensor_compile.compat.dynamo.replay.replayed_calls import trace_each
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import METHODS, tensor_methods
from dtensor_compile.compat.dynamo.trackers.tracker_tools import READ, Translator, fact_guard, graph_break
from dtensor_compile.compat.patches import needs, patch

_stock_accumulate_grad = polyfills.accumulate_grad

#: ``meta`` key of a detached value that replaces a result whose autograd graph was freed
#: (`fixups.freed_autograd_graphs`).
USED_UP = "dtensor_compile_spent"


def _hooks(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether a leaf has gradient hooks, and whether it has post-accumulate-grad hooks."""
    return bool(tensor._backward_hooks), bool(tensor._post_accumulate_grad_hooks)


_same_hooks = fact_guard("LEAF_HOOKS_MATCH", _hooks)


def leaves_of_a_reducer(tx: Translator) -> dict[int, torch.Tensor]:
    """Leaves by identity whose gradients torch's DDP reducer averages when autograd accumulates them."""
    return vars(tx.output).setdefault("dtensor_compile_reducer", {})


def _check_hooks(leaves: Sequence[VariableTracker]) -> None:
    """Breaks the graph if a leaf has hooks or a reducer averages its gradient; else guards that it has no hooks."""
    tx = InstructionTranslator.current_tx()
    reducer = leaves_of_a_reducer(tx)
    for leaf in leaves:
        node = leaf.as_proxy().node
        argument = node.meta.get("grapharg")
        # a leaf that is an attribute of the graph is not an argument, but can have hooks
        real = argument.example if argument is not None else tx.output.nn_modules.get(node.target)
        if leaf.source is None or not isinstance(real, torch.Tensor):
            continue
        if id(real) in reducer:
            graph_break("data-parallel-setting", f"backward() in the region: DDP's reducer averages {leaf.source.name}")
        if any(_hooks(real)):
            graph_break("leaf-hooks", f"{leaf.source.name}")
        _same_hooks(leaf.source)


def _attributes() -> Iterator[VariableTracker]:
    """Tensors that are attributes of the graph: another backend marks parameters so when it compiles an
    optimizer step."""
    for variable in InstructionTranslator.current_tx().output.side_effects.id_to_variable.values():
        if isinstance(variable, TensorVariable) and variable.as_proxy().node.op == "get_attr":
            yield variable


def _accumulate_grad(
    x: torch.Tensor, variable_grad: torch.Tensor | None, new_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """``.grad`` of a leaf after a traced backward pass, as autograd's AccumulateGrad makes it for a DTensor.

    torch copies the gradient into a tensor like the leaf: a partial gradient would be reduced, which eager leaves to
    the program.

    Args:
        x: the leaf.
        variable_grad: its previous ``.grad``.
        new_grad: the gradient from the backward pass.
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
        trace_each(tx)
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

    A gradient that was made inside keeps its identity when the program reads it: torch would take it for the previous
    one, and lose it at the end of the region.
    """

    def method_backward(
        stock: Any, self: TensorVariable, tx: Translator, *args: Any, **kwargs: Any
    ) -> VariableTracker | None:
        trace_each(tx)
        with _traceable(), patched_value(_ACCUMULATE, _accumulate_grad):  # Dynamo traces the current function
            return stock(self, tx, *args, **kwargs)

    def collect(
        stock: Any, self: TensorVariable, variables: Iterable[VariableTracker], *args: Any, **kwargs: Any
    ) -> Any:
        if not args and not kwargs:  # all leaves, not a list given by the program
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
    """Returns results whose autograd graph was freed by a backward pass of the region as detached, and marks them.

    torch gives up tracing that backward pass for such results, and expects that no result is a DTensor.
    """
    used_up = graph.autograd_grad_consumed_grad_fns
    for i, result in enumerate(results if used_up else ()):
        if isinstance(result, TensorVariable) and result.requires_grad:
            value = result.as_proxy().node.meta["example_value"]
            if used_up & collect_reachable_grad_fns([(value, None)]):
                results[i] = result.call_method(tx, "detach", [], {})
                results[i].as_proxy().node.meta[USED_UP] = True
