"""Meshes that a program finds in several places: which other meshes a graph serves."""

import pytest
import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.compat.dynamo.trackers.constant_objects import OPAQUE
from dtensor_compile.offline import job
from dtensor_compile.testing import make_mesh

pytestmark = pytest.mark.skipif(not OPAQUE, reason="torch guards each place by equality itself before 2.13")


@pytest.fixture(autouse=True)
def simulated():
    with job(2):
        torch._dynamo.reset()
        counters.clear()
        yield


class Holder:
    def __init__(self, mesh):
        self.mesh = mesh


def two_equal_meshes():
    one, other = (init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)) for _ in range(2))
    assert one == other and one is not other
    return one, other


def added(one, other, x):
    parts = [DTensor.from_local(x, holder.mesh, [Shard(0)], run_check=False) for holder in (one, other)]
    return (parts[0] + parts[1]).to_local()


def asks(one, other, x):
    return x + 1 if one.mesh is other.mesh else x + 2


def finds_more_after_asking(one, other, x):
    first = x + 1 if one.mesh is one.mesh else x
    return added(one, other, first)


def graphs_after(function, pairs):
    """The number of graphs after each of the calls with these pairs of meshes, which give what eager gives."""
    compiled, x, graphs = torch.compile(function, backend="dtensor_aten", fullgraph=True), torch.ones(2), []
    for pair in pairs:
        one, other = map(Holder, pair)
        assert torch.equal(compiled(one, other, x), function(one, other, x))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def test_a_graph_serves_equal_meshes():
    a, b = two_equal_meshes()
    unequal = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    assert graphs_after(added, [(a, a), (a, b), (b, a), (b, b), (unequal, unequal)]) == [1, 1, 1, 1, 2]


def test_a_program_that_asks_for_identity_gets_its_answer():
    a, b = two_equal_meshes()
    assert graphs_after(asks, [(a, a), (b, b), (a, b), (b, a), (b, b), (a, a)]) == [1, 1, 2, 3, 3, 3]


def test_places_that_are_found_after_the_question_are_the_same_object_too():
    a, b = two_equal_meshes()
    assert graphs_after(finds_more_after_asking, [(a, a), (b, b), (a, b)]) == [1, 1, 2]


def test_hooks_of_parallel_styles_have_no_guards_on_identity(monkeypatch):
    stock, places = GuardBuilder.DUPLICATE_INPUT, []

    def duplicate(self, guard, source_b):
        places.append(source_b.name)
        return stock(self, guard, source_b=source_b)

    monkeypatch.setattr(GuardBuilder, "DUPLICATE_INPUT", duplicate)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    parallelize_module(
        model, make_mesh((2,), ("tp",)), {str(i): (ColwiseParallel, RowwiseParallel)[i % 2]() for i in range(4)}
    )
    x = torch.ones(2, 4)
    assert torch.equal(torch.compile(model, backend="dtensor_aten", fullgraph=True)(x), model(x))
    assert [place for place in places if "hooks" in place] == []
