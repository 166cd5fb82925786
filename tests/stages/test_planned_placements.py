"""``options={"plan": "global"}``: eager's numbers with other placements inside."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_compile
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.global_plan.place import place
from dtensor_compile.testing import on_ranks

KIND = "global_plan"


def distributed(module: nn.Module, mesh, placements) -> nn.Module:
    """The module with DTensor parameters, placed by name."""
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        placed = distribute_tensor(parameter.data, mesh, placements(name), src_data_rank=None)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(placed))
    return module


def gradients(run, model, *args):
    model.zero_grad()
    out = run(*args)
    (out.float() ** 2).sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def compiled(model, *args, **options):
    torch._dynamo.reset()
    with dtensor_compile.record() as recording:
        run = torch.compile(model, backend="dtensor_aten", fullgraph=True, options=options)
        for _ in range(2):
            out, grads = gradients(run, model, *args)
    return out, grads, recording


def same(plain, model, *args, **options):
    """Compares with the plain model, and placements of results and gradients with those of ``"greedy"``; returns the
    decisions about the plan, and the recording."""
    want, want_grads = gradients(plain, plain, *(x.full_tensor() for x in args))
    greedy, greedy_grads, _ = compiled(model, *args, **options)
    out, grads, recording = compiled(model, *args, plan="global", **options)
    assert out.placements == greedy.placements
    torch.testing.assert_close(out.full_tensor(), want)
    for name, grad in want_grads.items():
        torch.testing.assert_close(grads[name].full_tensor(), grad, msg=lambda text, name=name: f"{name}: {text}")
        assert grads[name].placements == greedy_grads[name].placements
    return [d.reason for d in recording.decisions if d.kind == KIND], recording


class Net(nn.Module):
    def __init__(self, dim=16, hidden=64):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@on_ranks(2)
def test_replicated_parameters_and_rows():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), Net())
    model = distributed(copy.deepcopy(plain), mesh, lambda name: [Replicate()])
    x = distribute_tensor(torch.randn(64, 16), mesh, [Replicate()])
    reasons, _ = same(plain, model, x, topology="h100")
    print(reasons)
    assert len(reasons) == 1


@on_ranks(4)
def test_a_llama_over_two_mesh_dims():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Llama(LlamaConfig(layers=1, dim=64, ffn_dim=128, heads=4, kv_heads=2, vocab=96, sequence=16))
    model = copy.deepcopy(plain)
    tokens = torch.randint(0, 96, (4, 16))
    plan = place(model, mesh, (tokens,), topology="h100", fixed={"output.weight": [Replicate(), Shard(0)]})
    plan.apply(model)
    (placed,) = plan.distribute_inputs((tokens,))
    for buffer_name, buffer in list(model.named_buffers()):
        setattr(model, buffer_name, distribute_tensor(buffer, mesh, [Replicate(), Replicate()]))
    reasons, _ = same(plain, model, placed, topology="h100")
    print(reasons)
    assert len(reasons) == 1
