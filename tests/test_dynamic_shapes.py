"""Batch sizes that vary: redistributions in forward and backward follow them, also where they do not divide by the
mesh.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import dtensor_compile
from dtensor_compile import backend
from dtensor_compile.capture.sharding_rules import rules_anywhere
from dtensor_compile.compat.aot.symbolic.symbol_reads import quick_expressions
from dtensor_compile.compat.aot.symbolic.symbol_results import results_computed_once
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.dtensor.rules import sharding_decisions
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.lowering import lower
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks


@pytest.mark.slow
@on_ranks(2)
def test_redistributions_of_a_batch_that_varies():
    mesh = make_mesh((2,), ("tp",))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()

    def block(x):
        return F.gelu(F.linear(x, weight)).redistribute(placements=[Shard(0)]).redistribute(placements=[Shard(1)])

    counters.reset()
    run = torch.compile(block, backend="dtensor_aten", fullgraph=True)
    for batch in (4, 6, 9, 8):
        full, gradients = torch.randn(batch, 8), []
        for function in (block, run):
            x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
            out = function(x)
            out.to_local().square().sum().backward()
            gradients.append((out.to_local().detach(), x.grad.full_tensor(), weight.grad.full_tensor().clone()))
            weight.grad = None
        torch.testing.assert_close(*gradients)
    assert counters.graphs() <= 4  # at most one for each size


@on_ranks(2)
def test_a_result_that_is_a_view_of_an_input_when_the_batch_changes():
    mesh = make_mesh((2,), ("tp",))
    compiled = torch.compile(
        lambda x: (x.view(x.shape[0], 2, 2), x.transpose(0, 1), x * 2), backend="dtensor_aten", fullgraph=True
    )
    for batch in (4, 6, 8):
        x = distribute_tensor(torch.randn(batch, 4), mesh, [Shard(0)]).requires_grad_()
        view, turned, _ = compiled(x)
        assert torch.equal(view.to_local(), x.view(batch, 2, 2).to_local())
        assert torch.equal(turned.to_local(), x.transpose(0, 1).to_local())
        assert view.to_local().data_ptr() == x.to_local().data_ptr()
        (view.to_local().square().sum() + turned.to_local().sum()).backward()
        torch.testing.assert_close(x.grad.to_local(), 2 * x.detach().to_local() + 1)


@pytest.mark.slow
@on_ranks(2)
def test_what_is_gathered_meets_a_tensor_made_of_the_global_size():
    mesh = make_mesh((2,), ("tp",))

    def triangles(x):
        return x.tril() + x.triu()  # gathered for masks of the global sizes

    counters.reset()
    compiled = torch.compile(triangles, backend="dtensor", fullgraph=True)
    for batch in (10, 14, 6, 9):
        full, results = torch.randn(batch, 4), []
        for function in (triangles, compiled):
            x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
            out = function(x).redistribute(placements=[Replicate()])
            out.to_local().square().sum().backward()
            results.append((out.to_local().detach(), x.grad.full_tensor()))
        torch.testing.assert_close(*results)
    assert counters.graphs() == 3  # of the first size, of even ones, of uneven ones


def of_each_size(sizes):
    """The collectives that each size compiles, after a comparison with eager."""
    mesh, compiled_for = make_mesh((3,), ("tp",)), []
    torch._dynamo.reset()

    def sums(x, w):
        return torch.relu(x @ w).redistribute(placements=[Replicate()]).sum(0)

    compiled = torch.compile(sums, backend="dtensor_aten", fullgraph=True)
    for size in sizes:
        torch.manual_seed(size)
        x, w = torch.randn(size, 4), torch.randn(4, 4)
        args = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])
        with dtensor_compile.record() as recording:
            result = compiled(*args)
        torch.testing.assert_close(result.to_local(), sums(*args).to_local())
        compiled_for.append([c.kind for c in recording.collectives])
    return compiled_for


@pytest.mark.parametrize(
    "sizes", [(7, 9), pytest.param((9, 7, 8, 12, 3, 2), marks=pytest.mark.slow), (6, 3, 9, 0, 1, 2)]
)
def test_shards_that_vary_on_some_ranks_only(sizes):
    """Of 7 rows and then 9, the shard of the last rank of three grows and the others stay: all ranks trace with
    symbols.
    """
    for found in zip(*run_on_ranks(3, of_each_size, sizes)):
        assert (
            len({tuple(kinds) for kinds in found if kinds}) <= 1
        )  # a rank that has a graph for the size compiles none


def test_lookups_by_indices_in_strided_shards():
    """The cost of sending strided shards of a size that varies is counted without their offsets, which are in no tensor
    with values.
    """
    with simulated_job(4, 0):
        mesh = make_mesh((2, 2), ("dp", "tp"))
        x = distribute_tensor(torch.randn(8), mesh, [Replicate(), Shard(0)])
        indices = distribute_tensor(torch.zeros(4, 3, dtype=torch.long), mesh, [Shard(1), Shard(0)])

        def found(x, i):
            return x.index_select(0, i.flatten())

        compiled = torch.compile(found, backend="dtensor_aten", fullgraph=True, dynamic=True)(x, indices)
        assert compiled.placements == found(x, indices).placements and compiled.shape == (12,)


class Layers(torch.nn.Module):
    """Equal layers with a redistribution each; `scale` is a float that a program may change."""

    def __init__(self, mesh, layers, scale=0.5):
        super().__init__()
        weights = [distribute_tensor(torch.randn(8, 8), mesh, [Shard(1)]) for _ in range(layers)]
        self.weights = torch.nn.ParameterList(map(torch.nn.Parameter, weights))
        self.scale, self.eps = scale, 1e-5

    def forward(self, x):
        for weight in self.weights:
            x = F.rms_norm(x, (8,), eps=self.eps)
            x = (torch.tanh(x @ weight) * self.scale).redistribute(placements=[Replicate()])
        return x


def step(run, model, mesh, batch):
    x = distribute_tensor(torch.linspace(-1, 1, batch * 8).view(batch, 8), mesh, [Replicate()]).requires_grad_()
    out = run(x)
    out.to_local().square().sum().backward()
    found = out.to_local().detach(), x.grad.to_local(), *(w.grad.to_local().clone() for w in model.weights)
    model.zero_grad()
    return found


def compiled_layers(layers):
    """A mesh, a model on it, and the model compiled for sizes that vary."""
    mesh = make_mesh((2,), ("tp",))
    torch.manual_seed(0)
    model = Layers(mesh, layers)
    counters.reset()
    return mesh, model, torch.compile(model, backend="dtensor_aten", fullgraph=True, dynamic=True)


@on_ranks(2)
def test_equal_layers_with_two_batch_sizes_and_one_graph():
    mesh, model, compiled = compiled_layers(3)
    for batch in (4, 7, 6):
        torch.testing.assert_close(step(compiled, model, mesh, batch), step(model, model, mesh, batch))
    assert counters.graphs() == 1


@pytest.mark.slow
def test_what_equal_layers_need_is_found_once():
    """Decisions of sharding propagation and expansions of redistributions for symbolic sizes: as many for four layers
    as for two.
    """
    found = []
    with simulated_job(2, 0):
        mesh = make_mesh((2,), ("tp",))
        for layers in (2, 2, 4):  # what has no symbols is known from the first on
            counters.reset()
            model = Layers(mesh, layers)
            with (
                mock.patch.object(
                    sharding_decisions, "_propagated", side_effect=sharding_decisions._propagated
                ) as decided,
                mock.patch.object(lower, "trace_local", side_effect=lower.trace_local) as traced,
            ):
                step(torch.compile(model, backend="dtensor_aten", fullgraph=True, dynamic=True), model, mesh, 4)
            found.append((decided.call_count, traced.call_count))
    assert found[1] == found[2]
    assert min(found[1]) > 0


def test_a_decision_without_its_guards_is_not_kept():
    """One that is made where guards are not kept has none: the next one like it must add them."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with simulated_job(2, 0):
        mesh = make_mesh((2,), ("tp",))
        local = mode.from_tensor(
            torch.ones(6, 8), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        )
        with mode, rules_anywhere():
            x = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
            with (
                env.suppress_guards(),
                mock.patch.object(
                    sharding_decisions, "_propagated", side_effect=sharding_decisions._propagated
                ) as decided,
            ):
                x.sum(0), x.sum(0)
                assert decided.call_count == 2
            with mock.patch.object(
                sharding_decisions, "_propagated", side_effect=sharding_decisions._propagated
            ) as decided:
                x.sum(0), x.sum(0)
                assert decided.call_count == 1


def test_a_decision_with_a_size_of_its_own_is_made_once():
    """The result has a new node each time: what a tracer writes down for one is nothing to the other."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with simulated_job(2, 0):
        mesh = make_mesh((2,), ("tp",))
        local = mode.from_tensor(
            torch.ones(6, 8), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        )
        with (
            mode,
            rules_anywhere(),
            mock.patch.object(sharding_decisions, "_propagated", side_effect=sharding_decisions._propagated) as decided,
        ):
            x = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
            sizes = [torch.cat([x, x]).shape[0] for _ in range(3)]
    assert decided.call_count == 1
    assert len({id(size.node) for size in sizes}) == 3
    assert {size.node.expr for size in sizes} == {2 * x.shape[0].node.expr}


@on_ranks(2)
def test_a_float_of_a_module_is_a_number_until_it_changes():
    mesh, model, compiled = compiled_layers(1)
    with mock.patch.object(backend, "Compilation", side_effect=backend.Compilation) as begun:
        for scale in (0.5, 0.25, 0.125, 2.5):
            model.scale = scale
            torch.testing.assert_close(step(compiled, model, mesh, 4), step(model, model, mesh, 4))
            if scale == 0.5:
                assert begun.call_count == 1  # torch traces a second time, for the `eps`
    assert counters.graphs() == 2  # for the float that changed, once


def test_an_expression_is_read_anew_after_a_replacement():
    env = ShapeEnv(duck_shape=False)
    a, b = (env.create_symintnode(env.create_symbol(6, ConstantSource(name)), hint=6) for name in "ab")
    with quick_expressions():
        product = a * b
        before = product.node.expr
        assert before is product.node.expr and len(before.free_symbols) == 2
        assert a == b  # a guard, and one symbol stands for both from now on
        assert len(product.node.expr.free_symbols) == 1
        assert b == 6
        assert product.node.expr == 36 and (product + 1).node.expr == 37


def sizes_of_inputs(env: ShapeEnv, hint: int, names: str) -> list[torch.SymInt]:
    return [env.create_symintnode(env.create_symbol(hint, ConstantSource(name)), hint=hint) for name in names]


def test_an_operation_on_equal_sizes_is_computed_once_and_gives_a_node_each_time():
    (a,) = sizes_of_inputs(ShapeEnv(), 6, "a")
    with mock.patch.object(SymNode, "mul", autospec=True, side_effect=SymNode.mul) as computed, results_computed_once():
        products = [(a + 1) * 4 for _ in range(3)]
    assert computed.call_count == 1
    assert len({id(product.node) for product in products}) == 3
    assert len({product.node.expr for product in products}) == 1 and {product.node.hint for product in products} == {28}


def test_a_result_is_computed_anew_after_a_replacement():
    a, b = sizes_of_inputs(ShapeEnv(duck_shape=False), 6, "ab")
    with results_computed_once():
        assert len((a + b).node.expr.free_symbols) == 2 and (a + b).node.maybe_as_int() is None
        assert a == b  # a guard, and one symbol stands for both from now on
        assert len((a + b).node.expr.free_symbols) == 1
        assert b == 6
        assert (a + b).node.maybe_as_int() == 12


def test_an_answer_without_a_guard_is_none_with_one():
    env = ShapeEnv()
    (a,) = sizes_of_inputs(env, 6, "a")
    with results_computed_once():
        with env.suppress_guards():
            assert a % 3 == 0
        assert not env.guards
        for _ in range(2):
            assert a % 3 == 0
        (guard,) = env.guards
    assert guard.sloc.framework_loc.filename == __file__  # the place that asked
