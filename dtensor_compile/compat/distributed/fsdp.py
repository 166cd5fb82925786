"""State of ``fully_shard``, and of ``replicate`` in its newer form; nothing here depends on Dynamo.

A *group* holds the parameters that eager gathers together.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    AllGather,
    ReduceScatter,
    _get_gradient_divide_factors,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import Placement, Replicate

from dtensor_compile.compat.dtensor.specs import Spec

PRE_FORWARD, POST_FORWARD = FSDPState._pre_forward, FSDPState._post_forward
#: Code of the wrapper that keeps Dynamo out of a hook. Hooks of a list of modules are closures in such a wrapper,
#: around the methods.
_WRAPPER = PRE_FORWARD.__code__

#: Attribute of a group that holds the tensor with its number (`compat.distributed.fsdp_gradients.make_holders`).
HOLDER = "_dtensor_compile_holder"

#: Methods by which a program changes the state of its modules.
SETTERS = tuple(method for name, method in vars(FSDPModule).items() if name.startswith("set_"))

#: Whether a state has a list of groups; before 2.13 it has one group or none.
SEVERAL = isinstance(vars(FSDPState).get("_fsdp_param_group"), property)


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    if SEVERAL:
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def gathered_parameters() -> set[int]:
    """The ids of the parameters that modules have while they are gathered, of all states in this process."""
    states = [reference() for reference in list(_module_state_mapping.values())]
    return {
        id(whole)
        for state in states
        if isinstance(state, FSDPState)
        for group in groups_of(state)
        for param in group.fsdp_params
        if (whole := getattr(param, "_unsharded_param", None)) is not None
    }


def method_of(function: Any) -> Any:
    """The method of a state that a hook calls; `function` itself if it is no such hook."""
    if getattr(function, "__code__", None) is not _WRAPPER:
        return function
    inner = function
    while inner is not None and not isinstance(inner, types.MethodType):
        inner = getattr(inner, "__wrapped__", None)
    return inner.__func__ if inner is not None else function


def state_of(owner: Any) -> FSDPState:
    """The state itself, or the state of a hook of a list of modules."""
    for name in path_to_state(owner):
        owner = getattr(owner, name)
    return owner


def path_to_state(owner: Any) -> tuple[str, ...]:
    """The attributes that lead from a hook of a list of modules to the state; empty for the state itself."""
    path: list[str] = []
    while not isinstance(owner, FSDPState):
        path.append("__self__" if isinstance(owner, types.MethodType) else "__wrapped__")
        owner = getattr(owner, path[-1])
    return tuple(path)


# ---- facts on which compiled code is guarded -------------------------------------------------------------------


def facts(state: FSDPState) -> tuple[Any, ...]:
    """Everything that a forward depends on besides the parameters."""
    return (state._mp_policy, *(_group_facts(group) for group in groups_of(state)))


def gradient_facts(state: FSDPState) -> tuple[Any, ...]:
    """Everything that gradients depend on in addition."""
    return tuple(map(_facts_of_gradients, groups_of(state)))


def _group_facts(group: FSDPParamGroup) -> tuple[Any, ...]:
    return (
        group.mesh_info.mesh,
        len(group.fsdp_params),
        group.post_forward_mesh_info is None,
        group._training_state is TrainingState.PRE_BACKWARD,
        _at_rest(group),
    )


def _facts_of_gradients(group: FSDPParamGroup) -> tuple[Any, ...]:
    return (
        _held(group),  # code that adds to held gradients need not know whether there are any
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
        _reduces_unused(group),
        group._all_reduce_hook is None,
        _has_hooks(group),
    )


def _has_partly_reduced(group: FSDPParamGroup) -> bool:
    """Whether gradients of earlier backward passes are reduced over shards and wait to be reduced over replicas."""
    return group._partial_reduce_output is not None


def _holds(group: FSDPParamGroup) -> bool:
    """Whether gradients of earlier backward passes wait to be reduced with the next."""
    for param in group.fsdp_params:
        whole = getattr(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
            return True
    return False


def _has_hooks(group: FSDPParamGroup) -> bool:
    """Whether a sharded parameter has gradient hooks. Eager sets these gradients itself and never calls them."""
    return any(param.sharded_param._backward_hooks for param in group.fsdp_params)


def _reduces_unused(group: FSDPParamGroup) -> bool:
    """Whether unused parameters get gradients as well; the setting exists since 2.13."""
    return getattr(group, "reduce_scatter_unused_params", False)


def _is_plain(param: FSDPParam) -> bool:
    """Whether the modules of a parameter store it in the standard way only."""
    return all(type(module).__setattr__ is torch.nn.Module.__setattr__ for module, _ in _places(param))


def _own_comm(comm: Any) -> bool:
    return not type(comm).__module__.startswith("torch.") and isinstance(comm, (AllGather, ReduceScatter))


#: Reasons to keep a state out of a graph: a test, and its text.
_OBSTACLES: tuple[tuple[Callable[[FSDPParamGroup], bool], str], ...] = (
    (lambda g: isinstance(g.offload_policy, CPUOffloadPolicy), "parameters are offloaded to the CPU"),
    (lambda g: g._all_reduce_hook is not None, "set_all_reduce_hook"),
    (
        lambda g: _own_comm(g._all_gather_comm) or _own_comm(g._reduce_scatter_comm),
        "a custom all-gather or reduce-scatter",
    ),
    (
        lambda g: any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in g.fsdp_params),
        "fsdp_pre_all_gather",
    ),
    (_reduces_unused, "gradients for unused parameters"),
    (
        lambda g: g._training_state is TrainingState.PRE_BACKWARD,
        "the forward runs again inside of an eager backward pass",
    ),
    (lambda g: not all(map(_is_plain, g.fsdp_params)), "a module with a __setattr__ of its own"),
)
#: The same, if gradients are needed.
_OBSTACLES_TO_GRADIENTS: tuple[tuple[Callable[[FSDPParamGroup], bool], str], ...] = (
    (_has_hooks, "a parameter with a hook on its gradient"),
)


def obstacle(state: FSDPState, gradients: bool) -> str | None:
    """The reason why the forward of a module with this state has to run in eager; None if it can be traced."""
    table = _OBSTACLES + (_OBSTACLES_TO_GRADIENTS if gradients else ())
    return next((text for group in groups_of(state) for test, text in table if test(group)), None)


def mixed_precision(state: FSDPState) -> MixedPrecisionPolicy:
    """The policy for dtypes."""
    return state._mp_policy


def prepare(state: FSDPState) -> None:
    """Runs the lazy initialization that eager runs before it first uses the parameters: finds the root, sets dtypes."""
    state._lazy_init()


def _at_rest(group: FSDPParamGroup) -> bool:
    """Whether the modules have their sharded parameters, and none are being gathered."""
    return group.is_sharded and group._all_gather_result is None


def is_at_rest(state: FSDPState) -> bool:
    """Whether the modules have their sharded parameters.

    False after an eager forward without a backward, which may keep parameters unsharded, and after ``unshard()``.
    """
    return all(map(_at_rest, groups_of(state)))


def put_to_rest(state: Callable[[], FSDPState | None]) -> None:
    """Reshards the parameters of the modules. An eager backward that needs them unsharded gathers them again.

    Args:
        state: a weak reference.
    """
    found = state()
    for group in groups_of(found) if found is not None else ():
        group.wait_for_unshard()
        group._to_sharded()


# ---- parameters ----------------------------------------------------------------------------------------------------


class HeldGradient(NamedTuple):
    """Handling of a gradient at two points: on arrival, and between the reductions over shards and over replicas.

    At each point: "hold" keeps it for a later pass; "release" adds what is held to it before it is reduced further; ""
    does neither.
    """

    whole: str = ""
    shard: str = ""


@dataclass(frozen=True)
class Sharded:
    """One parameter that data-parallel ranks share.

    Attributes:
        parameter: the sharded one.
        path: attributes and indices that lead from the state to it.
        places: module and name; several if it is tied.
        mesh, placements: its sharding over the ranks: a mesh of one dim, or of two of which the first replicates.
        outer_mesh, outer_placements: of the DTensor that the module uses; None and () if it uses a plain tensor.
        data_parallel: the dims of `outer_mesh` over which `mesh` shares the parameter (``dp_mesh_dims``); none if these
            are two meshes.
        size: global shape of the sharded parameter, in elements per dim.
        dtype, reduce_dtype: of the tensor that the module uses, and of the reduction of gradients; None keeps the
        dtype.
        divide: reduction op, divisors of gradients before and after it.
        reshard: whether it is gathered again in the backward, not kept for it.
        holder: path from the state to the tensor with the number of its group (`make_holders`).
        index: its position in the group.
        held: handling of its gradient.
    """

    parameter: torch.nn.Parameter
    path: tuple[str | int, ...]
    places: tuple[tuple[torch.nn.Module, str], ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    outer_mesh: DeviceMesh | None
    outer_placements: tuple[Placement, ...]
    data_parallel: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    divide: tuple[str, float, float]
    reshard: bool
    holder: tuple[str | int, ...]
    index: int
    held: HeldGradient


def _places(param: FSDPParam) -> tuple[tuple[torch.nn.Module, str], ...]:
    info = param._module_info
    return ((info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names))


def sharded_parameters(state: FSDPState) -> Iterator[Sharded]:
    """The parameters of a prepared state."""
    for i, group in enumerate(groups_of(state)):
        path = ("_fsdp_param_groups", i) if SEVERAL else ("_fsdp_param_group",)
        held = _held(group)
        for j, param in enumerate(group.fsdp_params):
            outer = unsharded_spec(param)
            yield Sharded(
                parameter=param.sharded_param,
                path=(*path, "fsdp_params", j, "sharded_param"),
                places=_places(param),
                mesh=group.mesh_info.mesh,
                placements=_placements(group, param),
                outer_mesh=None if outer is None else outer.mesh,
                outer_placements=() if outer is None else outer.placements,
                data_parallel=data_parallel_dims(param),
                size=tuple(param._orig_size),
                dtype=param.param_dtype,
                reduce_dtype=reduction_dtype(param),
                divide=_divide(group, param),
                reshard=group.post_forward_mesh_info is not None,
                holder=(*path, HOLDER),
                index=j,
                held=held,
            )


def reduction_dtype(param: FSDPParam) -> torch.dtype | None:
    """The dtype in which eager adds up and reduces gradients of a parameter; None keeps theirs.

    As of 2.15 it is that of the sharded parameter if the policy has no ``reduce_dtype``.
    """
    known: Any = param
    return known.unsharded_grad_dtype if hasattr(FSDPParam, "unsharded_grad_dtype") else param.reduce_dtype


def _held(group: FSDPParamGroup) -> HeldGradient:
    if not group.reduce_grads:
        return HeldGradient("hold")
    whole, shard = "release" if _holds(group) else "", ""
    if isinstance(group.mesh_info, DDPMeshInfo):
        shard = "hold" if not group.all_reduce_grads else "release" if _has_partly_reduced(group) else ""
    return HeldGradient(whole, shard)


def data_parallel_dims(param: FSDPParam) -> tuple[int, ...]:
    """The mesh dims of the DTensor parameter that ``dp_mesh_dims`` names; empty if it is not given."""
    return tuple(sorted(getattr(param, "_dp_dim_indices", ())))


def _placements(group: FSDPParamGroup, param: FSDPParam) -> tuple[Placement, ...]:
    if isinstance(group.mesh_info, HSDPMeshInfo):
        return (Replicate(), param.fsdp_placement)
    return (param.fsdp_placement if isinstance(group.mesh_info, FSDPMeshInfo) else Replicate(),)


def _divide(group: FSDPParamGroup, param: FSDPParam) -> tuple[str, float, float]:
    """The reduction op and divisors, as torch chooses them; a factor within the reduction becomes a division
    before it."""
    info = group.mesh_info
    shards = info.shard_process_group if isinstance(info, FSDPMeshInfo) else None
    replicas = info.replicate_process_group if isinstance(info, DDPMeshInfo) else None
    dtype = reduction_dtype(param) or param.param_dtype or param.orig_dtype
    factor = group.gradient_divide_factor
    before, after, *ops = _get_gradient_divide_factors(
        shards, replicas, dtype, group.device.type, factor, group.force_sum_reduction_for_comms
    )
    if factor is not None and before is None and after is None:
        return "sum", factor, 1
    op = "avg" if all(op == dist.ReduceOp.AVG for op in ops) else "sum"
    return op, before or 1, after or 1


def unsharded_spec(param: FSDPParam) -> Spec | None:
    """The spec of the DTensor that the module uses; None if it uses a plain tensor."""
    return getattr(param, "_unsharded_dtensor_spec" if SEVERAL else "_tp_spec", None)
