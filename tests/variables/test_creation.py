"""DTensors that the compiled program makes: factories, ``distribute_tensor``, the constructor, strided shards, local
sizes.
"""

import pytest
import torch
import torch.distributed.tensor as dtn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_compile.testing import assert_parity, make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.variables.programs import assert_like_eager

ATEN = {"backend": "dtensor_aten"}


def _full(*size, **options):
    return dtn.full(size, 3.5, **options)


@pytest.mark.parametrize(
    "make", [_full, *(pytest.param(make, marks=pytest.mark.slow) for make in (dtn.ones, dtn.zeros))]
)
@on_ranks(4)
def test_factories(make):
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def program(d):
        n = d.shape[0]
        a = make(n, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
        b = make(5, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)], dtype=torch.float64)
        c = make(3, device_mesh=mesh["tp"], placements=[Shard(0)])
        with mesh:
            e = make(2, 2)
        return d + a, b * 2, c.full_tensor(), e, a.placements, b.to_local().shape

    def inputs(rows):
        return (distribute_tensor(torch.arange(4.0 * rows).reshape(rows, 4), mesh, [Shard(0), Replicate()]),)

    assert_like_eager(program, inputs(4), inputs(4), inputs(8), inputs(12), graphs=2, **ATEN)


@on_ranks(2)
def test_empty_has_the_right_facts():
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        return dtn.empty(6, 2, device_mesh=mesh, placements=[Shard(0)]).fill_(2) + x

    assert_like_eager(program, (distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]),), **ATEN)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(-1), Replicate(), Partial("sum"), Partial("avg")])
@pytest.mark.parametrize("source", [None, 0])
@on_ranks(2)
def test_distribute_tensor(source, placement):
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        d = distribute_tensor(x, mesh, [placement], src_data_rank=source)
        return d, d.redistribute(placements=[Replicate()]) * 2

    assert_like_eager(
        program, (torch.arange(24.0).reshape(4, 6),), (torch.arange(24.0).reshape(4, 6) + 1,), graphs=1, **ATEN
    )


@on_ranks(2)
def test_distribute_uneven_tensor():
    mesh = make_mesh((2,), ("tp",))
    program = lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None).full_tensor()  # noqa: E731
    assert_like_eager(program, *((torch.arange(2.0 * rows).reshape(rows, 2),) for rows in (5, 5, 3)), **ATEN)


@on_ranks(4)
def test_distribute_tensor_over_two_dims_in_nested_functions():
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def shard(x, placements):
        return distribute_tensor(x, mesh, placements, src_data_rank=None)

    def program(x):
        def product(a, b):
            return shard(a, [Shard(0), Replicate()]) @ shard(b, [Replicate(), Shard(1)])

        return product(x, x).redistribute(mesh, [Replicate(), Replicate()]).to_local()

    assert_like_eager(program, (torch.arange(16.0).reshape(4, 4),), graphs=1, **ATEN)


@on_ranks(2)
def test_a_distributed_leaf_cuts_the_gradient_as_in_eager():
    mesh = make_mesh((2,), ("tp",))

    def program(x, w):
        d = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
        return (d @ DTensor.from_local(w, mesh, [Replicate()])).sin(), d * 2

    results = []
    for run in (program, torch.compile(program, **ATEN, fullgraph=True)):
        x, w = torch.arange(16.0).reshape(4, 4).requires_grad_(), torch.eye(4).requires_grad_()
        outs = run(x, w)
        (outs[0].to_local().sum() + outs[1].to_local().sum()).backward()
        results.append((outs, x.grad, w.grad))
    assert results[0][1] is None
    assert not compare_values("step", *results)


@on_ranks(2)
def test_a_distributed_leaf_that_is_returned_collects_its_gradient():
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        y = x.detach() * 2
        d = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
        return d, d * 3, y

    results = []
    for run in (program, torch.compile(program, **ATEN)):
        d, e, y = run(torch.ones(4, 2).requires_grad_())
        e.to_local().sum().backward()
        results.append((d.is_leaf, d.grad, e, y))
    assert results[0][0] and not compare_values("step", *results)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot give a tensor that it creates itself a gradient"):
        torch.compile(program, **ATEN, fullgraph=True)(torch.ones(4, 2).requires_grad_())


@on_ranks(2)
def test_parameters_made_inside_are_left_to_python():
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        return x * 2, dtn.ones(4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)

    run = torch.compile(program, **ATEN)
    y, leaf = run(torch.ones(2))
    (leaf * 3).to_local().sum().backward()
    assert leaf.is_leaf and leaf.grad.to_local().tolist() == [3.0, 3.0]


@on_ranks(2)
def test_constructor():
    mesh = make_mesh((2,), ("tp",))

    def program(d):
        same = DTensor(d.to_local() * 2, d._spec, requires_grad=False)
        meta = TensorMeta(torch.Size([3, 4]), (4, 1), torch.float32)
        made = DTensor(torch.ones(3, 4), DTensorSpec(mesh, (Replicate(),), tensor_meta=meta), requires_grad=False)
        return same, made, made.placements, isinstance(made, DTensor)

    def inputs(rows):
        return (distribute_tensor(torch.arange(4.0 * rows).reshape(rows, 4), mesh, [Shard(0)]),)

    assert_like_eager(program, inputs(4), inputs(4), inputs(8), inputs(10), graphs=2, **ATEN)


@on_ranks(2)
def test_no_gradient_flows_through_the_constructor():
    mesh = make_mesh((2,), ("tp",))

    def program(d):
        wrapped = DTensor(d.to_local() * 2, d._spec, requires_grad=False)
        return d * wrapped

    d = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)]).detach().requires_grad_()
    assert_parity(program, [d], loss=lambda out: out.to_local().sum(), backend="dtensor_aten")


@on_ranks(2)
def test_local_sizes_are_constants():
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        shape, offset = compute_local_shape_and_global_offset((7, 4), mesh, [Shard(0)])
        symbolic = compute_local_shape_and_global_offset((x.shape[0], 4, 3), mesh, [Shard(0)])
        strided = compute_local_shape_and_global_offset((8, 4), mesh, [_StridedShard(0, split_factor=2)])
        return x.new_zeros(shape) + offset[0], strided, symbolic

    assert_like_eager(program, *((torch.ones(rows),) for rows in (2, 2, 3, 7, 1)), **ATEN)


@on_ranks(4)
def test_strided_shards():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]

    def program(x):
        d = DTensor.from_local(x, mesh, strided) * 2
        gathered = d.redistribute(mesh, [Replicate(), Replicate()])
        return (
            d,
            d.full_tensor(),
            gathered.redistribute(mesh, strided).to_local(),
            [p.split_factor for p in d.placements[:1]],
        )

    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    assert_like_eager(program, (x,), (x,), graphs=1, **ATEN)


@on_ranks(2)
def test_what_is_detached_from_a_leaf_made_inside_may_leave():
    mesh = make_mesh((2,), ("tp",))

    def program(d):
        y = d.detach().requires_grad_()
        z = (y * 3).sum()
        return d * 2 + y.detach(), z.detach()

    def leaks(d):
        y = d.detach().requires_grad_()
        return y * 3

    d = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)]).detach().requires_grad_()
    assert_parity(program, [d], loss=lambda out: out[0].to_local().sum(), backend="dtensor_aten")
    assert_parity(leaks, [d], loss=lambda out: out.to_local().sum(), backend="dtensor_aten", fullgraph=False)
