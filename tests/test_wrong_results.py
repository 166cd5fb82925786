"""Results that stock torch.compile gets wrong without a word: sizes, memory that is shared, gradients that were not
expected.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dtensor_compile
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.cases import mostly_slow


def full(*shape):
    torch.manual_seed(sum(shape))
    return torch.randn(*shape)


def sharded(*shape, placement=None, placements=None, grad=False, mesh=None):
    mesh = mesh or make_mesh((2,), ("tp",))
    return distribute_tensor(full(*shape), mesh, placements or [placement or Shard(0)]).requires_grad_(grad)


def compiled(function, **kwargs):
    torch._dynamo.reset()
    counters.reset()
    return torch.compile(function, backend="dtensor_aten", fullgraph=True, **kwargs)


# ---- the global shape of an input ----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_size_that_leaves_the_local_shape_as_it_was_is_seen():
    run = compiled(lambda x: x * x.shape[0])
    for rows in (10, 9, 10, 7, 8, 1):  # 10 and 9 rows have the same local shape on rank 0
        x = sharded(rows, 4)
        out = run(x)
        assert out.shape == x.shape
        torch.testing.assert_close(out.full_tensor(), x.full_tensor() * rows)


@on_ranks(2)
def test_redistributions_follow_an_uneven_size():
    run = compiled(lambda x: x.redistribute(placements=[Replicate()]) * 2)
    for rows in (10, 9, 7, 12):
        x = sharded(rows, 4, grad=True)
        out = run(x)
        out.to_local().sum().backward()
        torch.testing.assert_close(out.full_tensor(), x.full_tensor() * 2)
        assert x.grad.shape == (rows, 4)


@on_ranks(4)
def test_uneven_shards_over_two_dims_of_a_mesh_that_was_flattened():
    """Eager merges the two gathers and cuts the flat dim in equal parts, which is not where the shards end: it loses
    values.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh._flatten("all")
    for rows, dim in ((7, 0), (5, 0), (5, 1), (8, 0)):
        x = sharded(rows, rows, mesh=mesh, placements=[Shard(dim)] * 2, grad=True)
        whole = torch.randn(rows, rows, generator=torch.Generator().manual_seed(0))
        run = compiled(
            lambda x: x.redistribute(placements=[Replicate()] * 2).to_local(grad_placements=[Replicate()] * 2)
        )
        out = run(x)
        (out * whole).sum().backward()
        assert torch.equal(out, full(rows, rows))
        expected = distribute_tensor(whole, mesh, [Shard(dim)] * 2)  # cut by each rank for itself
        assert torch.equal(x.grad.to_local(), expected.to_local())


@on_ranks(2)
def test_one_recompile_for_a_new_batch_size_and_none_after():
    run = compiled(lambda x: x.relu() + 1)
    graphs = []
    for rows in (8, 8, 12, 16, 20):
        run(sharded(rows, 4))
        graphs.append(counters.graphs())
    assert graphs == [1, 1, 2, 2, 2]


@on_ranks(2)
def test_the_shape_of_a_parameter_is_guarded():
    weights = {"w": sharded(10, 4)}
    run = compiled(lambda x: (x @ weights["w"].t()) * weights["w"].shape[0])
    for rows in (10, 9):
        weights["w"] = sharded(rows, 4)
        x = sharded(3, 4, placement=Replicate())
        torch.testing.assert_close(run(x).full_tensor(), x.full_tensor() @ weights["w"].full_tensor().t() * rows)


# ---- memory that is shared through a DTensor -----------------------------------------------------------------------


def two_views(local, mesh):
    return [DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for _ in range(2)]


def write_one_read_both(x, y):
    x.add_(1)
    return x + y


@on_ranks(2)
def test_a_write_reaches_the_other_dtensor_over_the_same_local_tensor():
    mesh, run = make_mesh((2,), ("tp",)), compiled(write_one_read_both)
    for shared in (False, True, False):  # the same compiled code serves both
        local = torch.randn(3, 4)
        x, y = two_views(local, mesh)
        if not shared:
            y = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
        want = 2 * local + (2 if shared else 1)
        torch.testing.assert_close(run(x, y).to_local(), want)


@on_ranks(2)
def test_a_write_to_the_local_tensor_reaches_the_dtensor():
    mesh = make_mesh((2,), ("tp",))

    def through_attribute(x):
        x._local_tensor.mul_(2)
        return x * 1

    def through_argument(x, local):
        local[0] = 5
        return x * 1

    x = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False)
    assert compiled(through_attribute)(x).to_local().tolist() == [[2.0] * 4] * 3
    local = torch.ones(3, 4)
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    assert compiled(through_argument)(x, local).to_local()[0].tolist() == [5.0] * 4


@on_ranks(2)
def test_views_of_one_storage_that_do_not_overlap_are_compiled():
    mesh, flat = make_mesh((2,), ("tp",)), torch.randn(24)
    x, y = (DTensor.from_local(part.view(3, 4), mesh, [Shard(0)], run_check=False) for part in flat.split(12))
    want = x.to_local() + 1 + y.to_local()
    torch.testing.assert_close(compiled(write_one_read_both)(x, y).to_local(), want)


# ---- gradients that were not expected ------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["S(0)", "R", "P"])
@on_ranks(2)
def test_an_output_that_the_loss_does_not_use(placement):
    def two(x):
        return x * 2, (x * 3 if placement != "P" else x.sum(0))

    x = sharded(6, 4, placement=Replicate() if placement == "R" else Shard(0), grad=True)
    assert_parity(two, [x], loss=lambda out: out[0].full_tensor().square().sum(), backend="dtensor_aten")
    if (
        placement != "P"
    ):  # the zeros of x * 2 are sharded, and so is then the gradient; eager adds nothing and has a replicated one
        assert_parity(two, [x], loss=lambda out: out[1].full_tensor().square().sum(), backend="dtensor_aten")


@on_ranks(2)
def test_an_unbacked_size():
    run = compiled(lambda x: x * 2)
    for rows in (10, 10, 14):
        x = sharded(rows, 4, placement=Replicate(), grad=True)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        run(x).to_local().sum().backward()
        assert x.grad.full_tensor().tolist() == [[2.0] * 4] * rows
    assert counters.graphs() == 1


# ---- backward passes that raise ------------------------------------------------------------------------------------


def chunks(x):
    return x.chunk(2, 0)[0] * 2


def error_of(function, x):
    try:
        function(x).to_local().sum().backward()
    except Exception as error:  # noqa: BLE001 - compared with eager's
        return type(error), str(error)
    return None


@on_ranks(2)
def test_a_backward_that_raises_raises_when_it_runs():
    x = sharded(8, 4, grad=True)
    run = compiled(chunks)
    with dtensor_compile.record() as recording:
        out = run(x)
    torch.testing.assert_close(out.full_tensor(), chunks(x).full_tensor())
    assert out.requires_grad and out.placements == chunks(x).placements
    wanted = error_of(chunks, x)
    assert wanted is not None and error_of(run, x) == wanted
    assert [d.kind for d in recording.decisions].count("defer_backward_error") == 1


@on_ranks(2)
def test_an_input_that_is_written_to_beside_a_backward_that_raises():
    def program(x):
        x.mul_(2)
        return torch.special.zeta(x, x)

    x = torch.full((4,), 2.0, requires_grad=True)
    for run in (program, compiled(program)):
        with pytest.raises(RuntimeError, match="derivative for 'zeta' is not implemented"):
            run(x * 1).sum().backward()


@on_ranks(2)
def test_strict_refuses_a_backward_that_raises():
    with pytest.raises(Exception, match="mixed torch.Tensor and DTensor"):
        compiled(chunks, options={"strict": True})(sharded(8, 4, grad=True))


@on_ranks(2)
def test_mutation_and_plain_gradients_beside_a_backward_that_raises():
    def program(x, y):
        y.add_(1)
        return chunks(x), (y * 2).relu()

    x, y = sharded(8, 4, grad=True), torch.randn(3)
    out, other = compiled(program)(x, y.clone())
    torch.testing.assert_close(other, ((y + 1) * 2).relu())
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        out.to_local().sum().backward()


@on_ranks(2)
def test_partial_outputs_and_their_gradients():
    x = sharded(6, 4, grad=True)
    assert_parity(lambda x: x.sum(0), [x], loss=lambda out: out.full_tensor().square().sum(), backend="dtensor_aten")
    y = DTensor.from_local(torch.randn(4, 4), make_mesh((2,), ("tp",)), [Partial()], run_check=False)
    assert_parity(lambda y: F.relu(y.redistribute(placements=[Shard(0)])), [y], backend="dtensor_aten")


# ---- results that are views ----------------------------------------------------------------------------------------


def sum_of_full_squares(out):
    return sum(x.full_tensor().square().sum() for x in out)


@on_ranks(2)
def test_a_write_to_a_view_of_an_input_that_autograd_would_not_see_is_refused():
    def views(x):
        return x.transpose(0, 1), x.narrow(2, 1, 2)

    run = compiled(views)
    x = sharded(4, 3, 4, grad=True)
    for function in (views, run):
        one, other = function(x * 2)
        if function is run:
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                one.mul_(3)
        (one.sum() + other.square().sum()).backward()
    half = x.grad / 2
    x.grad = None
    one, other = run(x * 2)
    (one.sum() + other.square().sum()).backward()
    assert torch.equal(half.to_local(), x.grad.to_local())
    with torch.no_grad():
        y = x * 2
        one, other = run(y)
        one.mul_(3)
        torch.testing.assert_close(other.full_tensor(), (x * 6).full_tensor().narrow(2, 1, 2))


@pytest.mark.parametrize("kind", ["sum", "avg"])
@on_ranks(2)
def test_the_gradient_of_a_view_of_a_partial_input(kind):
    """It is replicated, as that of the partial input itself: partial, it would be as many times too large as there are
    ranks.
    """
    x = DTensor.from_local(full(5, 4), make_mesh((2,), ("tp",)), [Partial(kind)], run_check=False).requires_grad_()
    whole = x.detach().full_tensor()
    for program, times in (
        (lambda x: (x.t(),), 2),
        (lambda x: (x.unsqueeze(0), x.unsqueeze(0).redistribute(placements=[Shard(1)])), 4),  # a sum of two gradients
    ):
        x.grad = None
        sum_of_full_squares(compiled(program)(x)).backward()
        assert x.grad.placements == (Replicate(),)
        torch.testing.assert_close(x.grad.to_local(), times * whole)
        assert_parity(program, [x.detach().requires_grad_()], loss=sum_of_full_squares, backend="dtensor_aten")


def beside_its_view(x):
    y = x * 2
    return y, y.narrow(0, 1, 1), y.t()


def two_views_of_what_was_gathered(x):
    rows = (x * 2).narrow(0, 1, 1)
    return rows, rows.t()


def views_at_an_end(x):
    y = x * 2
    return y.select(0, y.shape[0] - 1), y


@pytest.mark.parametrize(
    "program", mostly_slow([beside_its_view, two_views_of_what_was_gathered, views_at_an_end], views_at_an_end)
)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_view_of_another_result_that_was_redistributed_for_it(program, world):
    """Its values are not in the memory of that result: made anew from it, each rank would see rows of its own shard, or
    none.
    """
    run_on_ranks(world, views_that_are_none, program)


def views_that_are_none(program):
    mesh = make_mesh((dist.get_world_size(),), ("tp",))
    for rows in (6, 4, 2):  # even; uneven; on three ranks one has none
        x = sharded(rows, 3, mesh=mesh, grad=True)
        whole = program(x.detach().full_tensor())
        for out, right in zip(compiled(program)(x), whole):
            torch.testing.assert_close(out.full_tensor(), right)
        assert_parity(program, [x], loss=sum_of_full_squares, backend="dtensor_aten")


@pytest.mark.parametrize("backend", ["dtensor_aten", "dtensor"])
@on_ranks(2)
def test_a_view_of_a_result_that_was_made_of_a_local_tensor(backend):
    """Two DTensors of one local tensor: torch counted one more result of the graph than there was (fuzz seeds 87135 and
    89054).
    """

    def of_anothers_shard(x):
        y = DTensor.from_local(
            x.to_local() * 2, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
        return y, y.flatten(1)

    def in_two_placements(x):
        shard = x.to_local() * 2
        return tuple(DTensor.from_local(shard, x.device_mesh, [p], run_check=False) for p in (Shard(0), Partial()))

    for program in (of_anothers_shard, in_two_placements):
        assert_parity(
            program,
            [sharded(6, 3, 2, mesh=make_mesh((2,)), grad=True)],
            loss=sum_of_full_squares,
            backend=backend,
            calls=2,
        )


@pytest.mark.parametrize("dim", mostly_slow([0, 1], 0))
@on_ranks(2)
def test_a_mask_that_was_gathered(dim):
    """Inductor gathered it as integers of eight bytes, for which it wrote no kernel, or one of other gradients (fuzz
    seed 89496).
    """

    def chosen(x):
        whole = x.redistribute(placements=[Replicate()])
        return (torch.where((x > 0).redistribute(placements=[Replicate()]), whole, 0.0),)

    def norm_of_rows(x):
        return (torch.linalg.vector_norm(x, dim=1).redistribute(placements=[Shard(0)]),)

    mesh = make_mesh((2,))
    for program in (chosen, norm_of_rows):
        x = distribute_tensor(torch.randn(16, 16), mesh, [Shard(dim)]).requires_grad_()
        assert_parity(program, [x], loss=sum_of_full_squares, backend="dtensor", options={"strict": True}, calls=2)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@on_ranks(3)
def test_a_graph_that_is_retained(dynamic):
    """A backward pass of Inductor's writes over saved tensors: torch refused to retain the graph, on the ranks that
    have such tensors.
    """

    def program(x):
        whole = x.sin().redistribute(placements=[Replicate()])
        return torch.where((x > 0).redistribute(placements=[Replicate()]), whole.exp(), 0.0).redistribute(
            placements=[Shard(1)]
        )

    mesh = make_mesh((3,))
    compiled = torch.compile(program, backend="dtensor", fullgraph=True, dynamic=dynamic)
    for retained in ((0, 2), (3, 0, 1)):  # one whose first backward pass writes over them, and one whose first does not
        torch._dynamo.reset()
        for times in retained:
            for rows in (5, 2):  # of two rows one rank has none
                x = sharded(rows, 4, mesh=mesh, grad=True)
                for again in range(times + 1):
                    gradients = []
                    for call in (program, compiled):
                        y = call(x)
                        loss = y.full_tensor().square().sum()
                        gradients.append(
                            [
                                torch.autograd.grad(loss, x, retain_graph=i < again)[0].full_tensor()
                                for i in range(again + 1)
                            ]
                        )
                    torch.testing.assert_close(gradients[1], gradients[0])


@on_ranks(3)
def test_a_size_that_only_the_backward_pass_fixes():
    """A result was planned with a size that the trace of its gradient made a number: the graph returned one integer
    less.
    """

    def program(x):
        norm = torch.linalg.vector_norm(x, dim=1).redistribute(placements=[Shard(0)])
        return (norm,)

    mesh = make_mesh((3,))
    for rows in (5, 2, 7):
        x = sharded(rows, 5, mesh=mesh, grad=True)
        assert_parity(program, [x], loss=sum_of_full_squares, backend="dtensor_aten", dynamic=True)


# ---- gradients of lookups --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_partial_gradient_of_a_lookup_in_a_sharded_table_is_refused_as_in_eager():
    """torch's redistribution takes it for indices, which the mask of the lookup is for."""
    table, weight = sharded(8, 4, grad=True), sharded(4, 6, placement=Shard(1), grad=True)
    tokens = sharded(5, placement=Replicate()).abs().mul(2).long()

    def step(tokens, table, weight):
        found = F.embedding(tokens, table).redistribute(placements=[Replicate()])
        return (found @ weight).square().sum().full_tensor()

    for run in (step, compiled(step)):
        with pytest.raises((AssertionError, RuntimeError), match="one partial type"):
            run(tokens, table, weight).backward()


@on_ranks(2)
def test_a_second_redistribution_brings_that_gradient_to_replicas():
    table, weight = sharded(8, 4, grad=True), sharded(4, 6, placement=Shard(1), grad=True)
    tokens = sharded(5, placement=Replicate()).abs().mul(2).long()

    def step(tokens, table, weight):
        found = F.embedding(tokens, table).redistribute(placements=[Replicate()]).redistribute(placements=[Replicate()])
        return (found @ weight).square().sum().full_tensor()

    assert_parity(step, [tokens, table, weight])
