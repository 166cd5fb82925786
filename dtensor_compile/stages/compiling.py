"""The scopes that are active while AOTAutograd traces and compiles a program, and the compilation itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dtensor_compile.capture.cacheable import survives_caches
from dtensor_compile.capture.sharding_rules import report_fallbacks
from dtensor_compile.capture.trace import capture_redistributions
from dtensor_compile.compat.aot.aot_backward import dtensor_tangents
from dtensor_compile.compat.aot.async_inputs import async_inputs, keep_gradients_of_async_inputs
from dtensor_compile.compat.aot.backward_runs import backward_runs
from dtensor_compile.compat.aot.block_graphs import programs_changed
from dtensor_compile.compat.aot.effects import tokens_from_inputs
from dtensor_compile.compat.aot.output_aliases import views_of_dtensors
from dtensor_compile.compat.aot.partition import bind_shard_sizes, place_random_states, share_groups
from dtensor_compile.compat.aot.run_graph import compile_to_aten, lower_for_aten
from dtensor_compile.compat.aot.symbolic.final_sizes import plan_until_sizes_stay
from dtensor_compile.compat.aot.symbolic.saved_sizes import sizes_can_be_saved
from dtensor_compile.compat.aot.symbolic.shapes import size_hint, sizes_from_expressions
from dtensor_compile.compat.aot.unwrap import native_calls
from dtensor_compile.compat.dtensor.lookup_masks import masks_at_run_time
from dtensor_compile.compat.dtensor.planned_calls import PlannedCalls
from dtensor_compile.compat.dynamo.counters import cached_programs
from dtensor_compile.compat.dynamo.data_dependent_scalars import backward_in_time
from dtensor_compile.compat.dynamo.settings import implicit_replication_is_allowed
from dtensor_compile.compat.inductor.cache_keys import local_layouts
from dtensor_compile.compat.inductor.compile import compile_with_inductor
from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.fixups.failing_backward import defer_backward_errors
from dtensor_compile.graph.arguments import texts_in
from dtensor_compile.graph.global_annotations import mark_local_tensors
from dtensor_compile.graph.inline_subgraph import is_whole
from dtensor_compile.graph.repeated_blocks import repeated_traces
from dtensor_compile.ir import known_groups
from dtensor_compile.ir.rank_free import dims_of_name, rank_free
from dtensor_compile.ops.call_block import block_graphs
from dtensor_compile.ops.coordinates import coordinate_in
from dtensor_compile.recording.graph_log import QuietLog
from dtensor_compile.recording.recorder import cache_key, recording
from dtensor_compile.runtime.artifacts import ArtifactsError, current_build, not_used
from dtensor_compile.runtime.collective_agreement import Agreement
from dtensor_compile.schedule.schedule_graph import costs_alike, graph_seconds
from dtensor_compile.stages.blocks import share_blocks, until_gradients_fit
from dtensor_compile.stages.compilation import Compilation
from dtensor_compile.stages.joint import plan_joint_graph
from dtensor_compile.stages.kernels import on_uncompiled, passes_over_kernels
from dtensor_compile.stages.lowered import lower_graph
from dtensor_compile.stages.planned_placements import planned_placements, until_placed
from dtensor_compile.stages.program import GRAPH_FUNCTIONS
from dtensor_compile.topology.devices import default_cluster, on_one_host
from dtensor_compile.topology.network import plans_for


@contextlib.contextmanager
def _shared_blocks(this: Compilation) -> Iterator[None]:
    """While active, equal blocks of the program are traced once."""
    with block_graphs() as known:
        this.blocks = known
        with programs_changed(functools.partial(share_blocks, this=this)):
            yield


#: Entered in this order.
SCOPES: tuple[Callable[[Compilation], AbstractContextManager[Any]], ...] = (
    lambda this: plans_for(this.options.topology),
    lambda this: rank_free(this.rank_free),
    lambda this: masks_at_run_time(coordinate_in) if this.rank_free else contextlib.nullcontext(),
    lambda this: capture_redistributions(),
    lambda this: mark_local_tensors(),
    lambda this: dtensor_tangents(this.program, this.tangents),
    lambda this: backward_runs(this.agreement.reach_backward, this.agreement.fail, this.agreement.has_run),
    lambda this: tokens_from_inputs(),
    lambda this: bind_shard_sizes(),
    lambda this: place_random_states(),
    lambda this: share_groups(),
    lambda this: views_of_dtensors(),
    lambda this: backward_in_time(),
    lambda this: sizes_from_expressions(),
    lambda this: sizes_can_be_saved(),
    lambda this: native_calls(this.agreement.has_run, this.agreement.explained),
    lambda this: keep_gradients_of_async_inputs(this.inputs),
    lambda this: contextlib.nullcontext() if this.options.strict else defer_backward_errors(this.log.decided),
    lambda this: report_fallbacks(this.log.decided),
    lambda this: _shared_blocks(this) if this.shares_blocks else contextlib.nullcontext(),
    lambda this: planned_placements(this) if this.plans_placements else contextlib.nullcontext(),
)


@contextlib.contextmanager
def _scopes(this: Compilation) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for scope in SCOPES:
            stack.enter_context(scope(this))
        yield


def key_of(this: Compilation) -> tuple[Any, ...] | None:
    """The cache key of everything besides the graph on which the steps depend; None keeps the compiled graph out of
    torch's caches.
    """
    if recording() or this.tangents.assumed or not this.merged or not survives_caches(this.program):
        return None
    if (build := current_build()) is not None and not build.kernels:
        return None
    # A program of which it is shown that ranks have the same graphs has the key of the first of them.
    place = (*cache_key(), on_one_host()) if this.shares is None else ("artifacts", this.digest, this.shares)
    facts: tuple[Any, ...] = (this.rank_free, implicit_replication_is_allowed(), async_inputs(this.inputs))
    facts += (*local_layouts(this.program.graph), repeated_traces(this.program, marked=True))
    if this.options.plan == "global":  # whose costs are those of the sizes of this call
        facts += tuple(size_hint(x) for x in this.inputs if isinstance(x, torch.SymInt))
    return (*this.options.cache_key(), *facts, place)


def code_header(gm: torch.fx.GraphModule) -> list[str]:
    """Statements that make the operators of this package, and the names of process groups in a rank-free graph, known
    to a process that loads the code of a lowered graph without having traced it."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    names = sorted({text for graph in graphs for text in texts_in(graph.nodes) if dims_of_name(text) is not None})
    ours = any(getattr(node.target, "namespace", "") == "dtensor_compile" for graph in graphs for node in graph.nodes)
    return [
        *(["import dtensor_compile.backend"] if ours else []),
        *([f"from {known_groups.__name__} import know_group"] if names else []),
        *(f"know_group({name!r})" for name in names),
    ]


def compile_program(this: Compilation) -> Callable[..., Any]:
    """Traces, plans, lowers, schedules and compiles the program; returns the compiled callable."""
    forecast = functools.partial(_forecast, this)
    return until_placed(lambda: until_gradients_fit(lambda: _compiled(this), this), forecast, this)


def _forecast(this: Compilation, calls: Sequence[PlannedCalls]) -> float | None:
    """Seconds of a step whose calls have these placements, by estimate of the lowered graphs; nothing is compiled or
    logged. Infinite if the program cannot be lowered so; None if other ranks would estimate something else."""
    options = dataclasses.replace(this.options, kernels="aten")
    agreement = Agreement(this.agreement.function)
    trial = dataclasses.replace(
        this, options=options, agreement=agreement, log=QuietLog(), calls=calls, digest="", order=[]
    )
    cluster = this.options.topology or default_cluster(calls[0].mesh.device_type)
    seconds, alike = 0.0, True

    def lower(graph: torch.fx.Graph) -> None:
        nonlocal seconds, alike
        lower_graph(graph, trial)
        if is_whole(graph):
            seconds += graph_seconds(graph, cluster)
            alike = alike and costs_alike(graph, cluster)

    plan = functools.partial(plan_joint_graph, this=trial)
    try:
        with _scopes(trial):
            trace = functools.partial(lower_for_aten, this.program, this.inputs, joint_pass=plan, post_grad_pass=lower)
            plan_until_sizes_stay(trace)
    except DTensorCompileError:  # the calls are other ones, or a redistribution holds more than is allowed
        return math.inf
    return seconds if alike and trial.even and not trial.between_meshes else None


def _compiled(this: Compilation) -> Callable[..., Any]:
    passes = {
        "joint_pass": functools.partial(plan_joint_graph, this=this),
        "post_grad_pass": functools.partial(lower_graph, this=this),
    }
    with _scopes(this):
        if this.aten:
            return plan_until_sizes_stay(functools.partial(compile_to_aten, this.program, this.inputs, **passes))
        before = cached_programs()
        compiled = plan_until_sizes_stay(
            functools.partial(
                compile_with_inductor,
                this.program,
                this.inputs,
                **passes,
                kernel_passes=passes_over_kernels(this),
                key=key_of(this),
                settings=this.options.inductor,
                cacheable=GRAPH_FUNCTIONS,
                uncompiled=on_uncompiled(this),
                kernels=(build := current_build()) is None or build.kernels,
                collectives=(lambda: this.agreement.text, this.agreement.found),
                header=code_header,
            )
        )
        if this.shares is not None and current_build() is None and cached_programs() == before:
            error = ArtifactsError("torch has another key for it (settings of Inductor or of Dynamo differ)")
            this.log.decided([not_used(this.options.artifacts or "", this.agreement.function, error)])
        return compiled
