import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtensor_compile import record
from dtensor_compile.passes.move_redistributions import move_redistributions
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, marked, move, rewritten, unchanged


def branches_of_one_gather():
    """Rows are gathered, multiplied by a small matrix and sliced."""

    def function(x, w):
        whole = move(x, "S(0)", "R")
        return ((whole @ marked(w, "R", (6, 2))).relu() * torch.relu(marked(whole[:, :1], "R", (4, 1))),)

    return rewritten(move_redistributions, function, torch.ones(2, 6), torch.ones(6, 2))


def sums_that_meet():
    """Two sums over ranks, of which one is scaled, are added and multiplied by a matrix."""

    def function(x, y, w):
        a, b = (move(t, "P(sum)", "R") for t in (x, y))
        return ((marked(a * 0.5, "R", (4, 6)) + b) @ marked(w, "R", (6, 2)),)

    return rewritten(move_redistributions, function, torch.ones(4, 6), torch.ones(4, 6), torch.ones(6, 2))


class Golden(TestCase):
    maxDiff = None

    def test_what_is_gathered_is_sent_where_it_is_small(self):
        before, after, decisions = run_on_ranks(2, branches_of_one_gather)[0]
        self.assertExpectedInline(
            before,
            """\
x_1: [2, 6]
w_1: [6, 2]
redistribute: [4, 6] = redistribute(x_1, S(0)->R)
mm: [4, 2] = mm(redistribute, w_1)
relu: [4, 2] = relu(mm)
slice_1: [4, 1] = slice(redistribute, 1, 0, 1)
relu_1: [4, 1] = relu(slice_1)
mul: [4, 2] = mul(relu, relu_1)
return [mul]
""",
        )
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
w_1: [6, 2]
mm_default: [2, 2] = mm(x_1, w_1)
relu_default: [2, 2] = relu(mm_default)
slice_tensor: [2, 1] = slice(x_1, 1, 0, 1)
relu_default_1: [2, 1] = relu(slice_tensor)
mul_tensor: [2, 2] = mul(relu_default, relu_default_1)
redistribute_default: [4, 2] = redistribute(mul_tensor, S(0)->R)
return [redistribute_default]
""",
        )
        assert decisions == [("move_redistributions", "S(0)->R", "behind its readers")]

    def test_sums_are_reduced_once_behind_the_last_linear_operator(self):
        _, after, decisions = run_on_ranks(2, sums_that_meet)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [4, 6]
y_1: [4, 6]
w_1: [6, 2]
mul_tensor: [4, 6] = mul(x_1, 0.5)
add_tensor: [4, 6] = add(mul_tensor, y_1)
mm_default: [4, 2] = mm(add_tensor, w_1)
redistribute_default: [4, 2] = redistribute(mm_default, P(sum)->R)
return [redistribute_default]
""",
        )
        assert len(decisions) == 2


def rows(*sizes):
    """A tensor of which each rank has some rows."""
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    return distribute_tensor(values, make_mesh((dist.get_world_size(),)), [Shard(0)]).requires_grad_()


def whole(x):
    return x.redistribute(placements=[Replicate()])


def check(function, *args):
    """Compares a program with eager, forward and backward, twice; the bytes of its forward and the passes that changed
    it.
    """
    loss = lambda out: out.square().sum()  # noqa: E731
    assert_parity(function, list(args), loss=loss, backend="dtensor_aten", options={"strict": True}, calls=2)
    torch._dynamo.reset()
    with torch.no_grad(), record() as recording:
        torch.compile(function, backend="dtensor_aten", options={"strict": True})(*args)
    report = recording.report().ours
    return report.totals.all.bytes, {decision.kind for decision in report.decisions}


SMALLER = {
    "a slice of columns": (lambda x: whole(x)[:, 2:4].exp(), 2),
    "a norm, then a slice": (lambda x: F.rms_norm(whole(x), (8,))[:, :2].exp(), 2),
    "a layer norm, then a slice": (lambda x: F.layer_norm(whole(x), (8,))[:, :2].exp(), 2),
    "softmax, then one column": (lambda x: torch.softmax(whole(x), -1).select(1, 3).cos(), 1),
    "a mean of columns": (lambda x: (whole(x) * 2.5).mean(1), 1),
    "halves that meet again": (lambda x: torch.mul(*whole(x).exp().split(4, 1)).sum(1), 1),
    "a transposed corner": (lambda x: whole(x).t()[:2].unsqueeze(0).sin(), 2),
}


@pytest.mark.slow
@on_ranks(3)
def test_a_gather_goes_behind_what_makes_it_smaller():
    for name, (function, columns) in SMALLER.items():
        sent, kinds = check(function, rows(6, 8))
        assert (sent, "move_redistributions" in kinds) == (2 * columns * 4 * 2, True), (name, sent, kinds)


@on_ranks(2)
def test_rows_of_a_table_that_is_sharded_by_columns_are_gathered_and_not_the_table():
    mesh = make_mesh((2,))
    table = distribute_tensor(torch.randn(16, 8), mesh, [Shard(1)], src_data_rank=0).requires_grad_()
    indices = distribute_tensor(torch.tensor([[1, 15], [3, 3]]), mesh, [Replicate()])
    sent, kinds = check(lambda table, indices: F.embedding(indices, whole(table)), table, indices)
    assert sent == 4 * 4 * 4 and "move_redistributions" in kinds


SCALARS = {
    "mean": lambda s: s.mean(0),
    "sum of dim -1": lambda s: s.sum(-1),
    "amax": lambda s: s.amax(0, keepdim=True),
    "squeeze": lambda s: s.squeeze(0),
    "softmax": lambda s: s.softmax(-1),
    "unsqueeze": lambda s: s.unsqueeze(-1),
    "cumsum": lambda s: s.cumsum(0),
    "expand": lambda s: s.expand(3),
}


@pytest.mark.slow
@on_ranks(2)
def test_dims_of_scalars():
    for name, of in SCALARS.items():
        torch._dynamo.reset()
        x = distribute_tensor(torch.arange(10.0).reshape(5, 2), make_mesh((2,)), [Shard(0)]).requires_grad_()
        print(name)  # shown where it fails
        assert_parity(lambda x, of=of: of(whole(x.sum())) * 2, [x], backend="dtensor_aten", options={"strict": True})


@pytest.mark.slow
@on_ranks(4)
def test_on_a_2d_mesh():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(torch.arange(32.0).reshape(4, 8), mesh, [Shard(0), Shard(1)]).requires_grad_()
    sent, kinds = check(lambda x: x.redistribute(placements=[Replicate(), Shard(1)]).exp().sum(1), x)
    assert "move_redistributions" in kinds or "reduce_before_sending" in kinds
    sent, kinds = check(lambda x: torch.softmax(x.redistribute(placements=[Shard(0), Replicate()]), 0)[:1] * 2, x)
    assert sent


@on_ranks(4)
def test_what_is_whole_along_an_outer_mesh_dim_is_not_cut_for_nothing():
    """Both terms are sent to one layout; the sum in another one sends as often, as one of them has to be cut along the
    outer dim.

    Found by the fuzzer (seed 89031): the cut counted as free, and the pass ended in its own check.
    """
    mesh = make_mesh((2, 2), ("dp", "tp"))
    sources, target = ([Shard(1), Shard(1)], [Replicate(), Shard(1)]), [Shard(1), Shard(0)]
    x, y = (distribute_tensor(torch.randn(4, 8), mesh, source, src_data_rank=0).requires_grad_() for source in sources)
    _, kinds = check(lambda x, y: x.redistribute(placements=target) + y.redistribute(placements=target), x, y)
    assert "move_redistributions" not in kinds


@pytest.mark.slow
@on_ranks(2)
def test_sums_of_uneven_shards_have_eagers_numbers():
    for function, _ in SMALLER.values():
        check(function, rows(5, 8))


@on_ranks(2)
def test_numbers_that_the_program_makes_of_its_rank_stay_where_they_are():
    """A local tensor is scaled by the rank; only who knows that it is a shard again could see that this is legal."""
    mesh, scale = make_mesh((2,)), dist.get_rank() + 1.0

    def function(x):
        mine = x.redistribute(placements=[Shard(1)]).to_local() * scale
        return DTensor.from_local(mine[:1], mesh, [Shard(1)], run_check=False)

    values = torch.arange(16.0).reshape(4, 4)
    _, kinds = check(function, distribute_tensor(values, mesh, [Shard(0)]).requires_grad_())
    assert "move_redistributions" not in kinds


@on_ranks(2)
def test_what_is_read_whole_stays():
    unchanged(move_redistributions, lambda x: (torch.relu(move(x, "S(0)", "R")),), local(2, 6))
    unchanged(move_redistributions, lambda x: (marked(move(x, "S(0)", "R")[:1], "R", (1, 6)),), local(2, 6))


@on_ranks(2)
def test_a_slice_of_which_nothing_is_known_stays():
    unchanged(move_redistributions, lambda x: (move(x, "S(0)", "R")[:, :1],), local(2, 6))


@on_ranks(2)
def test_narrow_sums_are_reduced_before_arithmetic():
    def function(x, w):
        return (move(x, "P(sum)", "R") @ marked(w, "R", (6, 2)),)

    unchanged(move_redistributions, function, torch.ones(4, 6).bfloat16(), torch.ones(6, 2).bfloat16())
    _, _, decisions = rewritten(move_redistributions, function, torch.ones(4, 6), torch.ones(6, 2))
    assert decisions


@on_ranks(2)
def test_what_is_not_linear_stays():
    unchanged(move_redistributions, lambda x: (move(x, "P(sum)", "R").square().sum(1),), local(4, 6))
    unchanged(move_redistributions, lambda x: (move(x, "P(max)", "R").sum(1),), local(4, 6))
    unchanged(move_redistributions, lambda x: (((y := move(x, "P(sum)", "R")) * y).sum(1),), local(4, 6))


@on_ranks(2)
def test_random_values_are_drawn_for_the_whole_tensor():
    check(lambda x: torch.nn.functional.dropout(whole(x), 0.5)[:, :2], rows(4, 8))


@on_ranks(2)
def test_masks_are_not_sent_through_inductor():
    function = lambda x: (whole(x) * 2).relu().redistribute(placements=[Shard(0)])  # noqa: E731
    assert_parity(function, [rows(4, 2)], loss=lambda out: out.full_tensor().square().sum(), calls=1)
