"""Runs a graph with torch's own kernels after AOTAutograd and our passes, without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config

from dtensor_compile.compat.aot.fx import called_graphs, run_boxed
from dtensor_compile.compat.inductor.compile import GraphFunction

#: Makes the function that runs in place of a local graph: a boxed one.
Made = Callable[[torch.fx.GraphModule], Callable[[list[Any]], Any]]


def compile_to_aten(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, joint_pass: GraphFunction, post_grad_pass: GraphFunction
) -> Callable[..., Any]:
    """Runs AOTAutograd on a Dynamo graph, with our passes where Inductor would call them; the result runs operator by
    operator.

    Args:
        joint_pass: runs on the joint graph (on the forward graph if there is no backward).
        post_grad_pass: runs on the forward and on the backward graph, after the graphs that these call.
    """

    def lower(graph_module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
        for part in called_graphs(graph_module):
            post_grad_pass(part.graph)
            part.recompile()
        post_grad_pass(graph_module.graph)
        return run_boxed(graph_module)

    return compile_for_aten(gm, example_inputs, joint_pass, lower)


def lower_for_aten(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, joint_pass: GraphFunction, post_grad_pass: GraphFunction
) -> None:
    """As `compile_to_aten`, with the backward graph at once and not when it first runs, for what the passes see."""
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        compile_to_aten(gm, example_inputs, joint_pass=joint_pass, post_grad_pass=post_grad_pass)


def compile_for_aten(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], joint_pass: GraphFunction, made: Made
) -> Callable[..., Any]:
    """Runs AOTAutograd on a Dynamo graph without Inductor; `made` compiles the forward and the backward graph."""

    def partition(
        joint: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, ...]:
        joint_pass(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def lower(graph_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return made(graph_module)

    def infer(graph_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        joint_pass(graph_module.graph)
        return made(graph_module)

    compile_graph = aot_autograd(fw_compiler=lower, bw_compiler=lower, inference_compiler=infer, partition_fn=partition)
    with config.patch(fallback_random=True):  # eager's random numbers, so that unused ones are drawn as well
        return compile_graph(gm, example_inputs)
