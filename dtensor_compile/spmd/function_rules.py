"""Functions whose arguments or calls are changed before they run on DTensors, to get the results of the program."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dtensor_compile.compat.dtensor.record import run_node
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import list_arg
from dtensor_compile.graph.nodes import source_line
from dtensor_compile.spmd.constraint import constrain, mean_loss, ones_of, replicated, update_statistics
from dtensor_compile.spmd.dtensor_graph import DTensorGraph
from dtensor_compile.spmd.in_place import function_name, written_argument
from dtensor_compile.spmd.logical_mesh import dims_in
from dtensor_compile.spmd.partition_spec import placements_to_axes
from dtensor_compile.spmd.recurrent import recurrent_layer

#: Functions of (input, p, training, inplace) that multiply by random numbers with the input's shape.
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "feature_dropout"})


def prepare(this: DTensorGraph, node: torch.fx.Node) -> None:
    """Changes a node that calls one of these functions, if needed."""
    if function_name(node).startswith("conv"):
        _cut_batch_alone(this, node)
    elif node.target is torch.nn.functional.batch_norm:
        _keep_statistics(this, node)
    elif node.target in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
        _count_targets(this, node)
    elif node.target is recurrent_layer:
        _record_recurrent(this, node)


def draw_whole(this: DTensorGraph, node: torch.fx.Node) -> Any:
    """Makes a node that draws random numbers for a DTensor draw them for the full tensor."""
    name, x = function_name(node), node.args[0] if node.args else None
    if name in _DROPOUTS and isinstance(x, torch.fx.Node) and isinstance(this.values[x], DTensor):
        return _multiply_by_draws(this, node, x)
    if name.endswith("_like") and isinstance(x, torch.fx.Node):
        this.replace_argument(node, x, ones_of)
    else:
        this.take_whole(node, "random numbers are drawn for the full tensor, as in the plain program")
    return run_node(this.gm, node, this.values)


def _multiply_by_draws(this: DTensorGraph, node: torch.fx.Node, x: torch.fx.Node) -> Any:
    """``dropout(x)`` as ``x * dropout(ones)``: the ones are full and plain, and are sharded without a collective."""
    with this.graph.inserting_before(node):
        draws = this.graph.create_node(node.op, node.target, node.args, node.kwargs)
    draws.meta = {key: item for key, item in node.meta.items() if key != "grapharg"}
    this.replace_argument(draws, x, ones_of)
    this.values[draws] = run_node(this.gm, draws, this.values)
    writes = written_argument(node) is not None
    node.op, node.target, node.args, node.kwargs = "call_method", "mul_" if writes else "mul", (x, draws), {}
    return run_node(this.gm, node, this.values)


def _cut_batch_alone(this: DTensorGraph, node: torch.fx.Node) -> None:
    """Makes the arguments of a convolution sharded along the batch or not at all."""
    tensors = [used for used in node.all_input_nodes if isinstance(this.values[used], torch.Tensor)]
    if not any(isinstance(this.values[used], DTensor) for used in tensors):
        return
    gathered, ndim = 0, max(this.values[used].dim() for used in tensors)
    for used in tensors:
        value = this.values[used]
        batched = used is tensors[0] and value.dim() == ndim  # otherwise its first dim is the channels
        if not isinstance(value, DTensor):
            this.replace_argument(node, used, replicated, this.text)
            continue
        keep: list[Placement] = [p if batched and p == Shard(0) else Replicate() for p in value.placements]
        gathered += int(value.numel()) * value.element_size() if tuple(keep) != value.placements else 0
        keep = this.over_mesh(keep, dims_in(this.mesh, value.device_mesh))
        this.replace_argument(
            node, used, constrain, this.text, placements_to_axes(keep, this.mesh_shape, value.dim()), False
        )
    _record_gathered(this, node, function_name(node), gathered)


def _record_recurrent(this: DTensorGraph, node: torch.fx.Node) -> None:
    """Adds a decision with the bytes gathered by a recurrent layer whose inputs are sharded along other dims."""
    gathered = 0
    for used in node.all_input_nodes:
        value = this.values[used]
        if isinstance(value, DTensor):
            batch = (0 if node.args[7] else 1) if used is node.args[1] else 1 if used in list_arg(node, 2) else None
            whole_or_batch = all(p.is_replicate() or batch is not None and p == Shard(batch) for p in value.placements)
            gathered += 0 if whole_or_batch else int(value.numel()) * value.element_size()
    _record_gathered(this, node, str(node.args[0]), gathered)


def _record_gathered(this: DTensorGraph, node: torch.fx.Node, name: str, gathered: int) -> None:
    if gathered:
        why = f"{name} runs on shards of the batch, with {gathered:,} bytes of other shards gathered"
        this.decisions.append(Decision("replicate_fallback", source_line(node), why))


def _keep_statistics(this: DTensorGraph, node: torch.fx.Node) -> None:
    """Updates the running statistics of a batch norm in a separate call, since DTensor would write to temporary shards
    of them.
    """
    given = inspect.signature(torch.nn.functional.batch_norm).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    x, mean, var = (given.arguments[name] for name in ("input", "running_mean", "running_var"))
    if mean is None or not given.arguments["training"] or not isinstance(this.values[x], DTensor):
        return
    with this.graph.inserting_before(node):
        update = this.graph.call_function(update_statistics, (x, mean, var, given.arguments["momentum"]))
    update.meta = {key: item for key, item in node.meta.items() if key not in ("grapharg", "example_value")}
    this.compute(update)
    given.arguments.update(running_mean=None, running_var=None)
    node.args, node.kwargs = given.args, given.kwargs


def _count_targets(this: DTensorGraph, node: torch.fx.Node) -> None:
    """Computes the mean loss of class indices as a sum over the sum of weights, if each rank has only some of the
    targets.
    """
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    given.apply_defaults()
    has = given.arguments
    of_classes = isinstance(has["target"], torch.fx.Node) and not this.values[has["target"]].is_floating_point()
    plain = has["reduction"] == "mean" and has["size_average"] is None and has["reduce"] is None
    if of_classes and plain and (this.is_cut(has["input"]) or this.is_cut(has["target"])):
        node.target, node.kwargs = mean_loss, {}
        node.args = (has["input"], has["target"], has["weight"], has["ignore_index"], has.get("label_smoothing"))
