"""torch's ``LocalTensor``: one tensor holds the local tensors of all ranks of a job and runs each operator per rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree

from dtensor_compile.compat.distributed.fake_group import simulated_job


@contextlib.contextmanager
def local_tensors(world: int) -> Iterator[LocalTensorMode]:
    """While active, new tensors hold the local tensors of all ranks of a job of `world`; collectives run among them."""
    with simulated_job(world, 0), _Mode(world) as mode:
        yield mode


class _Mode(LocalTensorMode):
    """Gives every rank its own copy of a generator that the program made; torch lets all ranks draw from one in
    turn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        if (
            generator is None
            or self._disable
            or any(isinstance(x, torch.Tensor) and type(x) is not LocalTensor for x in leaves)
        ):
            return super().__torch_dispatch__(func, types, args, kwargs)
        before, drawn = generator.get_state(), {}
        with self.disable():
            for rank in sorted(self.ranks):
                generator.set_state(before)
                own_args, own_kwargs = pytree.tree_unflatten([of_rank(leaf, rank, None) for leaf in leaves], structure)
                drawn[rank] = func(*own_args, **own_kwargs)
        written = next((x for x in leaves if isinstance(x, LocalTensor) and drawn[0] is x._local_tensors[0]), None)
        return LocalTensor(drawn) if written is None else written


def random_states(mode: LocalTensorMode) -> dict[int, torch.Tensor]:
    """The state of the CPU generator by rank."""
    return {rank: state.clone() for rank, (state, _) in mode._per_rank_rng_states.items()}


def of_rank(value: Any, rank: int, mesh_of: Any) -> Any:
    """The value as `rank` has it: a ``LocalTensor`` becomes that rank's tensor, other values stay.

    Args:
        value: nested tuples, lists and dicts.
        mesh_of: ``mesh_of(mesh)`` returns the rank's own mesh for a mesh of `value`.
    """

    def one(x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            return x.node._local_ints[rank] if isinstance(x.node, LocalIntNode) else int(x)
        if isinstance(x, DTensor):
            shape, stride = torch.Size(map(int, x.shape)), tuple(map(int, x.stride()))
            placements: tuple[Placement, ...] = x.placements
            local = _own(x._local_tensor, rank)
            made = DTensor.from_local(
                local, mesh_of(x.device_mesh), placements, run_check=False, shape=shape, stride=stride
            )
            return made.requires_grad_(x.requires_grad)
        return _own(x, rank).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return pytree.tree_map(one, value)


def _own(x: torch.Tensor, rank: int) -> torch.Tensor:
    return (x._local_tensors[rank] if isinstance(x, LocalTensor) else x).detach()
