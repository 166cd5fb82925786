"""Operators for the collectives of ``torch.distributed``, and for sending from one rank to another.

    c10d_all_reduce(Tensor x, str op, str group, int order) -> Tensor      and four more with a functional form in torch
    c10d_gather(Tensor[] outputs, Tensor[] inputs, int peer, str op, str group, int order) -> Tensor[]    and the others
    c10d_isend, c10d_irecv, c10d_barrier
    overwrite_(Tensor(a!) x, Tensor value) -> ()

All but `overwrite_` are functional: the result is new and complete. A collective that works in place is the functional
one, and then `overwrite_`: eager's collectives write to memory without autograd's knowledge, so gradients ignore them;
here too.

`peer` is a rank of the group, `group` a group's name, `order` the position among all communication of a graph: it
distinguishes otherwise equal nodes, so that two messages never become one. No node is ever dropped, since another rank
may count on it.

In a lowered graph (``lowering/lower_collectives.py``) messages between ranks are `c10d_exchange`, which starts several
at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed.device_meshes import group_named
from dtensor_compile.compat.distributed.functional_collectives import (
    REDUCTIONS,
    functional,
    hide_mutation_from_autograd,
    keep_in_place,
    wait_later,
    wait_tensor,
)

_library = torch.library.Library("dtensor_compile", "FRAGMENT")


def define(
    name: str, schema: str, kernel: Callable[..., object], fake: Callable[..., object], *tags: torch.Tag
) -> torch._ops.OpOverload:
    """Defines an operator that no pass drops and that has no gradient: its result is a constant to autograd."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _library._register_fake(name, fake)
    op = getattr(torch.ops.dtensor_compile, name).default
    keep_in_place(op)
    return op


def _nothing(device: torch.device | str = "cpu") -> torch.Tensor:
    """The result of an operator without one: a graph has tensors only."""
    return torch.empty(0, device=device)


# ---- in place ------------------------------------------------------------------------------------------------------


def _overwrite(x: torch.Tensor, value: torch.Tensor) -> None:
    x.detach().copy_(value)


def _fake_overwrite(x: torch.Tensor, value: torch.Tensor) -> None:
    def text() -> str:
        return f"the collective gives a tensor of shape {list(value.shape)}, the output has shape {list(x.shape)}"

    torch._check(x.dim() == value.dim(), text)
    for size, given in zip(x.shape, value.shape):
        torch._check(size == given, text)


overwrite_ = define("overwrite_", "(Tensor(a!) x, Tensor value) -> ()", _overwrite, _fake_overwrite)
hide_mutation_from_autograd(overwrite_)


# ---- collectives that torch has a functional form of ---------------------------------------------------------------


def _times(x: torch.Tensor, n: int) -> list[int]:
    return [x.shape[0] * n, *x.shape[1:]] if x.dim() else [n]


def _functional(name: str, arguments: str, shape: Callable[..., Sequence[int]]) -> torch._ops.OpOverload:
    """Defines the waiting counterpart of a functional collective of torch; `shape` is that of its result."""

    def kernel(x: torch.Tensor, *args: object) -> torch.Tensor:
        return wait_tensor(functional(name)(x.contiguous(), *args[:-1]))

    def fake(x: torch.Tensor, *args: object) -> torch.Tensor:
        return x.new_empty(shape(x, *args))

    return define(f"c10d_{name}", f"(Tensor x, {arguments}, str group, int order) -> Tensor", kernel, fake)


all_reduce = _functional("all_reduce", "str op", lambda x, *_: x.shape)
broadcast = _functional("broadcast", "int peer", lambda x, *_: x.shape)
all_gather_into_tensor = _functional("all_gather_into_tensor", "int size", lambda x, n, *_: _times(x, n))
reduce_scatter_tensor = _functional(
    "reduce_scatter_tensor", "str op, int size", lambda x, _, n, *__: [x.shape[0] // n, *x.shape[1:]]
)
all_to_all_single = _functional(
    "all_to_all_single",
    "SymInt[] output_splits, SymInt[] input_splits",
    lambda x, splits, *_: [sum(splits), *x.shape[1:]],
)

#: Operator -> torch's functional one, which takes the same arguments up to `order`.
FUNCTIONAL = {
    op: functional(op._schema.name.partition("::c10d_")[2])
    for op in (all_reduce, broadcast, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single)
}


# ---- collectives that run as they do in eager ----------------------------------------------------------------------

Tensors = list[torch.Tensor]
#: Fills the outputs: ``(outputs, inputs, peer, reduction, group)``.
Fill = Callable[[Tensors, Tensors, int, object, dist.ProcessGroup], object]


def _filling(name: str, fill: Fill) -> torch._ops.OpOverload:
    """Defines a collective that fills its arguments in eager: here it fills copies and returns them."""

    def kernel(outputs: Tensors, inputs: Tensors, peer: int, op: str, group: str, order: int) -> Tensors:
        results = [x.detach().clone(memory_format=torch.contiguous_format) for x in outputs]
        fill(results, [x.detach().contiguous() for x in inputs], peer, REDUCTIONS.get(op), group_named(group))
        return results or [_nothing(inputs[0].device)]

    def fake(outputs: Tensors, inputs: Tensors, peer: int, op: str, group: str, order: int) -> Tensors:
        return [x.new_empty(x.shape) for x in outputs] or [inputs[0].new_empty(0, dtype=torch.float32)]

    schema = "(Tensor[] outputs, Tensor[] inputs, int peer, str op, str group, int order) -> Tensor[]"
    return define(f"c10d_{name}", schema, kernel, fake)


reduce = _filling("reduce", lambda out, _, peer, op, group: dist.reduce(out[0], group_dst=peer, op=op, group=group))
gather = _filling("gather", lambda out, x, peer, _, group: dist.gather(x[0], out or None, group_dst=peer, group=group))
scatter = _filling(
    "scatter", lambda out, x, peer, _, group: dist.scatter(out[0], x or None, group_src=peer, group=group)
)
all_gather = _filling("all_gather", lambda out, x, _, __, group: dist.all_gather(out, x[0], group=group))
reduce_scatter = _filling(
    "reduce_scatter", lambda out, x, _, op, group: dist.reduce_scatter(out[0], x, op=op, group=group)
)
all_to_all = _filling("all_to_all", lambda out, x, _, __, group: dist.all_to_all(out, x, group=group))


def _barrier(group: str, order: int) -> torch.Tensor:
    dist.barrier(group_named(group))
    return _nothing()


barrier = define("c10d_barrier", "(str group, int order) -> Tensor", _barrier, lambda group, order: _nothing())


def _check_equal(text: str, sizes: Sequence[int], group: str, order: int) -> torch.Tensor:
    found: list[object] = [None] * group_named(group).size()
    dist.all_gather_object(found, (text, list(sizes)), group_named(group))
    if any(other != (text, list(sizes)) for other in found):
        raise ValueError("Inconsistent tensor metadata (including shape and stride) across ranks.")
    return _nothing()


#: Raises if ranks disagree about the metadata of a tensor (``DTensor.from_local(..., run_check=True)``).
check_equal = define(
    "c10d_check_equal",
    "(str text, SymInt[] sizes, str group, int order) -> Tensor",
    _check_equal,
    lambda *_: _nothing(),
)


# ---- from one rank to another --------------------------------------------------------------------------------------


def _isend(x: torch.Tensor, peer: int, tag: int, group: str, order: int) -> torch.Tensor:
    dist.send(x.detach().contiguous(), group=group_named(group), tag=tag, group_dst=peer)
    return _nothing(x.device)


def _irecv(like: torch.Tensor, peer: int, tag: int, group: str, order: int) -> torch.Tensor:
    received = like.new_empty(like.shape)
    dist.recv(received, group=group_named(group), tag=tag, group_src=peer)
    return received


isend = define(
    "c10d_isend",
    "(Tensor x, int peer, int tag, str group, int order) -> Tensor",
    _isend,
    lambda x, *_: x.new_empty(0, dtype=torch.float32),
)
irecv = define(
    "c10d_irecv",
    "(Tensor like, int peer, int tag, str group, int order) -> Tensor",
    _irecv,
    lambda like, *_: like.new_empty(like.shape),
)


def _exchange(
    tensors: Tensors, kinds: Sequence[int], peers: Sequence[int], tags: Sequence[int], groups: Sequence[str]
) -> Tensors:
    """Starts messages, in order; a message in flight keeps a copy of its data, since the graph may reuse the memory."""
    operations, results = [], []
    for x, receives, peer, tag, group in zip(tensors, kinds, peers, tags, groups):
        buffer = x.new_empty(x.shape) if receives else x.detach().clone(memory_format=torch.contiguous_format)
        function = dist.irecv if receives else dist.isend
        operations.append(dist.P2POp(function, buffer, group=group_named(group), tag=tag, group_peer=peer))
        results.append(buffer if receives else torch.empty(1, device=x.device))
    works = dist.batch_isend_irecv(operations) if len(set(groups)) == 1 else [_start(p) for p in operations]
    for i, result in enumerate(results):
        wait_later(result, works[i] if len(works) == len(results) else works[0])
    return results


def _start(p: dist.P2POp) -> dist.Work | None:
    peer = {"group_src": p.group_peer} if p.op is dist.irecv else {"group_dst": p.group_peer}
    return p.op(p.tensor, group=p.group, tag=p.tag, **peer)


def _fake_exchange(
    tensors: Tensors, kinds: Sequence[int], peers: Sequence[int], tags: Sequence[int], groups: Sequence[str]
) -> Tensors:
    return [x.new_empty(x.shape) if r else x.new_empty(1, dtype=torch.float32) for x, r in zip(tensors, kinds)]


#: Messages of one batch. `kinds`: 1 receives a tensor like the given one, 0 sends it. Each result is to be waited for;
#: that of a message that was sent means nothing else.
exchange = define(
    "c10d_exchange",
    "(Tensor[] tensors, int[] kinds, int[] peers, int[] tags, str[] groups) -> Tensor[]",
    _exchange,
    _fake_exchange,
)
_opaque = (reduce, gather, scatter, all_gather, reduce_scatter, all_to_all, barrier, check_equal)
#: Every operator here that communicates in a graph as it is captured, with its place in the order as its last argument.
COMMUNICATION = frozenset({*FUNCTIONAL, *_opaque, isend, irecv})
#: Operators of ours that communicate in a lowered graph.
LOWERED = (*_opaque, exchange)
