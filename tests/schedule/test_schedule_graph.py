"""Lowered graphs in a better order: what moves, what stays, and that numbers stay bitwise the same."""

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from expecttest import TestCase
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.graph.nodes import is_start
from dtensor_compile.ops.groups import REDISTRIBUTES
from dtensor_compile.recording.recorder import watch_graphs
from dtensor_compile.schedule.schedule_graph import graph_tasks, schedule_graph
from dtensor_compile.schedule.simulated_device import simulate
from dtensor_compile.testing import graph_text, make_mesh, on_ranks, run_on_ranks
from dtensor_compile.topology.links import Cluster, Device, Link

#: One byte a second and one operation a second; nothing takes time to start.
UNIT = Cluster("unit", 1, Link(0.0, 1.0), Link(0.0, 1.0), Device(((4, 1.0),), 1e9, 0.0))
_c10d = torch.ops._c10d_functional


def gathered(x):
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x, dist.get_world_size(), dist.group.WORLD.group_name))


def reduced(x):
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "sum", dist.get_world_size(), dist.group.WORLD.group_name))


def traced(function, *shapes, redistributes=True, dtype=torch.float32):
    gm = make_fx(function)(*(torch.ones(shape, dtype=dtype) for shape in shapes))
    for node in gm.graph.nodes:
        if redistributes and is_start(node):
            node.meta[REDISTRIBUTES] = True
    return gm


def changed(run, function, *shapes, dtype=torch.float32, **about):
    """Text of the graph of `function` after the pass `run`, and its reasons; that it gives the same is checked on the
    way.
    """
    gm = traced(function, *shapes, dtype=dtype, **about)
    torch.manual_seed(1 + dist.get_rank())
    inputs = [(torch.randn(shape) * 8).to(dtype) for shape in shapes]
    wanted = gm(*(x.clone() for x in inputs))
    decisions = run(gm.graph)
    gm.graph.lint()
    gm.recompile()
    found = gm(*(x.clone() for x in inputs))
    for a, b in zip(pytree.tree_leaves(wanted), pytree.tree_leaves(found)):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if dist.get_world_size() == 2 else {}))
    return graph_text(gm.graph), [d.reason for d in decisions]


def scheduled(function, *shapes, memory=float("inf"), **about):
    return changed(lambda graph: schedule_graph(graph, UNIT, memory), function, *shapes, **about)


def two_layers(x, w, v):
    return x @ gathered(w) @ gathered(v)


def backward_of_two_layers(g, w1, w0):
    g1 = g @ gathered(w1)
    r1 = reduced(g1)
    g0 = g1 @ gathered(w0)
    return r1, reduced(g0)


def writes(x, w):
    y = gathered(w)
    x.add_(1)
    return x @ y, gathered(x)


def sends_itself(x, w):
    a = reduced(x)
    return a, x @ gathered(w)


class Golden(TestCase):
    maxDiff = None

    def scheduled(self, *args, **about):
        first, second = run_on_ranks(2, scheduled, *args, **about)
        assert first == second
        return first

    def test_the_second_gather_runs_beside_the_first_product(self):
        text, reasons = self.scheduled(two_layers, (8, 8), (4, 8), (4, 8))
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 8]
w_1: [4, 8]
v_1: [4, 8]
all_gather_into_tensor: [8, 8] = all_gather_into_tensor(w_1, 2)
all_gather_into_tensor_1: [8, 8] = all_gather_into_tensor(v_1, 2)
wait_tensor: [8, 8] = wait_tensor(all_gather_into_tensor)
mm: [8, 8] = mm(x_1, wait_tensor)
wait_tensor_1: [8, 8] = wait_tensor(all_gather_into_tensor_1)
mm_1: [8, 8] = mm(mm, wait_tensor_1)
return mm_1
""",
        )
        self.assertExpectedInline(
            "\n".join(reasons),
            """\
128000.00 of 128000.00 ms exposed: it starts with the graph, and the first compute needs it
hidden: 128000.00 ms beside compute""",
        )

    def test_a_gather_passes_the_reduction_before_it(self):
        text, _ = self.scheduled(backward_of_two_layers, (8, 8), (4, 8), (4, 8))
        self.assertExpectedInline(
            text,
            """\
g_1: [8, 8]
w1_1: [4, 8]
w0_1: [4, 8]
all_gather_into_tensor: [8, 8] = all_gather_into_tensor(w1_1, 2)
all_gather_into_tensor_1: [8, 8] = all_gather_into_tensor(w0_1, 2)
wait_tensor: [8, 8] = wait_tensor(all_gather_into_tensor)
mm: [8, 8] = mm(g_1, wait_tensor)
reduce_scatter_tensor: [4, 8] = reduce_scatter_tensor(mm, sum, 2)
wait_tensor_2: [8, 8] = wait_tensor(all_gather_into_tensor_1)
mm_1: [8, 8] = mm(mm, wait_tensor_2)
wait_tensor_1: [4, 8] = wait_tensor(reduce_scatter_tensor)
reduce_scatter_tensor_1: [4, 8] = reduce_scatter_tensor(mm_1, sum, 2)
wait_tensor_3: [4, 8] = wait_tensor(reduce_scatter_tensor_1)
return [wait_tensor_1, wait_tensor_3]
""",
        )

    def test_nothing_passes_a_write(self):
        text, _ = self.scheduled(writes, (8, 8), (4, 8))
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 8]
w_1: [4, 8]
all_gather_into_tensor: [8, 8] = all_gather_into_tensor(w_1, 2)
wait_tensor: [8, 8] = wait_tensor(all_gather_into_tensor)
add_: [8, 8] = add_(x_1, 1)
all_gather_into_tensor_1: [16, 8] = all_gather_into_tensor(add_, 2)
mm: [8, 8] = mm(add_, wait_tensor)
wait_tensor_1: [16, 8] = wait_tensor(all_gather_into_tensor_1)
return [mm, wait_tensor_1]
""",
        )

    def test_what_the_program_sends_itself_keeps_its_order(self):
        text, _ = self.scheduled(sends_itself, (8, 8), (4, 8), redistributes=False)
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 8]
w_1: [4, 8]
reduce_scatter_tensor: [4, 8] = reduce_scatter_tensor(x_1, sum, 2)
wait_tensor: [4, 8] = wait_tensor(reduce_scatter_tensor)
all_gather_into_tensor: [8, 8] = all_gather_into_tensor(w_1, 2)
wait_tensor_1: [8, 8] = wait_tensor(all_gather_into_tensor)
mm: [8, 8] = mm(x_1, wait_tensor_1)
return [wait_tensor, mm]
""",
        )


@on_ranks(2)
def test_without_collectives_nothing_moves():
    gm = traced(lambda x: (x @ x).relu(), (4, 4))
    before = graph_text(gm.graph)
    assert schedule_graph(gm.graph, UNIT, 0.05) == [] and graph_text(gm.graph) == before


@on_ranks(2)
def test_memory_bound_keeps_the_graph_where_nothing_fits():
    gm = traced(two_layers, (8, 8), (4, 8), (4, 8))
    tasks = graph_tasks(gm.graph, UNIT)
    peak = simulate(tasks, range(len(tasks))).peak
    schedule_graph(gm.graph, UNIT, 0.0)
    tasks = graph_tasks(gm.graph, UNIT)
    assert simulate(tasks, range(len(tasks))).peak <= peak


@on_ranks(2)
def test_an_order_over_its_memory_bound_is_a_decision_that_says_by_how_much():
    def backward(x, w, v, u):  # the second gather is hoisted over a reduction, beside which it is held
        first = reduced(x @ gathered(w))
        return first, u @ gathered(v)

    over = {}
    for memory in (0.0, 10.0):
        gm = traced(backward, (64, 4), (2, 64), (2, 128), (1, 4))
        before = simulate(tasks := graph_tasks(gm.graph, UNIT), range(len(tasks))).peak
        decisions = [d for d in schedule_graph(gm.graph, UNIT, memory) if d.kind == "overlap_memory"]
        after = simulate(tasks := graph_tasks(gm.graph, UNIT), range(len(tasks))).peak
        over[memory] = after - before
        assert [d.after for d in decisions] == ([f"{after:,} bytes"] if memory == 0.0 else []), (
            before,
            after,
            decisions,
        )
        assert all(f"{after - before:,} bytes more" in d.reason for d in decisions)
    assert over[0.0] > 0


@on_ranks(2)
def test_random_numbers_keep_their_order():
    def draws(x, w):
        a = torch.rand_like(x)
        b = gathered(w)
        return torch.rand_like(x) @ b, a @ b

    gm = traced(draws, (8, 8), (4, 8))
    order = [node.name for node in gm.graph.nodes if "rand" in node.name]
    schedule_graph(gm.graph, UNIT, float("inf"))
    assert [node.name for node in gm.graph.nodes if "rand" in node.name] == order


def starts(layout_name, uneven, topology):
    """The collectives of a small Llama in order; that steps with and without the schedule give the same is checked on
    the way.
    """
    layout = LAYOUTS[layout_name]
    mesh = make_mesh(layout.mesh_shape(dist.get_world_size()), layout.dims)
    config = LlamaConfig(
        1, dim=48, ffn_dim=101 if uneven else 96, heads=4, kv_heads=4, vocab=129 if uneven else 128, sequence=16
    )
    orders, results = [], []

    def watch(stage, graph):
        if stage == "lowered":
            shapes = {
                n: [list(value.shape) for value in pytree.tree_leaves(n.meta["val"])]
                for n in graph.nodes
                if is_start(n)
            }
            orders.append([f"{n.target} {n.args[1:-1]} {shape}" for n, shape in shapes.items()])

    for schedule in (True, False):
        torch._dynamo.reset()

        def wrap(model, schedule=schedule):
            options = {"schedule": schedule, "strict": True, "overlap_memory": 0.5, "topology": topology}
            return torch.compile(model, backend="dtensor_aten", fullgraph=True, options=options)

        with watch_graphs(watch):
            trainer = Trainer(layout, mesh, config, 2, wrap)
            losses = []
            for index in range(2):
                trainer.optimizer.zero_grad()
                loss = trainer.loss(index)
                loss.backward()
                losses.append(loss.item())
        gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
        results.append((losses, {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}))
    (losses, gradients), (plain_losses, plain_gradients) = results
    assert losses == plain_losses
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain_gradients[name]), name
    return orders


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, ranks, uneven, topology",
    [
        ("fsdp", 2, True, None),
        ("tp", 2, False, None),
        ("2d", 4, False, "cpu-1gbit"),
    ],
)
def test_a_step_is_bitwise_the_same_and_all_ranks_have_one_order_of_starts(layout, ranks, uneven, topology):
    first, *others = run_on_ranks(ranks, starts, layout, uneven, topology)
    assert all(other == first for other in others) and len(first) == 4 and all(first)
