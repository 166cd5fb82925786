"""Gradients that come in placed otherwise than the results are: ``.grad`` is placed as in eager, from the first call
on.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.compat.aot.aot_backward import SAVES_VALUES_BEFORE_WRITES
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values


def tensor(placement, rows, seed=1):
    torch.manual_seed(seed)
    return distribute_tensor(torch.randn(rows, 4), make_mesh((2,), ("tp",)), [placement]).detach().requires_grad_()


def partial_gradient(y):
    return (y.to_local(grad_placements=[Partial()]) ** 2).sum()


def replicated_gradient(y):
    return y.sum().full_tensor()


def usual_gradient(y):
    return (y.full_tensor() ** 2).sum()


def sharded(rows):
    return (tensor(Shard(0), rows),)


def with_weight(rows):
    return tensor(Shard(0), rows), tensor(Replicate(), 4, seed=2)


#: Program, arguments for a batch size, losses of the calls.
CASES = {
    "partial": (lambda x: x * 2, lambda rows: (tensor(Replicate(), rows),), [partial_gradient] * 5),
    "replicated": (lambda x: x * 2, sharded, [replicated_gradient] * 5),
    "as expected": (lambda x: x.relu() * 2, sharded, [usual_gradient] * 5),
    "two results": (
        lambda x, w: ((x @ w).relu(), x * 3),
        with_weight,
        [lambda out: replicated_gradient(out[0]) + usual_gradient(out[1])] * 5,
    ),
    "a result that the loss does not use": (
        lambda x: (x * 2, x * 3),
        sharded,
        [lambda out: replicated_gradient(out[1])] * 5,
    ),
    "by turns": (
        lambda x: x * 2,
        sharded,
        [replicated_gradient, usual_gradient, replicated_gradient, usual_gradient, replicated_gradient],
    ),
}


def steps(run, arguments, losses):
    """Results and gradients of five calls, with three batch sizes."""
    found = []
    for rows, loss in zip((6, 6, 8, 8, 10), losses):
        args = arguments(rows)
        out = run(*args)
        loss(out).backward()
        found.append((out, [arg.grad for arg in args]))
    return found


def check(name, backend, graphs=2):
    program, arguments, losses = CASES[name]
    counters.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    assert not compare_values(name, steps(program, arguments, losses), steps(compiled, arguments, losses))
    assert counters.graphs() == graphs  # one per batch size until sizes are symbolic


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_gradients_are_placed_as_in_eager(name):
    check(name, "dtensor_aten")


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_gradients_are_placed_as_in_eager_through_inductor():
    check("two results", "dtensor")


@on_ranks(4)
def test_the_gradient_of_sums_that_are_expanded():
    """torch makes it contiguous, for which DTensor would shard the new rows among those that hold terms (fuzz seed
    89187).
    """
    shards = distribute_tensor(torch.randn(7), make_mesh((2, 2)), [Replicate(), Shard(0)]).to_local()
    x = DTensor.from_local(shards, make_mesh((2, 2)), [Partial(), Shard(0)], run_check=False, shape=(7,), stride=(1,))
    assert_parity(
        lambda x: (x * 3).expand(2, 7),
        [x.detach().requires_grad_()],
        loss=usual_gradient,
        backend="dtensor_aten",
        calls=2,
    )


@on_ranks(2)
def test_arguments_that_the_program_does_not_keep():
    def run(f):
        x = tensor(Shard(0), 6)
        replicated_gradient(f(x * 1)).backward()
        return x.grad

    counters.reset()
    compiled = torch.compile(lambda x: x * 2, backend="dtensor_aten", fullgraph=True)
    assert not compare_values("gradient", [run(lambda x: x * 2)] * 4, [run(compiled) for _ in range(4)])


@on_ranks(2)
def test_a_program_that_draws_random_numbers_is_not_run_again():
    def step(run):
        x = tensor(Shard(0), 6)
        torch.manual_seed(3)
        replicated_gradient(run(x)).backward()
        return x.grad.full_tensor(), torch.get_rng_state()

    def program(x):
        return nn.functional.dropout(x, 0.5) * 2

    counters.reset()
    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    for _ in range(3):
        assert not compare_values("step", step(program), step(compiled))


@on_ranks(2)
def test_a_backward_that_is_to_be_differentiated_is_refused_as_before():
    counters.reset()
    compiled = torch.compile(lambda x: x * x, backend="dtensor_aten", fullgraph=True)
    x = tensor(Shard(0), 6)
    with pytest.raises(RuntimeError, match="double backward"):
        (gradient,) = torch.autograd.grad(replicated_gradient(compiled(x)), x, create_graph=True)
        gradient.full_tensor().sum().backward()


def written(x, y):
    x.mul_(2)
    return x + y


def written_after_it_is_read(x, y):
    x.mul_(y)
    return y.sin()


def gradients_after_a_write(program, loss):
    leaves = tensor(Shard(0), 6), tensor(Shard(0), 6, seed=2)
    x, y = (leaf * 1 for leaf in leaves)
    loss(program(x, y), x).backward()
    return [x, *(leaf.grad for leaf in leaves)]


@on_ranks(2)
def test_an_input_that_is_written_to_has_eagers_gradient_whether_the_loss_reads_it_or_not():
    losses = [lambda out, x: (x * out).full_tensor().sum(), lambda out, x: (x * 3).full_tensor().sin().sum()]
    if SAVES_VALUES_BEFORE_WRITES:
        losses.append(lambda out, x: out.full_tensor().sin().sum())
    for program in (written, written_after_it_is_read):
        run = torch.compile(program, backend="dtensor_aten", fullgraph=True)
        for loss in losses:
            if not SAVES_VALUES_BEFORE_WRITES:  # an error instead of the gradient for what x holds after the write
                with pytest.raises(RuntimeError):
                    gradients_after_a_write(run, loss)
                continue
            for got, wanted in zip(gradients_after_a_write(run, loss), gradients_after_a_write(program, loss)):
                zeros = torch.zeros(6, 4)  # what eager leaves out, as the gradient of an input that no loss reads
                torch.testing.assert_close(got.full_tensor(), zeros if wanted is None else wanted.full_tensor())
