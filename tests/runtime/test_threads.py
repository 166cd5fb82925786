"""Compiled calls on several threads at once, and what is left of compiled code that nobody holds any more."""

import gc
import sys
import threading
import weakref

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.native.loader import native
from dtensor_compile.testing import make_mesh, on_ranks
from tests.runtime import needs_native

ROUNDS = 150


class Scales(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.scales = nn.ParameterList(
            DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False) for _ in range(8)
        )

    def forward(self, x):
        return sum((scale * x).to_local().sum() for scale in self.scales)


def at_once(*functions):
    """Runs them on a thread each, which start together."""
    errors, ready = [], threading.Barrier(len(functions))

    def run(function):
        ready.wait()
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again on the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


@needs_native
@on_ranks(1, timeout=60)
def test_backward_through_the_same_parameters():
    """The eager one holds the lock of a gradient and waits for the GIL; the compiled one has the GIL.

    Not with ``fullgraph=True``: torch 2.13 counts the frames of such calls in one variable for all threads,
    so that one now and then counts none and raises (pytorch/pytorch#185138; with ``backend="eager"`` too).
    """
    assert native() is not None
    model = Scales(make_mesh((1,), ("tp",)))
    counters.clear()  # the rank ran other tests before
    compiled, x = torch.compile(model, backend="dtensor_aten"), torch.tensor(3.0)
    compiled(x).backward()
    assert counters["stats"]["unique_graphs"] == 1

    def backward(call):
        for _ in range(ROUNDS):
            call(x).backward()

    at_once(lambda: backward(compiled), lambda: backward(model), lambda: backward(compiled))
    for scale in model.scales:
        assert torch.equal(scale.grad.to_local(), torch.full((4,), 3.0 * (3 * ROUNDS + 1)))


def test_compiled_code_that_is_not_used_any_more_goes(mesh):
    model = Scales(mesh)
    loss = torch.compile(model, backend="dtensor_aten", fullgraph=True)(torch.tensor(3.0))
    node = weakref.ref(type(loss.grad_fn))
    loss.backward()
    del loss, model
    torch._dynamo.reset()
    gc.collect()
    assert node() is None
