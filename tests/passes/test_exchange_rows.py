import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import TestCase
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile import record
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.passes.exchange_rows import exchange_rows
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks
from tests.cases import mostly_slow
from tests.passes.graphs import local, move, rewritten, unchanged


def rows_that_each_rank_reads():
    def function(x, i):
        return (F.embedding(i, move(x, "S(0)", "R", [16, 6])),)

    return rewritten(exchange_rows, function, local(8, 6), torch.tensor([9 - dist.get_rank(), 3]))


class Golden(TestCase):
    maxDiff = None

    def test_rows_that_each_rank_reads(self):
        before, after, decisions = run_on_ranks(2, rows_that_each_rank_reads)[1]
        self.assertExpectedInline(
            after,
            """\
x_1: [8, 6]
i_1: [2]
reshape_default: [2] = reshape(i_1, [2])
redistribute_default: [4] = redistribute(reshape_default, S(0)->R)
sub_tensor: [4] = sub(redistribute_default, 8)
ge_scalar: [4] = ge(sub_tensor, 0)
lt_scalar: [4] = lt(sub_tensor, 8)
logical_and_default: [4] = logical_and(ge_scalar, lt_scalar)
lt_scalar_1: [4] = lt(redistribute_default, 16)
ge_scalar_1: [4] = ge(redistribute_default, 0)
logical_and_default_1: [4] = logical_and(ge_scalar_1, lt_scalar_1)
remainder_scalar: [4] = remainder(redistribute_default, 8)
where_self: [4] = where(logical_and_default_1, remainder_scalar, redistribute_default)
embedding_default: [4, 6] = embedding(x_1, where_self)
unsqueeze_default: [4, 1] = unsqueeze(logical_and_default, -1)
full_default: [] = full([], 0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
where_self_1: [4, 6] = where(unsqueeze_default, embedding_default, full_default)
redistribute_default_1: [2, 6] = redistribute(where_self_1, P(sum)->S(0))
view_default: [2, 6] = view(redistribute_default_1, [2, 6])
return [view_default]
""",
        )
        assert decisions == [("exchange_rows", "S(0)->R", "S(0)->R of rows")]


class Table(torch.nn.Module):
    """A table whose rows are in shards over the ranks that split the batch; `more` reads it too."""

    def __init__(self, mesh, rows, padding=None, dtype=torch.float32, more=None):
        super().__init__()
        torch.manual_seed(3)
        placements = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
        self.weight = torch.nn.Parameter(distribute_tensor(torch.randn(rows, 4, dtype=dtype), mesh, placements))
        self.padding, self.more = padding, more

    def forward(self, *tokens):
        whole = self.weight.redistribute(placements=[Replicate()] * self.weight.device_mesh.ndim)
        if not isinstance(tokens[0], DTensor):
            whole = whole.to_local(grad_placements=[Partial()] + [Replicate()] * (self.weight.device_mesh.ndim - 1))
        found = sum(F.embedding(t, whole, padding_idx=self.padding) * (3 + k) for k, t in enumerate(tokens))
        return found if self.more is None else found @ whole.T


def tokens_of_this_rank(rows, *shape):
    torch.manual_seed(10 + dist.get_rank())
    return torch.randint(0, rows, shape)


def sent(make, tokens, backend="dtensor_aten", options=None):
    """Decisions of the pass, bytes and collectives of two steps whose results and gradients are those of eager."""
    ours, eager = make(), make()
    options = {"enable_passes": ["exchange_rows"], "strict": True} if options is None else options
    compiled = torch.compile(ours, backend=backend, fullgraph=True, options=options)
    with record() as recording:
        for _ in range(2):
            results = [run(*tokens) for run in (compiled, eager)]
            weight = torch.randn(results[0].shape, dtype=results[0].dtype)
            for result in results:
                result = result.to_local() if isinstance(result, DTensor) else result
                (result * weight[tuple(map(slice, result.shape))]).sum().backward()
            whole = [r.full_tensor() if isinstance(r, DTensor) else r for r in results]
            assert torch.equal(*whole)
    # other order of additions
    tolerance = {} if ours.weight.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours.weight.grad.to_local(), eager.weight.grad.to_local(), **tolerance)
    return (
        [d.reason for d in recording.decisions if d.kind == "exchange_rows"],
        recording.bytes_sent,
        len(recording.collectives),
    )


@pytest.mark.parametrize(
    "world, backend",
    [
        *((world, "dtensor_aten") for world in (2, 3)),
        *mostly_slow((world, "dtensor") for world in (2, 3)),
    ],
)
def test_rows_travel_and_not_the_table(world, backend):
    run_on_ranks(world, _rows_travel, backend)


def _rows_travel(backend):
    n = dist.get_world_size()
    for padding in (None, 5):
        tokens = tokens_of_this_rank(48, 3, 2)
        found = sent(lambda padding=padding: Table(make_mesh((n,)), 48, padding), [tokens], backend)
        rows, indices, table = 6 * 4 * 4 * (n - 1), 6 * 8 * (n - 1), 48 // n * 4 * 4 * (n - 1)
        assert found == (
            [
                f"{rows + indices:,} bytes of rows and indices are sent and not {table:,} bytes in 1",
                f"{rows:,} bytes of gradients and indices are sent and not {table:,} bytes in 1",
            ],
            2 * rows + indices,
            3,
        )


@pytest.mark.slow
@on_ranks(2)
def test_a_step_through_inductor_in_bfloat16():
    tokens = tokens_of_this_rank(48, 3, 2)
    found, *_ = sent(lambda: Table(make_mesh((2,)), 48, dtype=torch.bfloat16), [tokens], "dtensor")
    assert len(found) == 2


@on_ranks(2)
def test_two_lookups_of_one_table():
    found, size, count = sent(
        lambda: Table(make_mesh((2,)), 96), [tokens_of_this_rank(96, 5), tokens_of_this_rank(96, 10)[5:]]
    )
    # the gradients of the two are added first, and that sum is reduced
    assert len(found) == 1 and size < 2 * 48 * 16


@on_ranks(4)
def test_one_dim_of_a_mesh_of_two():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(10 + mesh.get_local_rank("dp"))
    found, *_ = sent(lambda: Table(mesh, 48), [torch.randint(0, 48, (6,))])
    assert len(found) == 2


def two_tables(mesh, in_order):
    """Both are looked up by the same indices, in the order in which they are gathered or not; on two mesh dims, over
    one each.
    """
    kinds = [("S(0)R", "RR"), ("RS(0)", "RR")] if mesh.ndim == 2 else [("S(0)", "R")] * 2

    def function(x, y, i):
        table, other = (move(t, *kind, [16, 6], mesh_text(mesh)) for t, kind in zip((x, y), kinds))
        first = F.embedding(i, table if in_order else other)
        return first, F.embedding(i, other if in_order else table)

    return rewritten(exchange_rows, function, local(8, 6), local(8, 6) + 1000, torch.tensor([9 - dist.get_rank(), 3]))


@on_ranks(2)
def test_tables_share_the_indices_that_are_there():
    for in_order in (True, False):
        _, text, decisions = two_tables(make_mesh((2,)), in_order)
        assert len(decisions) == 2 and text.count("S(0)->R)") == (1 if in_order else 2), text


@on_ranks(4)
def test_tables_over_other_mesh_dims_gather_indices_over_those():
    _, text, decisions = two_tables(make_mesh((2, 2), ("dp", "tp")), True)
    assert len(decisions) == 2 and text.count("S(0)R->RR)") == text.count("RS(0)->RR)") == 1, text


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
def test_a_model_under_fully_shard(reshard):
    run_on_ranks(2, _fully_sharded, reshard)


def _fully_sharded(reshard):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 4))
        for layer in model:
            fully_shard(layer, mesh=make_mesh((2,)), reshard_after_forward=reshard)
        return fully_shard(model, mesh=make_mesh((2,)))

    tokens, ours, eager = tokens_of_this_rank(64, 6), make(), make()
    compiled = torch.compile(
        ours, backend="dtensor", fullgraph=True, options={"enable_passes": ["exchange_rows"], "strict": True}
    )
    with record() as recording:
        for run in (compiled, compiled, eager, eager):
            run(tokens).square().sum().backward()
    for a, b in zip(ours.parameters(), eager.parameters()):
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local())
    assert len([d for d in recording.decisions if d.kind == "exchange_rows"]) == 2
    assert 32 * 8 * 4 not in [c.bytes for c in recording.collectives]  # what half of the table is


@on_ranks(2)
def test_a_batch_that_is_a_dtensor():
    torch.manual_seed(5)
    tokens = distribute_tensor(torch.randint(0, 48, (6, 2)), make_mesh((2,)), [Shard(0)])
    found, *_ = sent(lambda: Table(make_mesh((2,)), 48), [tokens])
    assert len(found) == 2


@on_ranks(2)
def test_a_table_that_something_else_reads_or_that_is_uneven_or_smaller_stays():
    two = make_mesh((2,))
    assert not sent(lambda: Table(two, 48, more=True), [tokens_of_this_rank(48, 2)])[0]
    assert not sent(lambda: Table(two, 49), [tokens_of_this_rank(49, 2)])[0]
    assert not sent(lambda: Table(two, 48), [tokens_of_this_rank(48, 60)])[0]
    assert not sent(lambda: Table(two, 48), [tokens_of_this_rank(48, 2)], options={})[0]  # has to be asked for

    def also_its_sine(x, i):
        table = move(x, "S(0)", "R", [16, 6])
        return F.embedding(i, table), table.sin()

    unchanged(exchange_rows, also_its_sine, local(8, 6), torch.tensor([1, 2]))


@pytest.mark.parametrize("backend", ["dtensor_aten", "dtensor"])
@pytest.mark.parametrize("index", [48, -1])
def test_an_index_outside_of_the_table_is_an_error_on_every_rank(index, backend):
    run_on_ranks(2, _outside, index, backend)


def _outside(index, backend):
    tokens = torch.tensor([3, index if dist.get_rank() == 0 else 4])
    model = torch.compile(Table(make_mesh((2,)), 48), backend=backend, options={"enable_passes": ["exchange_rows"]})
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        model(tokens)


@on_ranks(2)
def test_ranks_that_look_up_other_numbers_of_rows_are_an_error():
    table = Table(make_mesh((2,)), 48)

    def other_numbers(tokens):
        return table(tokens)

    compiled = torch.compile(other_numbers, backend="dtensor_aten", options={"enable_passes": ["exchange_rows"]})
    with pytest.raises(
        Exception, match="AgreementError.* all_gather_into_tensor int64 of [23] elements .* of [23] elements"
    ):
        compiled(tokens_of_this_rank(48, 2 + dist.get_rank()))
