"""Python's garbage collector while a program is compiled."""

import gc
import threading

import pytest
import torch

from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.garbage_collection import RARE, rare_collections


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_it_runs_less_often_until_the_last_thread_has_compiled():
    entered, leave = threading.Event(), threading.Event()

    def compile_elsewhere():
        with rare_collections():
            entered.set()
            assert leave.wait(30)

    thread = threading.Thread(target=compile_elsewhere)
    with rare_collections():
        thread.start()
        assert entered.wait(30) and gc.get_threshold() == RARE
    assert gc.get_threshold() == RARE
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (60_000, 30, 60)])
def test_a_program_that_turned_it_off_or_down_keeps_that(own):
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_while_the_forward_and_the_backward_are_compiled(monkeypatch):
    seen = []
    lower = "dtensor_compile.stages.compiling.lower_graph"
    monkeypatch.setattr(lower, lambda graph, this: seen.append(gc.get_threshold()))
    compiled = torch.compile(lambda x: x.sin().sum(), backend="dtensor", fullgraph=True)
    with fresh_caches():
        compiled(torch.randn(4, requires_grad=True)).backward()
    torchs = getattr(torch._dynamo.config, "gc_gen2_threshold_during_compile", None) or 0  # as of 2.15
    rare = (*RARE[:2], max(RARE[2], torchs))
    assert seen == [rare, rare] and gc.get_threshold() == (700, 10, 10)
