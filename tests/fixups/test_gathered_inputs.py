"""Parameters that ``fully_shard`` gathers outside of the region have no fixed address; for CUDA graphs."""

import pytest
import torch
import torch._inductor.compile_fx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtensor_compile.recording.recorder import record
from dtensor_compile.testing import on_ranks


class Root(nn.Module):
    """A block of its own group, and a parameter of the root's."""

    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.last(self.block(x).relu())


def fixed_inputs(monkeypatch, **options):
    """For each graph the shapes of the inputs whose memory is fixed, and the bytes of decisions about them."""
    found = []
    inner = torch._inductor.compile_fx.get_static_input_idxs

    def static_indices(count):
        found.append(inner(count))
        return found[-1]

    monkeypatch.setattr(torch._inductor.compile_fx, "get_static_input_idxs", static_indices)
    model = Root()
    for module in (model.block, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    with record() as recording:
        torch.compile(model, backend="dtensor", options=options)(torch.ones(2, 8)).sum().backward()
    decided = [d for d in recording.decisions if d.kind == "forget_addresses"]
    return found, [d.bytes for d in decided]


@pytest.mark.slow
@on_ranks(2)
def test_gathered_parameters_of_the_root_have_no_fixed_address():
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain, undecided = fixed_inputs(monkeypatch)
        graphs, decided = fixed_inputs(monkeypatch, **{"triton.cudagraphs": True})
    assert undecided == [] and decided == [8 * 8 * 4]
    assert len(set(plain[0]) - set(graphs[0])) == 1 and set(graphs[0]) < set(plain[0])
