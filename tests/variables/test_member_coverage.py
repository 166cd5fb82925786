"""Every public name of meshes, groups, works, placements, DTensors and ``torch.distributed`` has a row, and the row is
true.

The walk asks the installed torch for its names. The behaviour tests run an example of each row: values as in eager, and
one graph, or for a row that breaks exactly one break that names the cause of the row.
"""

from __future__ import annotations

import copy
import re
import textwrap
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_compile.causes import code_in
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from dtensor_compile.variables import torch_distributed_table as functions
from dtensor_compile.variables.device_mesh import DeviceMeshVariable
from dtensor_compile.variables.dtensor import MEMBERS as DTENSOR
from dtensor_compile.variables.member_rules import MemberRule, Row, Table, table
from dtensor_compile.variables.placement import PlacementVariable
from dtensor_compile.variables.process_group import ProcessGroupVariable
from dtensor_compile.variables.work_handles import FUTURE, WORK, CFuture

# ---- the walk ------------------------------------------------------------------------------------------------------

#: What Python asks of every class.
_OF_ANY_CLASS = frozenset(
    [
        "__init__",
        "__new__",
        "__module__",
        "__doc__",
        "__annotations__",
        "__dict__",
        "__slots__",
        "__weakref__",
        "__init_subclass__",
        "__subclasshook__",
        "__class__",
        "__dir__",
        "__reduce__",
        "__reduce_ex__",
        "__sizeof__",
        "__getattribute__",
        "__hash__",
        "__torch_dispatch__",
        "__torch_function__",
    ]
)
#: Of what a Python program calls, these are not: torch registers them as formulas of autograd.
_FORMULAS = re.compile(r"_(backward|setup_context)$")


def members(cls: type, beside: type = object) -> set[str]:
    """The public members of a class, and the special methods that it defines itself; without what `beside` has, too."""
    own = {name for name in vars(cls) if name.startswith("__") and name.endswith("__")}
    public = {name for name in dir(cls) if not name.startswith("_")}
    return (own | public) - set(dir(beside) if beside is not object else ()) - _OF_ANY_CLASS


def names(module: types.ModuleType) -> set[str]:
    """The public names of a module that stand for something of torch's."""
    listed = getattr(module, "__all__", None)
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names are names
        for name in listed if listed is not None else dir(module):
            thing = getattr(module, name)
            if name.startswith("_") or isinstance(thing, types.ModuleType) or _FORMULAS.search(name):
                continue
            home = getattr(thing, "__module__", None)
            if listed is not None or _belongs(module, thing, home):
                found.add(name)
    return found


def _belongs(module: types.ModuleType, thing: Any, home: str | None) -> bool:
    """Whether something in a module without ``__all__`` is part of it, and not imported for its own use."""
    if module is functions.functional_collectives:
        return home == module.__name__ and isinstance(thing, (types.FunctionType, type))
    return bool(home) and home.startswith(("torch.distributed", "torch._C._distributed_c10d"))


def without_row(found: set[str], rows: Table) -> list[str]:
    return sorted(found - set(rows))


CLASSES: Mapping[str, tuple[type, Table, type]] = {
    "DeviceMesh": (DeviceMesh, DeviceMeshVariable.members, object),
    "ProcessGroup": (dist.ProcessGroup, ProcessGroupVariable.members, object),
    "Work": (dist.Work, WORK, object),
    "Future": (CFuture, FUTURE, object),
    "Placement": (Placement, PlacementVariable.members, object),
    "Shard": (Shard, PlacementVariable.members, object),
    "Replicate": (Replicate, PlacementVariable.members, object),
    "Partial": (Partial, PlacementVariable.members, object),
    "_StridedShard": (_StridedShard, PlacementVariable.members, object),
    "DTensor": (DTensor, DTENSOR, torch.Tensor),
}


@pytest.mark.parametrize("name", CLASSES)
def test_each_member_has_a_row(name):
    cls, rows, beside = CLASSES[name]
    assert without_row(members(cls, beside), rows) == []


@pytest.mark.parametrize("module", functions.TABLES, ids=lambda module: module.__name__)
def test_each_name_of_a_module_has_a_row(module):
    assert without_row(names(module), functions.TABLES[module]) == []


def test_a_new_member_is_reported():
    class NewMesh(DeviceMesh):
        def rotate(self):
            """A method that no table knows."""

        def __len__(self):
            return 1

    assert without_row(members(NewMesh), DeviceMeshVariable.members) == ["__len__", "rotate"]
    assert "to_local" in members(DTensor, torch.Tensor) and "reshape" not in members(DTensor, torch.Tensor)


def test_a_new_function_is_reported():
    module = types.ModuleType("torch.distributed.new")
    module.all_reduce, module.all_swap = dist.all_reduce, lambda x: x
    module.all_swap.__module__ = "torch.distributed.new"
    module.helper, module._hidden = textwrap.dedent, dist.all_reduce
    assert without_row(names(module), functions.DISTRIBUTED) == ["all_swap"]


def test_a_row_that_breaks_needs_a_cause_that_exists():
    with pytest.raises(KeyError, match="no cause 'object-colective'; did you mean 'object-collective'"):
        table(breaks={"object-colective": "all_gather_object"})


def test_every_function_that_becomes_operators_has_a_polyfill():
    with pytest.raises(KeyError):
        functions.collective_calls.retrack(dist.get_rank)


# ---- what the rows say ---------------------------------------------------------------------------------------------

_NAMES = {
    "copy": copy,
    "dist": dist, "torch": torch, "tensor": tensor, "DeviceMesh": DeviceMesh, "DTensor": DTensor, "Partial": Partial,
    "Placement": Placement, "Replicate": Replicate, "Shard": Shard, "StridedShard": _StridedShard,
    "functional": functions.functional_collectives,
    "differentiable": torch.distributed.nn.functional, "parallel": torch.distributed.tensor.parallel,
    "experimental": torch.distributed.tensor.experimental, "debug": torch.distributed.tensor.debug,
    "_STRIDED": _StridedShard(0, split_factor=2),
    "_STYLE": torch.distributed.tensor.parallel.SequenceParallel(),
    "_INPUTS": {"input_layouts": Shard(0), "desired_input_layouts": Replicate()},
    "_OUTPUTS": {"output_layouts": Shard(0), "desired_output_layouts": Replicate()},
}  # fmt: skip


def program(example: str) -> Callable[..., Any]:
    """``statement; statement -> expression`` after a matrix product, and one more product after it."""
    *statements, expression = re.split(r" -> ", example)
    body = [line for part in statements for line in part.split("; ")]
    lines = ["y = x @ x", *body, f"result = {expression}", "return y @ y, result"]
    scope = dict(_NAMES)
    exec("def f(x, mesh, group, placement, d):\n" + textwrap.indent("\n".join(lines), "    "), scope)
    return scope["f"]


def arguments() -> tuple[Any, ...]:
    mesh = make_mesh((1, 2), ("dp", "tp"))
    x = torch.arange(16.0).reshape(4, 4) + dist.get_rank()
    d = DTensor.from_local(x.clone() + 1, mesh, [Replicate(), Shard(0)])
    return x, mesh, mesh.get_group("tp"), Shard(0), d


def check(example: str, row: Row) -> None:
    """Eager and compiled agree twice, and the graph breaks as the row says."""
    function = program(example)
    breaks = row.rule is MemberRule.BREAK
    torch.manual_seed(0)
    expected = function(*arguments())
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="dtensor_aten", fullgraph=not breaks)
    for call in range(2):
        torch.manual_seed(0)
        differences = compare_values(f"call {call}", expected, compiled(*arguments()))
        assert not differences, "\n".join(map(str, differences))
    texts = list(counters["graph_break"])
    assert [code_in(text) for text in texts] == ([row.cause] if breaks else []), texts
    if not breaks:
        assert counters["stats"]["unique_graphs"] == 1


def examples(text: str) -> dict[str, str]:
    """``name: example``, one a line."""
    return dict(re.split(r": ", line.strip(), maxsplit=1) for line in text.strip().splitlines())


_MESSAGES = "[dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, z, peer)]"
_OTHER = "peer = 1 - dist.get_rank()"
_HALVES = "o = torch.empty(2, 4)"
_DOUBLE = "o = torch.empty(8, 4)"
_LIST = "o = [torch.empty_like(x) for _ in range(2)]"
_PARTS = "[t.contiguous() for t in x.chunk(2)]"
_ON_0 = "if dist.get_rank() == 0"
_SUM = "z = x.clone(); w = dist.all_reduce(z, async_op=True); w.wait()"

EXAMPLES: Mapping[str, tuple[Table, dict[str, str]]] = {
    "DeviceMesh": (DeviceMeshVariable.members, examples("""
        device_type: mesh.device_type
        from_group: mesh.from_group(group, "cpu")
        get_all_groups: mesh.get_all_groups()
        get_coordinate: mesh.get_coordinate()
        get_group: mesh.get_group("tp")
        get_local_rank: mesh.get_local_rank(mesh_dim=1)
        get_rank: mesh.get_rank()
        mesh: mesh.mesh
        mesh_dim_names: mesh.mesh_dim_names
        ndim: mesh.ndim
        shape: mesh.shape
        size: (mesh.size(), mesh.size(0), mesh.size(-1))
        __getitem__: (mesh["tp"], mesh["dp", "tp"], mesh[("tp",)], mesh[["tp"]], mesh[()])
        __eq__: (mesh == mesh, mesh == 3, mesh["tp"] == mesh)
        __repr__: repr(mesh)
        __str__: str(mesh)
        __format__: f"{mesh}"
        __hash__: {mesh: 1}[mesh]
        __ne__: mesh != mesh["tp"]
        __copy__: copy.copy(mesh)
        __deepcopy__: copy.deepcopy([mesh])
        __dict__: vars(mesh) is None
        __setattr__: setattr(mesh, "scale", 2)
        __enter__: mesh.__enter__().ndim
        __exit__: mesh.__exit__(None, None, None)
        __getstate__: sorted(mesh.__getstate__())[0]
        __setstate__: mesh.__setstate__({})
        _flatten: mesh._flatten().size()
        _unflatten: mesh._unflatten(1, (1, 2), ("a", "b"))
        _concatenate: mesh._concatenate([mesh["dp"], mesh["tp"]])
    """)),
    "ProcessGroup": (ProcessGroupVariable.members, examples(f"""
        BackendType: group.BackendType.GLOO
        GLOO: group.GLOO
        CUSTOM: group.CUSTOM
        MPI: group.MPI
        NCCL: group.NCCL
        UCC: group.UCC
        UNDEFINED: group.UNDEFINED
        XCCL: group.XCCL
        bound_device_id: group.bound_device_id
        use_pg_for_symm_mem_rendezvous: group.use_pg_for_symm_mem_rendezvous
        group_desc: group.group_desc
        group_name: group.group_name
        name: group.name()
        rank: group.rank()
        size: group.size()
        allreduce: z = x.clone(); group.allreduce([z], dist.ReduceOp.MAX, timeout=None).wait() -> z
        allreduce_coalesced: z = x.clone(); group.allreduce_coalesced([z]).wait() -> z
        broadcast: z = x.clone(); group.broadcast(z, 0).wait() -> z
        reduce: z = x.clone(); group.reduce(z, 0).wait() -> z {_ON_0} else None
        allgather: {_LIST}; group.allgather([o], [x]).wait() -> o
        allgather_coalesced: {_LIST}; group.allgather_coalesced([[o[0]], [o[1]]], [x]).wait() -> o
        all_gather_single: {_DOUBLE}; group.all_gather_single(o, x).wait() -> o
        all_gather_single_coalesced: {_DOUBLE}; group.all_gather_single_coalesced([o], [x]).wait() -> o
        allgather_into_tensor_coalesced: {_DOUBLE}; group.allgather_into_tensor_coalesced([o], [x]).wait() -> o
        reduce_scatter: {_HALVES}; group.reduce_scatter(o, {_PARTS}).wait() -> o
        reduce_scatter_single: {_HALVES}; group.reduce_scatter_single(o, x).wait() -> o
        reduce_scatter_single_coalesced: {_HALVES}; group.reduce_scatter_single_coalesced([o], [x]).wait() -> o
        reduce_scatter_tensor_coalesced: {_HALVES}; group.reduce_scatter_tensor_coalesced([o], [x]).wait() -> o
        all_to_all_single: o = torch.empty(4, 4); group.all_to_all_single(o, x, [], []).wait() -> o
        alltoall_base: o = torch.empty(4, 4); group.alltoall_base(o, x, [], []).wait() -> o
        alltoall: o = [torch.empty(2, 4) for _ in range(2)]; group.alltoall(o, {_PARTS}).wait() -> o
        gather: {_LIST}; group.gather(o {_ON_0} else [], x, 0).wait() -> o {_ON_0} else None
        scatter: {_HALVES}; group.scatter(o, {_PARTS} {_ON_0} else [], 0).wait() -> o
        send: z = x.clone(); w = group.send([z], 1, 0) {_ON_0} else group.recv([z], 0, 0); w.wait() -> z
        recv: z = x.clone(); w = group.recv([z], 1, 3) {_ON_0} else group.send([z], 0, 3); w.wait() -> z
        barrier: group.barrier().wait()
        monitored_barrier: group.monitored_barrier()
        boxed: group.boxed() is None
        unbox: group.unbox(None) if x is None else group.boxed() is None
        get_group_store: group.get_group_store() is None
        __repr__: repr(group)
        __str__: str(group)
        __format__: f"{{group}}"
        __eq__: group == group
        __ne__: group != group
        __hash__: {{group: 1}}[group]
        set_timeout: group.set_timeout(dist.timedelta(seconds=120))
        supports_reconfigure: group.supports_reconfigure
        supports_window: group.supports_window
        supports_abort_hooks: group.supports_abort_hooks
        supports_completion_hooks: group.supports_completion_hooks
        get_backend: group.get_backend(x.device) is None
    """)),
    "Work": (WORK, examples(f"""
        wait: {_SUM} -> (z, w.wait(), w.wait(dist.timedelta(seconds=3)), isinstance(w, dist.Work), type(w) is dist.Work)
        is_completed: {_SUM} -> w.is_completed()
        is_success: {_SUM} -> w.is_success()
        exception: {_SUM} -> w.exception()
        synchronize: {_SUM} -> w.synchronize()
        result: {_SUM} -> w.result()
        source_rank: w = dist.isend(x, 1) {_ON_0} else dist.irecv(x, 0); w.wait() -> 0 {_ON_0} else w.source_rank()
        get_future: {_SUM} -> w.get_future().wait()
        boxed: {_SUM} -> w.boxed() is None
        unbox: {_SUM} -> w.unbox(w) is None if x is None else w.boxed() is None
    """)),
    "Future": (FUTURE, examples(f"""
        wait: {_SUM} -> (w.get_future().wait(), torch.futures.wait_all([w.get_future()]))
        value: {_SUM} -> w.get_future().value()
        done: {_SUM} -> w.get_future().done()
        then: {_SUM} -> w.get_future().then(lambda f: f.value()[0] + 1).wait()
        add_done_callback: {_SUM}; w.get_future().add_done_callback(lambda f: None) -> z
    """)),
    "Placement": (PlacementVariable.members, examples("""
        dim: (placement.dim, Shard(-1).dim, StridedShard(1, split_factor=2).dim)
        reduce_op: Partial("max").reduce_op
        split_factor: StridedShard(0, split_factor=2).split_factor
        is_shard: (placement.is_shard(), placement.is_shard(1), placement.is_shard(dim=0), Replicate().is_shard())
        is_partial: (placement.is_partial(), Partial().is_partial("sum"), Partial().is_partial("max"))
        is_replicate: (Replicate().is_replicate(), placement.is_replicate())
        ALL_REDUCE_OPS: Partial.ALL_REDUCE_OPS
        LINEAR_REDUCE_OPS: Partial().LINEAR_REDUCE_OPS
        local_shard_size_and_offset: [s.local_shard_size_and_offset(8, 2, 1) for s in (placement, Shard, _STRIDED)]
        __eq__: (placement == Shard(0), placement != Shard(1), placement == 3)
        __repr__: repr(placement)
        __str__: str(placement)
        __fx_repr__: placement.__fx_repr__()
        __format__: f"{placement}"
        __hash__: {placement: 1}[Shard(0)]
        __ne__: placement != Shard(1)
        __copy__: copy.copy(placement)
        __dict__: vars(placement)
    """)),
    "DTensor": (DTENSOR, examples("""
        from_local: DTensor.from_local(x, mesh, [Replicate(), Shard(0)])
        to_local: d.to_local()
        full_tensor: (d + 1).full_tensor()
        redistribute: d.redistribute(placements=[Replicate(), Shard(1)])
        device_mesh: d.device_mesh
        placements: (d.placements, (d + 1).placements)
        __get_tensor_shard__: d.__get_tensor_shard__(None)
        __create_chunk_list__: len(d.__create_chunk_list__())
        __create_write_items__: len(d.__create_write_items__("a", d))
        __tensor_flatten__: d.__tensor_flatten__()[0]
    """)),
    "torch.distributed": (functions.DISTRIBUTED, examples(f"""
        all_reduce: z = x.clone(); dist.all_reduce(z, dist.ReduceOp(dist.ReduceOp.MIN), group) -> z
        all_reduce_coalesced: z = x.clone(); dist.all_reduce_coalesced([z]) -> z
        broadcast: z = x.clone(); dist.broadcast(z, 0) -> z
        reduce: z = x.clone(); dist.reduce(z, 0) -> z {_ON_0} else None
        all_gather: {_LIST}; dist.all_gather(o, x) -> o
        all_gather_coalesced: {_LIST}; dist.all_gather_coalesced([[o[0]], [o[1]]], [x]) -> o
        all_gather_into_tensor: {_DOUBLE}; dist.all_gather_into_tensor(o, x) -> o
        all_gather_single: {_DOUBLE}; dist.all_gather_single(o, x) -> o
        gather: {_LIST}; dist.gather(x, o {_ON_0} else None) -> o {_ON_0} else None
        scatter: {_HALVES}; dist.scatter(o, {_PARTS} {_ON_0} else None) -> o
        reduce_scatter: {_HALVES}; dist.reduce_scatter(o, {_PARTS}) -> o
        reduce_scatter_tensor: {_HALVES}; dist.reduce_scatter_tensor(o, x) -> o
        reduce_scatter_single: {_HALVES}; dist.reduce_scatter_single(o, x) -> o
        all_to_all_single: o = torch.empty(4, 4); dist.all_to_all_single(o, x) -> o
        all_to_all: o = [torch.empty(2, 4) for _ in range(2)]; dist.all_to_all(o, {_PARTS}) -> o
        barrier: dist.barrier()
        send: z = x.clone(); w = dist.send(z, 1) {_ON_0} else dist.recv(z, 0) -> z
        recv: z = x.clone(); w = dist.recv(z, 1) {_ON_0} else dist.send(z, 0) -> z
        isend: z = x.clone(); w = dist.isend(z, 1) {_ON_0} else dist.irecv(z, 0); w.wait() -> z
        irecv: z = x.clone(); w = dist.irecv(z, 1) {_ON_0} else dist.isend(z, 0); w.wait() -> z
        P2POp: {_OTHER}; p = dist.P2POp(dist.isend, x, peer) -> (p.peer, p.tag)
        batch_isend_irecv: {_OTHER}; z = x.clone(); p = {_MESSAGES}; w = dist.batch_isend_irecv(p); \
[i.wait() for i in w] -> z
        init_device_mesh: dist.init_device_mesh("cpu", (2,))
        new_group: dist.new_group([0, 1]).size()
        new_subgroups: dist.new_subgroups(1)[0].size()
        new_subgroups_by_enumeration: dist.new_subgroups_by_enumeration([[0], [1]])[0].size()
        get_debug_level: dist.get_debug_level() == dist.DebugLevel.OFF
        timedelta: dist.timedelta(seconds=3)
        GroupName: dist.GroupName("name")
        ReduceOp: r = dist.ReduceOp -> (r.SUM, r(r.MAX), r.SUM == r.MAX, r.SUM.name)
        BackendConfig: str(dist.BackendConfig(dist.Backend("gloo")))
        DeviceMesh: dist.DeviceMesh("cpu", [0, 1])
        ProcessGroup: (isinstance(group, dist.ProcessGroup), dist.ProcessGroup.size(group))
        Work: isinstance(x, dist.Work)
        group: dist.group.WORLD.size()
        GroupMember: dist.GroupMember.NON_GROUP_MEMBER == group
        Backend: (dist.Backend("gloo"), dist.Backend.NCCL, dist.Backend.backend_list)
        reduce_op: dist.reduce_op.SUM
        default_pg_timeout: dist.default_pg_timeout
        record_comm: c = dist.record_comm("name"); c.__enter__(); c.__exit__(None, None, None) -> 0
        DebugLevel: dist.DebugLevel.INFO
        BuiltinCommHookType: dist.BuiltinCommHookType.ALLREDUCE
        DistError: str(dist.DistError("text"))
        DistBackendError: str(dist.DistBackendError("text"))
        DistNetworkError: str(dist.DistNetworkError("text"))
        DistStoreError: str(dist.DistStoreError("text"))
        QueueEmptyError: str(dist.QueueEmptyError("text"))
        RankType: dist.RankType is None
        log: dist.log.name
        get_rank: (dist.get_rank(), dist.get_rank(group))
        get_world_size: (dist.get_world_size(), dist.get_world_size(group))
        get_backend: (dist.get_backend(), dist.get_backend(group))
        get_backend_config: dist.get_backend_config()
        get_default_backend_for_device: dist.get_default_backend_for_device(x.device)
        get_global_rank: dist.get_global_rank(group, 1)
        get_group_rank: dist.get_group_rank(group, 1)
        get_node_local_rank: dist.get_node_local_rank()
        get_pg_count: dist.get_pg_count()
        get_process_group_ranks: dist.get_process_group_ranks(group)
        supports_complex: dist.supports_complex(dist.ReduceOp.SUM)
        is_available: dist.is_available()
        is_initialized: dist.is_initialized()
        is_backend_available: dist.is_backend_available("gloo")
        is_gloo_available: dist.is_gloo_available()
        is_mpi_available: dist.is_mpi_available()
        is_nccl_available: dist.is_nccl_available()
        is_ucc_available: dist.is_ucc_available()
        is_xccl_available: dist.is_xccl_available()
        is_torchelastic_launched: dist.is_torchelastic_launched()
        all_gather_object: {_LIST}; dist.all_gather_object(o, 3) -> o
        gather_object: {_LIST}; dist.gather_object(3, o {_ON_0} else None) -> o {_ON_0} else None
        scatter_object_list: o = [None]; dist.scatter_object_list(o, [1, 2] {_ON_0} else None) -> o
        broadcast_object_list: o = [dist.get_rank()]; dist.broadcast_object_list(o) -> o
        send_object_list: o = [3]; w = dist.send_object_list(o, 1) {_ON_0} else dist.recv_object_list(o, 0) -> o
        recv_object_list: o = [3]; w = dist.recv_object_list(o, 1) {_ON_0} else dist.send_object_list(o, 0) -> o
        monitored_barrier: dist.monitored_barrier()
        set_debug_level: dist.set_debug_level(dist.DebugLevel.OFF)
        set_debug_level_from_env: dist.set_debug_level_from_env()
        set_timeout: dist.set_timeout(dist.timedelta(seconds=120))
        get_backend_impl: dist.get_backend_impl(group) is None
        HashStore: dist.HashStore() is None
        AllreduceOptions: dist.AllreduceOptions() is None
        AllreduceCoalescedOptions: dist.AllreduceCoalescedOptions() is None
        AllToAllOptions: dist.AllToAllOptions() is None
        BarrierOptions: dist.BarrierOptions() is None
        BroadcastOptions: dist.BroadcastOptions() is None
        GatherOptions: dist.GatherOptions() is None
        ReduceOptions: dist.ReduceOptions() is None
        ReduceScatterOptions: dist.ReduceScatterOptions() is None
        ScatterOptions: dist.ScatterOptions() is None
    """)),
    "torch.distributed.nn.functional": (functions.DIFFERENTIABLE, examples(f"""
        all_reduce: differentiable.all_reduce(x)
        all_gather: differentiable.all_gather(x)
        all_to_all: differentiable.all_to_all([torch.empty(2, 4) for _ in range(2)], {_PARTS})
        all_to_all_single: differentiable.all_to_all_single(torch.empty(4, 4), x)
        broadcast: differentiable.broadcast(x, 0)
        gather: differentiable.gather(x)
        reduce: differentiable.reduce(x, 0) {_ON_0} else differentiable.reduce(x, 0) * 0
        reduce_scatter: differentiable.reduce_scatter(torch.empty(2, 4), {_PARTS})
        scatter: differentiable.scatter({_PARTS}, 0)
    """)),
    "torch.distributed._functional_collectives": (functions.FUNCTIONAL, examples("""
        all_reduce: functional.all_reduce(x, "sum", group) + 0
        all_reduce_coalesced: functional.all_reduce_coalesced([x, x], "sum", group)[1] + 0
        all_reduce_inplace: z = x.clone(); functional.all_reduce_inplace(z, "sum", group) -> z
        broadcast: functional.broadcast(x, 0, group) + 0
        wait_tensors: functional.wait_tensors([functional.all_reduce(x, "sum", (mesh, 1))])[0] + 0
        wait_tensor: functional.wait_tensor(functional.all_reduce(x, "sum", (mesh, 1))) + 0
        permute_tensor: functional.permute_tensor(x[0], [1, 0], group) + 0
        all_gather_tensor: functional.all_gather_tensor(x, 1, group) + 0
        all_gather_tensor_autograd: functional.all_gather_tensor_autograd(x, 1, group) + 0
        all_gather_tensor_inplace: z = torch.empty(8, 4); functional.all_gather_tensor_inplace(z, x, group) -> z
        all_gather_inplace: o = [torch.empty_like(x), torch.empty_like(x)]; functional.all_gather_inplace(o, x) -> o
        all_gather_into_tensor_coalesced: functional.all_gather_into_tensor_coalesced([x], group)[0] + 0
        all_gather_single: functional.all_gather_single(x, 0, group) + 0
        all_gather_single_autograd: functional.all_gather_single_autograd(x, 0, group) + 0
        all_gather_single_coalesced: functional.all_gather_single_coalesced([x], group)[0] + 0
        reduce_scatter_tensor: functional.reduce_scatter_tensor(x, "sum", 0, group) + 0
        reduce_scatter_tensor_autograd: functional.reduce_scatter_tensor_autograd(x, "sum", 1, group) + 0
        reduce_scatter_tensor_inplace: z = torch.empty(2, 4); \
functional.reduce_scatter_tensor_inplace(z, x, "sum", group) -> z
        reduce_scatter_tensor_coalesced: functional.reduce_scatter_tensor_coalesced([x], "sum", [0], group)[0] + 0
        reduce_scatter_single: functional.reduce_scatter_single(x, "sum", 0, group) + 0
        reduce_scatter_single_autograd: functional.reduce_scatter_single_autograd(x, "sum", 0, group) + 0
        reduce_scatter_single_coalesced: functional.reduce_scatter_single_coalesced([x], "sum", [0], group)[0] + 0
        reduce_scatter_inplace: o = torch.empty(2, 4); \
functional.reduce_scatter_inplace(o, [x[:2], x[2:]], "sum", group) -> o
        all_to_all_single: functional.all_to_all_single(x, [2, 2], [2, 2], group) + 0
        all_to_all_single_autograd: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], group) + 0
        all_to_all_inplace: z = torch.empty(4, 4); functional.all_to_all_inplace(z, x, None, None, group) -> z
        AsyncCollectiveTensor: isinstance(x, functional.AsyncCollectiveTensor)
    """)),
    "torch.distributed.tensor": (functions.TENSOR, examples("""
        DTensor: isinstance(d, DTensor)
        Placement: isinstance(placement, Placement)
        Shard: Shard(0)
        Replicate: Replicate()
        Partial: (Partial("avg"), Partial.is_partial(Partial(), "sum"))
        distribute_tensor: tensor.distribute_tensor(x, mesh, [Replicate(), Shard(0)])
        ones: tensor.ones(4, 4, device_mesh=mesh, placements=[Replicate(), Shard(0)])
        zeros: tensor.zeros(4, 4, device_mesh=mesh, placements=[Replicate(), Shard(0)])
        full: tensor.full((4, 4), 2.0, device_mesh=mesh, placements=[Replicate(), Shard(0)])
        linspace: tensor.linspace(0.0, 1.0, 8, device_mesh=mesh, placements=[Replicate(), Shard(0)])
        logspace: tensor.logspace(0.0, 1.0, 8, device_mesh=mesh, placements=[Replicate(), Shard(0)])
        empty: tensor.empty(4, 4, device_mesh=mesh, placements=[Replicate(), Shard(0)]).shape
        distribute_module: m = tensor.distribute_module(torch.nn.Identity(), mesh) -> m(d)
    """)),
    "torch.distributed.tensor.parallel": (functions.PARALLEL, examples("""
        ParallelStyle: isinstance(x, parallel.ParallelStyle)
        ColwiseParallel: parallel.ColwiseParallel().use_local_output
        RowwiseParallel: parallel.RowwiseParallel().input_layouts
        SequenceParallel: parallel.SequenceParallel().use_local_output
        PrepareModuleInput: parallel.PrepareModuleInput(**_INPUTS).input_layouts
        PrepareModuleOutput: parallel.PrepareModuleOutput(**_OUTPUTS).output_layouts
        PrepareModuleInputOutput: parallel.PrepareModuleInputOutput(**_INPUTS, **_OUTPUTS) is None
        parallelize_module: m = torch.nn.Identity() -> parallel.parallelize_module(m, mesh["tp"], _STYLE) is None
    """)),
    "torch.distributed.tensor.experimental": (functions.EXPERIMENTAL, examples("""
        local_map: p = [Replicate(), Shard(0)] -> experimental.local_map(lambda a: a * 2, p, (p,))(d)
        register_sharding: experimental.register_sharding(torch.ops.aten._log_softmax.default) is None
    """)),
    "torch.distributed.tensor.debug": (functions.DEBUG, examples("""
        CommDebugMode: debug.CommDebugMode().get_total_counts()
    """)),
}  # fmt: skip


#: Names that only the newest of the supported releases have: nothing is asked of them in the others.
NEWER = frozenset(
    [
        "supports_reconfigure",
        "supports_window",
        "supports_abort_hooks",
        "supports_completion_hooks",
        "wait_tensors",
        "get_backend",
        "set_timeout",
        "get_backend_impl",
        "reduce_scatter_inplace",
        "linspace",
        "logspace",
    ]
)
_HOMES = {name: cls for name, (cls, *_) in CLASSES.items()} | {module.__name__: module for module in functions.TABLES}


def there(kind: str, name: str) -> bool:
    """Whether the installed torch has what an example calls."""
    return name not in NEWER or hasattr(_HOMES[kind], name)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, texts) in EXAMPLES.items() for name in texts if there(kind, name)]
)
@on_ranks(2)
def test_row(kind, name):
    rows, texts = EXAMPLES[kind]
    check(texts[name], rows[name])


#: Rows without an example of their own, and why.
WITHOUT_EXAMPLE = {
    "an error on gloo, as in eager": "gather_single gather_into_tensor new_window",
    "changes the group for good": """
        reconfigure get_reconfigure_handle register_abort_hook register_post_hook register_pre_hook
        unregister_abort_hook unregister_post_hook unregister_pre_hook
    """,
    "tested as a context": """
        record_comm loss_parallel implicit_replication allow_inflight_collective_as_graph_input_ctx
    """,
    "ends or splits groups of the job that runs the tests, or needs NCCL": """
        abort shutdown merge_remote_group split_group shrink_group init_process_group
    """,
    "Python's deepcopy asks for identities: another placement, another graph": "__deepcopy__",
    "tested below": "destroy_process_group __setattr__ __delattr__ recv_anysource timeout",
    "raises on a CPU, as in eager": "block_current_stream get_future_result isend_inplace irecv_inplace "
    "batch_p2p_ops_inplace",
    "starts servers or files, or needs what a reducer makes": """
        Store FileStore PrefixStore TCPStore rendezvous ProcessGroupGloo ProcessGroupNCCL ProcessGroupNCCL2
        ProcessGroupNCCLLazy Reducer Logger GradBucket
    """,
    "changes the process for good, or stops it": "register_rendezvous_handler breakpoint context_parallel "
    "visualize_sharding",
    "draws random numbers, which eager refuses without a seed": "rand randn",
    "one kind with a row above": "set_result set_exception __getstate__ __setstate__ Function ReduceOp group",
    "called by autograd and torch.compile only": """
        __coerce_tangent_metadata__ __coerce_same_metadata_as_tangent__ __slots__ __tensor_unflatten__ __dict__
    """,
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_each_row_has_an_example_or_a_reason(kind):
    rows, texts = EXAMPLES[kind]
    public = {name for name in rows if not name.startswith("_") or name.startswith("__")}
    reasons = {name for names_ in WITHOUT_EXAMPLE.values() for name in names_.split()}
    assert public - set(texts) - reasons == set()
    assert set(texts) <= set(rows)


@on_ranks(2)
def test_a_group_that_the_program_ends():
    def program(x, group):
        y = x @ x
        dist.destroy_process_group(group)
        return y @ y

    x = torch.eye(3)
    compiled = torch.compile(program, backend="dtensor_aten")
    for _ in range(2):
        group = dist.new_group([0, 1])
        dist.barrier()  # else a rank ends the group while the other one still connects
        counters.clear()
        assert torch.equal(compiled(x, group), x)
        assert {code_in(text) for text in counters["graph_break"]} <= {"group-lifetime"}
        assert group not in dist.distributed_c10d._world.pg_map


@pytest.mark.skipif(not hasattr(dist.Work, "timeout"), reason="works of this torch show no timeout")
@on_ranks(2)
def test_the_timeout_of_a_work():
    """A work of a compiled call is complete and knows none: the graph breaks, and the program has the error of such
    backends.
    """

    def program(x):
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return work.timeout

    counters.clear()
    with pytest.raises(RuntimeError, match="doesn't support getTimeout"):
        torch.compile(program, backend="dtensor_aten")(torch.ones(2))
    assert {code_in(text) for text in counters["unimplemented"]} == {"raw-object"}


@on_ranks(2)
def test_a_message_from_any_rank():
    def program(x, group):
        y = x @ x
        work = group.send([y], 1, 0) if dist.get_rank() == 0 else group.recv_anysource([y], 0)
        work.wait()
        return y @ x

    x = torch.eye(3) * (1 + dist.get_rank())
    assert torch.equal(
        torch.compile(program, backend="dtensor_aten")(x, dist.group.WORLD), torch.eye(3) * (1 + dist.get_rank())
    )


@on_ranks(2)
def test_a_work_lives_across_a_graph_break():
    def program(x):
        y = x @ x
        work = dist.all_reduce(y, async_op=True)
        torch._dynamo.graph_break()
        work.wait()
        return y, isinstance(work, dist.Work), work.result()[0] + 1

    x = torch.ones(2, 2)
    counters.clear()
    assert not compare_values("result", program(x), torch.compile(program, backend="dtensor_aten")(x))
    assert len(counters["graph_break"]) == 1


@on_ranks(2)
def test_a_setting_that_changes_is_asked_again():
    compiled = torch.compile(lambda x: (x + 1, dist.get_debug_level()), backend="dtensor_aten", fullgraph=True)
    try:
        for level in (dist.DebugLevel.OFF, dist.DebugLevel.INFO):
            dist.set_debug_level(level)
            assert compiled(torch.ones(2))[1] == level
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


CONTEXTS = {
    "record_comm": "with dist.record_comm('name'):\n    result = x + 1",
    "allow_inflight": (
        "with functional.allow_inflight_collective_as_graph_input_ctx():\n"
        "    result = functional.all_reduce(x, 'sum', group) + 0"
    ),
    "implicit_replication": "with experimental.implicit_replication():\n    result = (d + torch.ones(8, 4)) * d",
    "loss_parallel": (
        "with parallel.loss_parallel():\n    logits = DTensor.from_local(x, mesh['tp'], [Shard(1)])\n"
        "    result = torch.nn.functional.cross_entropy(logits, torch.arange(4), reduction='sum').full_tensor()"
    ),
    "mesh": "with mesh:\n    result = tensor.ones(4, 4)",
}  # fmt: skip


def _context_program(body: str) -> Callable[..., Any]:
    scope = dict(_NAMES)
    exec("def f(x, mesh, group, placement, d):\n" + textwrap.indent(body + "\nreturn x @ x, result", "    "), scope)
    return scope["f"]


@pytest.mark.parametrize("name", CONTEXTS)
@on_ranks(2)
def test_context(name):
    function = _context_program(CONTEXTS[name])
    compiled = torch.compile(function, backend="dtensor_aten", fullgraph=True)
    for _ in range(2):
        assert not compare_values(name, function(*arguments()), compiled(*arguments()))
    assert not torch._C._get_dtensor_allow_implicit_replication()


BACKWARD_INSIDE = {
    "implicit_replication": (
        "with experimental.implicit_replication():\n"
        "    loss = (e @ torch.ones(4, 3)).sum() + (e * torch.full((8, 4), 2.0)).sum()\n"
        "    (gradient,) = torch.autograd.grad(loss, [e])"
    ),
    "loss_parallel": (
        "with parallel.loss_parallel():\n    logits = DTensor.from_local(e.to_local(), mesh['tp'], [Shard(1)])\n"
        "    loss = torch.nn.functional.cross_entropy(logits, torch.arange(4))\n"
        "    (gradient,) = torch.autograd.grad(loss, [logits])"
    ),
}


@pytest.mark.parametrize("name", BACKWARD_INSIDE)
@on_ranks(2)
def test_backward_inside_a_context(name):
    body = "e = d * 2\n" + BACKWARD_INSIDE[name] + "\nresult = loss.full_tensor().detach(), gradient.to_local()"
    function = _context_program(body)
    compiled = torch.compile(function, backend="dtensor_aten", fullgraph=True)

    def run(call):
        x, mesh, group, placement, d = arguments()
        return call(x, mesh, group, placement, d.detach().requires_grad_())

    for _ in range(2):
        assert not compare_values(name, run(function), run(compiled))
