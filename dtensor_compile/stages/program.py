"""Steps on the Dynamo graph, before AOTAutograd traces it, and the wrappers of the compiled program that they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor_compile.capture.cacheable import cache_decisions, name_constants
from dtensor_compile.capture.checks import check_program, shards_are_even, tensor_meshes
from dtensor_compile.capture.cross_mesh import join_groups, redistribute
from dtensor_compile.capture.gradient_placements import unexpected_placements
from dtensor_compile.compat.aot.tangents import remember_arguments
from dtensor_compile.compat.dynamo.observers.observe import name_in_program, name_modules
from dtensor_compile.compat.dynamo.replay.node_copies import PLACE
from dtensor_compile.compat.dynamo.replay.replayed_calls import traced_apart
from dtensor_compile.compat.dynamo.settings import saves_compiled_graph
from dtensor_compile.compat.inductor.compile import uses_cuda_graphs
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import NotSavedError
from dtensor_compile.fixups.aliased_inputs import check_aliases, may_write
from dtensor_compile.fixups.check_counts import check_counts
from dtensor_compile.fixups.freed_autograd_graphs import restore_freed_graphs
from dtensor_compile.fixups.gathered_inputs import forget_addresses
from dtensor_compile.fixups.negative_inputs import negative_inputs
from dtensor_compile.fixups.preserved_versions import keep_versions
from dtensor_compile.fixups.repeated_writes import write_once
from dtensor_compile.fixups.return_view_bases import return_bases, without_bases
from dtensor_compile.fixups.unread_collectives import calls_collectives
from dtensor_compile.graph.node_costs import path_of
from dtensor_compile.graph.runner import GraphStep
from dtensor_compile.ir.known_groups import know_groups_of_this_job
from dtensor_compile.ir.mesh import guard_mesh_order, merge_groups, without_merged_groups
from dtensor_compile.native.loader import without_native
from dtensor_compile.ops.redistribute_across import ORDERED
from dtensor_compile.ops.unshard import average_gradient, unshard
from dtensor_compile.recording.recorder import recording
from dtensor_compile.runtime.artifacts import ArtifactsError, not_used, program_digest, shared_rank
from dtensor_compile.runtime.watch_runs import watched
from dtensor_compile.schedule.left_alone import unordered_kernels
from dtensor_compile.spmd.spread import spread_annotations
from dtensor_compile.spmd.trackers import GRAPH_FUNCTIONS as ANNOTATIONS
from dtensor_compile.stages.blocks import BLOCKS
from dtensor_compile.stages.compilation import Compilation

#: Functions of this package that a cacheable Dynamo graph may call.
GRAPH_FUNCTIONS = (redistribute, unshard, average_gradient, *ANNOTATIONS)


def make_groups(program: torch.fx.GraphModule, this: Compilation) -> list[Decision]:
    """Makes the process groups over several mesh dims, and over several meshes, that plans may use."""
    meshes = tensor_meshes(program)
    this.merged = merge_groups(meshes)
    join_groups(program)
    if this.rank_free:
        know_groups_of_this_job()
    return [*without_native(), *without_merged_groups(meshes)]


def return_bases_of_views(program: torch.fx.GraphModule, this: Compilation) -> None:
    """Adds view bases to the outputs; `wrap_compiled` removes them after each run."""
    this.sends = calls_collectives(program)
    this.bases = return_bases(program)


def expect_gradients(program: torch.fx.GraphModule, this: Compilation) -> None:
    """Prepares the handling of tangents that differ from those expected."""
    this.writes = may_write(program)
    this.even = this.options.schedule and shards_are_even(program)
    tangents = this.tangents
    tangents.repeatable, tangents.sends = not this.writes, ORDERED
    tangents.on_mismatch = lambda unexpected: this.decided(
        [unexpected_placements(unexpected, lambda: this.communication)]
    )


def run_negative_inputs(program: torch.fx.GraphModule, this: Compilation) -> list[Decision]:
    """Leaves a program to ATen whose inputs Inductor would read with another sign."""
    decisions = [] if this.aten else negative_inputs(program)
    this.negative = bool(decisions)
    return decisions


def report_cacheability(program: torch.fx.GraphModule, this: Compilation) -> list[Decision]:
    """Names the modules of the program for the report; returns decisions with the reasons that prevent caching."""
    if not recording():
        return []
    name_modules(program)
    return cache_decisions(program, GRAPH_FUNCTIONS)


def report_inductor_order(program: torch.fx.GraphModule) -> list[Decision]:
    """Decisions about graphs that keep Inductor's own order of kernels."""
    return [unordered_kernels()]


def report_blocks(program: torch.fx.GraphModule, this: Compilation) -> list[Decision]:
    """Decisions about modules of one class that one module holds: the number of calls traced once, and the difference
    of each other call."""
    places = {node.meta[PLACE][:2] for node in program.graph.nodes if PLACE in node.meta}
    copied = sum(call > 0 for _, call in places)
    names = [(path_of(name_in_program(name)) or name, why) for name, why in traced_apart()]
    apart = [Decision(BLOCKS, "", f"{name} is traced by itself: {why}") for name, why in names]
    if not copied:
        return apart
    reason = f"{copied} of {len(places)} calls of equal modules are not traced, but copied from the trace of another"
    return [Decision(BLOCKS, "", reason), *apart]


def find_artifacts(program: torch.fx.GraphModule, this: Compilation) -> list[Decision]:
    """Looks the program up in the artifacts that the options name."""
    folder = this.options.artifacts
    if folder is None:
        return []
    this.digest = program_digest(program, this.inputs, this.options.cache_key())
    try:
        this.shares = shared_rank(folder, this.digest)
    except ArtifactsError as error:
        return [not_used(folder, this.agreement.function, error)]
    if this.aten:
        why = "a program with such inputs" if this.negative else 'kernels="aten"'
        reason = f"{why} compiles nothing for which there could be artifacts"
        return [Decision("artifacts", "", reason, folder, "not used", left_alone=True)]
    return []


#: Steps that run whether the program is captured or compiled by stock torch.
ALWAYS = (
    GraphStep(check_program, lambda this: (this.inputs,), required=True),
    GraphStep(check_counts, required=True),
    GraphStep(write_once, required=True),
    GraphStep(name_constants, required=True),
    GraphStep(guard_mesh_order, lambda this: (this.inputs,), required=True),
    GraphStep(spread_annotations, lambda this: (this.inputs, this.log.decided, this.options.fallback), required=True),
)

CAPTURED = (
    GraphStep(run_negative_inputs, lambda this: (this,), required=True, reads=True),
    GraphStep(make_groups, lambda this: (this,), required=True),
    GraphStep(return_bases_of_views, lambda this: (this,), required=True),
    GraphStep(expect_gradients, lambda this: (this,), required=True),
    GraphStep(forget_addresses, when=lambda this: not this.aten and uses_cuda_graphs(this.options.inductor)),
    GraphStep(report_blocks, lambda this: (this,), reads=True),
    GraphStep(find_artifacts, lambda this: (this,), reads=True),
    GraphStep(report_cacheability, lambda this: (this,), reads=True),
    GraphStep(
        report_inductor_order,
        when=lambda this: this.options.schedule and not this.aten and not this.orders_kernels,
        reads=True,
    ),
)


def wrap_compiled(compiled: Callable[..., Any], this: Compilation) -> Callable[..., Any]:
    """The compiled graph in its wrappers: unexpected tangents, aliases, versions, freed graphs, views, errors.

    Raises:
        NotSavedError: torch saves the compiled graph alone, and the program needs one of the others.
    """
    saved = saves_compiled_graph()
    run = compiled if saved else remember_arguments(compiled, this.tangents)
    wrappers = {
        "writes to inputs, which may share memory": lambda run: check_aliases(
            this.program, run, this.log.decided, lambda: this.communication
        ),
        "preserves versions of its inputs": lambda run: keep_versions(this.program, run),
        "runs a backward pass that frees the graphs of its results": lambda run: restore_freed_graphs(
            this.program, run
        ),
        "returns views": lambda run: without_bases(run, this.bases),
    }
    for what, wrapper in wrappers.items():
        run, inner = wrapper(run), run
        if saved and run is not inner:
            raise NotSavedError(
                f"aot_compile cannot save {this.agreement.function or 'the program'}: it {what}, and torch saves the "
                "compiled graph without the code around it; build artifacts of it instead (dtensor-compile build)"
            )
    return run if saved else this.log.counted(watched(run, this.agreement))
