"""Redistributions from one mesh to another: values, gradients and bytes against what full tensors say; eager and compiled."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import dtensor_compile
from dtensor_compile.capture import mesh as mesh_module
from dtensor_compile.capture.mesh import mesh_layout
from dtensor_compile.capture.spec import parse_spec
from dtensor_compile.compat.dtensor import make_spec, with_local
from dtensor_compile.errors import AgreementError, MeshError, NoProcessGroupError, PlacementError, PlanError
from dtensor_compile.testing import on_ranks, run_on_ranks


def meshes_of_four():
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    return {
        "square": square,
        "whole": DeviceMesh("cpu", [0, 1, 2, 3]),
        "front": DeviceMesh("cpu", [0, 1]),
        "back": DeviceMesh("cpu", [2, 3]),
        "middle": DeviceMesh("cpu", [1, 2]),
        "three": DeviceMesh("cpu", [0, 1, 2]),
        "last": DeviceMesh("cpu", [3]),
        "tp": square["tp"],
        "dp": square["dp"],
    }


def distinct(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) * 7 % 31 - 15


def term(full, place):
    """What a rank at `place` of the mesh dims that are partial adds to a sum."""
    return full.roll(sum(place), 0) * (1 + 2 * sum(place)) if full.numel() else full


def local_at(full, mesh_shape, placements, at):
    """The local tensor at a coordinate, cut by hand; terms of a sum differ."""
    pending = [c for p, c in zip(placements, at) if isinstance(p, Partial)]
    local = term(full, pending) if pending else full
    for p, n, c in zip(placements, mesh_shape, at):
        if isinstance(p, Shard):
            chunks = local.chunk(n, p.dim) if local.size(p.dim) else ()
            local = chunks[c] if c < len(chunks) else local.narrow(p.dim, 0, 0)
    return local.clone(memory_format=torch.contiguous_format)


def value_of(full, mesh_shape, placements):
    """The global value that such local tensors stand for."""
    pending = [range(n) if isinstance(p, Partial) else (0,) for p, n in zip(placements, mesh_shape)]
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if not ops:
        return full
    dims = [i for i, p in enumerate(placements) if isinstance(p, Partial)]
    terms = torch.stack([term(full, [at[i] for i in dims]) for at in itertools.product(*pending)])
    (op,) = ops
    return {"sum": terms.sum, "avg": terms.mean, "max": terms.amax, "min": terms.amin}[op](0)


def absent(full):
    """The local tensor of a rank that is not part of the mesh, as torch's operators make it."""
    return full.new_empty(0) if full.dim() else full.new_zeros(())


def placed(full, mesh, placements, requires_grad=False):
    """The DTensor on this rank; without a local tensor where the rank is not part of the mesh."""
    layout, rank = mesh_layout(mesh), dist.get_rank()
    at = layout.coordinate(rank)
    local = absent(full) if at is None else local_at(full, layout.shape, placements, at)
    return with_local(local, make_spec(mesh, placements, full.shape, full.dtype)).requires_grad_(requires_grad)


def is_placed(x, full, mesh, placements):
    """Complaints about a DTensor that should hold `full` there."""
    at = mesh_layout(mesh).coordinate(dist.get_rank())
    wanted = absent(full) if at is None else local_at(full, mesh_layout(mesh).shape, placements, at)
    local = x.to_local()
    if x.device_mesh != mesh or tuple(x.placements) != tuple(placements) or x.shape != full.shape:
        return f"{x.device_mesh} {x.placements} {x.shape}"
    if local.shape != wanted.shape or not torch.equal(local, wanted):
        return f"{local} instead of {wanted}"
    return "" if local.is_contiguous() else f"strides {local.stride()}"


CASES = [
    (case, shape)
    for case, shapes in {
        "front S(0) -> back S(0)": [(8, 4), (5, 3), (1, 6), (0, 4)],
        "front S(0) -> back S(1)": [(5, 3), (1, 1)],
        "front S(0) -> middle R": [(5, 3), (8,)],
        "front R -> back R": [(5, 3), ()],
        "front R -> whole S(1)": [(4, 7), (3, 2)],
        "three S(0) -> middle S(0)": [(5, 3), (7, 2), (2, 2)],
        "middle S(1) -> three S(0)": [(5, 3)],
        "square S(0)S(1) -> whole S(0)": [(8, 4), (5, 3), (3, 1)],
        "whole S(0) -> square S(1)S(0)": [(8, 4), (5, 3)],
        "square S(0)S(0) -> front S(0)": [(7, 3), (9, 2)],
        "square RS(0) -> last R": [(5, 3)],
        "last R -> square S(0)R": [(5, 3)],
        "tp S(0) -> square S(0)S(1)": [(5, 4)],
        "square RS(1) -> tp R": [(3, 5)],
        "tp S(0) -> dp S(0)": [(5, 2)],
        "dp R -> whole S(0)": [(6, 2)],
        "front P(sum) -> back S(0)": [(5, 3), (4,)],
        "front P(sum) -> back R": [(5, 3)],
        "front P(max) -> middle S(1)": [(5, 3)],
        "square P(sum)S(0) -> back S(0)": [(5, 3)],
        "square P(sum)P(sum) -> last R": [(6, 2)],
        "front P(avg) -> whole S(0)": [(4, 2)],
        "tp P(min) -> whole R": [(4, 3)],
        "last P(sum) -> front S(0)": [(4, 3)],
    }.items()
    for shape in shapes
]


def parsed(case, meshes):
    source, target = (side.split() for side in case.split(" -> "))
    return meshes[source[0]], parse_spec(source[1]), meshes[target[0]], parse_spec(target[1])


def of_cases(compile_):
    """Complaints of this rank about all cases, forward and backward, in one program; bytes sent per case."""
    meshes, complaints = meshes_of_four(), []
    parts = [(*parsed(case, meshes), distinct(shape)) for case, shape in CASES]
    xs = [placed(full, mesh, spec, requires_grad=True) for mesh, spec, _, _, full in parts]

    def program(*xs):
        return [dtensor_compile.redistribute(x * 1, other, goal) for x, (_, _, other, goal, _) in zip(xs, parts)]

    with dtensor_compile.record() as recording:
        run = torch.compile(program, backend="dtensor_aten", fullgraph=True) if compile_ else program
        for _ in range(2):
            ys = run(*xs)
            tangents = [placed(distinct(full.shape) + 1, other, goal) for _, _, other, goal, full in parts]
            for x in xs:
                x.grad = None
            torch.autograd.backward(ys, tangents)
    for (case, shape), x, y, (mesh, spec, other, goal, full) in zip(CASES, xs, ys, parts):
        back = tuple(Replicate() if isinstance(p, Partial) and n > 1 else p for p, n in zip(spec, mesh_layout(mesh).shape))
        back = tuple(Replicate() if isinstance(p, Partial) else p for p in back)
        found = is_placed(y, value_of(full, mesh_layout(mesh).shape, spec), other, goal)
        complaints += [f"{case} {shape}: {found}"] if found else []
        found = is_placed(x.grad, distinct(full.shape) + 1, mesh, back)
        complaints += [f"gradient of {case} {shape}: {found}"] if found else []
    return complaints, len(recording.breaks), len(recording.compilations)


@pytest.mark.parametrize("compile_", [False, True])
def test_values_and_gradients(compile_):
    answers = run_on_ranks(4, of_cases, compile_, timeout=300)
    assert [complaints for complaints, _, _ in answers] == [[]] * 4
    assert all(breaks == 0 and compilations == compile_ for _, breaks, compilations in answers)
