"""Construction of meshes, groups and DTensors inside the compiled program.

A mesh or a group is created once, while tracing: the arguments are constants and every rank traces the same program, so
that all ranks create the same groups in the same order. The result is kept per place of the program and reused when
that place is traced again with the same arguments (tracing may restart, and may restart on one rank only). The compiled
code is guarded on it, so that it is valid as long as the groups of the job exist.

A DTensor is created by nodes of the graph, from a local tensor and a spec whose parts are known while tracing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from dtensor_compile.capture.checks import check_commuting
from dtensor_compile.compat.dtensor.creation import (
    MESH_ENV,
    compute_local_shape_and_global_offset,
    group_is_alive,
    is_in_factory,
    mesh_is_alive,
    world,
)
from dtensor_compile.compat.dtensor.specs import StridedShard, local_and_spec
from dtensor_compile.compat.dynamo.left_to_python import leave_to_python
from dtensor_compile.compat.dynamo.trackers.calls import (
    attribute,
    call_site,
    emit_call,
    handle_calls,
    handle_construction,
    handle_methods,
    keep_leaves_inside,
    leaf_is_returned,
)
from dtensor_compile.compat.dynamo.trackers.constant_tensors import constant_value
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import MemberVariable
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build,
    constant_argument,
    constant_source,
    fact_guard,
    function_variable,
    graph_break,
    raise_in_program,
)
from dtensor_compile.errors import PlacementError
from dtensor_compile.graph.global_annotations import mark_node
from dtensor_compile.variables.collective_calls import checked_local_tensor

# ---- evaluated while tracing ---------------------------------------------------------------------------------------


def real_argument(argument: VariableTracker) -> Any:
    """The value of an argument: a constant, a mesh, a group, a placement, a tensor of constants, or a list of those.

    Raises:
        NotImplementedError: the value is only known at run time.
    """
    if argument.is_tensor():
        return constant_value(argument)
    return constant_argument(argument)


def real_arguments(
    args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> tuple[list[Any], dict[str, Any]]:
    """`real_argument` of all arguments."""
    return [real_argument(arg) for arg in args], {name: real_argument(arg) for name, arg in kwargs.items()}


def _frozen(value: Any) -> Any:
    """Hashable stand-in for an argument; stand-ins are equal if the arguments are."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), _frozen(value.tolist()))
    if isinstance(value, (list, tuple, range)):
        return tuple(map(_frozen, value))
    if isinstance(value, dist.ProcessGroup):
        return ("group", id(value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return value


#: Key -> (result, the objects whose addresses are in the key). The key consists of the default group, function,
#: arguments, place in the program, and number of earlier calls at this place.
_made: dict[Any, tuple[Any, Any]] = {}


def _is_alive(thing: Any) -> bool:
    if isinstance(thing, DeviceMesh):
        return mesh_is_alive(thing)
    if isinstance(thing, dist.ProcessGroup):
        return group_is_alive(thing)
    return not isinstance(thing, (list, tuple)) or all(map(_is_alive, thing))


def _leaves(thing: Any) -> list[Any]:
    if isinstance(thing, (list, tuple)):
        return [leaf for part in thing for leaf in _leaves(part)]
    return [thing] if isinstance(thing, (DeviceMesh, dist.ProcessGroup)) else []


#: ``destroy_process_group`` ends the life of groups, and of compiled code that contains them.
_alive = fact_guard("ALIVE", _is_alive)


def make_once(
    tx: Translator,
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    owner: DeviceMesh | None = None,
) -> VariableTracker:
    """Calls ``function(*args, **kwargs)``, which creates meshes or groups, unless this place of the program did so
    before.

    Args:
        owner: the mesh whose method `function` is.
    """
    key = (id(world()), name, owner, _frozen(list(args)), _frozen(kwargs), *call_site(tx))
    if key not in _made or not _is_alive(_made[key][0]):
        try:
            _made[key] = function(*args, **kwargs), (world(), owner, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the program sees it
            raise_in_program(tx, error)
    made = _made[key][0]
    for leaf in _leaves(made):
        _alive(constant_source(tx, "made", leaf))
    return build(tx, made)


def _refuse(name: str, what: str) -> NoReturn:
    leave_to_python(DeviceMesh)
    graph_break(
        "maker-argument",
        f"{name}: {what}",
        f"backend='dtensor' calls {name} once, while tracing, and needs the values of its arguments then.",
    )


def trace_constructor(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """Traces a call of a function, or of ``DeviceMesh`` itself, that creates meshes or groups."""
    function = stock.as_python_constant()
    try:
        real_args, real_kwargs = real_arguments(args, kwargs)
    except NotImplementedError:
        _refuse(function.__name__, ", ".join(map(str, [*args, *kwargs.values()])))
    return make_once(tx, function.__qualname__, function, real_args, real_kwargs)


# ---- sizes ---------------------------------------------------------------------------------------------------------


def local_sizes(
    global_shape: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shape and offsets of the local tensor, as torch computes them, in integer arithmetic that can be traced with
    symbolic sizes.

    Shards of one dim nest from left to right, so that their offsets add up. An empty shard begins at the end of the
    tensor."""
    if not mesh._is_current_rank_part_of_mesh():
        return (0,), ()
    sizes: list[Any] = list(global_shape)
    offsets: list[Any] = [0] * len(global_shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            size, offset = Shard.local_shard_size_and_offset(
                sizes[dim], mesh.size(mesh_dim), mesh._sym_get_coordinate(mesh_dim)
            )
            offsets[dim] = global_shape[dim] if size == 0 else offsets[dim] + offset
            sizes[dim] = size
    return tuple(sizes), () if skip_offset else tuple(offsets)


def _compute_sizes(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``compute_local_shape_and_global_offset``: a constant if its arguments are, otherwise `local_sizes`."""
    named = dict(zip(("global_shape", "mesh", "placements", "skip_offset"), args)) | kwargs
    try:
        if not named["global_shape"].is_python_constant():
            raise NotImplementedError
        real = {name: real_argument(arg) for name, arg in named.items()}
    except NotImplementedError:
        strided = any(isinstance(p, StridedShard) for p in constant_argument(named["placements"]))
        return (stock if strided else function_variable(local_sizes)).call_function(tx, [], named)
    try:
        return build(tx, compute_local_shape_and_global_offset(**real))
    except Exception as error:  # noqa: BLE001 - whatever it raises, the program sees it
        raise_in_program(tx, error)


# ---- the current mesh ----------------------------------------------------------------------------------------------

#: A program that asks for the current mesh depends on the one that is current at the call.
_same_current_mesh = fact_guard("CURRENT_MESH", lambda env: list(env.mesh_stack[-1:]))
#: Open ``with mesh:`` blocks of the program that is being traced.
_open: list[DeviceMesh] = []


def enter_mesh(mesh: DeviceMesh) -> Callable[[], None]:
    """Makes the mesh the current one while the body of ``with mesh:`` is traced; returns the function that ends it."""
    MESH_ENV.mesh_stack.append(mesh)
    _open.append(mesh)

    def leave() -> None:
        _open.pop()
        MESH_ENV.mesh_stack.pop()

    return leave


def track_current_mesh(tx: Translator) -> VariableTracker:
    """Tracker of the mesh of the innermost ``with mesh:``, in the compiled program or around its call."""
    if not _open:
        _same_current_mesh(constant_source(tx, "mesh_env", MESH_ENV))
    try:
        return build(tx, MESH_ENV.get_current_mesh())
    except RuntimeError as error:
        raise_in_program(tx, error)


# ---- DTensors ------------------------------------------------------------------------------------------------------


def wrap_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> DTensor:
    """``DTensor(local, spec, requires_grad=False)`` in public terms: passes no gradient to its local tensor."""
    return DTensor.from_local(
        local.detach(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def wrap_made(local: torch.Tensor, mesh: DeviceMesh, *spec: Any) -> DTensor:
    """`wrap_local` for a local tensor that torch, not the program, created as a part of a DTensor; gives passes its
    global metadata.
    """
    made = wrap_local(local, mesh, *spec)
    mark_node(local, local_and_spec(made)[1])
    return made


class _WithoutGradient(torch.autograd.Function):
    """Identity that requires a gradient because `like` does, and passes no gradient on, as a new leaf to the rest of a
    graph.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        return None, None


def leaf_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` as a new leaf that requires a gradient, as `like` does, and passes none to `like`."""
    return _WithoutGradient.apply(tensor, like)


def _construct(
    tx: Translator, stock: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``DTensor(local_tensor, spec, *, requires_grad)``"""
    named = dict(zip(("local_tensor", "spec"), args)) | kwargs
    if (
        len(args) > 2
        or named.keys() != {"local_tensor", "spec", "requires_grad"}
        or not named["local_tensor"].is_tensor()
    ):
        return stock.construct(tx, args, kwargs)
    if constant_argument(named["requires_grad"]):
        graph_break("leaf-made", "DTensor(..., requires_grad=True)")
    spec, meta = named["spec"], attribute(tx, named["spec"], "tensor_meta")
    parts = [attribute(tx, spec, "mesh"), attribute(tx, spec, "placements")]
    parts += [attribute(tx, meta, "shape"), attribute(tx, meta, "stride")]
    wrap = wrap_made if is_in_factory(tx.f_code.co_filename) else wrap_local
    return emit_call(tx, wrap, named["local_tensor"], *parts)


def _distribute(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``distribute_tensor``: makes a new leaf of a tensor that requires a gradient."""
    tensor: Any = args[0] if args else kwargs.get("tensor")
    if tensor is None or not tensor.is_tensor():
        return stock.call_function(tx, args, kwargs)
    tensor = tensor.realize()
    if (
        not tensor.requires_grad
        or tensor.python_type() is DTensor
        or not constant_argument(attribute(tx, tensor, "is_leaf"))
    ):
        return stock.call_function(tx, args, kwargs)
    if leaf_is_returned(tx):
        graph_break("leaf-made", "distribute_tensor of a tensor that requires a gradient")
    detached = tensor.call_method(tx, "detach", [], {})
    kwargs = {**kwargs, "tensor": detached} if not args else kwargs
    distributed = stock.call_function(tx, [detached, *args[1:]] if args else [], kwargs)
    return emit_call(tx, leaf_like, distributed, tensor)


def _from_local(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``DTensor.from_local``, which torch traces as one node; the default mesh is the current one."""
    given = args[1] if len(args) > 1 else kwargs.get("device_mesh")
    if given is None or given.is_constant_none():
        mesh = track_current_mesh(tx)
        args, kwargs = (
            ([args[0], mesh, *args[2:]], kwargs) if len(args) > 1 else (args, {**kwargs, "device_mesh": mesh})
        )
    if "run_check" in kwargs and constant_argument(kwargs["run_check"]):
        args, kwargs = checked_local_tensor(tx, args, kwargs)
    _check_placements(tx, args[2] if len(args) > 2 else kwargs.get("placements"))
    return stock.call_function(tx, args, kwargs)


def _check_placements(tx: Translator, placements: VariableTracker | None) -> None:
    """Raises in the program, with advice, where torch refuses placements that are partial with several kinds of
    reductions.
    """
    if placements is None or placements.is_constant_none():
        return
    try:
        check_commuting(real_argument(placements), "a DTensor")
    except PlacementError as error:
        raise_in_program(tx, error)
    except NotImplementedError:  # torch sees them at run time
        return


def _copy(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``copy.copy``, which looks up ``__copy__`` on the class."""
    if len(args) == 1 and isinstance(args[0].realize(), MemberVariable):
        return args[0].realize().call_method(tx, "__copy__", [], {})
    return stock.call_function(tx, args, kwargs)


# ---- the tables ----------------------------------------------------------------------------------------------------

#: Functions and classes whose calls are handled here.
OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    (DeviceMesh.from_group, handle_calls(trace_constructor)),
    (DeviceMesh._concatenate, handle_calls(trace_constructor)),
    (compute_local_shape_and_global_offset, handle_calls(_compute_sizes)),
    (DeviceMesh, handle_construction(trace_constructor)),
    (DTensor, handle_construction(_construct)),
    (DTensor.from_local, handle_calls(_from_local)),
    (distribute_tensor, handle_calls(_distribute)),
    (copy.copy, handle_calls(_copy)),
    (MESH_ENV, handle_methods(get_current_mesh=lambda tx, stock, args, kwargs: track_current_mesh(tx))),
)


def keep_leaves() -> AbstractContextManager[None]:
    """Context in which a leaf that `_distribute` creates does not leave the graph."""
    return keep_leaves_inside(leaf_like)
