"""Gradient accumulation without communication under ``fully_shard``: `set_requires_gradient_sync`, in one graph each
way.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtensor_compile
from dtensor_compile.causes import code_in
from dtensor_compile.compat.distributed.fsdp_gradients import HELD_IN_PARAMETER
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.cases import mostly_slow
from tests.variables.test_data_parallel import BACKEND, MLP, Blocks, local_input, nested, per_block

#: A microbatch that reduces over shards and not over replicas.
SHARDS = "shards"
#: Of the microbatches of two steps, which ones reduce; and an ordinary step.
SYNC = (False, False, False, True, False, False, False, True, True)


def two_dims():
    model, mesh = Blocks(2, 8), make_mesh((2, 2), ("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def mixed():
    return per_block(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def hybrid():
    return per_block(make_mesh((2, 2), ("replicate", "shard")))


def in_a_list():
    model, mesh = Blocks(2, 6), make_mesh((2,), ("dp",))
    fully_shard([model.blocks[0], model.norm], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid_uneven():
    """The hidden width 9 and the bias of 3 divide over 2 ranks in no way."""
    model = MLP((7, 9, 3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=make_mesh((2, 2), ("replicate", "shard")), mp_policy=policy)


def replicated():
    return replicate(Blocks(2, 6), mesh=make_mesh((2,), ("replicate",)))


#: Models, and the widths of their inputs.
BUILD = {
    "nested uneven": (nested, 7),
    "per block": (per_block, 6),
    "mixed": (mixed, 6),
    "two dims": (two_dims, 8),
    "hybrid": (hybrid, 6),
    "hybrid uneven": (hybrid_uneven, 7),
    "in a list": (in_a_list, 6),
    "replicated": (replicated, 6),
}


def in_one_graph(model, backend):
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True)


def microbatches(build, width, sync=SYNC, backends=(None,), between=lambda model, call: None, compiled=in_one_graph):
    """Gradients after each microbatch; `backends` take turns."""
    torch._dynamo.reset()
    counters.reset()
    torch.manual_seed(0)
    model = build()
    calls = [model if b is None else compiled(model, b) for b in backends]
    seen = []
    for i, reduces in enumerate(sync):
        call = calls[i % len(calls)]
        model.set_requires_gradient_sync(bool(reduces))
        if reduces == SHARDS:
            model.set_requires_all_reduce(False)
        x = local_input(width, i)
        call(x).float().exp().mean().backward()
        if reduces is True:
            seen.append([x.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        else:  # a forward without a backward leaves whole parameters in eager's root
            seen.append([x.grad])
            between(model, call)
    return seen


def assert_same(build, width, backends=(BACKEND,), computed_in=None, **about):
    eager = microbatches(build, width, **about)
    ours = microbatches(build, width, backends=backends, **about)
    for i, (a, b) in enumerate(zip(eager, ours)):
        differences = compare_values(f"microbatch {i}", a, b, computed_in)
        assert not differences, "\n".join(map(str, differences))


@pytest.mark.parametrize(
    "name",
    mostly_slow(["nested uneven", "in a list", "per block", "mixed"], "nested uneven"),
)
@on_ranks(2)
def test_accumulates_as_eager(name):
    assert_same(*BUILD[name])
    assert counters.graphs() == 3  # with held gradients, without, and holding them


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nested uneven", "per block", "mixed"])
@on_ranks(2)
def test_accumulates_as_eager_under_a_root_whose_hooks_run_in_eager(name):
    def compiled(model, backend):  # torch calls hooks of the module that it is given outside of the graph
        return torch.compile(model, backend=backend)

    assert_same(*BUILD[name], compiled=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two dims", "hybrid", "nested uneven"])
@on_ranks(4)
def test_accumulates_as_eager_on_four_ranks(name):
    assert_same(*BUILD[name])
    assert counters.graphs() == 3


#: Held as they come, then reduced over shards, then over replicas; then over shards twice; then an ordinary step.
IN_STAGES = (False, SHARDS, True, SHARDS, SHARDS, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid", "hybrid uneven"])
@on_ranks(4)
def test_shards_wait_for_replicas(name):
    assert_same(*BUILD[name], sync=IN_STAGES)
    counters.reset()
    assert_same(*BUILD[name], sync=(SHARDS, SHARDS, SHARDS, True) * 3)
    assert counters.graphs() == 2


@pytest.mark.slow
@on_ranks(2)
def test_replicated_gradients_wait():
    assert_same(*BUILD["replicated"], sync=IN_STAGES)


@pytest.mark.slow
@on_ranks(4)
def test_eager_and_compiled_microbatches_of_shards_take_turns():
    assert_same(*BUILD["hybrid uneven"], sync=IN_STAGES, backends=(BACKEND, None))
    assert_same(*BUILD["hybrid uneven"], sync=IN_STAGES, backends=(None, BACKEND))


@pytest.mark.slow
@on_ranks(4)
def test_shards_that_wait_are_sent_over_shards_alone():
    with dtensor_compile.record() as recording:
        microbatches(*BUILD["hybrid"], (SHARDS,), (BACKEND,))
    collectives = [collective for graph in recording.graphs for collective in graph.collectives]
    assert {collective.mesh_dim for collective in collectives} == {"shard"}
    assert {collective.kind for collective in collectives} != {"all_gather"}


@pytest.mark.slow
@on_ranks(2)
def test_through_inductor():
    assert_same(per_block, 6, ("dtensor",))
    assert_same(mixed, 6, ("dtensor",), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["per block", "mixed", "in a list"])
@pytest.mark.parametrize(
    "backends",
    [(BACKEND, None), (None, BACKEND)],
    ids=["compiled first", "eager first"],
)
@on_ranks(2)
def test_eager_and_compiled_microbatches_take_turns(name, backends):
    assert_same(*BUILD[name], backends=backends)


@pytest.mark.slow
@on_ranks(4)
def test_eager_and_compiled_microbatches_take_turns_under_tensor_parallel():
    assert_same(*BUILD["two dims"], backends=(BACKEND, None))
    assert_same(*BUILD["two dims"], backends=(None, BACKEND))


@pytest.mark.slow
@on_ranks(2)
def test_two_graphs_serve_all_steps():
    sync = (False, False, False, True) * 3
    microbatches(per_block, 6, sync[:8], (BACKEND,))
    assert counters.graphs() == 2
    microbatches(per_block, 6, sync, (BACKEND,))
    assert counters.graphs() == 2


@on_ranks(2)
def test_microbatches_that_hold_their_gradients_reduce_nothing():
    with dtensor_compile.record() as recording:
        microbatches(per_block, 6, (False,), (BACKEND,))
    kinds = {collective.kind for graph in recording.graphs for collective in graph.collectives}
    assert kinds == {"all_gather"}


@pytest.mark.slow
@on_ranks(2)
def test_held_gradients_are_reduced_in_as_many_collectives_as_others():
    def reductions(sync):
        with dtensor_compile.record() as recording:
            microbatches(per_block, 6, sync, (BACKEND,))
        return sum(collective.kind != "all_gather" for graph in recording.graphs for collective in graph.collectives)

    assert 0 < reductions((False, True)) == reductions((True,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["per block", "in a list"])
@on_ranks(2)
def test_evaluation_and_forwards_without_a_backward_in_between(name):
    def between(model, call):
        x = local_input(6, 77)
        with torch.no_grad():
            call(x)
        call(x)

    assert_same(*BUILD[name], between=between)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["per block", "in a list"])
@on_ranks(2)
def test_eager_forwards_in_between_leave_whole_parameters(name):
    def between(model, call):
        model(local_input(6, 77))
        model.unshard()

    assert_same(*BUILD[name], between=between)


@pytest.mark.slow
@on_ranks(4)
def test_shards_that_eager_reduces_are_kept_no_longer():
    """Compiled code makes the flat tensor of shards, and eager adds it to its own."""
    torch.manual_seed(0)
    model = hybrid()
    groups, made = [], []
    for reduces, call in ((False, in_one_graph(model, BACKEND)), (True, model)):
        model.set_requires_all_reduce(reduces)
        call(local_input(6, reduces)).exp().mean().backward()
        if not reduces:
            groups = [part._get_fsdp_state()._fsdp_param_group for part in (*model.blocks, model)]
            made = [weakref.ref(group._partial_reduce_output) for group in groups]
    gc.collect()
    assert len(made) == 3 and not any(flat() is not None for flat in made)


def assert_same_gradients(program):
    """`program` gets what compiles a function or leaves it as it is, and returns parameters, which have eager's
    gradients.
    """
    results = []
    for backend in (None, BACKEND):
        torch._dynamo.reset()
        torch.manual_seed(0)

        def wrap(f, backend=backend, fullgraph=True):
            return f if backend is None else torch.compile(f, backend=backend, fullgraph=fullgraph)

        results.append([p.grad for p in program(wrap)])
    assert compare_values("gradients", *results) == []


@pytest.mark.slow
@on_ranks(2)
def test_two_forwards_before_the_backward():
    def program(wrap):
        model = per_block()
        call = wrap(lambda x: model(x))
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            one, two = call(local_input(6, 1)), call(local_input(6, 2))
            (one.exp().sum() + F.relu(two).sum()).backward()
        return model.parameters()

    assert_same_gradients(program)


@pytest.mark.slow
@on_ranks(2)
def test_two_models_share_code_and_no_gradients():
    def program(wrap):
        models = [per_block(), per_block()]
        call = wrap(lambda model, x: model(x))
        for sync in (False, True):
            for i, model in enumerate(models):
                model.set_requires_gradient_sync(sync)
                call(model, local_input(6, i)).exp().sum().backward()
        return [p for model in models for p in model.parameters()]

    assert_same_gradients(program)


class Branches(nn.Module):
    """One of two layers, of which the last microbatch does not use the first."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, first):
        return self.one(x) if first else self.two(x)


@on_ranks(2)
def test_what_is_held_of_parameters_that_the_last_microbatch_does_not_use():
    def program(wrap):
        model = fully_shard(Branches())
        call = wrap(lambda *args: model(*args))
        for i, first in enumerate((True, True, False)):
            model.set_requires_gradient_sync(not first)
            call(local_input(6, i), first).exp().mean().backward()
        return model.parameters()

    assert_same_gradients(program)


@pytest.mark.skipif(not HELD_IN_PARAMETER, reason="before 2.15 eager mixes up shards of which not all are held")
@on_ranks(4)
def test_shards_of_parameters_that_not_every_microbatch_uses():
    results = []
    for backends in ((None,), (BACKEND,), (BACKEND, None), (None, BACKEND)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fully_shard(Branches(), mesh=make_mesh((2, 2), ("replicate", "shard")))
        calls = [model if b is None else torch.compile(lambda *args: model(*args), backend=b) for b in backends]
        for i, first in enumerate((True, False, True)):
            model.set_requires_all_reduce(i == 2)
            calls[i % len(calls)](local_input(6, i), first).exp().mean().backward()
        results.append([p.grad for p in model.parameters()])
    for other in results[1:]:
        assert compare_values("gradients", results[0], other) == []


@pytest.mark.slow
@on_ranks(2)
def test_a_setting_that_changes_in_the_region_breaks_the_graph():
    steps = []

    def program(wrap):
        model = per_block()

        def step(x, y):
            model.set_requires_gradient_sync(False)
            model(x).exp().mean().backward()
            model.set_requires_gradient_sync(True)
            model(y).exp().mean().backward()

        steps.append(step)
        run = wrap(step, fullgraph=False)
        for i in range(2):
            run(local_input(6, i), local_input(6, i + 5))
        return model.parameters()

    assert_same_gradients(program)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        torch.compile(steps[-1], backend=BACKEND, fullgraph=True)(local_input(6), local_input(6))
    assert code_in(str(error.value)) == "data-parallel-setting"
