"""A wait for several collectives becomes a wait for each, where each is first read or later."""

import operator

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline

from dtensor_compile.fixups import joined_waits
from dtensor_compile.testing import assert_parity, graph_text, make_mesh, on_ranks


def _wait_tensors(tensors):
    return tensors


def _graph():
    graph, value = torch.fx.Graph(), torch.empty(2)
    x, y = graph.placeholder("x"), graph.placeholder("y")
    joined = graph.call_function(_wait_tensors, ([x, y],))
    joined.meta["val"] = [value, value]
    first, second = (graph.call_function(operator.getitem, (joined, place)) for place in range(2))
    total = graph.call_function(torch.ops.aten.add.Tensor, (second, first))
    graph.output((total,))
    for node in (x, y, first, second, total):
        node.meta["val"] = value
    return graph


def test_each_result_has_a_wait_of_its_own(monkeypatch):
    monkeypatch.setattr(joined_waits, "wait_tensors", _wait_tensors)
    graph = _graph()
    joined_waits.separate_waits(graph)
    graph.lint()
    assert_expected_inline(
        graph_text(graph),
        """\
x: [2]
y: [2]
wait_tensor_default: [2] = wait_tensor(x)
wait_tensor_default_1: [2] = wait_tensor(y)
add_tensor: [2] = add(wait_tensor_default_1, wait_tensor_default)
return [add_tensor]
""",
    )


def test_other_graphs_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(joined_waits, "wait_tensors", None)
    graph = _graph()
    before = graph_text(graph)
    joined_waits.separate_waits(graph)
    assert graph_text(graph) == before


@pytest.mark.parametrize("backend", [pytest.param("dtensor", marks=pytest.mark.slow), "dtensor_aten"])
@on_ranks(2)
def test_coalesced_collectives_have_eagers_numbers(backend):
    group = make_mesh((2,)).get_group()

    def program(x, y):
        a, b = funcol.all_reduce_coalesced([x * 2, y], "sum", group)
        (c,) = funcol.all_gather_into_tensor_coalesced([a + 1], group)
        return a * 3, b.sin(), c

    inputs = [torch.arange(4.0), torch.ones(3)]
    assert_parity(program, inputs, backend=backend, loss=None)
