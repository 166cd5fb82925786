import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import TestCase
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtensor_compile import record
from dtensor_compile.passes.look_up_before_sending import look_up_before_sending
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, marked, move, rewritten, unchanged


def rows_of_a_table():
    def function(x, i):
        return (F.embedding(marked(i, "R", (2,)), move(x, "S(0)", "R", [16, 6])),)

    return rewritten(look_up_before_sending, function, local(8, 6), torch.tensor([9, 3]))


def some_rows():
    def function(x):
        return (marked(move(x, "S(0)", "R", [16, 6])[7:10], "R", (3, 6)) * 1,)

    return rewritten(look_up_before_sending, function, local(8, 6))[1]


class Golden(TestCase):
    maxDiff = None

    def test_rows_of_a_table(self):
        before, after, decisions = run_on_ranks(2, rows_of_a_table)[1]
        self.assertExpectedInline(
            after,
            """\
x_1: [8, 6]
i_1: [2]
sub_tensor: [2] = sub(i_1, 8)
lt_scalar: [2] = lt(sub_tensor, 0)
ge_scalar: [2] = ge(sub_tensor, 8)
logical_or_default: [2] = logical_or(lt_scalar, ge_scalar)
full_default: [] = full([], 0, dtype=torch.int64, layout=torch.strided, device=cpu, pin_memory=False)
where_self: [2] = where(logical_or_default, full_default, sub_tensor)
embedding_default: [2, 6] = embedding(x_1, where_self)
unsqueeze_default: [2, 1] = unsqueeze(logical_or_default, -1)
full_default_1: [] = full([], 0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
where_self_1: [2, 6] = where(unsqueeze_default, full_default_1, embedding_default)
redistribute_default: [2, 6] = redistribute(where_self_1, P(sum)->R)
return [redistribute_default]
""",
        )
        assert decisions == [("look_up_before_sending", "S(0)->R", "P(sum)->R of rows")]

    def test_a_slice_takes_its_part_of_each_rank(self):
        texts = run_on_ranks(2, some_rows)
        self.assertExpectedInline(
            texts[0],
            """\
x_1: [8, 6]
slice_tensor: [1, 6] = slice(x_1, 0, 7, 8)
constant_pad_nd_default: [3, 6] = constant_pad_nd(slice_tensor, [0, 0, 0, 2], 0)
redistribute_default: [3, 6] = redistribute(constant_pad_nd_default, P(sum)->R)
mul: [3, 6] = mul(redistribute_default, 1)
return [mul]
""",
        )
        self.assertExpectedInline(
            texts[1],
            """\
x_1: [8, 6]
slice_tensor: [2, 6] = slice(x_1, 0, 0, 2)
constant_pad_nd_default: [3, 6] = constant_pad_nd(slice_tensor, [0, 0, 1, 0], 0)
redistribute_default: [3, 6] = redistribute(constant_pad_nd_default, P(sum)->R)
mul: [3, 6] = mul(redistribute_default, 1)
return [mul]
""",
        )


def whole(x):
    return x.redistribute(placements=[Replicate()])


PROGRAMS = {
    "embedding": lambda x, i: F.embedding(i, whole(x)).sin(),
    "index_select": lambda x, i: whole(x).index_select(0, i.flatten()).cos(),
    "a slice within a shard": lambda x, i: whole(x)[1:3] * 2,
    "a slice over shards": lambda x, i: whole(x)[3:6].exp(),
    "a row": lambda x, i: whole(x)[5].exp(),
    "the last row": lambda x, i: whole(x)[-1].exp(),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_programs_have_eagers_numbers_forward_and_backward(dtype):
    mesh = make_mesh((4,))
    for name, function in PROGRAMS.items():
        values = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
        table = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
        indices = distribute_tensor(torch.tensor([[0, 31], [7, 8]]), mesh, [Replicate()])
        loss = lambda out: out.square().sum()  # noqa: E731
        assert_parity(function, [table, indices], loss=loss, backend="dtensor_aten", options={"strict": True}, calls=2)
        torch._dynamo.reset()
        with torch.no_grad(), record() as recording:
            torch.compile(function, backend="dtensor_aten")(table, indices)
        kinds = {decision.kind for decision in recording.decisions}
        assert "look_up_before_sending" in kinds and recording.bytes_sent < 3 * 8 * 4 * dtype.itemsize, name


@on_ranks(2)
def test_on_a_2d_mesh_and_for_uneven_shards():
    mesh, loss = make_mesh((1, 2), ("dp", "tp")), lambda out: out.square().sum()
    for rows in (16, 15):
        table = distribute_tensor(torch.randn(rows, 4), mesh, [Replicate(), Shard(0)], src_data_rank=0).requires_grad_()
        function = lambda x: x.redistribute(placements=[Replicate(), Replicate()])[2:4].exp()  # noqa: E731
        assert_parity(function, [table], loss=loss, backend="dtensor_aten", options={"strict": True}, calls=2)


@on_ranks(2)
def test_what_would_not_be_right_or_pay_stays():
    def lookup(spec, shape, dtype=torch.float32):
        def function(x, i):
            return (F.embedding(marked(i, spec, shape), move(x, "S(0)", "R", [16, 6])),)

        return function, torch.zeros(8, 6, dtype=dtype), torch.zeros(2, dtype=torch.int64)

    unchanged(look_up_before_sending, *lookup("S(0)", (4,)))  # each rank looks up other rows
    unchanged(look_up_before_sending, *lookup("R", (2,), torch.bool))  # no sums of these
    unmarked = lambda x, i: (F.embedding(i, move(x, "S(0)", "R", [16, 6])),)  # noqa: E731
    unchanged(look_up_before_sending, unmarked, local(8, 6), torch.tensor([1, 2]))
    unmarked = lambda x: (move(x, "S(0)", "R", [16, 6])[1 + dist.get_rank() : 3 + dist.get_rank()] * 1,)  # noqa: E731
    unchanged(look_up_before_sending, unmarked, local(8, 6))
    most = lambda x: (marked(move(x, "S(0)", "R", [16, 6])[:9], "R", (9, 6)) * 1,)  # noqa: E731
    unchanged(look_up_before_sending, most, local(8, 6))

    def two_slices(x):
        y = move(x, "S(0)", "R", [16, 6])
        return (marked(y[:2], "R", (2, 6)).exp() + marked(y[-2:], "R", (2, 6)).exp(),)

    unchanged(look_up_before_sending, two_slices, local(8, 6))  # two collectives for one

    def read_whole_too(x):
        y = move(x, "S(0)", "R", [16, 6])
        return marked(y[:2], "R", (2, 6)) * 1, y.exp()

    unchanged(look_up_before_sending, read_whole_too, local(8, 6))


@pytest.mark.slow
@on_ranks(2)
def test_through_inductor():
    mesh = make_mesh((2,))
    table = distribute_tensor(
        torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)]
    ).requires_grad_()
    indices = distribute_tensor(torch.tensor([[0, 15], [7, 8]]), mesh, [Replicate()])

    def function(x, i):
        made = torch.distributed.tensor.full((2, 4), 0.5, device_mesh=mesh, placements=[Shard(0)])
        return F.embedding(i, whole(x)).sin() * whole(made) + whole(x)[7:9].exp() + whole(x.cos())[:, :1].sum() * 0.1

    assert_parity(function, [table, indices], loss=lambda out: out.square().sum(), calls=2)
