"""Keys of torch's caches of compiled graphs that are equal in every process, and the guards of cached graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import GlobalSource
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.distributed.device_meshes import mesh_dims, rank_map
from dtensor_compile.compat.dynamo.trackers.tracker_tools import kind_of_constant
from dtensor_compile.compat.patches import feature, hook, needs, patch
from dtensor_compile.compat.pytree import tensor_and_inner

_REDUCE = patch("torch._inductor.codecache:FxGraphCachePickler._reduce_fake_script_object", "self t")
_INIT = patch("torch._inductor.codecache:FxGraphCachePickler.__init__", "self gm ...")
_SYMINTS = patch("torch._inductor.codecache:GuardedCache._filter_backed_symints", "cls inputs")


@needs(
    "graphs cached across processes",
    _REDUCE,
    _INIT,
    without="programs with a mesh are recompiled in each process",
    upstream="#183999, #173526",
    remove_when="FxGraphCachePickler reduces a mesh, and a memory format, to a value that is the same in every process",
)
@contextlib.contextmanager
def keys_of_any_process() -> Iterator[None]:
    """While active, cache keys identify a device mesh by its layout, a memory format by its name, and an object that
    tracing made by its kind.

    torch pickles the mesh, including Python's hash of its names, which differs between processes: no program with a
    mesh among its inputs would ever be found. For a memory format, ``pickle`` takes the first module that has a name
    ``torch``: in a process that `multiprocessing` spawns, ``__mp_main__``. Objects of tracing are globals that are
    named by their addresses; the key has the objects themselves where the graph takes them.
    """
    from torch._inductor.codecache import FxGraphCachePickler, _ident

    def reduce(stock: Any, self: FxGraphCachePickler, value: FakeScriptObject) -> tuple[Any, ...]:
        mesh = value.real_obj
        if not isinstance(mesh, DeviceMesh):
            return stock(self, value)
        layout = (mesh.device_type, mesh.mesh_dim_names, mesh_dims(mesh), rank_map(mesh))
        return _ident, ((value.script_class_name, repr(layout)),)

    def init(stock: Any, self: FxGraphCachePickler, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        table: Any = self.dispatch_table
        table.update({torch.memory_format: lambda value: (_ident, (str(value),)), GlobalSource: _reduce_global})

    with patched(_REDUCE, reduce), patched(_INIT, init):
        yield


def _reduce_global(source: GlobalSource) -> tuple[Any, ...]:
    from torch._inductor.codecache import _ident

    name = source.global_name
    return _ident, (f"global {kind_of_constant(name) or name}",)


#: If it does not work, no graph is cached: a program of other sizes could find it.
GUARDS_LOCAL_SIZES = feature(
    "graphs over dynamic local sizes in caches",
    _SYMINTS,
    hook("torch.fx.experimental.symbolic_shapes:ShapeEnv.create_symintnode", "self sym hint ..."),
    without="graphs are recompiled in each process",
    upstream="#127970, #128045",
    remove_when="_filter_backed_symints and get_pruned_guards look into sizes of tensors and of what subclasses hold",
)


@contextlib.contextmanager
def guards_of_local_sizes() -> Iterator[None]:
    """While active, caches that this thread uses guard graphs on every symbol of their inputs.

    torch guards on the SymInts among the inputs, assuming that each symbol is one of them. For a DTensor, the global
    size is an input, and may be an expression (``2*s3``) of a symbol that only occurs in the local size: guards on
    ``s3`` are then omitted, and guards on such an expression refer to the source where Dynamo found ``s3`` and cannot
    be evaluated.
    """
    if not GUARDS_LOCAL_SIZES.works():
        yield
        return
    from torch._inductor.codecache import GuardedCache

    def backed_symints(stock: Any, cls: type[GuardedCache[Any]], inputs: Sequence[Any]) -> list[torch.SymInt]:
        found = stock(cls, inputs)
        return [*found, *_left_out(found, inputs)]

    with patched(_SYMINTS, backed_symints):
        yield


def _left_out(found: Sequence[torch.SymInt], inputs: Sequence[Any]) -> list[torch.SymInt]:
    """A SymInt for each backed symbol of `inputs` that is missing in `found`, in an order that is equal in every
    process."""
    envs = {
        id(size.node.shape_env): size.node.shape_env
        for value in inputs
        for size in _sizes(value)
        if isinstance(size, torch.SymInt)
    }
    symbols: set[sympy.Symbol] = set().union(*(free_symbols(size) for value in inputs for size in _sizes(value)))
    missing = symbols - {size.node.expr for size in found}
    return [
        env.create_symintnode(symbol, hint=int(env.backed_var_to_val[symbol]))
        for env in envs.values()
        for symbol in sorted(missing, key=str)
        if symbol in env.backed_var_to_val
    ]


def local_layouts(graph: torch.fx.Graph) -> tuple[tuple[str, ...], ...]:
    """Sizes and strides, and bits of conjugation and negation, of each input of a Dynamo graph that is a tensor
    subclass and of its inner tensors; for keys. Offsets are left out, as in torch's keys: a rank's local tensor may be
    its part of one that all ranks have.

    torch's key of a DTensor has its spec alone. A local tensor may have other sizes than the spec says, be transposed
    or conjugated; and a symbolic local size that equals another size of the call by chance has the symbol of that one,
    for which a cached graph has no guard. A call where that differs must not find the graph.
    """
    values = (node.meta.get("example_value") for node in graph.find_nodes(op="placeholder"))
    return tuple(
        tuple(_layout(tensor) for tensor in tensor_and_inner(value))
        for value in values
        if is_traceable_wrapper_subclass(value)
    )


def _layout(tensor: torch.Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return f"{tuple(tensor.size())} {strides} {tensor.is_conj()} {tensor.is_neg()}"


def _sizes(value: Any) -> Iterable[Any]:
    """The value itself if it is a SymInt; sizes, strides and offset of a tensor and its inner tensors."""
    if isinstance(value, torch.SymInt):
        yield value
    for tensor in tensor_and_inner(value):
        if tensor.layout is torch.strided:
            yield from (*tensor.size(), *tensor.stride(), tensor.storage_offset())
