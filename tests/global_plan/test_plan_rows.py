"""Plans call by call, against each other, and what rules refuse."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.errors import PlacementError
from dtensor_compile.global_plan.alternatives import refusals
from dtensor_compile.global_plan.place import place
from dtensor_compile.global_plan.plan_rows import differences, plan_rows, row_of_values, row_values
from dtensor_compile.offline import job


@pytest.fixture(scope="module")
def mesh():
    with job(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture(scope="module")
def plan(mesh):
    with torch.device("meta"):
        model = Llama(LlamaConfig(layers=3, dim=512, ffn_dim=2048, heads=8, kv_heads=4, vocab=1024, sequence=256))
        tokens = torch.zeros(4, 256, dtype=torch.long)
    return place(model, mesh, tokens, topology="cpu-10gbit")


@pytest.mark.slow
def test_rows_add_up_to_the_plan(plan):
    for choice in (plan.choice, *(known.choice for known in plan.known if known.choice)):
        rows = plan_rows(plan.variables, choice)
        for part in ("compute", "exposed", "hidden", "sent", "memory"):
            assert sum(getattr(row, part) for row in rows) == pytest.approx(getattr(choice, part), rel=1e-9, abs=1e-12)


def test_equal_blocks_are_one_row(plan):
    rows = [row for row in plan_rows(plan.variables, plan.choice) if row.module.startswith("blocks.*.feed_forward")]
    assert rows and {row.count for row in rows} == {3}


def test_every_backward_row_has_the_module_of_its_forward(plan):
    rows = [row for row in plan_rows(plan.variables, plan.choice) if row.name == "aten.embedding_dense_backward"]
    assert [row.module for row in rows] == ["embedding"]


def test_a_plan_does_not_differ_from_itself_saved(plan):
    rows = plan_rows(plan.variables, plan.choice)
    saved = [row_of_values(values) for values in json.loads(json.dumps([row_values(row) for row in rows]))]
    assert differences(saved, rows) == []


def test_differences_between_plans(plan):
    ours = plan_rows(plan.variables, plan.choice)
    (other,) = (known.choice for known in plan.known if known.name == "data parallel")
    assert other is not None
    theirs = plan_rows(plan.variables, other)
    found = differences(theirs, ours)
    assert found and all(this.before is None or this.after is None or this.before != this.after for this in found)
    total = [sum(row.compute + row.exposed + row.hidden for row in rows) for rows in (theirs, ours)]
    assert sum(this.seconds for this in found) == pytest.approx(total[1] - total[0], rel=1e-3, abs=1e-9)
    gone = differences(theirs, ours[:-1])
    assert gone[-1].after is None


def test_what_rules_refuse_is_said(mesh):
    plan = place(nn.Sequential(nn.Linear(7, 8, bias=False), nn.Softmax(-1)), mesh, torch.ones(8, 7), topology="h100")
    by_text = {(r.operator, r.mesh_dim, r.input, str(r.placement)): r.reason for r in refusals(plan, "0")}
    assert by_text["aten.mm", "dp", 0, "S(1)"] == "7 does not divide into 2 even shards"
    (softmax,) = {r.reason for r in refusals(plan, "1") if r.mesh_dim == "tp" and r.placement == Shard(1)}
    assert softmax == "the rule redistributes it to R"
    assert {r.operator for r in refusals(plan, "0.weight")} == {"aten.t"}
    with pytest.raises(PlacementError, match="'2' is no parameter, input or module"):
        refusals(plan, "2")


def test_fixed_placements_are_in_the_rows(mesh):
    model = nn.Linear(8, 8, bias=False)
    plan = place(model, mesh, torch.ones(8, 8), topology="h100", fixed={"weight": [Replicate(), Shard(1)]})
    (row,) = (row for row in plan_rows(plan.variables, plan.choice) if row.kind == "parameter")
    assert row.placed == "RS(1)"
