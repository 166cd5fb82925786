"""Rules for the names of ``torch.distributed`` and its subpackages: a table per module, and the resulting entries.

A row has the rule for a call while tracing (`member_rules.MemberRule`). Names with rule `INLINE` are left to torch,
which traces them like other Python, and have no entry; nor have names that the installed release lacks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
from torch.distributed import tensor

from dtensor_compile.compat.distributed.functional_collectives import functional_collectives
from dtensor_compile.compat.dynamo import settings
from dtensor_compile.compat.dynamo.left_to_python import leave_calls_to_python
from dtensor_compile.compat.dynamo.trackers.calls import (
    NamespaceVariable,
    handle_calls,
    handle_construction,
    refuse_methods,
)
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack, TrackGiven, TrackMade
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build,
    build_unguarded,
    constant_source,
    fact_guard,
    raise_in_program,
)
from dtensor_compile.variables import collective_calls
from dtensor_compile.variables import mesh_constructors as factories
from dtensor_compile.variables.member_rules import MemberRule, Row, Table, table

DISTRIBUTED = table(
    operator="""
        all_reduce all_reduce_coalesced broadcast reduce all_gather all_gather_coalesced all_gather_into_tensor
        all_gather_single gather scatter reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all_single
        all_to_all barrier isend irecv send recv batch_isend_irecv
    """,
    make="init_device_mesh new_group new_subgroups new_subgroups_by_enumeration split_group",
    ask="get_debug_level",
    bake="timedelta GroupName ReduceOp BackendConfig",
    inline="""
        DeviceMesh ProcessGroup Work P2POp group GroupMember Backend RankType reduce_op log default_pg_timeout
        record_comm DebugLevel BuiltinCommHookType DistError DistBackendError DistNetworkError DistStoreError
        QueueEmptyError get_rank get_world_size get_backend get_backend_config get_default_backend_for_device
        get_global_rank get_group_rank get_node_local_rank get_pg_count get_process_group_ranks supports_complex
        is_available is_initialized is_backend_available is_gloo_available is_mpi_available is_nccl_available
        is_ucc_available is_xccl_available is_torchelastic_launched
    """,
    breaks={
        "object-collective": """
            all_gather_object gather_object scatter_object_list broadcast_object_list send_object_list recv_object_list
        """,
        "error-of-other-ranks": "monitored_barrier",
        "group-lifetime": "init_process_group destroy_process_group shrink_group",
        "process-setting": "set_debug_level set_debug_level_from_env set_timeout register_rendezvous_handler "
        "breakpoint",
        "raw-object": """
            rendezvous Store FileStore HashStore PrefixStore TCPStore ProcessGroupGloo Reducer Logger GradBucket
            get_backend_impl ProcessGroupNCCL ProcessGroupNCCL2 ProcessGroupNCCLLazy gather_single gather_into_tensor
            AllToAllOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions BroadcastOptions GatherOptions
            ReduceOptions ReduceScatterOptions ScatterOptions
        """,
    },
)

DIFFERENTIABLE = table(
    operator="all_reduce all_gather all_to_all all_to_all_single broadcast gather reduce reduce_scatter scatter",
    inline="Function ReduceOp group",
)

FUNCTIONAL = table(
    inline="""
        all_reduce all_reduce_coalesced all_reduce_inplace broadcast wait_tensor wait_tensors permute_tensor
        all_gather_tensor all_gather_tensor_autograd all_gather_tensor_inplace all_gather_inplace
        all_gather_into_tensor_coalesced all_gather_single all_gather_single_autograd all_gather_single_coalesced
        reduce_scatter_tensor reduce_scatter_tensor_autograd reduce_scatter_tensor_inplace
        reduce_scatter_tensor_coalesced reduce_scatter_single reduce_scatter_single_autograd
        reduce_scatter_single_coalesced reduce_scatter_inplace
        all_to_all_single all_to_all_single_autograd all_to_all_inplace
        isend_inplace irecv_inplace batch_p2p_ops_inplace allow_inflight_collective_as_graph_input_ctx
        AsyncCollectiveTensor
    """
)

TENSOR = table(
    inline="""
        DTensor Placement Shard Replicate Partial distribute_tensor ones empty full linspace logspace rand randn zeros
    """,
    breaks={"leaf-made": "distribute_module"},
)

PARALLEL = table(
    inline="""
        ParallelStyle ColwiseParallel RowwiseParallel SequenceParallel PrepareModuleInput PrepareModuleOutput
        PrepareModuleInputOutput loss_parallel
    """,
    breaks={"leaf-made": "parallelize_module"},
)

EXPERIMENTAL = table(
    inline="local_map implicit_replication",
    breaks={"process-setting": "register_sharding context_parallel"},
)

DEBUG = table(inline="CommDebugMode", breaks={"looks-at-execution": "visualize_sharding"})

#: Module -> its table. (A submodule of ``torch.distributed`` with the same names as the package shares its table.)
TABLES: Mapping[types.ModuleType, Table] = {
    dist: DISTRIBUTED,
    dist.distributed_c10d: DISTRIBUTED,
    dist.device_mesh: DISTRIBUTED,
    torch.distributed.nn.functional: DIFFERENTIABLE,
    functional_collectives: FUNCTIONAL,
    tensor: TENSOR,
    tensor.placement_types: TENSOR,
    tensor.parallel: PARALLEL,
    tensor.experimental: EXPERIMENTAL,
    tensor.debug: DEBUG,
}


# ---- what a call does ----------------------------------------------------------------------------------------------


def _value(tx: Translator, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    """The result of a call as a constant of the code; exceptions are raised in the program."""
    try:
        result = function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it raises, the program sees it
        raise_in_program(tx, error)
    if isinstance(result, (str, int, float, type(None))):
        return build(tx, result)
    return _track_value(tx, result)


def _bake(function: Callable[..., Any]) -> Retrack:
    """Handler of calls whose result follows from their arguments; breaks the graph if those are no constants."""

    def bake(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        try:
            real_args, real_kwargs = factories.real_arguments(args, kwargs)
        except NotImplementedError:
            collective_calls.refuse(function.__name__, "member-argument")
        return _value(tx, function, real_args, real_kwargs)

    return handle_construction(bake)


@dataclass(frozen=True)
class _Question:
    """A function with a guarded answer, wrapped because torch skips guards on functions themselves once they have
    passed.
    """

    function: Callable[..., Any]


def _ask(function: Callable[..., Any]) -> Retrack:
    """Handler of queries about the process; guards the answer."""
    question = _Question(function)
    same_answer = fact_guard(function.__name__.upper(), lambda asked: asked.function())

    def ask(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        same_answer(constant_source(tx, "asked", question))
        return _value(tx, function, [], {})

    return handle_calls(ask)


def _refusal(function: Callable[..., Any], name: str, code: str) -> Retrack:
    def refuse(tx: Translator, *_: Any) -> VariableTracker:
        if isinstance(function, types.FunctionType):
            leave_calls_to_python(function)
        collective_calls.refuse(name, code)

    return handle_construction(refuse)


def _retrack(module: types.ModuleType, name: str, row: Row) -> Retrack | None:
    thing = getattr(module, name)
    if row.rule is MemberRule.OPERATOR:
        return collective_calls.retrack(thing)
    if row.rule is MemberRule.MAKE:
        return handle_calls(factories.trace_constructor)
    if row.rule is MemberRule.ASK:
        return _ask(thing)
    if row.rule is MemberRule.BAKE:
        return _bake(thing)
    if row.rule is MemberRule.BREAK:
        return _refusal(thing, f"{module.__name__}.{name}", row.cause)
    return None


def _entries() -> Iterator[tuple[Any, Retrack]]:
    for module, rows in TABLES.items():
        for name, row in rows.items():
            retrack = (
                _retrack(module, name, row) if row.rule is not MemberRule.INLINE and name in vars(module) else None
            )
            if retrack is not None:
                yield vars(module)[name], retrack


#: C++ enumerations: Python has no bytecode that creates a value of one.
_ENUMS = (dist.DebugLevel, dist.BuiltinCommHookType, dist.ProcessGroup.BackendType, dist.ReduceOp.RedOpType)


def _track_value(tx: Translator, value: Any) -> VariableTracker:
    return build_unguarded(tx, value, constant_source(tx, "value", value))


def _read_reduction(tx: Translator, name: str) -> VariableTracker:
    """``dist.reduce_op.SUM``: the old name of ``dist.ReduceOp.SUM``, which warns."""
    return _value(tx, getattr, [vars(dist)["reduce_op"], name], {})


# ---- objects of C++ that come in -----------------------------------------------------------------------------------

_RAW_NAMES = [name for name, row in DISTRIBUTED.items() if row.cause == "raw-object"]
#: Classes whose methods have side effects.
RAW_CLASSES = tuple(cls for name in ("Work", *_RAW_NAMES) if isinstance(cls := getattr(dist, name, None), type))


def _refuse_methods(cls: type) -> TrackGiven:
    names = ["__setattr__", *(name for name in dir(cls) if not name.startswith("__") and callable(getattr(cls, name)))]
    return refuse_methods(names, lambda name: collective_calls.refuse(f"{cls.__name__}.{name}", "raw-object"))


#: Methods that are called as functions of their class, as ``contextlib.ExitStack`` does.
_UNBOUND = (
    (dist.ProcessGroup, "unbox", "raw-object"),
    (dist.Work, "unbox", "raw-object"),
    (dist.DeviceMesh, "__enter__", "mesh-entered-by-hand"),
    (dist.DeviceMesh, "__exit__", "mesh-entered-by-hand"),
)
#: Entries for `compat.dynamo.tracing.Entries`.
OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    *_entries(),
    (vars(dist)["reduce_op"], lambda stock: NamespaceVariable(stock, _read_reduction)),
    *(
        (getattr(cls, name), _refusal(getattr(cls, name), f"{cls.__name__}.{name}", code))
        for cls, name, code in _UNBOUND
    ),
    *settings.OBJECTS,
)
GIVEN: Mapping[type, TrackGiven] = {cls: _refuse_methods(cls) for cls in RAW_CLASSES}
MADE: Mapping[type, TrackMade] = {cls: _track_value for cls in _ENUMS}
CONTEXTS = settings.CONTEXTS
