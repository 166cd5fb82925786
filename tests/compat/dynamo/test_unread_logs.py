"""Graphs are printed, and guards timed with cold caches, where a log or a trace of the process takes that."""

import logging
import unittest.mock

import pytest
import torch
from torch._logging._internal import trace_log

from dtensor_compile.offline import job


def _step(backend: str) -> tuple[int, int]:
    """Compiles a forward and a backward pass; returns how often graphs were printed and caches flushed."""
    torch._dynamo.reset()
    stock = torch._dynamo.guards.profile_guard_manager
    printed, flushed = unittest.mock.Mock(return_value="code"), unittest.mock.Mock(wraps=stock)
    with (
        unittest.mock.patch.object(torch.fx.GraphModule, "print_readable", printed),
        unittest.mock.patch.object(torch._dynamo.guards, "profile_guard_manager", flushed),
    ):
        x = torch.ones(4, requires_grad=True)
        torch.compile(lambda x: (x * 2).sin().sum(), backend=backend)(x).backward()
    assert x.grad is not None
    return printed.call_count, flushed.call_count


def test_nothing_is_made_that_nothing_takes():
    with job(2):
        assert _step("dtensor_aten") == (0, 0)
    printed, flushed = _step("aot_eager")  # other backends see stock torch
    assert printed >= 3 and flushed == 1


@pytest.mark.parametrize(
    "log, level, at_least",
    [
        ("torch._functorch._aot_autograd.graph_compile.__aot_joint_graph", logging.INFO, (1, 0)),
        ("torch._functorch._aot_autograd.graph_compile.__aot_graphs", logging.INFO, (2, 0)),
        ("torch._dynamo.guards.__guards", logging.DEBUG, (0, 1)),
    ],
)
def test_logs_get_what_they_ask_for(log, level, at_least):
    with job(2), unittest.TestCase().assertLogs(log, level):
        printed, flushed = _step("dtensor_aten")
    assert printed >= at_least[0] and flushed == at_least[1]


def test_traces_have_the_graphs():
    with job(2):
        _step("dtensor_aten")  # torch's own handler notices that no trace is asked for, and goes
        with unittest.TestCase().assertLogs(trace_log, logging.DEBUG) as logs:
            printed, flushed = _step("dtensor_aten")
    kinds = {kind for record in logs.records for kind in getattr(record, "metadata", {})}
    assert {"aot_joint_graph", "aot_forward_graph", "aot_backward_graph"} <= kinds
    assert printed >= 3 and flushed == 1
