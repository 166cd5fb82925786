"""DTensors in compiled code: what they say of themselves, and conversions over meshes and placements from anywhere."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from dtensor_compile.stages import program as program_steps
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.stages import with_run
from tests.variables.programs import assert_expression_like_eager, assert_like_eager

EXPRESSIONS = """
d.placements
d.device_mesh
d.device_mesh is mesh
d.device_mesh.shape
d._spec.placements
d._spec.mesh.ndim
d.placements[0].dim
d.placements == (Shard(0), Replicate())
all(q.is_shard() or q.is_replicate() for q in d.placements)
[type(q).__name__ for q in d.placements]
dict(zip(mesh.mesh_dim_names, d.placements))
(d + 1).placements
(d @ d).placements
(d + 1).device_mesh
(d + 1).device_mesh["tp"].size()
(d + 1).device_mesh.get_group("tp")
{"placements": (d + 1).placements, "mesh": (d + 1).device_mesh, "slice": (d + 1).device_mesh["tp"]}
(d + 1)._spec.placements
(d + 1)._spec.mesh
(d + 1)._spec.tensor_meta.shape
[(q, q.dim) for q in (d + 1).placements if q.is_shard()]
d.to_local()
(d + 1).to_local()
d.redistribute(mesh, [Replicate(), Replicate()])
d.redistribute(placements=[Replicate(), Shard(0)])
(d + 1).redistribute((d + 1).device_mesh, (Replicate(), Shard(1))).to_local()
d.full_tensor()
DTensor.from_local(x, mesh, [Shard(0), Replicate()])
DTensor.from_local(x, mesh, (placement, Replicate()), run_check=False)
DTensor.from_local(x, d.device_mesh, d.placements)
DTensor.from_local(x, (d + 1).device_mesh, (d + 1).placements)
DTensor.from_local(x, d.device_mesh["tp"], [Shard(0)]).to_local()
DTensor.from_local(x, mesh["tp"], [Shard(0)]).full_tensor()
isinstance(d, DTensor)
"""


@pytest.mark.parametrize("expression", EXPRESSIONS.strip().splitlines())
@on_ranks(2)
def test_expression(expression):
    assert_expression_like_eager(expression)


@on_ranks(2)
def test_placements_and_mesh_of_an_input_are_guarded():
    mesh, turned = make_mesh((1, 2), ("dp", "tp")), make_mesh((2, 1), ("dp", "tp"))

    def program(d):
        return d @ d, d.placements[0].is_shard(), d.device_mesh.size(1)

    def tensor(mesh, placement):
        return DTensor.from_local(torch.eye(4), mesh, [placement, Replicate()])

    inputs = tensor(mesh, Replicate()), tensor(mesh, Replicate()), tensor(mesh, Shard(0)), tensor(turned, Replicate())
    assert_like_eager(program, *((d,) for d in inputs), graphs=3)


@on_ranks(2)
def test_spec_of_a_result_with_symbolic_sizes_breaks_the_graph():
    mesh = make_mesh((2,), ("tp",))
    tensors = [DTensor.from_local(torch.ones(n, 4), mesh, [Shard(0)]) for n in (2, 3)]
    program = lambda d: (d @ d.T, (d + 1)._spec.placements)  # noqa: E731
    assert_like_eager(program, *((d,) for d in tensors), fullgraph=False, dynamic=True)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="backend='dtensor' makes the spec of a DTensor"):
        torch.compile(program, backend="dtensor", fullgraph=True, dynamic=True)(tensors[0])


@on_ranks(2)
def test_one_mesh_of_many_inputs_is_one_input_of_the_graph():
    mesh, meshes = make_mesh((2,), ("tp",)), []

    def count_meshes(gm, inputs):
        meshes.append(sum(not isinstance(x, torch.Tensor) for x in inputs))

    def program(tensors, mesh):
        return (
            sum(d.redistribute(d.device_mesh, [Replicate()]).to_local() for d in tensors)
            + DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()]).to_local()
        )

    tensors = [DTensor.from_local(torch.eye(2) + i, mesh, [Shard(0)]) for i in range(4)]
    with with_run(program_steps, "ALWAYS", "check_program", count_meshes):
        assert_like_eager(program, (tensors, mesh), graphs=1)
    assert meshes == [1]


@on_ranks(2)
def test_training_through_a_slice_made_in_the_program():
    mesh = make_mesh((1, 2), ("dp", "tp"))
    x, w = torch.arange(16.0).reshape(4, 4) / 16, torch.eye(4) + 0.5

    def program(x, w):
        tp = mesh["tp"]
        a = DTensor.from_local(x, tp, [Shard(0)])
        b = DTensor.from_local(w, tp, [Replicate()])
        return (a @ b).redistribute(tp, [Replicate()]).to_local() * tp.size()

    results = []
    for run in (program, torch.compile(program, backend="dtensor", fullgraph=True)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = run(a, b)
        out.pow(2).sum().backward()
        results.append((out, a.grad, b.grad))
    assert not compare_values("step", *results)


@on_ranks(2)
def test_mesh_and_placements_inside_a_checkpointed_region():
    mesh = make_mesh((1, 2), ("dp", "tp"))

    def block(d):
        other = [Replicate()] * d.device_mesh.ndim
        return (d @ d).redistribute(mesh, other).to_local() * mesh["tp"].size()

    def program(d):
        return checkpoint(block, d, use_reentrant=False).sin()

    results = []
    for run in (program, torch.compile(program, backend="dtensor", fullgraph=True)):
        local = (torch.eye(4) + 1).requires_grad_()
        d = DTensor.from_local(local, mesh, [Replicate(), Replicate()])
        out = run(d)
        out.sum().backward()
        results.append((out, local.grad))
    assert not compare_values("step", *results)
