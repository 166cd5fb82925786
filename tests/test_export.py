"""``dtensor_compile.export``: the program of one rank, over local tensors, computes what the module computes."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtensor_compile
from dtensor_compile.testing import make_mesh, on_ranks


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, *, scale=None):
        y = self.down(torch.relu(self.up(x)))
        return y if scale is None else {"scaled": y * scale, "plain": y}


def tp_mlp():
    torch.manual_seed(0)
    mesh = make_mesh((dist.get_world_size(),), ("tp",))
    return parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_tensor_parallel_program_saved_and_loaded(strict):
    model, x = tp_mlp(), torch.randn(5, 4)
    program = dtensor_compile.export(model, (x,), strict=strict)
    assert list(program.state_dict) == list(model.state_dict())
    assert sum("all_reduce" in target for target in targets(program)) == 1
    assert not any(isinstance(t, DTensor) for t in [*program.state_dict.values(), *program.constants.values()])
    for run in (program.module(), saved_and_loaded(program).module()):
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)


@on_ranks(2)
def test_dynamic_batch():
    model = tp_mlp()
    program = dtensor_compile.export(model, (torch.randn(4, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    run = saved_and_loaded(program).module()
    for batch in (2, 5, 9):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)


@on_ranks(2)
def test_dynamic_shapes_by_name_and_keyword_arguments():
    model, scale = tp_mlp(), torch.tensor(2.0)
    shapes = {"x": {0: torch.export.Dim.AUTO}, "scale": None}
    run = dtensor_compile.export(model, (torch.randn(4, 4),), {"scale": scale}, dynamic_shapes=shapes).module()
    for batch in (3, 6):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(run(x, scale=scale), model(x, scale=scale))


@on_ranks(2)
def test_static_sizes_are_checked():
    run = dtensor_compile.export(tp_mlp(), (torch.randn(4, 4),)).module()
    with pytest.raises((AssertionError, RuntimeError)):
        run(torch.randn(5, 4))


@on_ranks(2)
def test_dtensors_in_and_out_are_local_tensors():
    mesh = make_mesh((2,), ("tp",))
    torch.manual_seed(0)
    model = distribute_module(nn.Linear(4, 3), mesh)
    x = distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0)])  # uneven: 3 and 2 rows
    out = dtensor_compile.export(model, (x,)).module()(x.to_local())
    torch.testing.assert_close(out, model(x).to_local())


@on_ranks(2)
def test_row_wise_embedding_tied_to_the_output():
    mesh = make_mesh((2,), ("tp",))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.arange(20.0).reshape(10, 2) / 10, mesh, [Shard(0)]))
            self.also = self.weight

        def forward(self, tokens):
            found = nn.functional.embedding(tokens, self.weight).redistribute(placements=[Replicate()])
            return nn.functional.linear(found, self.also).full_tensor()

    model, tokens = Tied(), distribute_tensor(torch.tensor([0, 4, 5, 9]), mesh, [Replicate()])
    run = saved_and_loaded(dtensor_compile.export(model, (tokens,))).module()
    for local in (tokens.to_local(), torch.tensor([9, 1, 2, 3])):
        expected = model(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
        torch.testing.assert_close(run(local), expected)


@on_ranks(2)
def test_buffers_that_the_program_changes():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("offset", torch.ones(4), persistent=False)

        def forward(self, x):
            self.seen.add_(1)
            return x * self.seen + self.offset

    program = dtensor_compile.export(Counts(), (torch.ones(4),))
    run = program.module()
    assert list(program.state_dict) == ["seen"]
    assert [run(torch.ones(4))[0].item() for _ in range(3)] == [2.0, 3.0, 4.0]
