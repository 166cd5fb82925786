"""Where Inductor by itself computes other numbers than eager, or none: the backend that goes through it gives
eager's.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import make_mesh, on_ranks


def forward_and_backward(function, backend, sizes, *options):
    """Outputs and gradients for each size of a batch that is sharded on two ranks; `backend` None is eager."""
    counters.reset()
    mesh = make_mesh((2,), ("tp",))
    run = torch.compile(function, backend=backend, fullgraph=True, **dict(options)) if backend else function
    results = []
    for size in sizes:
        torch.manual_seed(size)
        x = distribute_tensor(torch.randn(size, 3, 4), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()]).requires_grad_()
        out = run(x, w)
        assert isinstance(out, DTensor)
        out.to_local().square().sum().backward()
        results += [out.to_local().detach(), x.grad.to_local(), w.grad.to_local()]
    return results


def assert_follows_eager(function, sizes):
    got = forward_and_backward(function, "dtensor", sizes)
    assert counters.graphs() <= 2
    for value, wanted in zip(got, forward_and_backward(function, None, sizes), strict=True):
        torch.testing.assert_close(value, wanted)


@on_ranks(2)
def test_a_saved_tensor_whose_shape_is_a_multiple_of_the_shard_size():
    assert_follows_eager(lambda x, w: torch.einsum("bsd,dh->bsh", x, w), (10, 14, 18))


@on_ranks(2)
def test_roundings_that_the_program_asks_for_and_random_values():
    def function(x, w):
        rounded = x.to(torch.bfloat16).float() * 3
        return F.dropout(rounded, 0.5) @ w

    assert_follows_eager(function, (10, 10))


@on_ranks(2)
def test_options_bring_inductors_own_numbers_back():
    def rounded(x, w):
        return x.to(torch.bfloat16).float() @ w

    inductors = {"options": {"emulate_precision_casts": False}}
    free = forward_and_backward(rounded, "dtensor", (10,), *inductors.items())
    eager = forward_and_backward(rounded, None, (10,))
    assert not torch.equal(free[0], eager[0])


@on_ranks(2)
def test_operators_with_effects_and_smallest_sizes_when_the_batch_changes():
    mesh = make_mesh((2,), ("tp",))

    def function(x):
        return torch.linalg.inv(x + 5 * torch.linalg.matrix_exp(x * 0)), torch.linalg.svdvals(
            x.full_tensor().flatten(1)
        )

    counters.reset()
    compiled = torch.compile(function, backend="dtensor", fullgraph=True)
    for size in (6, 10):
        x = distribute_tensor(torch.randn(size, 3, 3), mesh, [Shard(0)])
        for value, wanted in zip(compiled(x), function(x), strict=True):
            torch.testing.assert_close(getattr(value, "_local_tensor", value), getattr(wanted, "_local_tensor", wanted))
    assert counters.graphs() == 2


@on_ranks(2)
def test_a_result_whose_placement_no_cache_can_keep():
    mesh = make_mesh((2,), ("tp",))
    weight = distribute_tensor(torch.randn(10, 4), mesh, [Shard(0)])
    indices = distribute_tensor(torch.tensor([1, 7, 3]), mesh, [Replicate()])
    wanted = str(F.embedding(indices, weight).placements)
    for _ in range(2):  # the second compilation would find the first one's result in Inductor's cache
        counters.reset()
        compiled = torch.compile(lambda i, w: F.embedding(i, w), backend="dtensor", fullgraph=True)
        assert str(compiled(indices, weight).placements) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_a_matrix_product_that_is_added_with_a_factor(dtype):
    """Inductor makes an addmm of it and forgets the factor: a step of SGD would add the whole gradient."""

    def step(weight, x, y):
        wide = weight.double().add(x.t() @ y, alpha=0.3)
        weight.add_(x.t() @ y, alpha=-0.1)
        return weight.add(x.t() @ y, alpha=0.5), (x.t() @ x).add(x.t() @ y, alpha=3), wide

    torch.manual_seed(0)
    weight, x, y = torch.randn(4, 4).to(dtype), torch.randn(6, 4).to(dtype), torch.randn(6, 4).to(dtype)
    compiled_weight = weight.clone()
    counters.reset()
    got = torch.compile(step, backend="dtensor", fullgraph=True)(compiled_weight, x, y)
    want = step(weight, x, y)
    for value, wanted in zip((*got, compiled_weight), (*want, weight), strict=True):
        torch.testing.assert_close(value, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
@on_ranks(2)
def test_a_whole_step_of_sgd(options):
    def run(backend):
        counters.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        parallelize_module(model, make_mesh((2,), ("tp",)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled = torch.compile(step, backend=backend, fullgraph=True) if backend else step
        losses = [compiled(torch.randn(6, 4), torch.randn(6, 4)).detach() for _ in range(4)]
        return losses + [p.detach().full_tensor() for p in model.parameters()]

    for value, wanted in zip(run("dtensor"), run(None), strict=True):
        torch.testing.assert_close(value, wanted)
