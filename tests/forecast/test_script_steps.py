"""Scripts that are planned as they are."""

import pytest
import torch

from dtensor_compile.cli import main
from dtensor_compile.forecast.step_plan import from_json

SCRIPT = """
import argparse, os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=32)
p.add_argument("--steps", type=int, default=100)
p.add_argument("--world", default="its own")
args = p.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
try:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Embedding(64, args.width), nn.Linear(args.width, args.width, bias=False)).cuda()
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    run = torch.compile(model, backend="dtensor")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    losses = []
    for step, (batch,) in enumerate(DataLoader(TensorDataset(torch.randint(64, (2 * args.steps, 8))), batch_size=2)):
        loss = run(batch.to("cuda")).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # the line that reads a value
        if losses[-1] != 0:
            raise ValueError("no value of a loss is known")
finally:
    dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_a_script_is_planned_as_it_is(script, tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main(["plan", "--world", "4", "--json", str(file), script, "--width", "64"]) == 0
    plan = from_json(file.read_text())
    at_most = {kind: max(held) for kind, *held in zip(plan.memory.kinds, *(at.bytes for at in plan.memory.over_time))}
    mine = 2 * 64 * 64 * 4 // 4
    assert at_most["parameters"] == at_most["gradients"] == mine and at_most["optimizer states"] == 2 * mine
    assert plan.world == 4 and {row.mesh_dim for row in plan.communication} == {"dp"}
    assert {row.kind for row in plan.communication} >= {"all_gather", "reduce_scatter"}
    assert min(plan.time.forward, plan.time.backward, plan.time.rest) > 0 and plan.graphs == 2
    assert len(plan.made_up) == 1 and plan.made_up[0].endswith("# the line that reads a value")
    assert "reads a value, and gets 0" in capsys.readouterr().out
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for _ in range(4):
        optimizer.step()  # what ended the script is gone


def test_a_script_that_makes_too_few_steps(script, capsys):
    assert main(["plan", script, "--steps", "2"]) == 2
    assert "made 2 steps of an optimizer, and 3 are needed" in capsys.readouterr().err


def test_options_of_the_command_go_before_the_script(script, capsys):
    assert main(["plan", script, "--world", "4"]) == 2
    assert "--world behind" in capsys.readouterr().err


def test_a_script_is_not_swept(script, capsys):
    assert main(["plan", "--sweep", "tp=2,4", script]) == 2
    assert "--sweep varies arguments of a function" in capsys.readouterr().err
