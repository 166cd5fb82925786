"""Forecasts of training steps."""

import dataclasses
import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.cli import main
from dtensor_compile.forecast.forecast import make_plan
from dtensor_compile.forecast.host_costs import HOST_DISPATCH, HOST_DISPATCHED, issue_seconds
from dtensor_compile.forecast.observed_step import Marks, Point
from dtensor_compile.forecast.step_log import StepLog
from dtensor_compile.forecast.step_plan import PlanFormatError, StepPlan, from_json, to_json
from dtensor_compile.forecast.training import StepSettings
from dtensor_compile.offline import device, job
from dtensor_compile.report.run_target import Job
from tests.forecast.targets import HEADS, HIDDEN, ROWS, WIDTH

HERE = "tests.forecast.targets:"
WEIGHTS = 2 * WIDTH * HIDDEN * 4


def plan_of(name, mesh=(("tp", 2),), gpu="h100", **settings) -> StepPlan:
    return make_plan(HERE + name, Job(mesh), gpu=gpu, settings=StepSettings(**settings))


def kinds_at(plan, place):
    return dict(zip(plan.memory.kinds, plan.memory.over_time[place].bytes))


def most(plan):
    return {kind: max(values) for kind, *values in zip(plan.memory.kinds, *(at.bytes for at in plan.memory.over_time))}


@pytest.fixture(scope="module")
def tensor_parallel():
    return plan_of("tensor_parallel", clip=1.0)


def test_memory_of_each_kind(tensor_parallel):
    held = most(tensor_parallel)
    assert held["parameters"] == WEIGHTS / 2
    assert held["gradients"] == WEIGHTS / 2
    assert held["optimizer states"] == WEIGHTS  # and two counters of steps, which AdamW keeps on the host
    assert held["inputs"] == ROWS * WIDTH * 4
    assert held["gathered parameters"] == 0
    assert held["collectives"] == ROWS * WIDTH * 4  # the partial result, which is reduced in place
    assert held["saved activations"] >= ROWS * HIDDEN // 2 * 4


def test_memory_over_time_adds_up(tensor_parallel):
    memory = tensor_parallel.memory
    totals = [sum(at.bytes) for at in memory.over_time]
    assert max(totals) == memory.peak == sum(memory.peak_of_kinds) <= memory.reserved
    assert min(min(at.bytes) for at in memory.over_time) >= 0
    seconds = [at.seconds for at in memory.over_time]
    assert seconds == sorted(seconds) and seconds[-1] <= tensor_parallel.time.step
    first = kinds_at(tensor_parallel, 0)
    assert first["gradients"] == first["temporaries"] == 0


def test_what_runs_in_eager_is_named():
    """Where clipping and the optimizer hold most: of a model whose gradients are larger than what it computes."""
    memory = plan_of("classes", loss="cross_entropy", clip=1.0).memory
    assert memory.peak_where == "the optimizer" and not memory.peak_module
    points = {"forward": 10, "loss": 12, "backward": 15, "rest": 20, "optimizer": 22, "end": 30}
    marks = Marks(**{name: Point(requests, 0) for name, requests in points.items()})
    assert [marks.part_at(requests) for requests in (9, 10, 13, 15, 21, 29)] == [
        "",
        "eager operators of the forward pass",
        "the loss",
        "eager operators of the backward pass",
        "clipping of gradients",
        "the optimizer",
    ]


def test_time_adds_up(tensor_parallel):
    time = tensor_parallel.time
    assert time.compute + time.exposed + time.idle == pytest.approx(time.step)
    assert time.forward + time.backward + time.rest == pytest.approx(time.step)
    assert min(dataclasses.astuple(time)) >= 0 and time.rest > 0


def test_communication_and_flops(tensor_parallel):
    rows = {(row.mesh_dim, row.kind): row for row in tensor_parallel.communication}
    assert rows["tp", "all_reduce"].bytes >= ROWS * WIDTH * 4  # of two ranks: half of it twice
    flops = 2 * ROWS * WIDTH * HIDDEN // 2 * 2
    assert tensor_parallel.model_flops == 3 * flops
    assert tensor_parallel.tokens == 0 and tensor_parallel.breaks == 0
    assert tensor_parallel.graphs == 2 and tensor_parallel.kernels > 0 == tensor_parallel.spills


def test_a_plan_survives_json(tensor_parallel):
    assert from_json(to_json(tensor_parallel)) == tensor_parallel
    with pytest.raises(PlanFormatError, match="version"):
        from_json(json.dumps({"version": "0.1"}))
    with pytest.raises(PlanFormatError, match="not a plan"):
        from_json("[]")


def test_gathered_parameters():
    plan = plan_of("sharded", (("dp", 4),), optimizer="sgd")
    held = most(plan)
    assert held["parameters"] == 2 * WEIGHTS / 4
    assert WEIGHTS <= held["gathered parameters"] <= 2 * WEIGHTS + WEIGHTS / 2
    assert held["optimizer states"] == 0
    assert {row.kind for row in plan.communication if row.mesh_dim == "dp"} == {"all_gather", "reduce_scatter"}


@pytest.mark.slow
def test_equal_blocks_compiled_once_have_the_figures_of_each():
    """Kernels are not fused across the ends of blocks, of which a step of microseconds takes notice."""
    once, traced = (plan_of("layers", (("dp", 2), ("tp", 2)), blocks=blocks) for blocks in ("once", "traced"))
    assert once.kernels < traced.kernels and once.graphs == traced.graphs == 2
    for part in dataclasses.fields(once.time):
        values = [getattr(plan.time, part.name) for plan in (once, traced)]
        assert values[0] == pytest.approx(values[1], rel=0.05), part.name
    assert once.memory.peak == pytest.approx(traced.memory.peak, rel=0.02)
    sent = [{(row.mesh_dim, row.kind): row.bytes for row in plan.communication} for plan in (once, traced)]
    assert sent[0] == sent[1]
    assert once.model_flops == traced.model_flops


def test_a_step_that_does_everything_itself():
    plan = plan_of("step")
    held = most(plan)
    assert held["parameters"] == held["gradients"] == held["optimizer states"] == WEIGHTS / 2
    assert held["saved activations"] > 0
    assert plan.time.backward > 0 and plan.time.rest > 0


def test_tokens_of_a_job():
    plan = plan_of("tokens", (("dp", 4), ("tp", 2)), optimizer="none")
    assert plan.tokens == 2 * 16 * 4
    assert most(plan)["optimizer states"] == 0


def test_a_model_that_reads_values_while_it_is_made():
    assert most(plan_of("reads_a_value_on_the_host", optimizer="none"))["parameters"] == WEIGHTS / 2


def test_a_loss_of_ones_own():
    assert plan_of("tensor_parallel", loss=f"{HERE}weighted_loss", optimizer="none").time.backward > 0


def test_attention_that_runs_again_counts_as_often_as_it_runs():
    """Checkpointing keeps the state of the random generator around attention, in an operator of higher order."""
    plain, again = (plan_of(name, (("tp", 1),), optimizer="none") for name in ("attends", "attends_again"))
    attention = 2 * 2 * HEADS * ROWS * ROWS * WIDTH  # two matmuls
    assert plain.model_flops == again.model_flops == 3 * attention
    assert plain.flops == attention * 7 // 2 and again.flops == plain.flops + attention


def test_bytes_of_operators_on_lists():
    """Those that write in place return nothing, and one tensor may be given twice."""
    with job(1), device("h100") as emulated:
        a, b = ([torch.ones(256, device="cuda") for _ in range(3)] for _ in range(2))
        emulated.observer = log = StepLog(emulated)
        torch._foreach_mul_(a, 2.0)
        torch._foreach_addcmul_(a, b, b)
        torch._foreach_norm(a)
    bytes_of_list = 3 * 256 * 4
    assert [(r.operation.bytes, r.listed) for r in log.requests] == [
        (2 * bytes_of_list, 3),
        (3 * bytes_of_list, 9),
        (bytes_of_list + 3 * 4, 3),
    ]


def test_operators_over_dtensors_cost_the_host_more():
    with job(2), device("h100") as emulated:
        mesh = init_device_mesh("cuda", (2,))
        a = [DTensor.from_local(torch.ones(256, device="cuda"), mesh, [Shard(0)]) for _ in range(3)]
        emulated.observer = log = StepLog(emulated)
        torch._foreach_mul_(a, 2.0)
        torch.stack(torch._foreach_norm(a))
        a[0] * torch.ones((), device="cuda")
        torch.ones(256, device="cuda").mul_(2.0)
    counted = [(r.operation.name, r.dispatches, r.dispatched) for r in log.requests]
    assert counted[:2] == [("aten._foreach_mul_", 1, 3), ("aten._foreach_norm", 1, 3)]
    assert counted[2] == ("aten.stack", 1, 3) and counted[-1] == ("aten.mul_", 0, 0)
    # Beside a plain tensor, too, and once: sharding propagation, which has global sizes, is no request.
    (mul,) = [r for r in log.requests if r.operation.name == "aten.mul"]
    assert mul.dispatches == 1 and mul.operation.bytes == (2 * 256 + 1) * 4
    plain = [dataclasses.replace(r, dispatches=0, dispatched=0) for r in log.requests]
    more = [issue_seconds(None, r) - issue_seconds(None, without) for r, without in zip(log.requests, plain)]
    assert more[0] == pytest.approx(HOST_DISPATCH + 3 * HOST_DISPATCHED) and more[-1] == 0


def test_a_gpu_of_ones_own_is_what_times_rest_on(tmp_path):
    values = {"capability": "9.0", "multiprocessors": 132, "bytes": 80 << 30, "shared_memory": 232_448, "l2": 50 << 20}
    slow = {"peak": {"4": 1e9}, "memory": 1e9, "launch": 0.0}
    (tmp_path / "slow.json").write_text(json.dumps({**values, "device": slow}))
    plan = make_plan(HERE + "tensor_parallel", Job((("tp", 2),)), gpu=str(tmp_path / "slow.json"), cluster="h100")
    assert plan.time.compute > plan.flops / 1e9 > 10 * plan_of("tensor_parallel").time.compute


def test_a_model_that_does_not_fit(capsys):
    status = main(["plan", f"{HERE}large", "--mesh", "tp=2", "--optimizer", "adamw"])
    output = capsys.readouterr()
    assert status == 1
    text = " ".join(output.out.split())
    assert "does not fit: 320.06 GiB of 80.00 GiB, 240.06 GiB too much; most of it: optimizer states 128.00 GiB" in text
    assert "Shard optimizer states over more ranks" in text
    assert output.err == "the step does not fit into NVIDIA H100 80GB HBM3\n"


def test_the_command(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main(["plan", f"{HERE}tensor_parallel", "--mesh", "tp=2", "--gpu", "a100", "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert "fits: " in output and "of 80.00 GiB" in output and "NVIDIA A100" in output
    plan = from_json(file.read_text())
    assert plan.cluster == "a100" and plan.memory.fixed == 2 * (4096 * 1024 * 2 + 16 * 1024 * 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["frozen"], "needs no gradient: there is nothing to train"),
        (["reads_a_value"], "raises: .*targets.py"),
        (["raises_in_backward"], "raises: RuntimeError: aten.nll_loss_backward.default got mixed"),
        (["missing"], "has no 'missing'"),
        (["tensor_parallel", "--gpu", "h1000"], "h1000"),
        (["tensor_parallel", "--loss", "none"], "--loss none is none of sum, mean, cross_entropy"),
        (["tensor_parallel", "--set", "rows"], "--set rows: an argument and its value, NAME=VALUE"),
        (["tensor_parallel", "--rank", "7"], "7 is no rank of a job of 2 ranks"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_programs_that_cannot_be_planned(arguments, message, capsys):
    import re

    name, *rest = arguments
    assert main(["plan", HERE + name, "--mesh", "tp=2", *rest]) == 2
    output = capsys.readouterr().err
    assert re.search(message, output) and len(output.strip().splitlines()) == 1, output
