"""Graphs of blocks: AOTAutograd traces a block by itself, once, and the program that calls it with one operator a call.

A block is a part of the Dynamo graph. AOTAutograd makes two graphs over local tensors of it, forward and backward, and
a function around them that knows about everything else: DTensors, inputs that are written to, saved tensors, tangents.
That function runs while the program is traced, for each call; its graphs are operators then.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as aot_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _LazyGraphModule

from dtensor_compile.compat.aot.autograd_functions import functions_built, inside_of_block
from dtensor_compile.compat.aot.partition import bases_saved
from dtensor_compile.compat.aot.run_graph import Made, compile_for_aten
from dtensor_compile.compat.aot.tangents import expected_placements
from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.replay.node_copies import Fakes
from dtensor_compile.compat.inductor.compile import EAGER_NUMBERS, GraphFunction, GraphPass
from dtensor_compile.compat.inductor.uncompiled_kernels import run_made
from dtensor_compile.compat.patches import hook, needs, patch

_CALLED = patch("torch._functorch.aot_autograd:create_functional_call", "mod params_spec params_len ...")
_TRACED = patch("torch._functorch.aot_autograd:create_aot_state", "stack flat_fn ...")


@needs(
    "equal blocks compiled once",
    _CALLED,
    _TRACED,
    hook("torch._functorch.config:force_non_lazy_backward_lowering"),
    hook("torch._functorch.config:check_custom_op_aliasing"),
    hook("torch.fx._lazy_graph_module:_LazyGraphModule"),
    without="every block of a model is compiled by itself",
    upstream="not reported: invoke_subgraph does so for marked functions, but not with DTensors",
    remove_when="invoke_subgraph takes DTensors, and equal modules are found without marks",
)
@contextlib.contextmanager
def programs_changed(change: Callable[[torch.fx.GraphModule], None]) -> Iterator[None]:
    """While active, AOTAutograd traces a copy of each Dynamo graph on this thread that `change` has changed.

    `change` is called only if the graph is traced at all: it is not if the compiled code comes from a cache, whose key
    is of the graph as it was.
    """
    copies: list[torch.fx.GraphModule] = []

    def called(stock: Any, mod: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mod, torch.fx.GraphModule):
            return stock(mod, *args, **kwargs)
        copies.append(_LazyGraphModule(mod, copy_of(mod.graph)))  # its nodes are interpreted, no code is needed
        copies[-1].meta = mod.meta
        return stock(copies[-1], *args, **kwargs)

    def traced(stock: Any, *args: Any, **kwargs: Any) -> Any:
        program = copies[-1] if copies else None
        copies.clear()
        if program is not None:
            change(program)
        return stock(*args, **kwargs)

    # While blocks are traced nothing is executed, so that torch cannot check operators for aliases of their inputs.
    with patched(_CALLED, called), patched(_TRACED, traced), aot_config.patch(check_custom_op_aliasing=False):
        yield


def copy_of(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph with copies of the nodes of another one."""
    made = torch.fx.Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def example_inputs(body: torch.fx.GraphModule) -> list[Any]:
    """Fake inputs of a part of a Dynamo graph, which are leaves."""
    values = [node.meta["example_value"] for node in body.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(values)
    assert isinstance(mode, FakeTensorMode)
    fakes = Fakes(mode)
    return [fakes.copy(value) for value in values]


def trace_block(
    body: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    joint_pass: GraphFunction,
    made: Made,
    base_of: Callable[[torch.fx.Node], torch.fx.Node],
    otherwise: Callable[[], Exception],
    settings: dict[str, Any] | None,
) -> Callable[..., Any]:
    """The function of a block: ``(*inputs)`` to its results, to be called while a program is traced.

    Args:
        joint_pass: runs on the joint graph (on the forward graph if there is no backward).
        made: takes the forward graph and then, if there is one, the backward graph.
        base_of: the view base of a node of the joint graph, which is saved in place of the node.
        otherwise: makes the error that the backward pass of a call raises if it gets other gradients than it was traced
            for: with other placements, or none.
        settings: of Inductor; None where its passes over joint graphs do not run.
    """
    context = TracingContext.try_get()
    with (
        tracing(copy.copy(context)),  # AOTAutograd notes facts about the graph of the program there
        inside_of_block(),
        bases_saved(base_of),
        functions_built(after=lambda compiled, _: _check_gradients(compiled, otherwise), at_run_time=False),
        aot_config.patch(force_non_lazy_backward_lowering=True),
    ):
        if settings is None:
            return compile_for_aten(body, inputs, joint_pass, made)
        from torch._inductor.compile_fx import compile_fx

        patches = {**EAGER_NUMBERS, **settings, "joint_custom_pre_pass": GraphPass(joint_pass, None)}
        return compile_fx(body, inputs, inner_compile=run_made(made), config_patches=patches)  # type: ignore[return-value]


def _check_gradients(compiled: Any, otherwise: Callable[[], Exception]) -> None:
    stock_forward, stock_backward = compiled.forward, compiled.backward

    def forward(ctx: Any, *args: Any) -> Any:
        results = stock_forward(ctx, *args)
        ctx.expected = [
            expected_placements(result.placements) if isinstance(result, DTensor) else () for result in results
        ]
        return results

    def backward(ctx: Any, *gradients: Any) -> Any:
        values = gradients[0] if len(gradients) == 1 and isinstance(gradients[0], list) else gradients
        placed = [tuple(value.placements) if isinstance(value, DTensor) else () for value in values]
        if placed != ctx.expected or any(value is None for value in values):
            raise otherwise()
        return stock_backward(ctx, *gradients)

    compiled.forward, compiled.backward = staticmethod(forward), staticmethod(backward)
