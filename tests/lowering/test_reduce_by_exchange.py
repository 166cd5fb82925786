"""A sum that gloo would scatter is exchanged and added."""

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from dtensor_compile.graph.nodes import is_start
from dtensor_compile.lowering import reduce_by_exchange as module
from dtensor_compile.lowering.reduce_by_exchange import reduce_by_exchange
from dtensor_compile.recording.recorder import watch_graphs
from dtensor_compile.schedule.bucket import bucket_collectives
from dtensor_compile.testing import graph_text, make_mesh, on_ranks, run_on_ranks
from tests.cases import mostly_slow
from tests.schedule.test_bucket import SLOW
from tests.schedule.test_schedule_graph import changed, reduced, traced

_c10d = torch.ops._c10d_functional


def total(x):
    return reduced(x) * 2


def mean(x):
    n, group = dist.get_world_size(), dist.group.WORLD.group_name
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "avg", n, group)) + 1


def exchanged(dtype=torch.float32, shape=(4, 3), unrolled=8, function=total):
    module.UNROLLED = unrolled
    try:
        return changed(reduce_by_exchange, function, shape, dtype=dtype)
    finally:
        module.UNROLLED = 8


class Golden(TestCase):
    maxDiff = None

    def test_parts_are_exchanged_and_added(self):
        (text, reasons), other = run_on_ranks(2, exchanged)
        assert (text, reasons) == other and "sends twice as much" in reasons[0]
        self.assertExpectedInline(
            text,
            """\
x_1: [4, 3]
all_to_all_single_default: [4, 3] = all_to_all_single(x_1, [2, 2], [2, 2])
wait_tensor_default: [4, 3] = wait_tensor(all_to_all_single_default)
view: [2, 2, 3] = view(wait_tensor_default, [2, 2, 3])
select: [2, 3] = select(view, 0, 0)
select_1: [2, 3] = select(view, 0, 1)
add: [2, 3] = add(select, select_1)
mul: [2, 3] = mul(add, 2)
return mul
""",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_two_ranks_bitwise(dtype):
    run_on_ranks(2, exchanged, dtype)


@pytest.mark.parametrize("unrolled", [8, 1])
def test_four_ranks_within_tolerance(unrolled):
    texts = run_on_ranks(4, exchanged, torch.float32, (8, 3), unrolled)
    assert all("all_to_all" in text and ("sum" in text) == (unrolled == 1) for text, _ in texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_means_of_two_ranks_bitwise(dtype):
    text, reasons = run_on_ranks(2, exchanged, dtype, (6, 5), 8, mean)[0]
    assert "all_to_all" in text and "div" in text and len(reasons) == 1


@pytest.mark.parametrize("unrolled", [8, 1])
def test_means_of_four_ranks_within_tolerance(unrolled):
    texts = run_on_ranks(4, exchanged, torch.float32, (8, 3), unrolled, mean)
    assert all("all_to_all" in text for text, _ in texts)


@on_ranks(2)
def test_a_mean_of_integers_stays_the_error_that_it_is():
    gm = traced(lambda x: mean(x.float()), (4, 3))
    node = next(n for n in gm.graph.nodes if "reduce_scatter" in n.name)
    node.args[0].meta["val"] = torch.ones(4, 3, dtype=torch.int64)
    before = graph_text(gm.graph)
    assert reduce_by_exchange(gm.graph) == [] and graph_text(gm.graph) == before


@on_ranks(2)
def test_other_reductions_and_the_programs_own_stay():
    def largest(x):
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "max", 2, dist.group.WORLD.group_name))

    for gm in (traced(largest, (4, 3)), traced(total, (4, 3), redistributes=False)):
        before = graph_text(gm.graph)
        assert reduce_by_exchange(gm.graph) == [] and graph_text(gm.graph) == before


@on_ranks(2)
def test_an_empty_tensor():
    changed(reduce_by_exchange, total, (0, 3))
    changed(reduce_by_exchange, total, (4, 0))


def bucketed(dtype=torch.float32, op="sum", shapes=((4, 3), (8,), (4, 0), (12, 2, 2))):
    def run(graph):
        inputs = [torch.ones(shape, dtype=dtype) for shape in shapes]
        FakeTensorProp(graph.owning_module, FakeTensorMode()).propagate(
            *inputs
        )  # of one mode, as a compiled graph's are
        return bucket_collectives(graph, SLOW) + reduce_by_exchange(graph)

    def function(*tensors):
        n, group = dist.get_world_size(), dist.group.WORLD.group_name
        return tuple(_c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, op, n, group)) for x in tensors)

    return changed(run, function, *shapes, dtype=dtype)


class GoldenBucket(TestCase):
    maxDiff = None

    def test_a_bucket_is_one_exchange(self):
        first, other = run_on_ranks(2, bucketed, shapes=((4, 3), (8,)))
        assert first == other
        self.assertExpectedInline(
            first[0],
            """\
arg0_1: [4, 3]
arg1_1: [8]
view: [2, 6] = view(arg0_1, [2, 6])
view_1: [2, 4] = view(arg1_1, [2, 4])
cat: [2, 10] = cat([view, view_1], 1)
view_2: [20] = view(cat, [-1])
all_to_all_single_default: [20] = all_to_all_single(view_2, [10, 10], [10, 10])
wait_tensor_default: [20] = wait_tensor(all_to_all_single_default)
view_3: [2, 10] = view(wait_tensor_default, [2, 10])
slice_1: [2, 6] = slice(view_3, 1, 0, 6)
view_4: [2, 2, 3] = view(slice_1, [2, 2, 3])
select: [2, 3] = select(view_4, 0, 0)
select_1: [2, 3] = select(view_4, 0, 1)
add: [2, 3] = add(select, select_1)
slice_2: [2, 4] = slice(view_3, 1, 6, 10)
view_5: [2, 4] = view(slice_2, [2, 4])
select_2: [4] = select(view_5, 0, 0)
select_3: [4] = select(view_5, 0, 1)
add_1: [4] = add(select_2, select_3)
return [add, add_1]
""",
        )


def shards_in_memory():
    """Number and bytes of the memory that gradients of a compiled step hold, and their own bytes."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    fully_shard(model, mesh=make_mesh((2,), ("dp",)))
    torch.compile(model, backend="dtensor", fullgraph=True)(torch.randn(4, 8)).square().sum().backward()
    shards = [parameter.grad.to_local() for parameter in model.parameters()]
    memory = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
    return len(memory), sum(memory.values()), sum(shard.nbytes for shard in shards)


@pytest.mark.slow
def test_gradients_of_a_bucket_have_memory_of_their_own():
    for count, held, needed in run_on_ranks(2, shards_in_memory):
        assert (count, held) == (4, needed)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_of_two_ranks_bitwise(dtype, op):
    text, reasons = run_on_ranks(2, bucketed, dtype, op)[0]
    assert text.count("= all_to_all") == 1 and "reduce_scatter" not in text and len(reasons) == 2


@on_ranks(2)
def test_a_bucket_of_another_reduction_is_one_that_gloo_scatters():
    text, reasons = bucketed(op="max", shapes=((4, 3), (8,)))
    assert text.count("= reduce_scatter_tensor_coalesced") == 1 and len(reasons) == 1


@on_ranks(2)
def test_a_bucket_of_empty_tensors():
    bucketed(shapes=((4, 0), (0,)))


def test_buckets_of_four_ranks_within_tolerance():
    texts = run_on_ranks(4, bucketed)
    assert all(text.count("= all_to_all") == 1 for text, _ in texts)


def shared(topology):
    """Collectives of a step of a fully_shard model; that its gradients are eager's is checked on the way."""
    mesh, collectives = make_mesh((dist.get_world_size(),), ("dp",)), []

    def gradients(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        torch.manual_seed(1 + dist.get_rank())
        wrap(model)(torch.randn(4, 8)).square().sum().backward()
        return [p.grad.to_local() for p in model.parameters()]

    def watch(stage, graph):
        if stage == "lowered":
            collectives.extend(node.target._opname for node in graph.nodes if is_start(node))

    wanted = gradients(lambda model: model)
    options = {"strict": True, "topology": topology}
    with watch_graphs(watch):
        found = gradients(lambda model: torch.compile(model, backend="dtensor_aten", fullgraph=True, options=options))
    for a, b in zip(wanted, found):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if dist.get_world_size() == 2 else {}))
    return collectives


@pytest.mark.parametrize(
    "ranks, topology, exchanges",
    mostly_slow([(2, None, 1), (2, "cpu-1gbit", 1), (4, "cpu-1gbit", 1)], (2, "cpu-1gbit", 1)),
)
def test_gradients_of_fully_shard_are_exchanged(ranks, topology, exchanges):
    first, *others = run_on_ranks(ranks, shared, topology)
    assert all(other == first for other in others)
    assert first.count("all_to_all_single") == exchanges and not any("reduce" in name for name in first)
