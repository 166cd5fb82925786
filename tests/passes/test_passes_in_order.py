import pytest
import torch

from dtensor_compile.passes import PASSES
from dtensor_compile.testing import graph_text, on_ranks
from tests.passes.graphs import local, move, rewritten, run_alone


def program(x):
    a, b = move(x, "S(0)", "R"), move(x, "S(0)", "R")
    return torch.relu(move(b, "R", "S(0)")), a + 1


def raises_half_way(graph):
    node = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_before(node):
        graph.call_function(torch.ops.aten.neg.default, (node.args[0],))
    raise KeyError("the reason")


def breaks_the_graph(graph):
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    nodes[0].args = (nodes[-1], *nodes[0].args[1:])
    return []


def small_graph():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x + 1) * 2).graph
    return graph


@on_ranks(2)
def test_passes_in_order_give_the_same_results():
    _, after, decisions = rewritten(run_alone, program, local(2, 6))
    assert after.count("redistribute(") == 1
    assert [kind for kind, *_ in decisions] == ["share_equal_redistributions", "cancel_inverse_pairs"]


@on_ranks(2)
def test_disabled_pass_does_not_run():
    for run in PASSES:
        _, _, decisions = rewritten(lambda graph: run_alone(graph, disabled=[run.__name__]), program, local(2, 6))
        assert run.__name__ not in [kind for kind, *_ in decisions]


@pytest.mark.parametrize("bad", [raises_half_way, breaks_the_graph])
def test_pass_that_fails_is_dropped_with_its_change(bad):
    graph = small_graph()
    before = graph_text(graph)
    with pytest.warns(UserWarning, match=rf"{bad.__name__}: pass dropped[\s\S]*strict"):
        (decision,) = run_alone(graph, [bad])
    assert decision.kind == bad.__name__ and decision.reason.startswith("pass dropped: ")
    assert graph_text(graph) == before
    graph.lint()
    out = torch.fx.GraphModule(torch.nn.Module(), graph)(torch.tensor([-3.0, 3.0]))
    assert out.tolist() == [0.0, 8.0]


def test_passes_after_one_that_fails_still_run():
    ran = []

    def good(graph):
        ran.append(len(graph.nodes))
        return []

    graph = small_graph()
    with pytest.warns(UserWarning):
        run_alone(graph, [raises_half_way, good])
    assert ran == [len(small_graph().nodes)]


@pytest.mark.parametrize(("bad", "error"), [(raises_half_way, KeyError), (breaks_the_graph, RuntimeError)])
def test_strict_raises(bad, error):
    with pytest.raises(error):
        run_alone(small_graph(), [bad], strict=True)
