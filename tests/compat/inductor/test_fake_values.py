"""Inductor takes the fake values of lowered nodes as they are, and those that our steps leave are right."""

import operator
from unittest import mock

import pytest
import torch
from torch._inductor import fx_utils
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from dtensor_compile.compat.aot.fx import CALL
from dtensor_compile.compat.dtensor.specs import storage_of
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.compat.inductor.fake_values import KnownValues
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.graph.arguments import fake_result
from dtensor_compile.graph.operator_traits import is_view
from dtensor_compile.offline import job
from dtensor_compile.stages import lowered
from dtensor_compile.testing import make_mesh


def layout_of(value):
    if isinstance(value, (list, tuple)):
        return [layout_of(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return type(value)
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


def wrong_values(graph):
    """The nodes of a graph whose value is not what their operator makes of those of their arguments."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            with graph.owning_module.meta["mode"]:
                again = fake_result(node)
            if layout_of(again) != layout_of(node.meta["val"]) or not shares_storage(node):
                yield node, again


def shares_storage(node):
    """Whether the value of a view has the storage of that of its argument; True for other nodes."""
    values = node.meta["val"], node.all_input_nodes[0].meta["val"] if node.all_input_nodes else None
    if not is_view(node.target) or not all(isinstance(value, torch.Tensor) for value in values):
        return True
    return storage_of(values[0]) == storage_of(values[1])


@pytest.mark.parametrize(
    "layout, blocks",
    [
        ("fully_shard_tp", "once"),
        pytest.param("2d", "each", marks=pytest.mark.slow),
        ("fully_shard", "each"),
        pytest.param("tp", "each", marks=pytest.mark.slow),
    ],
)
def test_steps_leave_values_as_operators_make_them(layout, blocks, monkeypatch):
    seen = []

    def lower(graph, this, stock=lowered.lower_graph):
        stock(graph, this)
        values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        graph.owning_module.meta["mode"] = values[0].fake_mode
        seen.append([f"{node.format_node()}: {layout_of(again)}" for node, again in wrong_values(graph)])

    monkeypatch.setattr("dtensor_compile.stages.compiling.lower_graph", lower)
    world = 4 if layout in ("2d", "fully_shard_tp") else 2
    with job(world):
        chosen = LAYOUTS[layout]
        mesh = make_mesh(chosen.mesh_shape(world), chosen.dims)
        options = {"blocks": blocks, "strict": True}

        def compiled(model):
            return torch.compile(model, backend="dtensor_aten", fullgraph=True, options=options)

        Trainer(chosen, mesh, LlamaConfig(layers=2), 1, compiled).loss(0).backward()
    assert len(seen) == (4 if blocks == "once" else 2)
    assert not any(seen), seen


@pytest.mark.slow
def test_inductor_computes_the_values_of_what_it_changed_alone(monkeypatch):
    updated, written, stock = [], [], FakeTensorUpdater.incremental_update

    def update(self):  # with torch's parameters, as the feature requires
        updated.append(stock(self))
        return updated[-1]

    def compiled_anew():
        torch._dynamo.reset()
        updated.clear()
        written.clear()
        with fresh_caches(), job(2):
            mesh = make_mesh((2,))
            x, w = (distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_() for _ in range(2))
            compiled = torch.compile(
                lambda x, w: torch.sin(x.redistribute(placements=[Replicate()]) @ w).square(), backend="dtensor"
            )
            compiled(x, w).to_local().sum().backward()
        return any(updated), [line.partition("#")[0] for code in written for line in code.splitlines()]

    monkeypatch.setattr(FakeTensorUpdater, "incremental_update", update)
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(written.append))
    updates, code = compiled_anew()
    monkeypatch.setattr(KnownValues, "keep", lambda self, graph: None)
    assert not updates
    assert compiled_anew() == (True, code)
    assert any("all_gather" in line for line in code)


@pytest.fixture
def called_twice():
    """A graph that calls another one twice, with fake values."""
    inner = make_fx(lambda x: (x.sin().sum(0),), tracing_mode="fake")(torch.randn(4, 3))
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    x, body = graph.placeholder("x"), graph.get_attr("body")
    twice = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    calls = [graph.call_function(CALL, (body, "body", operand)) for operand in (x, twice)]
    sums = [graph.call_function(operator.getitem, (call, 0)) for call in calls]
    graph.output(tuple(sums))
    module = torch.fx.GraphModule({"body": inner}, graph)
    with mode:
        x.meta["val"], twice.meta["val"] = torch.empty(4, 3), torch.empty(4, 3)
        for call, item in zip(calls, sums):
            item.meta["val"] = torch.empty(3)
            call.meta["val"] = (item.meta["val"],)
        for node in inner.graph.nodes:
            if node.op != "output":
                node.meta["val"] = torch.empty(node.meta["val"].shape)
    with V.set_fake_mode(mode), KnownValues().hold():
        yield module, FakeTensorUpdater(module)


def collected(updater):
    """How many nodes an update changed, and of how many it collected the values of the arguments."""
    with mock.patch("torch._inductor.fx_utils.get_fake_args_kwargs", wraps=fx_utils.get_fake_args_kwargs) as collect:
        return updater.incremental_update(), collect.call_count


def test_nothing_is_collected_for_a_graph_that_did_not_change(called_twice):
    _, updater = called_twice
    assert collected(updater) == (0, 0)
    assert collected(updater) == (0, 0)


def test_a_changed_argument_is_seen_as_is_its_return_to_what_it_was(called_twice):
    module, updater = called_twice
    (twice,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert collected(updater) == (0, 0)
    value = twice.meta["val"]
    for factor in (3, 2):
        twice.update_arg(1, factor)
        assert collected(updater)[1] > 0
        assert twice.meta["val"] is not value
        value = twice.meta["val"]
        assert collected(updater) == (0, 0)


def test_other_strides_of_what_a_graph_is_called_with_reach_it(called_twice):
    module, updater = called_twice
    (x,) = module.graph.find_nodes(op="placeholder")
    (twice,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with V.fake_mode:
        x.meta["val"], twice.meta["val"] = torch.empty(3, 4).t(), torch.empty(3, 4).t()
    assert collected(updater)[1] > 0
    (inner,) = module.body.graph.find_nodes(op="placeholder")
    assert inner.meta["val"].stride() == (1, 4)


def test_a_change_inside_of_a_called_graph_is_seen(called_twice):
    module, updater = called_twice
    (sine,) = module.body.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sine.target = torch.ops.aten.cos.default
    assert collected(updater)[1] > 0
    assert collected(updater) == (0, 0)


def program(x, y):
    product = x @ y
    return product.t().sin(), x.cos().t().exp(), torch.split(y, [1, 2])[1].neg()


def propagated(module):
    """The nodes whose operators a propagation runs again, with `module` left with its values."""
    ran, stock = [], FakeTensorProp.run_node

    def run_node(self, n):
        ran.append(n.name)
        return stock(self, n)

    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    values = KnownValues()
    with mock.patch.object(FakeTensorProp, "run_node", run_node), values.hold():
        FakeTensorProp(module, inputs[0].fake_mode).propagate_dont_convert_inputs(*inputs)
    return [node.name for node in module.graph.nodes if node.name in ran and node.op == "call_function"]


def trusted(known=True):
    module = make_fx(program, tracing_mode="fake")(torch.randn(4, 3), torch.randn(3, 5))
    if known:
        KnownValues().trust(module.graph)
    return module


def layouts(module):
    return {node.name: layout_of(node.meta["val"]) for node in module.graph.nodes if "val" in node.meta}


def turn_x(module):
    """Gives the cosine an argument with other strides."""
    (cosine,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    with module.graph.inserting_before(cosine):
        turned = module.graph.call_function(torch.ops.aten.t.default, cosine.args)
        copied = module.graph.call_function(
            torch.ops.aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
        )
        cosine.args = (module.graph.call_function(torch.ops.aten.t.default, (copied,)),)


def test_no_operator_runs_again_whose_arguments_are_what_they_were():
    module = trusted()
    before = {node.name: node.meta.get("val") for node in module.graph.nodes}
    assert propagated(module) == []
    assert all(node.meta.get("val") is before[node.name] for node in module.graph.nodes if node.op == "call_function")
    assert len(propagated(module)) == 10  # the note holds once


def test_what_depends_on_a_change_runs_again():
    module, unknown = trusted(), trusted(known=False)
    for one in (module, unknown):
        turn_x(one)
    assert propagated(module) == ["t_default", "clone_default", "t_default_1", "cos", "t_1", "exp"]
    assert len(propagated(unknown)) == 13
    assert layouts(module) == layouts(unknown)
    (cosine,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    assert cosine.meta["val"].stride() == (1, 4)
    assert all(map(shares_storage, module.graph.nodes))


def test_a_change_that_leaves_the_layout_ends_at_the_next_new_tensor():
    module = trusted()
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    with module.graph.inserting_before(product):
        product.update_arg(0, module.graph.call_function(torch.ops.aten.neg.default, (product.args[0],)))
    assert propagated(module) == ["neg_default", "mm"]


def test_values_of_another_mode_are_not_taken():
    module = trusted()
    (x, y), mode = module.graph.find_nodes(op="placeholder"), FakeTensorMode()
    with mode:
        x.meta["val"], y.meta["val"] = torch.empty(4, 3), torch.empty(3, 5)
    assert len(propagated(module)) == 10
    assert all(value.fake_mode is mode for node in module.graph.nodes for value in tensors_of(node))


def tensors_of(node):
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
