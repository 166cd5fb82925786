"""Train steps as one region: parameters, gradients, state of the optimizer and losses follow eager, in one graph."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.cases import mostly_slow


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def tp_mlp():
    torch.manual_seed(0)
    mesh = make_mesh((dist.get_world_size(),), ("tp",))
    return parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def whole_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def follows_eager(make, *, graphs=2, fullgraph=True, steps=4, backend="dtensor_aten", between=None, wanted_breaks=0):
    """`make(model)` returns a step and an optimizer; both run `steps` times eager and compiled, from the same state.

    graphs: how many are compiled at most (None: any number): the first call has no gradients yet, so two are usual.
    between: called with the optimizer after each step, outside of the region.
    """
    results = []
    for compiled in (False, True):
        model = tp_mlp()
        step, optimizer = make(model)
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(step, backend=backend, fullgraph=fullgraph) if compiled else step
        torch.manual_seed(1)
        losses = []
        for _ in range(steps):
            losses.append(run(torch.randn(5, 4), torch.randn(5, 4)))
            if between is not None:
                between(optimizer)
        state = [
            v.float() for p in model.parameters() for _, v in sorted(optimizer.state[p].items()) if torch.is_tensor(v)
        ]
        results.append((losses, [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()], state))
    for what, eager, ours in zip(("losses", "parameters", "gradients", "state"), *results):
        differences = compare_values(what, eager, ours)
        assert not differences, "\n".join(map(str, differences))
    assert bool(counters["graph_break"]) == bool(wanted_breaks), dict(counters["graph_break"])
    assert graphs is None or counters["stats"]["unique_graphs"] <= graphs


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True, amsgrad=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, "adamw"))
@on_ranks(2)
def test_whole_train_step(name):
    def make(model):
        optimizer = OPTIMIZERS[name](model.parameters())
        return whole_step(model, optimizer), optimizer

    follows_eager(make)


@on_ranks(2)
def test_step_alone_with_gradients_from_outside():
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            optimizer.step()
            return x

        for i, p in enumerate(model.parameters()):
            p.grad = DTensor.from_local(
                torch.full_like(p.to_local(), i + 1.0), p.device_mesh, p.placements, run_check=False
            )
        return step, optimizer

    follows_eager(make, graphs=1)


@pytest.mark.slow
@on_ranks(2)
def test_what_a_step_sets_on_the_optimizer_stays():
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = whole_step(model, optimizer)

        def step(x, y):
            optimizer.steps_so_far = 1 + getattr(optimizer, "steps_so_far", 0)
            return inner(x, y) * optimizer.steps_so_far

        made.append(optimizer)
        return step, optimizer

    made = []
    follows_eager(make, graphs=None)
    assert [optimizer.steps_so_far for optimizer in made] == [4, 4]


@pytest.mark.slow
@on_ranks(2)
def test_scheduler_in_the_region():
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        inner = whole_step(model, optimizer)

        def step(x, y):
            loss = inner(x, y)
            scheduler.step()
            return loss

        return step, optimizer

    follows_eager(make, graphs=None)


@on_ranks(2)
def test_groups_of_parameters_and_a_frozen_one():
    def make(model):
        model.up.bias.requires_grad_(False)
        groups = [
            {"params": list(model.up.parameters()), "lr": 0.1},
            {"params": list(model.down.parameters()), "momentum": 0.5},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        return whole_step(model, optimizer), optimizer

    follows_eager(make)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd with momentum", "adamw"])
@on_ranks(2)
def test_two_steps_in_one_region_the_first_makes_the_state(kind):
    def make(model):
        optimizer = OPTIMIZERS[kind](model.parameters())
        inner = whole_step(model, optimizer)
        return lambda x, y: inner(x, y) + inner(x, y), optimizer

    follows_eager(make)


@pytest.mark.slow
@on_ranks(2)
def test_gradients_accumulate_clip_and_become_zero():
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            for i in range(2):
                (F.mse_loss(model(x), y) / (i + 1)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return norm

        return step, optimizer

    follows_eager(make)


@pytest.mark.slow
@on_ranks(2)
def test_closure():
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return step, optimizer

    follows_eager(make)


@pytest.mark.slow
@on_ranks(2)
def test_hooks_before_and_after_a_step():
    counts = []

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def halve(optimizer, args, kwargs):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        counts.append({"after": 0})
        mine = counts[-1]
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_: mine.update(after=mine["after"] + 1))
        return whole_step(model, optimizer), optimizer

    follows_eager(make, graphs=None)
    assert [c["after"] for c in counts] == [4, 4]


@on_ranks(2)
def test_optimizer_of_the_users_own():
    class SignMomentum(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    p.add_((state["m"] * 0.9 + p.grad * 0.1).sign(), alpha=-group["lr"])
                    state["m"].mul_(0.99).add_(p.grad, alpha=0.01)

    def make(model):
        optimizer = SignMomentum(model.parameters(), 0.01)
        return whole_step(model, optimizer), optimizer

    follows_eager(make)


@pytest.mark.slow
@on_ranks(2)
def test_state_that_is_loaded_again():
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return whole_step(model, optimizer), optimizer

    follows_eager(make, between=lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()))


@pytest.mark.slow
@on_ranks(2)
def test_gradient_of_an_intermediate_and_hooks_on_it():
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            out = model(x)
            out.register_hook(lambda grad: grad * 2)
            F.mse_loss(out, y).backward()
            optimizer.step()
            return out.detach()

        return step, optimizer

    follows_eager(make)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(2)
def test_hooks_of_parameters_break_the_graph_and_are_not_lost(kind):
    def make(model):
        def halve(value):
            if kind == "register_hook":
                return value * 0.5
            value.grad = value.grad * 0.5

        getattr(model.up.weight, kind)(halve)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return whole_step(model, optimizer), optimizer

    follows_eager(make, graphs=None, fullgraph=False, wanted_breaks=1)


@pytest.mark.slow
@on_ranks(2)
def test_a_hook_registered_later_is_not_lost():
    model = tp_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.reset()
    run = torch.compile(whole_step(model, optimizer), backend="dtensor_aten")
    x, y, seen = torch.randn(5, 4), torch.randn(5, 4), []
    run(x, y)
    run(x, y)
    model.up.weight.register_hook(lambda grad: seen.append(1))
    run(x, y)
    assert seen == [1]


@pytest.mark.slow
@on_ranks(2)
def test_hooks_of_parameters_that_another_backend_marked_are_not_lost():
    """Dynamo makes attributes of the graph of parameters whose optimizer another backend has compiled a step of."""

    def make(model):
        model.up.weight.register_hook(lambda grad: grad * 0.5)
        for parameter in model.parameters():
            torch._dynamo.mark_static_address(parameter, guard=True)  # as torch does for such a step
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return whole_step(model, optimizer), optimizer

    follows_eager(make, graphs=None, fullgraph=False, wanted_breaks=1)


@on_ranks(1)
def test_other_backends_still_break_around_a_step():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    p.grad = torch.ones(2)
    torch._dynamo.reset()
    torch.compile(optimizer.step, backend="dtensor_aten", fullgraph=True)()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(lambda: optimizer.step(), backend="aot_eager", fullgraph=True)()


SCHEDULED = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULED)
@on_ranks(2)
def test_a_learning_rate_that_changes_each_step_compiles_once_more(name):
    """The first graph has the number in it, the second takes it as an input."""
    schedulers = []

    def make(model):
        optimizer = SCHEDULED[name](model.parameters())
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))
        return whole_step(model, optimizer), optimizer

    follows_eager(make, graphs=3, steps=5, between=lambda optimizer: schedulers[-1].step())


@on_ranks(2)
def test_a_step_of_adam_rounds_as_in_eager():
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            optimizer.step()
            return x

        for i, p in enumerate(model.parameters()):
            local = torch.linspace(-1, 1, p.to_local().numel()).view_as(p.to_local()) * 10.0**-i
            p.grad = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False)
        return step, optimizer

    eager, ours = tp_mlp(), tp_mlp()
    for model, run in ((eager, False), (ours, True)):
        step, _ = make(model)
        step = torch.compile(step, backend="dtensor_aten", fullgraph=True) if run else step
        for _ in range(4):
            step(torch.ones(1), None)
    for a, b in zip(eager.parameters(), ours.parameters()):
        torch.testing.assert_close(a.to_local(), b.to_local(), rtol=1e-7, atol=3e-8)
