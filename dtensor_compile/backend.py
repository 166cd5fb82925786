"""The ``"dtensor"`` backend: the stages, in order. And ``"dtensor_aten"``, the same without Inductor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.capture.aliased_inputs import heed_aliases, may_write
from dtensor_compile.capture.base_results import return_bases, without_bases
from dtensor_compile.capture.bind_meshes import bind_meshes_to_primals
from dtensor_compile.capture.cacheable import GRAPH_FUNCTIONS, cache_decisions, survives_caches
from dtensor_compile.capture.effect_tokens import make_tokens_real
from dtensor_compile.capture.empty_masks import make_masks_boolean
from dtensor_compile.capture.failing_backward import defer_backward_errors
from dtensor_compile.capture.marks import mark_local_tensors
from dtensor_compile.capture.mesh import guard_mesh_order, merge_groups, without_merged_groups
from dtensor_compile.capture.preserved_versions import keep_versions
from dtensor_compile.capture.repeated_writes import write_once
from dtensor_compile.capture.sharding_rules import report_fallbacks
from dtensor_compile.capture.spent_graphs import restore_spent_graphs
from dtensor_compile.capture.trace import capture_redistributions
from dtensor_compile.capture.unread_collectives import calls_collectives, drop_unread_collectives
from dtensor_compile.checks import check_program, shards_are_even, tensor_meshes
from dtensor_compile.compat.aot import compile_to_aten
from dtensor_compile.compat.aot_backward import dtensor_tangents
from dtensor_compile.compat.async_inputs import async_inputs, keep_gradients_of_async_inputs
from dtensor_compile.compat.backward_runs import backward_runs
from dtensor_compile.compat.data_dependent import backward_in_time
from dtensor_compile.compat.effects import tokens_from_inputs
from dtensor_compile.compat.final_sizes import plan_until_sizes_stay
from dtensor_compile.compat.inductor import compile_as_stock, compile_with_inductor
from dtensor_compile.compat.module_hooks import check_gradients_of_hooks
from dtensor_compile.compat.observe import name_modules
from dtensor_compile.compat.partition import bind_shard_sizes, place_random_states, share_groups
from dtensor_compile.compat.scheduler import KernelOrder, orders_kernels, rearrange
from dtensor_compile.compat.settings import implicit_replication_is_allowed
from dtensor_compile.compat.shapes import sizes_from_expressions, split_nary
from dtensor_compile.compat.tangents import Tangents, remember_arguments
from dtensor_compile.compat.unwrap import native_calls
from dtensor_compile.compat.views import views_of_dtensors
from dtensor_compile.cross_mesh import join_groups
from dtensor_compile.decisions import Decision
from dtensor_compile.lowering.check_counts import check_counts
from dtensor_compile.lowering.check_memory import check_memory
from dtensor_compile.lowering.drop_copies import drop_copies
from dtensor_compile.lowering.fuse_products import fuse_products
from dtensor_compile.lowering.left_alone import communication_seconds, estimated_kernels, handed_back, kernels_left, order_left, unordered_kernels
from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.lowering.lower_collectives import (
    hold_draws,
    hold_collectives,
    is_repeatable,
    lower_collectives,
    order_collectives,
)
from dtensor_compile.lowering.order_rows import order_rows, rows_left
from dtensor_compile.lowering.overlap import kernels_in_order, passes_after_lowering
from dtensor_compile.lowering.regather import regather
from dtensor_compile.lowering.schedule_graph import ORDERED, explain
from dtensor_compile.lowering.send_contiguous import send_contiguous
from dtensor_compile.lowering.send_transposed import columns_left, send_transposed
from dtensor_compile.lowering.size_ranges import tell_ranges
from dtensor_compile.lowering.spread_by_mask import spread_by_mask
from dtensor_compile.lowering.uncompiled import runs_uncompiled
from dtensor_compile.lowering.view_again import view_again
from dtensor_compile.options import Options
from dtensor_compile.passes import dropped, run_passes
from dtensor_compile.passes.nodes import across, has_even_shards, redistributions
from dtensor_compile.report.recorder import GraphLog, cache_key, recording
from dtensor_compile.runtime.agree import Agreement
from dtensor_compile.runtime.native import without_native
from dtensor_compile.spmd.spread import spread_annotations
from dtensor_compile.topology.files import to_values
from dtensor_compile.topology.network import plans_for
from dtensor_compile.variables import install_trackers


def dtensor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph over DTensors; ``torch.compile(model, backend="dtensor")`` calls it.

    Args:
        gm: graph of torch functions, with DTensor values.
        example_inputs: fake inputs.
        mode, options: as given to ``torch.compile``; see `dtensor_compile.options.Options`.

    Raises:
        OptionError: an unknown option or a wrong value.
        NoProcessGroupError, MeshError: the program cannot run in this process.
        AgreementError: it calls other collectives on another rank.
        PlanError: a redistribution needs more memory than ``redistribution_memory``.
    """
    agreement = Agreement.of_frame()
    with agreement.failures_told():
        return _compile(gm, example_inputs, Options.parse(mode, options), agreement)


def _compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], opts: Options, agreement: Agreement) -> Callable[..., Any]:
    check_program(gm, example_inputs)
    check_counts(gm)
    write_once(gm)
    guard_mesh_order(gm, example_inputs)
    log, tangents = GraphLog(opts.topology), Tangents.of_frame()
    spread_annotations(gm, example_inputs, log.decided, opts.fallback)
    if not opts.capture:
        return compile_as_stock(gm, example_inputs, opts.inductor)
    merged = merge_groups(tensor_meshes(gm))
    log.decided([*without_native(), *without_merged_groups(tensor_meshes(gm))])
    join_groups(gm)
    own_collectives = calls_collectives(gm)
    bases = return_bases(gm)
    writes = may_write(gm)
    tangents.repeatable = not writes
    communication: list[float] = []  # seconds, of each graph that was lowered
    tangents.decided, tangents.communication = log.decided, lambda: sum(communication)
    if recording():
        name_modules(gm)
        log.decided(cache_decisions(gm))

    measured = opts.kernel_costs == "measured"
    even = [opts.schedule and shards_are_even(gm)]
    lowered_passes = passes_after_lowering(opts.topology, opts.overlap_memory, opts.enable_passes, even=lambda: all(even), measured=measured)

    @plans_for(opts.topology, opts.redistribution_memory)
    def plan_joint_graph(graph: torch.fx.Graph) -> None:
        check_gradients_of_hooks()
        bind_meshes_to_primals(graph)
        make_tokens_real(graph)
        make_masks_boolean(graph)
        if not own_collectives:
            drop_unread_collectives(graph)
        log.captured(graph)
        log.decided(handed_back(graph))
        log.decided(run_passes(graph, disabled=opts.disable_passes, enabled=opts.enable_passes, strict=opts.strict))
        log.planned(graph)
        even.append(all(map(has_even_shards, redistributions(graph))))
        check_memory(graph)
        log.decided(tell_ranges(graph))
        shapes = (drop_copies,) if across(graph) else (drop_copies, order_rows, send_transposed)
        if across(graph):
            because = "ranks of one mesh alone have another graph, and would decide otherwise"
            log.decided([*rows_left(graph, because), *columns_left(graph, because)])
        log.decided(run_passes(graph, shapes, disabled=opts.disable_passes, strict=opts.strict))
        check_memory(graph)
        spread_by_mask(graph)
        tangents.repeatable = not writes and is_repeatable(graph)
        order_collectives(graph)
        hold_collectives(graph)
        log.decided(regather(graph, opts.regather))
        hold_draws(graph)
        view_again(graph)

    orders_again, of_the_graph = opts.schedule and opts.kernels != "aten" and orders_kernels(), list[Decision]()

    if opts.schedule and opts.kernels != "aten" and not orders_again:
        log.decided([unordered_kernels()])

    @plans_for(opts.topology, opts.redistribution_memory)
    def lower_graph(graph: torch.fx.Graph) -> None:
        split_nary(graph)
        log.decided(lower_redistributions(graph, strict=opts.strict))
        lower_collectives(graph)
        if opts.kernels != "aten":
            send_contiguous(graph)
        decided = run_passes(graph, lowered_passes if opts.schedule else (), disabled=opts.disable_passes, strict=opts.strict)
        # What is said of the order holds of the kernels, where they are ordered again.
        of_the_graph[:] = [d for d in decided if d.kind == ORDERED and orders_again]
        log.decided([d for d in decided if d not in of_the_graph])
        if log.recordings and not orders_again:
            log.decided(order_left(graph, opts.topology, scheduled=opts.schedule))
        view_again(graph)
        log.lowered(graph)
        log.decided(estimated_kernels() if measured else [])
        if log.recordings:
            communication.append(communication_seconds(graph, opts.topology))
        agreement.note(graph)
        log.decided(run_passes(graph, (fuse_products,), strict=opts.strict))

    def order_kernels(kernels: list[Any]) -> list[Any]:
        try:
            return rearrange(
                kernels, topology=opts.topology, overlap_memory=opts.overlap_memory, measured=measured, told=tell_order
            )
        except Exception as error:
            if opts.strict:
                raise
            log.decided([*of_the_graph, dropped("schedule_kernels", error)])
            return kernels

    def tell_order(found: KernelOrder) -> None:
        log.decided([kernels_in_order(found.before, found.after, found.least)])
        log.decided(explain(found.tasks, found.order, found.after, found.starts))
        if log.recordings:
            log.decided(kernels_left(found))
        log.ordered(found)

    def tell_uncompiled(graph: str, said: str) -> None:
        log.decided([runs_uncompiled(graph, said)])

    planned_for = str(opts.topology and to_values(opts.topology)), opts.schedule, opts.kernel_costs, opts.overlap_memory, opts.redistribution_memory, opts.regather
    replicates = implicit_replication_is_allowed()
    key = (opts.disable_passes, opts.enable_passes, opts.strict, opts.fallback, planned_for, replicates, async_inputs(example_inputs), cache_key())
    scopes: list[contextlib.AbstractContextManager[None]] = [
        plans_for(opts.topology),
        capture_redistributions(),
        mark_local_tensors(),
        dtensor_tangents(gm, tangents),
        backward_runs(agreement.reach_backward, agreement.fail, agreement.has_run),
        tokens_from_inputs(),
        bind_shard_sizes(),
        place_random_states(),
        share_groups(),
        views_of_dtensors(),
        backward_in_time(),
        sizes_from_expressions(),
        native_calls(),
        keep_gradients_of_async_inputs(example_inputs),
    ]
    if not opts.strict:
        scopes.append(defer_backward_errors(log.decided))
    with contextlib.ExitStack() as stack:
        for scope in (*scopes, report_fallbacks(log.decided)):
            stack.enter_context(scope)
        if opts.kernels == "aten":
            compile = functools.partial(compile_to_aten, gm, example_inputs, joint_pass=plan_joint_graph, post_grad_pass=lower_graph)
        else:
            compile = functools.partial(
                compile_with_inductor,
                gm,
                example_inputs,
                joint_pass=plan_joint_graph,
                post_grad_pass=lower_graph,
                kernel_pass=order_kernels if opts.schedule else None,
                key=None if recording() or tangents.assumed or not merged or not survives_caches(gm) else key,
                settings=opts.inductor,
                cacheable=GRAPH_FUNCTIONS,
                uncompiled=None if opts.strict else tell_uncompiled,
            )
        compiled = plan_until_sizes_stay(compile)
    agreement.reach()
    run = heed_aliases(gm, remember_arguments(compiled, tangents), log.decided, tangents.communication)
    return agreement.watched(without_bases(restore_spent_graphs(gm, keep_versions(gm, run)), bases))


def dtensor_aten(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`dtensor` with ``options={"kernels": "aten"}``: compiles fast, runs like eager; for tests and for finding faults."""
    return dtensor(gm, example_inputs, mode=mode, options={**(options or {}), "kernels": "aten"})


install_trackers(dtensor)
install_trackers(dtensor_aten)
