"""What a step holds at its peak, on real ranks: gathered parameters live as long as in eager or as stock has them."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization

from dtensor_compile.demo.parallel import Gathered
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.step_memory import allocated_peak, resident_peak

LAYERS, DIM = 12, 512
MIB = 1 << 20


class Layers(nn.Module):
    """Products of a small batch with weights of one MiB each, so that the weights are what is held."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def parametrized(mesh):
    torch.manual_seed(0)
    model = Layers()
    for layer in model.layers:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        register_parametrization(layer, "weight", Gathered(mesh), unsafe=True)
    return model


def stepping(model, run):
    """A step from no gradients; two of them have run."""
    x = torch.randn(4, DIM)

    def step():
        model.zero_grad()
        run(x).backward()

    for _ in range(2):
        step()
    model.zero_grad()
    return step


def saved_bytes(model, run):
    """Bytes of the memory that is kept from forward to backward, parameters aside."""
    kept = {}
    own = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        local = x.to_local() if hasattr(x, "to_local") else x
        if local.untyped_storage().data_ptr() not in own:
            kept[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(torch.randn(4, DIM))
    return sum(kept.values())


def compiled(model, backend, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, **({"options": options} if options else {}))


@pytest.mark.slow
@on_ranks(2)
def test_without_inductor_inputs_of_a_backward_are_freed_as_they_are_used():
    mesh = make_mesh((2,), ("dp",))
    peaks = {}
    for name, options in {"aot_eager": {}, "dtensor_aten": {"overlap_memory": 0.0}}.items():
        model = parametrized(mesh)
        step = stepping(model, compiled(model, name, **options))
        peaks[name] = resident_peak(step), allocated_peak(step)
    for ours, stock in zip(peaks["dtensor_aten"], peaks["aot_eager"]):
        assert ours <= stock + LAYERS / 3 * MIB, (
            peaks
        )  # gloo's threads free what they sent a few layers earlier or later


@pytest.mark.slow
@on_ranks(2)
def test_no_more_is_kept_for_backward_than_eager_keeps():
    mesh = make_mesh((2,), ("dp",))
    model = parametrized(mesh)
    eager = saved_bytes(model, model)
    for kernels in ("aten", "inductor"):
        model = parametrized(mesh)
        run = compiled(model, "dtensor", kernels=kernels)
        run(torch.randn(4, DIM)).backward()
        assert 0 < saved_bytes(model, run) <= eager, (kernels, saved_bytes(model, run), eager)
