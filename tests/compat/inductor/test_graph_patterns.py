"""Patterns that cannot be in a graph: `compat.inductor.graph_patterns`."""

import copy
from unittest import mock

import pytest
import torch
from torch._inductor import pattern_matcher
from torch._inductor.fx_passes import joint_graph, post_grad
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.compat.inductor.graph_patterns import possible_patterns


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v


def views(x, y, z):
    for _ in range(10):
        x = x.view(8, 16).permute(1, 0).permute(1, 0).view(1, 2, 8, 8)
    return x + 1, torch.mm(y[0, 0], z[0, 0])


def added(x, y, z):
    return y[0, 0] + torch.mm(x[0, 0], z[0, 0]), x.to(torch.float64).to(torch.float32)


def passes():
    with fresh_caches():
        torch._dynamo.reset()
        torch.compile(torch.neg)(torch.ones(2))  # registers them; a graph from a cache would not
    return [*joint_graph.pass_patterns, joint_graph.early_patterns, *post_grad.pass_patterns]


def traced(function):
    return make_fx(function, tracing_mode="fake")(*torch.randn(3, 1, 2, 8, 8))


def applied(graph, scope=None):
    """Numbers of matches, of patterns that were tried, and the code after all passes."""
    graph = copy.deepcopy(graph)
    tried = mock.Mock()
    stock = pattern_matcher.PatternExpr.match

    def match(self, node):
        tried(self)
        return stock(self, node)

    with mock.patch.object(pattern_matcher.PatternExpr, "match", match):
        if scope is None:
            counts = [this.apply(graph) for this in passes()]
        else:
            with scope():
                counts = [this.apply(graph) for this in passes()]
    return counts, tried.call_count, graph.graph.python_code("self").src


@pytest.mark.parametrize("function", [attention, views, added])
def test_the_same_patterns_are_found(function):
    graph = traced(function)
    stock, ours = applied(graph), applied(graph, possible_patterns)
    assert (stock[0], stock[2]) == (ours[0], ours[2]) and sum(stock[0]) > 0


def test_fewer_are_looked_for():
    graph = traced(views)
    assert applied(graph, possible_patterns)[1] < applied(graph)[1] / 4


def test_the_passes_themselves_stay():
    """A pass is the same for all compilations of the process."""
    before = {id(this): {end: len(entries) for end, entries in this.patterns.items()} for this in passes()}
    applied(traced(views), possible_patterns)
    assert before == {id(this): {end: len(entries) for end, entries in this.patterns.items()} for this in passes()}
