"""Training steps as programs have them, on real ranks: losses, gradients and parameters after two steps are eager's."""

import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtensor_compile.testing import run_on_ranks

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools" / "bench"))
from configurations import CONFIGURATIONS, MESHES, NAMES, SMALL, build  # noqa: E402


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(name, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    dims, _ = MESHES[name.partition(": ")[0]]
    world = dist.get_world_size()
    built = build(name, "cpu", SMALL, (world,) if len(dims) == 1 else (2, world // 2))
    torch.manual_seed(dist.get_rank())
    compile = (lambda f: torch.compile(f, backend=backend, fullgraph=True, **built.options)) if backend else lambda f: f
    optimizer = torch.optim.SGD(built.model.parameters(), lr=0.1, momentum=0.9)
    run, losses = compile(built.loss), []
    for tokens, targets in [*built.inputs, *built.inputs]:
        with built.around():
            loss = run(tokens, targets)
            loss.backward()
        losses.append(local(loss).item())
        gradients = [local(p.grad).clone() for p in built.model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, [local(p).detach().clone() for p in built.model.parameters()]


def compare(name, backend):
    eager, ours = trained(name, None), trained(name, backend)
    mixed = "mixed precision" in name
    about = {"rtol": 3e-2, "atol": 3e-3} if mixed else {"rtol": 2e-4, "atol": 1e-5}
    torch.testing.assert_close(ours[0], eager[0], **about)
    for found, wanted in zip([*ours[1], *ours[2]], [*eager[1], *eager[2]], strict=True):
        torch.testing.assert_close(found, wanted, **about)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_operators_train_as_eager(name):
    run_on_ranks(4, compare, name, "dtensor_aten", timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_kernels_train_as_eager(name):
    run_on_ranks(4, compare, name, "dtensor", timeout=800)


@pytest.mark.slow
def test_two_dims_of_parallelism_train_as_eager():
    run_on_ranks(4, compare, "fully_shard x tensor parallel: plain", "dtensor_aten")
