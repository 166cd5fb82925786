"""Means of losses over targets of which ranks have other numbers that count: those of the plain program."""

import pytest
import torch
import torch.nn.functional as F

from dtensor_compile import record
from dtensor_compile.spmd import Mesh, mark_sharding
from dtensor_compile.testing import on_ranks
from tests.cases import mostly_slow

TARGETS = torch.tensor([0, 1, 2, 3, -100, -100, 4, -100])
LOSSES = {
    "cross entropy": lambda y, t, w: F.cross_entropy(y, t),
    "of weighted classes": lambda y, t, w: F.cross_entropy(y, t, weight=w),
    "smoothed": lambda y, t, w: F.cross_entropy(y, t, label_smoothing=0.1),
    "smoothed, of weighted classes": lambda y, t, w: F.cross_entropy(y, t, w, label_smoothing=0.1),
    "another index": lambda y, t, w: F.cross_entropy(y, t.clamp(min=0), ignore_index=0),
    "of log probabilities": lambda y, t, w: F.nll_loss(y.log_softmax(-1), t, weight=w),
    "a module": lambda y, t, w: torch.nn.CrossEntropyLoss()(y, t),
    "of pixels": lambda y, t, w: F.cross_entropy(y.view(4, 2, 5).transpose(1, 2), t.view(4, 2)),
    "of probabilities": lambda y, t, w: F.cross_entropy(y, F.one_hot(t.clamp(min=0), 5).to(y.dtype)),
    "a sum": lambda y, t, w: F.cross_entropy(y, t, reduction="sum"),
    "one by one": lambda y, t, w: F.cross_entropy(y, t, reduction="none"),
}


@pytest.mark.parametrize("name", mostly_slow(LOSSES, *LOSSES.keys() - {"a module", "smoothed", "of weighted classes"}))
@on_ranks(2)
def test_values_and_gradients(name):
    mesh = Mesh(range(2), (2,), ("data",))
    mesh.to_device_mesh()
    torch.manual_seed(0)
    x, weight, classes = torch.randn(8, 6), torch.randn(5, 6, requires_grad=True), torch.rand(5)

    def plain(x, weight, targets):
        return LOSSES[name](x @ weight.t(), targets, classes)

    def marked(x, weight, targets):
        return plain(mark_sharding(x, mesh, ("data", None)), weight, mark_sharding(targets, mesh, ("data",)))

    expected = plain(x, weight, TARGETS)
    (gradient,) = torch.autograd.grad(expected.sum(), weight)
    found = torch.compile(marked, backend="dtensor_aten", fullgraph=True)(x, weight, TARGETS)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), weight)[0], gradient)


@pytest.mark.parametrize("kernels", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", mostly_slow([7, 3, 8], 3))
@pytest.mark.parametrize("targets", ["none counts on the last ranks", "none counts"])
@on_ranks(4)
def test_uneven_batches_and_cut_classes(targets, rows, kernels):
    """On a 2x2 mesh that cuts the batch and the classes (5 of them), called twice, with a graph that is gone through
    twice.
    """
    mesh = Mesh(range(4), (2, 2), ("data", "classes"))
    mesh.to_device_mesh()
    torch.manual_seed(0)
    y, t = torch.randn(rows, 5, requires_grad=True), torch.arange(rows) % 5
    t[0 if targets == "none counts" else rows // 2 :] = -100

    def marked(y, t):
        return F.cross_entropy(
            mark_sharding(y, mesh, ("data", "classes")), mark_sharding(t, mesh, ("data",)), label_smoothing=0.1
        )

    expected = F.cross_entropy(y, t, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(expected, y)
    compiled = torch.compile(marked, backend="dtensor", options={"kernels": kernels}, fullgraph=True)
    for _ in range(2):
        found = compiled(y, t)
        torch.testing.assert_close(found, expected, equal_nan=True)
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(found, y, retain_graph=True)[0], gradient, equal_nan=True)


@on_ranks(2)
def test_one_number_is_sent():
    """The sum. How many targets count each rank sees in those it was given."""
    mesh = Mesh(range(2), (2,), ("data",))
    y, targets = torch.randn(8, 5), TARGETS
    mark_sharding(y, mesh, ("data", None))
    mark_sharding(targets, mesh, ("data",))
    with record() as recording:
        torch.compile(lambda y, targets: F.cross_entropy(y, targets), backend="dtensor_aten", fullgraph=True)(
            y, targets
        )
    assert [(c.kind, c.bytes) for c in recording.report().ours.collectives] == [("all_reduce", 4)]
