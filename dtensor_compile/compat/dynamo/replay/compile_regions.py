"""Regions that a program marks with ``torch.compiler.nested_compile_region``, over DTensors.

Dynamo makes an operator of higher order of such a region, and a graph of its own; it knows no guards of DTensors that
would let another call share that graph. Here the function of the region is called like any other. Where it is the
``forward`` of one of several modules of a class, its calls are traced once, as those of other blocks, and compiled once
whatever the option ``blocks`` says but ``"each"``, since the program asks for it.

    before   @nested_compile_region          invoke_subgraph(body, "subgraph_0", x, w)
             def forward(self, x)
    after                                    the nodes of body, with a `Place` in a region
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.replay.replayed_calls import is_inside_block, is_of_block, note_traced_apart
from dtensor_compile.compat.dynamo.trackers.module_calls import function_of, notes
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator
from dtensor_compile.compat.patches import needs, patch

_CALL = patch(
    "torch._dynamo.variables.higher_order_ops:InvokeSubgraphHigherOrderVariable._call_function", "self tx args kwargs"
)


@needs(
    "marked regions over DTensors",
    _CALL,
    without="a program with nested_compile_region over DTensors is an error of the compilation",
    upstream="not reported: the reuse of a region refuses guards on DTensors (DTENSOR_MATCH)",
    remove_when="nested_compile_region takes DTensors, and Inductor plans communication across its ends",
)
@contextlib.contextmanager
def regions_called() -> Iterator[None]:
    """While active, marked regions over DTensors are traced as parts of the program around them."""

    def call(
        stock: Callable[..., VariableTracker],
        self: VariableTracker,
        tx: Translator,
        args: Sequence[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        function, *given = (argument.realize() for argument in args)
        if not _are_over_dtensors([function, *given, *kwargs.values()]):
            return stock(self, tx, args, kwargs)
        if isinstance(function, UserFunctionVariable):
            called = function_of(function)
            notes(tx, "regions")[called.__code__] = True
            if not is_inside_block(tx) and not is_of_block(tx, called, [*function.self_args(), *given]):
                reason = (
                    "it is a marked region, but not the forward of one of several modules of a class that is called "
                    "outside of checkpointed regions and of other operators of higher order"
                )
                note_traced_apart(tx, called.__qualname__, reason)
        return function.call_function(tx, given, kwargs)

    with patched(_CALL, call):
        yield


def _are_over_dtensors(trackers: Sequence[VariableTracker]) -> bool:
    """Whether trackers stand for a DTensor, for a module that has one, or for a function that names such a module."""
    found: list[bool] = []

    def look(part: VariableTracker) -> None:
        if isinstance(part, TensorVariable):
            found.append(isinstance(part.as_proxy().node.meta.get("example_value"), DTensor))
        elif isinstance(part, UnspecializedNNModuleVariable):
            found.append(_has_dtensors(part.value))
        elif isinstance(part, UserFunctionVariable):
            found.extend(map(_has_dtensors, _named_in(function_of(part))))

    VariableTracker.visit(look, trackers)
    return any(found)


def _named_in(function: Any) -> list[Any]:
    """What a function has besides its arguments: values of its closure and defaults, and globals that it names."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found += [function.__globals__.get(name) for name in function.__code__.co_names]
    with contextlib.suppress(ValueError):  # a cell without contents
        found += [cell.cell_contents for cell in function.__closure__ or ()]
    return found


def _has_dtensors(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) and any(isinstance(part, DTensor) for part in value.parameters())
