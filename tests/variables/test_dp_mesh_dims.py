"""``fully_shard(..., dp_mesh_dims=...)``: parameters that are DTensors on the whole mesh, of which some dims are
data-parallel.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.cases import mostly_slow

DataParallelMeshDims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
pytestmark = pytest.mark.skipif(DataParallelMeshDims is None, reason="fully_shard has no dp_mesh_dims in this release")

#: Dims of the mesh that are tensor-parallel in the tests; the others see different rows of the batch, or replicas.
TENSOR_PARALLEL = "tp"


class Block(nn.Module):
    def __init__(self, dim=6, hidden=10):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def placements(mesh, dim=None):
    """Replicated over all dims but the tensor-parallel one, over which it is sharded by tensor dim `dim`."""
    return [Shard(dim) if name == TENSOR_PARALLEL and dim is not None else Replicate() for name in mesh.mesh_dim_names]


def build(mesh, dims, **kwargs):
    torch.manual_seed(0)
    model = Model()
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        tensor_dim = 0 if "up" in name else 1 if name.endswith("down.weight") else None
        distributed = distribute_tensor(parameter.detach(), mesh, placements(mesh, tensor_dim))
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(distributed))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims, **kwargs)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **kwargs)


def batch(mesh, step):
    torch.manual_seed(10 + step)
    rows = [Replicate() if name == TENSOR_PARALLEL else Shard(0) for name in mesh.mesh_dim_names]
    return distribute_tensor(torch.randn(8, 6), mesh, rows)


def train(shape, names, dims, wrap, held=(), **kwargs):
    """Losses, and gradients after each of three steps, which accumulate; nothing is reduced in the steps of `held`."""
    mesh = make_mesh(shape, names)
    model = build(mesh, DataParallelMeshDims(**dims), **kwargs)

    def step(x):
        return model(x).float().square().mean()

    f, seen = wrap(step), []
    for i in range(3):
        model.set_requires_gradient_sync(i not in held)
        loss = f(batch(mesh, i))
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
        seen.append((loss.detach(), gradients))
    return seen


CASES = {
    "sharded": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tensor parallel first": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "two dims shared as one": ((2, 2), ("dp", "cp"), {"shard": ("dp", "cp")}),
    "replicated and sharded": ((2, 2), ("rep", "dp"), {"replicate": "rep", "shard": "dp"}),
    "replicated": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
}


def assert_same(case, backend="dtensor_aten", computed_in=None, **kwargs):
    eager = train(*CASES[case], lambda f: f, **kwargs)
    ours = train(*CASES[case], lambda f: torch.compile(f, backend=backend, fullgraph=True), **kwargs)
    for step, (a, b) in enumerate(zip(eager, ours)):
        differences = compare_values(f"step {step}", a, b, computed_in)
        assert not differences, "\n".join(map(str, differences))


@pytest.mark.parametrize("case", mostly_slow(CASES, "two dims shared as one"))
@on_ranks(4)
def test_numbers_and_gradients_are_those_of_eager(case):
    assert_same(case)


@pytest.mark.slow
@on_ranks(4)
def test_accumulation():
    assert_same("sharded", held=(0, 1))


@pytest.mark.slow
@on_ranks(4)
def test_accumulation_in_another_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_same("sharded", held=(0, 1), mp_policy=policy, computed_in=torch.bfloat16)


@pytest.mark.slow
@on_ranks(4)
def test_parameters_kept_for_the_backward():
    assert_same("sharded", reshard_after_forward=False)


@pytest.mark.slow
@on_ranks(4)
def test_gradients_that_eager_holds_are_reduced_in_the_graph():
    """Two steps that eager holds, then a compiled one that reduces."""
    shape, names, dims = CASES["sharded"]
    seen = []
    for compiled_steps in ((), (2,), (0, 1)):
        mesh = make_mesh(shape, names)
        model = build(mesh, DataParallelMeshDims(**dims))
        compiled = torch.compile(lambda x: model(x).square().mean(), backend="dtensor_aten", fullgraph=True)
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            x = batch(mesh, i)
            loss = compiled(x) if i in compiled_steps else model(x).square().mean()
            loss.full_tensor().backward()
        seen.append({name: p.grad for name, p in model.named_parameters()})
    for other in seen[1:]:
        differences = compare_values("gradients", seen[0], other)
        assert not differences, "\n".join(map(str, differences))
