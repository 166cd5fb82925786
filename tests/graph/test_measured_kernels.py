"""Seconds of operators on the device at hand: which are measured, how often, and that an order is made of them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile import offline
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.graph import measured_kernels
from dtensor_compile.graph.measured_kernels import measured_seconds
from dtensor_compile.recording.recorder import record
from dtensor_compile.schedule import schedule_graph
from dtensor_compile.schedule.schedule_graph import graph_tasks
from dtensor_compile.topology.links import CLUSTERS

aten = torch.ops.aten
CLUSTER = CLUSTERS["cpu-1gbit"]


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(measured_kernels, "_measured", {})


def seconds_by_operator(function, *inputs, mode="real"):
    gm = make_fx(function, tracing_mode=mode)(*inputs)
    return {node.target: measured_seconds(node) for node in gm.graph.nodes if node.op == "call_function"}


def test_products_convolutions_and_attention_are_measured_and_loops_are_not():
    def program(x, w, k):
        return (x @ w).relu() + 1, torch.conv2d(k, k), torch.nn.functional.scaled_dot_product_attention(k, k, k)

    found = seconds_by_operator(program, torch.ones(8, 8), torch.ones(8, 8), torch.ones(2, 2, 4, 4))
    measured = {target for target, seconds in found.items() if seconds is not None}
    assert {aten.mm.default, aten.convolution.default} < measured and any(
        "attention" in str(target) for target in measured
    )
    assert found[aten.relu.default] is None and found[aten.add.Tensor] is None
    assert all(found[target] > 0 for target in measured)


def test_a_product_takes_what_it_takes_on_these_sizes_and_strides():
    """A million times the operations take longer on any machine; symbolic sizes are those that were seen."""
    small = seconds_by_operator(torch.mm, torch.ones(8, 8), torch.ones(8, 8))[aten.mm.default]
    large = seconds_by_operator(torch.mm, torch.ones(800, 800), torch.ones(800, 800).T, mode="symbolic")[
        aten.mm.default
    ]
    assert large > 3 * small


def test_equal_operators_are_measured_once(monkeypatch):
    calls = []
    monkeypatch.setattr(measured_kernels, "_measure", lambda target, *args: calls.append(target) or 1.0)
    seconds_by_operator(lambda x, w: x @ w @ w.relu() @ w.t(), torch.ones(4, 4), torch.ones(4, 4))
    assert calls == [aten.mm.default] * 2  # w.t() has other strides


def test_what_draws_is_not_run_and_the_generator_stays_where_it_was():
    q = torch.ones(1, 2, 4, 4)
    gm = make_fx(lambda q: aten._scaled_dot_product_flash_attention(q, q, q, 0.5)[0] @ q, tracing_mode="fake")(q)
    before = torch.get_rng_state()
    found = {node.target: measured_seconds(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert found[aten._scaled_dot_product_flash_attention.default] is None and found[aten.bmm.default] > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_without_the_device_the_estimate_has_to_do():
    with offline.device("h200"):
        gm = make_fx(torch.mm, tracing_mode="fake")(torch.empty(4, 4, device="cuda"), torch.empty(4, 4, device="cuda"))
        node = next(node for node in gm.graph.nodes if node.target is aten.mm.default)
        found = measured_seconds(node)
    assert found is None


def test_the_order_is_made_of_what_is_measured(monkeypatch):
    monkeypatch.setattr(
        schedule_graph, "measured_seconds", lambda node: 5.0 if node.target is aten.mm.default else None
    )
    gm = make_fx(lambda x: (x @ x).relu())(torch.ones(4, 4))
    assert [task.seconds for task in graph_tasks(gm.graph, CLUSTER, measured=True) if task.seconds][0] == 5.0
    assert all(task.seconds < 1 for task in graph_tasks(gm.graph, CLUSTER))


@pytest.mark.parametrize("measured", [True, False])
def test_kernels_of_inductor_are_measured_where_it_is_asked_for(measured, monkeypatch):
    """By what the report predicts: seconds of a product of a thousand seconds."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from dtensor_compile.schedule import kernel_order
    from dtensor_compile.testing import make_mesh

    monkeypatch.setattr(kernel_order, "measured_seconds", lambda node: 1000.0)
    with simulated_job(2, 0), record() as recording:
        mesh = make_mesh((2,), ("dp",))
        x = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])
        options = {"kernel_costs": "measured" if measured else "estimated"}
        torch.compile(lambda x: x.full_tensor() @ torch.ones(64, 64), backend="dtensor", options=options)(x)
    (predicted,) = (d.reason for d in recording.decisions if d.kind == "schedule_kernels")
    assert ("1000000." in predicted) == measured
