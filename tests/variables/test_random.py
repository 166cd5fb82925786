"""Random numbers: from generators of the program and from torch's own, values and states as in eager."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.dynamo.trackers.generator_trackers import DRAWS_TOGETHER
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values

CAPTURED = torch.Generator()


def dtensor_argument(x, g):
    return torch.empty_like(x).normal_(generator=g) + x


def fills(x, g):
    return (
        torch.empty(20).normal_(1.0, std=2.0, generator=g), torch.empty(7).uniform_(generator=g, to=4.0),
        torch.empty(6).random_(3, 40, generator=g), torch.empty(4, dtype=torch.int64).random_(10, generator=g),
        torch.empty(5).exponential_(generator=g), torch.empty(5).bernoulli_(0.3, generator=g),
    )  # fmt: skip


def makes(x, g):
    return (
        torch.rand(3, generator=g), torch.randn(2, 9, generator=g), torch.randint(0, 9, (4,), generator=g),
        torch.randint(5, (3,), generator=g, dtype=torch.int32), torch.randperm(6, generator=g),
        torch.bernoulli(torch.full((9,), 0.4), generator=g), torch.full((5,), 0.5).bernoulli(generator=g),
        torch.multinomial(torch.ones(5), 2, generator=g),
    )  # fmt: skip


def captured(x, g):
    return torch.rand(3, generator=CAPTURED) + x.full_tensor().sum()


def strided(x, g):
    transposed, part = torch.zeros(6, 5).t(), torch.zeros(8, 40)
    transposed.normal_(generator=g)
    part[:, 3:37].normal_(generator=g)
    return transposed, part


def same_twice(x, g):
    pair = (g, g)
    return torch.rand(2, generator=pair[0]) + torch.rand(2, generator=pair[1])


def moves_a_generator(x, g):
    g.manual_seed(5)
    a, state = torch.rand(2, generator=g), g.get_state()
    b = torch.rand(2, generator=g)
    g.set_state(state)
    return a, b, torch.rand(2, generator=g), state


def makes_generators(x, g):
    seeded, fresh = torch.Generator().manual_seed(11), torch.Generator(device="cpu")
    return (
        torch.rand(3, generator=seeded),
        torch.rand(3, generator=seeded),
        torch.rand(2, generator=fresh),
        seeded.get_state(),
    )


def seeds(x, g):
    before = torch.rand(3)
    torch.manual_seed(7)
    a, b = torch.rand(3), torch.empty_like(x).normal_()
    torch.manual_seed(-7)
    return before, a, b, torch.rand(3), nn.functional.dropout(x, 0.5)


def states(x, g):
    state = torch.get_rng_state()
    a = torch.rand(3)
    torch.set_rng_state(state)
    return a, torch.rand(3)


def default_by_name(x, g):
    a = torch.rand(3, generator=torch.default_generator)
    torch.default_generator.manual_seed(4)
    return a, torch.rand(2)


def initializes(x, g):
    w, v = x.clone(), x.clone()
    nn.init.normal_(w, std=0.02)
    nn.init.kaiming_uniform_(v)
    nn.init.xavier_normal_(v, generator=g)
    nn.init.trunc_normal_(w)
    matrix = torch.empty(6, 4)
    nn.init.orthogonal_(matrix, generator=g)
    return w * 2 + v.sum(), matrix


def truncates(x, g):
    plain, given = torch.empty(9), torch.empty(40)
    narrow, far = x.clone(), torch.empty_like(x)
    nn.init.trunc_normal_(narrow, std=2.0, a=-0.2, b=0.3)
    nn.init.trunc_normal_(given, std=3.0, generator=g)
    nn.init.trunc_normal_(plain, std=3.0)
    nn.init.trunc_normal_(far, mean=3.0, std=1.0, a=-1, b=2)
    return plain, given, narrow, far, torch.rand(2), torch.rand(2, generator=g)


PROGRAMS = [
    dtensor_argument, fills, makes, captured, strided, same_twice, moves_a_generator, makes_generators, seeds, states,
    default_by_name, initializes, truncates,
]  # fmt: skip
#: Their ``trunc_normal_`` of shards asks all ranks how long to go on.
BREAK = (initializes, truncates) if DRAWS_TOGETHER else ()


def calls(run):
    """Results of three calls, and the states in which they leave the generators."""
    CAPTURED.manual_seed(9)
    results = []
    for rows in (5, 5, 7):
        torch.manual_seed(1)
        x = distribute_tensor(torch.randn(rows, 4), make_mesh((2,), ("tp",)), [Shard(0)]).detach()
        g = torch.Generator().manual_seed(3)
        torch.manual_seed(42)
        results.append((run(x, g), g.get_state(), torch.get_rng_state(), CAPTURED.get_state()))
    return results


def check(program, backend="dtensor_aten"):
    counters.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=program not in BREAK)
    assert not compare_values(program.__name__, calls(program), calls(compiled))
    assert counters.graphs() <= 2 or program in BREAK  # one for every batch size at most


@pytest.mark.slow
@on_ranks(2)
def test_values_and_states_equal_eagers():
    for program in PROGRAMS:
        check(program)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_through_inductor_what_draws_from_torchs_generator_stays_in_order():
    for program in (seeds, states, initializes, truncates, makes):
        check(program, "dtensor")


@on_ranks(2)
def test_gradients_pass_by_what_is_drawn():
    def program(x, g):
        noise = torch.empty(4).normal_(generator=g)
        y = (x * 2).redistribute(placements=[Replicate()]).to_local() * noise
        return y.uniform_(generator=g) + y * 0, y

    def step(run):
        x = distribute_tensor(torch.ones(4, 4), make_mesh((2,), ("tp",)), [Shard(0)]).requires_grad_()
        a, b = run(x, torch.Generator().manual_seed(3))
        (a + b).sum().backward()
        return a, b, x.grad

    counters.reset()
    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    assert not compare_values("step", step(program), step(compiled))


@on_ranks(2)
def test_a_generator_goes_on_after_a_graph_break():
    def program(x, g):
        a = torch.rand(3, generator=g)
        torch._dynamo.graph_break()
        return a, torch.rand(3, generator=g)

    counters.reset()
    compiled = torch.compile(program, backend="dtensor_aten")
    assert not compare_values("program", calls(program), calls(compiled))
    assert counters.graph_breaks() == 1


@on_ranks(2)
def test_a_generator_that_the_program_makes_may_leave_it():
    def program(x, g):
        made = torch.Generator().manual_seed(2)
        return torch.rand(2, generator=made), made

    counters.reset()
    a, made = torch.compile(program, backend="dtensor_aten", fullgraph=True)(torch.ones(2), None)
    b, expected = program(None, None)
    assert torch.equal(a, b) and torch.equal(made.get_state(), expected.get_state())


@on_ranks(2)
def test_a_generator_inside_of_a_checkpointed_region_breaks_the_graph():
    def program(x, g):
        return checkpoint(lambda y: y * torch.rand(4, generator=g), x, use_reentrant=False)

    counters.reset()
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="generator-inner"):
        torch.compile(program, backend="dtensor_aten", fullgraph=True)(x, torch.Generator())
    compiled = torch.compile(program, backend="dtensor_aten")
    a, b = (run(x, torch.Generator().manual_seed(1)) for run in (program, compiled))
    assert torch.equal(a, b)


@on_ranks(2)
def test_what_a_checkpointed_region_draws_stays_in_order():
    """Its draws are in operators of higher order, which keep the state of the generator for the backward pass."""
    mesh = make_mesh((2,), ("tp",))

    def program(x, weights):
        total = x.sum()
        for i, weight in enumerate(weights):  # branches that do not depend on each other, so that all could move

            def branch(x, weight=weight):
                gathered = DTensor.from_local(x @ weight, mesh, [Shard(0)]).full_tensor()
                return nn.functional.dropout(gathered, 0.5).sin()

            part = checkpoint(branch, x, use_reentrant=False) if i % 2 else branch(x)
            total = total + i * part.sum() + nn.functional.dropout(x, 0.3).sum()
        return total

    def step(run):
        torch.manual_seed(3)
        x, *weights = (torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(5))
        loss = run(x, weights)
        loss.backward()
        return loss, x.grad, [weight.grad for weight in weights], torch.get_rng_state()

    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    assert not compare_values("step", step(program), step(compiled))


@on_ranks(2)
def test_attention_that_a_checkpointed_region_draws_for_has_a_cost():
    """torch's kernel of attention is an operator that draws; its value and its work are known to every pass."""
    mesh = make_mesh((2,), ("tp",))

    def program(q, weight):
        def region(q, weight):
            whole = DTensor.from_local(q @ weight, mesh, [Shard(0)]).full_tensor()
            return nn.functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)

        return checkpoint(region, q, weight, use_reentrant=False).square().sum()

    def step(run):
        q, weight = (torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (0, 1))
        loss = run(q.unsqueeze(0), weight)
        loss.backward()
        return loss, q.grad, weight.grad

    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True, options={"strict": True})
    assert not compare_values("step", step(program), step(compiled))
