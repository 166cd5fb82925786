"""What goes in and comes out of a compiled call in C++, on ranks: uneven and empty shards, several mesh dims, some of
size 1.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtensor_compile.compat.dynamo.observers.host_time import checks_of_guards
from dtensor_compile.native.loader import native
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.cases import mostly_slow
from tests.runtime import needs_native

pytestmark = needs_native


class Model(nn.Module):
    """`a` and `b` are used, `sometimes` where it is asked for, `unused` never."""

    def __init__(self, mesh, placements, shape, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.sometimes, self.unused = (
            nn.Parameter(distribute_tensor(torch.randn(shape, dtype=dtype), mesh, placements)) for _ in range(4)
        )

    def forward(self, x, half=True):
        y = self.a * self.b * x + self.a
        return (y * self.sometimes if half else y).sum().full_tensor(), y * 2


def pair(*arguments):
    model = Model(*arguments)
    return Model(*arguments), model, torch.compile(model, backend="dtensor_aten", fullgraph=True)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def check(mesh, placements, shape, dtype=torch.float32):
    """Results and gradients are eager's, with what programs do to ``.grad`` in between."""
    assert native() is not None
    eager, model, compiled = pair(mesh, placements, shape, dtype)
    x = distribute_tensor(torch.ones(shape, dtype=dtype) * 3, mesh, placements)
    for clear in (None, None, True, False, None, True, None):
        for half in (True, False):
            results = []
            for call in (eager, compiled):
                loss, out = call(x, half)
                loss.backward(retain_graph=half)
                if half:
                    loss.backward()
                results.append((loss.detach(), out.detach()))
            assert not (found := compare_values("results", *results)), found
        assert not (found := compare_values("gradients", gradients(eager), gradients(model))), found
        assert model.unused.grad is None
        for one in (eager, model) if clear is not None else ():
            one.zero_grad(set_to_none=clear)
    assert checks_of_guards(Model.forward, {"self": model, "x": x, "half": True})()


LAYOUTS = {
    "uneven": ((2,), [Shard(0)], (5, 3)),
    "nothing at all": ((2,), [Shard(0)], (0, 3)),
    "a mesh dim of size 1": ((2, 1), [Shard(0), Shard(1)], (5, 3)),
}


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "uneven"))
@on_ranks(2)
def test_shards_on_two_ranks(name):
    shape, placements, size = LAYOUTS[name]
    check(make_mesh(shape, ("dp", "tp")[: len(shape)]), placements, size)


LARGER = {
    "2x2 uneven in both": ((2, 2), [Shard(0), Shard(1)], (5, 3)),
    "2x1x2": ((2, 1, 2), [Shard(0), Shard(0), Shard(1)], (3, 3)),
    "four, one without a row": ((4,), [Shard(0)], (3, 2)),
}


@pytest.mark.parametrize("name", mostly_slow(LARGER, "four, one without a row"))
@on_ranks(4)
def test_shards_on_four_ranks(name):
    shape, placements, size = LARGER[name]
    check(make_mesh(shape, ("dp", "pp", "tp")[-len(shape) :]), placements, size)


@on_ranks(2)
# by local sizes, the partitioner would move gathers of backward into forward on one of them
def test_one_row_for_two_ranks():
    check(make_mesh((2,), ("tp",)), [Shard(0)], (1, 3))


@on_ranks(2)
def test_uneven_shards_in_bfloat16():
    check(make_mesh((2,), ("tp",)), [Shard(0)], (5, 3), torch.bfloat16)


@on_ranks(2)
def test_hooks_and_uneven_shards():
    mesh = make_mesh((2,), ("tp",))
    eager, model, compiled = pair(mesh, [Shard(0)], (5, 3))
    seen = {eager: [], model: []}
    for one, grads in seen.items():
        one.a.register_hook(lambda gradient, grads=grads: grads.append(gradient.full_tensor()) or gradient * 2)
        one.b.register_post_accumulate_grad_hook(
            lambda parameter, grads=grads: grads.append(parameter.grad.full_tensor())
        )
    for _ in range(2):
        for call in (eager, compiled):
            call(torch.tensor(2.0))[0].backward()
    assert len(seen[eager]) == 4 and not (found := compare_values("seen", *seen.values())), found
    assert not (found := compare_values("gradients", gradients(eager), gradients(model))), found


@pytest.mark.slow
@on_ranks(2)
def test_parameters_in_other_shards():
    """As large a local tensor on one rank among them: rank 0 has three rows of five and of six."""
    mesh, other = make_mesh((2,), ("tp",)), make_mesh((2, 1), ("tp", "dp"))
    eager, model, compiled = pair(mesh, [Shard(0)], (5, 3))
    scale = torch.tensor(2.0)
    replacements = [
        (mesh, [Shard(0)], (5, 3)),
        (mesh, [Shard(0)], (6, 3)),
        (mesh, [Shard(1)], (5, 3)),
        (mesh, [Replicate()], (5, 3)),
        (other, [Shard(0), Replicate()], (5, 3)),
    ]
    for on, placements, shape in replacements:
        for one in (eager, model):
            torch.manual_seed(1)
            for name in ("a", "b", "sometimes"):
                setattr(one, name, nn.Parameter(distribute_tensor(torch.randn(shape), on, placements)))
        results = [call(scale) for call in (eager, compiled)]
        assert not (found := compare_values("results", *results)), found
        for loss, _ in results:
            loss.backward()
        assert not (found := compare_values("gradients", gradients(eager), gradients(model))), found
