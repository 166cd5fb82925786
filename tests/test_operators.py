"""Operators that torch cannot trace over DTensors, and operators without a sharding rule."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

import dtensor_compile
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks


def tensor(*shape, placement=None, grad=True):
    torch.manual_seed(sum(shape))
    return distribute_tensor(torch.randn(*shape), make_mesh((2,), ("tp",)), [placement or Shard(0)]).requires_grad_(
        grad
    )


def indices(values, placement):
    return distribute_tensor(torch.tensor(values), make_mesh((2,), ("tp",)), [placement])


def run(function, *args, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="dtensor_aten", fullgraph=True, options=options)(*args)


def square(out):
    return (out.full_tensor() if isinstance(out, DTensor) else out).square().sum()


def parity(function, *args, loss=square, **kwargs):
    assert_parity(function, list(args), loss=loss, backend="dtensor_aten", **kwargs)


@pytest.mark.parametrize("rows", [10, 7])
@on_ranks(2)
def test_rowwise_lookups(rows):
    weight = tensor(rows, 4)
    i, j = indices([1, 6, 3], Replicate()), indices([0, 2, 5], Replicate())
    for call in range(2):  # eager calls before and between, whose masks torch keeps
        assert F.embedding(i if call else j, weight).full_tensor().shape == (3, 4)
        parity(lambda i, w: F.embedding(i, w).redistribute(placements=[Replicate()]), i, weight)

    def two(i, j, w):
        whole = F.embedding(i, w).redistribute(placements=[Replicate()])
        return whole * F.embedding(j, w).redistribute(placements=[Shard(1)])

    parity(two, i, j, weight)


@on_ranks(2)
def test_a_rowwise_lookup_that_is_returned():
    weight, i = tensor(10, 4), indices([1, 7, 3], Replicate())
    eager, ours = F.embedding(i, weight), run(lambda i, w: F.embedding(i, w), i, weight)
    assert str(ours.placements) == str(eager.placements)
    assert torch.equal(ours._local_tensor, eager._local_tensor)
    with pytest.raises(AssertionError):  # its mask is not an output: never a wrong value
        ours.full_tensor()


@pytest.mark.parametrize("rows", [pytest.param(10, marks=pytest.mark.slow), 7, 2])
@on_ranks(2)
def test_argmax_over_a_sharded_dim(rows):
    x = tensor(rows, 4, grad=False)
    for program in (lambda x: x.argmax(0), lambda x: x.argmin(), lambda x: x.max(0)[1], lambda x: x.argmax(1)):
        parity(program, x, loss=None)
        parity(program, x, loss=None, dynamic=True)


@on_ranks(4)
def test_argmax_over_a_dim_sharded_twice():
    x = distribute_tensor(torch.randn(9, 4), make_mesh((2, 2), ("dp", "tp")), [Shard(0), Shard(0)])
    parity(lambda x: x.argmax(0), x, loss=None)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@on_ranks(2)
def test_one_hot(placement):
    i = indices([1, 7, 3, 2], placement)
    parity(lambda i, w: F.one_hot(i, 10).to(w.dtype) @ w, i, tensor(10, 4, placement=Replicate()))


@on_ranks(2)
def test_checks_of_linear_algebra_run():
    x = distribute_tensor(torch.eye(3).repeat(4, 1, 1) * 2, make_mesh((2,), ("tp",)), [Shard(0)])
    parity(torch.linalg.inv, x, loss=None)
    with pytest.raises(RuntimeError, match="singular"):
        run(lambda x: torch.linalg.inv(x), x * 0)


@on_ranks(2)
def test_slices_of_other_dims_keep_the_shards():
    for program in (lambda x: x[:, 1:3] * 2, lambda x: x[:] + x[:, :], lambda x: x[..., -2:] * 1):
        parity(program, tensor(10, 4), dynamic=True)


@on_ranks(2)
def test_flattening_a_sharded_second_dim_with_symbolic_sizes():
    def block(x, w):
        return F.layer_norm(x, (4,)).matmul(w).redistribute(placements=[Replicate()])

    parity(block, tensor(3, 10, 4, placement=Shard(1)), tensor(4, 4, placement=Replicate()), dynamic=True)


# ---- operators without a rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()])
@on_ranks(2)
def test_attention_is_sharded_by_batch_and_by_head(placement):
    attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    args = [tensor(2, 4, 8, 4, placement=placement) for _ in range(3)]
    with dtensor_compile.record() as recording:
        out = run(attention, *args)
        square(out).backward()
    plain = [x.detach().full_tensor().requires_grad_() for x in args]
    want = attention(*plain)
    want.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    for x, y in zip(args, plain):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    if placement in (Shard(0), Shard(1)):
        assert out.placements == (placement,) and not recording.collectives


@on_ranks(2)
def test_an_operator_without_a_rule_runs_replicated_and_is_reported():
    a, b = tensor(4, 3), tensor(5, 3, placement=Replicate())
    with dtensor_compile.record() as recording:
        out = run(torch.cdist, a, b)
    torch.testing.assert_close(out.full_tensor(), torch.cdist(a.full_tensor(), b.full_tensor()))
    reasons = [d.reason for d in recording.decisions if d.kind == "replicate_fallback"]
    assert any("_cdist_forward" in reason for reason in reasons)
    with pytest.raises(Exception, match="does not have a sharding strategy registered"):
        run(torch.cdist, a, b, fallback="error")
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
        torch.cdist(a, b)  # eager is as it was


@on_ranks(2)
def test_a_custom_operator_runs_replicated():
    with torch.library._scoped_library("dtc_test", "FRAGMENT") as library:
        library.define("twice_sorted(Tensor x) -> (Tensor, Tensor)")
        library.impl("twice_sorted", lambda x: tuple(t.clone() for t in x.sort(0)), "CompositeExplicitAutograd")
        library._register_fake("twice_sorted", lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)))
        x = tensor(8, 2, grad=False)
        values, order = run(lambda x: torch.ops.dtc_test.twice_sorted(x), x)
    assert values.placements == order.placements == (Replicate(),)
    torch.testing.assert_close(values.to_local(), x.full_tensor().sort(0)[0])


@on_ranks(2)
def test_a_rule_may_compile_a_program_that_needs_rules_of_ours():
    """torch asks a rule between a look into its cache of decisions and the entry there: the cache must not go in
    between.
    """
    a, b, asked = tensor(4, 3), tensor(5, 3, placement=Replicate()), []

    def rule(x):
        asked.append(run(torch.cdist, a, b))
        return [([Shard(0)], [Shard(0)])]

    with torch.library._scoped_library("dtc_test", "FRAGMENT") as library:
        library.define("halved(Tensor x) -> Tensor")
        library.impl("halved", lambda x: x / 2, "CompositeExplicitAutograd")
        register_sharding(torch.ops.dtc_test.halved.default)(rule)
        x = tensor(8, 2, grad=False)
        results = [torch.ops.dtc_test.halved(x) for _ in range(3)]
    assert len(asked) == 1
    for out in results:
        torch.testing.assert_close(out.full_tensor(), x.full_tensor() / 2)


@on_ranks(2)
def test_fill_keeps_the_shards():
    def program(x):
        y = x * 1
        y.fill_(3)
        return y + x

    x = tensor(7, 2, grad=False)
    out = run(program, x)
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), x.full_tensor() + 3)


@on_ranks(2)
def test_one_value_is_assigned_to_a_column_of_shards():
    def program(x):
        y = x.clone()
        y[..., 0] = 3
        return y * 2

    x = tensor(7, 2, grad=False)
    out = run(program, x)
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), program(x.full_tensor()))


@pytest.mark.parametrize("shape", [(8, 8), pytest.param((2, 1, 8, 8), marks=pytest.mark.slow), (2, 4, 8, 8)])
@on_ranks(2)
def test_attention_with_a_mask(shape):
    """Heads or batch stay sharded, and a replicated mask is cut as they are, without communication; torch has no rule
    for it, so the reference are whole tensors.
    """
    torch.manual_seed(0)
    mesh = make_mesh((2,), ("tp",))
    whole, mask = torch.randn(2, 4, 8, 4), torch.rand(shape) > 0.2

    def attend(q, mask):
        for _ in range(2):  # two blocks share the mask
            q = F.scaled_dot_product_attention(q, q * 2, q, attn_mask=mask)
        return q

    for placement in (Shard(0), Shard(1), Replicate()):
        reference = whole.clone().requires_grad_()
        want = attend(reference, mask)
        want.square().sum().backward()
        cut = [Replicate()]
        if isinstance(placement, Shard) and len(shape) == 4 and shape[placement.dim] != 1:
            cut.append(placement)  # the mask cut as the heads or the batch are
        for mask_placement in cut:
            q = distribute_tensor(whole, mesh, [placement]).requires_grad_()
            out = run(attend, q, distribute_tensor(mask, mesh, [mask_placement]))
            assert out.placements == (placement,)
            torch.testing.assert_close(out.full_tensor(), want)
            out.square().sum().full_tensor().backward()
            torch.testing.assert_close(q.grad.full_tensor(), reference.grad)
