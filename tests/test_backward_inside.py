"""``loss.backward()`` inside of a compiled region leaves in ``.grad`` what eager leaves there: values, placements and
strides.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import make_mesh, on_ranks


def leaf(*shape, placement, transposed=False):
    torch.manual_seed(sum(shape))
    local = torch.randn(*shape).t().contiguous().t() if transposed else torch.randn(*shape)
    return DTensor.from_local(local, make_mesh((2,), ("dp",)), [placement], run_check=False).requires_grad_()


def step(x, w):
    loss = (x @ w).redistribute(placements=[Replicate()]).square().mean()
    loss.backward()
    return loss.detach()


def step_of_the_sum(x, w):
    loss = (x @ w).sum().redistribute(placements=[Replicate()])
    loss.backward()
    return loss.detach()


LEAVES = {
    "a partial gradient": lambda: (leaf(3, 4, placement=Shard(0)), leaf(4, 5, placement=Replicate())),
    "a gradient in shards of a replica": lambda: (leaf(6, 4, placement=Replicate()), leaf(4, 5, placement=Shard(1))),
    "a transposed leaf": lambda: (leaf(3, 4, placement=Shard(0)), leaf(4, 5, placement=Replicate(), transposed=True)),
    "partial input": lambda: (leaf(3, 4, placement=Partial()), leaf(4, 5, placement=Replicate())),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "dtensor_aten"])
@pytest.mark.parametrize("program", [step, step_of_the_sum])
@on_ranks(2)
def test_gradients_are_placed_as_in_eager(program, backend):
    for name, leaves in LEAVES.items():
        torch._dynamo.reset()
        counters.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        eager, ours = leaves(), leaves()
        for call in range(3):  # the later ones add to the gradients of the first
            program(*eager), compiled(*ours)
            for want, got in zip(eager, ours):
                assert got.grad.placements == want.grad.placements, (
                    name,
                    call,
                    got.grad.placements,
                    want.grad.placements,
                )
                assert got.grad.stride() == want.grad.stride(), (name, call)
                assert got.grad._local_tensor.stride() == want.grad._local_tensor.stride(), (name, call)
                torch.testing.assert_close(
                    got.grad.full_tensor(), want.grad.full_tensor(), msg=lambda text: f"{name}, {call}: {text}"
                )
