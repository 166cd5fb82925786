"""Gathered parameters and activations that are kept for backward, or gathered again there: numbers, collectives, what
is held.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import dtensor_compile
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks

#: Rows of the weights; 7 and 5 are uneven over two and three ranks.
SIZES = (6, 7, 5, 4)


def sharded(mesh):
    """Weights in shards, and inputs."""
    gen = torch.Generator().manual_seed(0)
    weights = [torch.randn(b, a, generator=gen) for a, b in zip(SIZES, SIZES[1:])]
    params = [distribute_tensor(w, mesh, [Shard(0)]).requires_grad_() for w in weights]
    return params, torch.randn(3, SIZES[0], generator=gen, requires_grad=True)


def network(x, params):
    """A gather for each layer, as data parallelism with sharded parameters has them."""
    for param in params:
        x = torch.tanh(F.linear(x, param.redistribute(placements=[Replicate()]).to_local()))
    return x


#: Each gather by itself, so that they can be counted.
ALONE = ("bucket_collectives",)


def run(step, **options):
    """Result, gradients, the gathers of forward and of backward, what was decided."""
    mesh = make_mesh((torch.distributed.get_world_size(),), ("dp",))
    params, x = sharded(mesh)
    if options:
        torch._dynamo.reset()
        options = {"kernels": "aten", "strict": True, "disable_passes": ALONE, **options}
        step = torch.compile(step, backend="dtensor", fullgraph=True, options=options)
    with dtensor_compile.record() as recording:
        for _ in range(2):
            y = step(x, params)
            y.square().sum().backward()
    gathers = [sum(c.kind == "all_gather" for c in graph.collectives) for graph in recording.graphs]
    decided = [(d.before, d.after) for d in recording.decisions if d.kind == "regather"]
    grads = [x.grad, *(p.grad.full_tensor() for p in params)]
    return [y.detach(), *grads], gathers, decided


def results(kernels="aten"):
    """Gathers and decisions by option, after a comparison with eager."""
    eager, _, _ = run(network)
    rows = {}
    for wanted in (None, "always", "never", 0, 7 * 6 * 4, 10**9):
        values, gathers, decided = run(network, regather=wanted, kernels=kernels)
        for ours, theirs in zip(values, eager):
            torch.testing.assert_close(ours, theirs)
        rows[wanted] = gathers, decided
    return rows


KEPT, AGAIN = ("S(0)->R", "kept for backward"), ("S(0)->R", "gathered again in backward")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters(ranks):
    """The gradient of a layer's input needs its weight; all gathers are repeated, none, or those that a budget
    leaves.
    """
    rows = run_on_ranks(ranks, results)[0]
    assert rows[None] == ([3, 0], [])
    assert rows["always"] == rows[0] == ([3, 3], [AGAIN] * 3)
    assert rows["never"] == rows[10**9] == ([3, 0], [KEPT] * 3)
    # 168 bytes: the last, of 80, takes longest for its bytes; the first would be 168 more, the second 140.
    assert rows[7 * 6 * 4] == ([3, 2], [AGAIN, AGAIN, KEPT])


@pytest.mark.slow
def test_parameters_through_inductor():
    rows = run_on_ranks(2, results, "inductor")[0]
    assert rows["always"][0] == [3, 3] and rows["never"][0] == [3, 0]


@pytest.mark.slow
@on_ranks(2)
def test_what_fsdp_and_checkpoints_repeat_is_kept_where_that_is_asked_for():
    mesh = make_mesh((2,), ("dp",))

    def gathers(wanted):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        options = {"kernels": "aten", "regather": wanted, "strict": True, "disable_passes": ALONE}
        with dtensor_compile.record() as recording:
            step = torch.compile(model, backend="dtensor", fullgraph=True, options=options)
            x = torch.arange(12.0).reshape(2, 6).requires_grad_()
            step(x).sum().backward()
        return [sum(c.kind == "all_gather" for c in graph.collectives) for graph in recording.graphs], x.grad

    (default, grad), (kept, grad_kept) = gathers(None), gathers("never")
    assert default[0] == kept[0] and default[1] > 0 == kept[1]
    torch.testing.assert_close(grad, grad_kept)

    def region(x, params):
        return checkpoint(network, x, params, use_reentrant=False)

    eager, _, _ = run(network)
    for wanted, expected in (None, [3, 3]), ("never", [3, 0]), ("always", [3, 3]):
        values, found, _ = run(region, regather=wanted)
        assert found == expected
        for ours, theirs in zip(values, eager):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@on_ranks(4)
def test_activations_of_two_mesh_dims():
    """What is gathered for a product is gathered again from the shard of the activation, which is kept in its place."""
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def program(x, w):
        whole = torch.tanh(x).redistribute(placements=[Shard(0), Replicate()])
        return (whole @ w).to_local()

    results = []
    for wanted in ("never", "always"):
        torch._dynamo.reset()
        gen = torch.Generator().manual_seed(1)
        x = distribute_tensor(torch.randn(6, 5, generator=gen), mesh, [Shard(0), Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.randn(5, 4, generator=gen), mesh, [Replicate(), Shard(1)]).requires_grad_()
        options = {"kernels": "aten", "regather": wanted, "strict": True}
        with dtensor_compile.record() as recording:
            y = torch.compile(program, backend="dtensor", fullgraph=True, options=options)(x, w)
            y.sum().backward()
        counts = [sum(c.kind == "all_gather" for c in graph.collectives) for graph in recording.graphs]
        assert isinstance(x.grad, DTensor)
        results.append((counts, y.detach(), x.grad.full_tensor(), w.grad.full_tensor()))
    (never, *kept), (always, *again) = results
    assert always[1] == never[1] + 1 and always[0] == never[0]
    for one, other in zip(kept, again):
        torch.testing.assert_close(one, other)


@on_ranks(2)
def test_nothing_is_held_for_gathers_that_backward_does_not_need():
    """The first weight's gradient needs the input, not the weight; an input without gradient needs no weight at all."""
    mesh = make_mesh((2,), ("dp",))
    params, x = sharded(mesh)
    with dtensor_compile.record() as recording:
        options = {"kernels": "aten", "regather": "always"}
        step = torch.compile(network, backend="dtensor", fullgraph=True, options=options)
        step(x.detach(), params[:1]).sum().backward()
    assert [d for d in recording.decisions if d.kind == "regather"] == []
    assert [sum(c.kind == "all_gather" for c in graph.collectives) for graph in recording.graphs] == [1, 0]
