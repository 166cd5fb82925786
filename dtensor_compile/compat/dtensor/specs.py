"""Specs, placements without a public name, and the function through which every redistribution goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from dtensor_compile.compat.apply_patches import Place, patched, this_place
from dtensor_compile.compat.patches import needs, patch
from dtensor_compile.native.loader import native

StridedShard = _StridedShard
MaskPartial = _MaskPartial
Spec = DTensorSpec

stock_redistribute_local = _redistribute.redistribute_local_tensor

RedistributeHook = Callable[[torch.Tensor, DTensorSpec, DTensorSpec, Callable[[], torch.Tensor]], torch.Tensor]
#: Takes local tensors, their specs, and the target specs; returns the local tensors in these.
RedistributeSeveral = Callable[
    [Sequence[torch.Tensor], Sequence[DTensorSpec], Sequence[DTensorSpec]], Sequence[torch.Tensor]
]


@contextlib.contextmanager
def min_cost_plans() -> Iterator[None]:
    """While active, torch plans redistributions by cost instead of greedily, in this process."""
    _redistribute._gen_transform_infos.cache_clear()
    try:
        with _redistribute.use_min_cost_redistribution_plan():
            yield
    finally:
        _redistribute._gen_transform_infos.cache_clear()


def make_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """A spec for a contiguous global tensor of `shape`."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * shape[i + 1]
    return DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), tuple(stride), dtype))


#: Field of a spec, as of 2.12, that says whether strided shards stand for an order of mesh dims; views make others.
_IS_ORDER = "use_strided_shard_as_shard_order"


def spec_as_of_views(mesh: DeviceMesh, placements: Sequence[Placement], meta: TensorMeta) -> Spec:
    """A spec whose strided shards are those of a view: cut as they are, and not for an order of mesh dims."""
    strided = any(isinstance(placement, StridedShard) for placement in placements)
    settings: dict[str, Any] = {_IS_ORDER: False} if strided and _IS_ORDER in Spec.__dataclass_fields__ else {}
    return Spec(mesh, tuple(placements), meta, **settings)


def meta_of(spec: Spec) -> TensorMeta:
    """The tensor metadata (sizes, strides, dtype) of a spec that has it."""
    assert spec.tensor_meta is not None
    return spec.tensor_meta


def redistribute_local(local: torch.Tensor, source: Spec, target: Spec) -> torch.Tensor:
    """The local tensor in the target spec, by the function that `redistribute_hook` replaces."""
    return _redistribute.redistribute_local_tensor(local, source, target)


#: The functions of the open scopes of `redistribute_hook` for several tensors, by place, as for functions of torch.
_several: dict[Place, list[RedistributeSeveral]] = {}


def redistribute_locals(
    locals_: Sequence[torch.Tensor], sources: Sequence[Spec], targets: Sequence[Spec]
) -> list[torch.Tensor]:
    """Local tensors in the target specs, at once where `redistribute_hook` is active."""
    if open_ := _several.get(this_place()):
        return list(open_[-1](locals_, sources, targets))
    return [redistribute_local(*each) for each in zip(locals_, sources, targets, strict=True)]


def local_and_spec(tensor: DTensor) -> tuple[torch.Tensor, Spec]:
    """The local tensor and spec of a DTensor, without autograd history."""
    return tensor._local_tensor, tensor._spec


def with_local(local: torch.Tensor, spec: Spec) -> DTensor:
    """The DTensor of a local tensor and spec, without autograd history."""
    return DTensor(local, spec, requires_grad=False)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy with memory of its own and the same placements (``clone`` would reduce partial sums)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    with torch.no_grad():
        return with_local(tensor._local_tensor.clone(), tensor._spec)


def is_traced(local: torch.Tensor) -> bool:
    """Whether a local tensor has no values, because it is being traced."""
    return isinstance(local, (FakeTensor, FunctionalTensor))


def canonical_placements(spec: Spec) -> tuple[Placement, ...]:
    """The placements of a spec, with a shard order other than left to right written as strided shards."""
    if any(isinstance(p, _StridedShard) for p in spec.placements):
        return tuple(spec.placements)
    default = DTensorSpec.compute_default_shard_order(spec.placements)
    if spec.shard_order is None or tuple(spec.shard_order) == tuple(default):
        return tuple(spec.placements)
    return DTensorSpec._convert_shard_order_to_StridedShard(spec.shard_order, tuple(spec.placements), spec.mesh)


def spec_of_parts(
    placements: tuple[Placement, ...],
    dtype: torch.dtype,
    order: Any,
    mesh: DeviceMesh,
    shape: Sequence[int],
    stride: tuple[int, ...],
) -> DTensorSpec:
    """The spec made of parts that AOTAutograd flattened; `order` is its shard order."""
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    ordered = None if order is None else False  # the order must not be encoded in strided shards as well
    return DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order, use_strided_shard_as_shard_order=ordered)


def apply_mask(placement: MaskPartial, local: torch.Tensor) -> torch.Tensor:
    """The local partial sum of a row-wise embedding: rows that this rank does not hold become zero.

    Releases the mask that the lookup left in the placement, as torch does when it reduces. Functional: `local` is not
    written, because the graph may still need its values.

    Raises:
        AssertionError: the lookup has not made the mask yet.
    """
    buffer = placement.mask_buffer
    mask = buffer.data
    if mask is None:
        raise AssertionError("a masked partial placement is reduced before its lookup made the mask")
    buffer.release_mask()
    if isinstance(mask, FunctionalTensor) and not isinstance(local, FunctionalTensor):
        mask = torch._from_functional_tensor(mask.elem)  # AOTAutograd guesses a tangent after it has traced the forward
    if mask.ndim < local.ndim:
        mask = mask.unsqueeze(-1)
    return torch.where(mask, torch.zeros((), dtype=local.dtype, device=local.device), local)


class Memory(NamedTuple):
    """The bytes of a tensor: its storage, start and end offset in bytes, and whether a wrapper (a DTensor) holds the
    tensor."""

    storage: int
    start: int
    end: int
    held: bool


def storage_of(tensor: torch.Tensor) -> int:
    """An identifier of the storage of a tensor, real or fake, valid while the storage lives."""
    return tensor.untyped_storage()._cdata


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """The memory of a tensor, of the local tensor of a DTensor, or of the result of a collective; None without a
    storage."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local = local.elem if isinstance(local, AsyncCollectiveTensor) else local
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
        return None
    # An empty shard counts as one element, so that aliasing is the same on all ranks.
    last = sum(max(size - 1, 0) * stride for size, stride in zip(local.shape, local.stride()))
    start = cast("int", local.storage_offset()) * local.itemsize  # may be symbolic, as sizes are
    return Memory(storage_of(local), start, start + (last + 1) * local.itemsize, local is not tensor)


def in_storages_of_their_own(values: tuple[Any, ...]) -> bool:
    """Whether all `values` are known to have distinct storages; cheap, and False leaves the question open."""
    if native() is not None:
        return native().own_storages(values)
    tensors = [
        value._local_tensor if type(value) is DTensor else value for value in values if isinstance(value, torch.Tensor)
    ]
    try:
        return len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        return False


def writes_to_arguments(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> bool:
    """Whether an operator (for a packet: any of its overloads) writes to an argument."""
    overloads = [getattr(op, name) for name in op.overloads()] if isinstance(op, torch._ops.OpOverloadPacket) else [op]
    return any(overload._schema.is_mutable for overload in overloads)


#: torch uses one function for explicit and implicit redistributions, forward and backward, and imports it by name into
#: three modules.
_REDISTRIBUTE = tuple(
    patch(f"torch.distributed.tensor.{module}:redistribute_local_tensor", "local_tensor current_spec target_spec ...")
    for module in ("_redistribute", "_dispatch", "_api")
)


@needs(
    "redistributions as nodes of the graph",
    *_REDISTRIBUTE,
    without="there is nothing to compile",
    essential=True,
    upstream="not reported: an extension point that only a backend which plans redistributions needs",
    remove_when="DTensor lets a mode or a backend replace redistribute_local_tensor while tracing",
)
@contextlib.contextmanager
def redistribute_hook(hook: RedistributeHook, several: RedistributeSeveral) -> Iterator[None]:
    """While active, redistributions on this thread go to `hook`, and those of `redistribute_locals` to `several`.

    ``hook(local, source_spec, target_spec, stock)`` returns the local tensor in the target spec; ``stock()`` is torch's
    own redistribution.
    """

    def redistribute_local_tensor(
        _: Any, local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **kwargs: Any
    ) -> torch.Tensor:
        def stock() -> torch.Tensor:
            return stock_redistribute_local(local_tensor, current_spec, target_spec, **kwargs)

        return hook(local_tensor, current_spec, target_spec, stock)

    with contextlib.ExitStack() as stack:
        for row in _REDISTRIBUTE:
            stack.enter_context(patched(row, redistribute_local_tensor))
        open_ = _several.setdefault(this_place(), [])
        open_.append(several)
        stack.callback(open_.remove, several)
        yield


__all__ = [
    "MaskPartial", "Partial", "Placement", "Replicate", "Shard", "Spec", "StridedShard",
    "apply_mask", "canonical_placements", "copy_of", "in_storages_of_their_own", "is_traced", "local_and_spec",
    "make_spec", "memory_of",
    "redistribute_hook", "redistribute_local", "redistribute_locals", "stock_redistribute_local", "storage_of",
    "with_local", "writes_to_arguments",
]  # fmt: skip
