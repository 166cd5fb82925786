"""Results that are views of one value, of which the program keeps the value to itself."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from dtensor_compile.fixups.return_view_bases import return_bases
from dtensor_compile.testing import make_mesh, run_on_ranks
from dtensor_compile.testing.parity import sum_of_squares

PROGRAMS = {
    "reshaped and transposed": lambda h: (h.view(-1), h.t()),
    "beside its detached value": lambda h: (h.view(-1), h.detach()),
    "beside the pieces of a split": lambda h: (h.t(), *h.chunk(2, 1), h.view(-1)),
    "of two values": lambda h: (h.t(), h.view(-1), (h + 1).t(), (k := h - 1).view(-1), k.t()),
    "a view of a view": lambda h: (h.view(-1).view(8, -1), h.t()[1:]),
}


def inputs(rows):
    mesh = make_mesh((2,))
    x = torch.arange(rows * 8.0).view(rows, 8)  # whole numbers: no order of additions rounds
    return distribute_tensor(x, mesh, [Shard(0)]).detach().requires_grad_()


def described(results):
    return [(r.shape, r.stride(), r.placements, r.requires_grad, r.full_tensor().tolist()) for r in results]


def both(name, rows, options):
    """Results, which of them share memory with the first, and gradients, of two calls in eager and compiled."""
    torch._dynamo.reset()
    program = PROGRAMS[name]

    def run(x):
        return program(x * 2)

    found = []
    for function in (run, torch.compile(run, fullgraph=True, **options)):
        x = inputs(rows)
        for _ in range(2):
            results = function(x)
            sum_of_squares(results).backward()
        shared = results[0].to_local().untyped_storage().data_ptr()
        same_memory = [r.to_local().untyped_storage().data_ptr() == shared for r in results]
        found.append([described(results), same_memory, x.grad.full_tensor().tolist(), x.grad.placements])
    return found


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_gradients_and_memory_are_those_of_eager(name, dynamic):
    rows = 8 if name == "a view of a view" or dynamic else 6
    for eager, compiled in run_on_ranks(2, both, name, rows, {"backend": "dtensor_aten", "dynamic": dynamic}):
        assert len(compiled[0]) == len(eager[0])  # the value itself stays inside
        assert compiled == eager


def test_through_inductor():
    for eager, compiled in run_on_ranks(2, both, "reshaped and transposed", 8, {"backend": "dtensor"}):
        assert compiled == eager


def added(name):
    """How many bases the graph of a program returns beside its results."""
    torch._dynamo.reset()
    counts = []

    def backend(gm, example_inputs):
        counts.append(return_bases(gm))
        return gm

    program = {**PROGRAMS, **KEPT}[name]
    torch.compile(lambda x: program(x * 2), backend=backend)(inputs(8))
    return counts


KEPT = {
    "one view": lambda h: h.view(-1),
    "pieces of a split": lambda h: h.chunk(2, 1),
    "the value is a result": lambda h: (h, h.t(), h.view(-1)),
    "no gradient": lambda h: (h.detach().view(-1), h.detach().t()),
    "twice the same": lambda h: (h.t(), h.t() + 1),
}


@pytest.mark.parametrize(
    "name, bases",
    [
        ("reshaped and transposed", 1),
        ("of two values", 2),
        ("beside its detached value", 1),
        *((name, 0) for name in KEPT),
    ],
)
def test_bases_are_results_where_views_share_them(name, bases):
    assert run_on_ranks(2, added, name) == [[bases]] * 2
