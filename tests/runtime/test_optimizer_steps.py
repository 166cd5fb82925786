"""Compiled steps of optimizers over DTensors: what programs do to the optimizer in between reaches the next step."""

import copy
import dis
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_compile.compat.dynamo import counters, guards
from dtensor_compile.native.loader import READS, native
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.cases import mostly_slow
from tests.runtime import needs_native

MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def dtensor(mesh, value, size=4):
    return DTensor.from_local(torch.full((size,), value), mesh, [Shard(0)], run_check=False)


of_each_kind = pytest.mark.parametrize("name", mostly_slow(MAKE, "sgd", "adamw fused"))


class Job:
    """Three parameters that only their values tell apart, and an optimizer of them."""

    def __init__(self, mesh, make, compiled):
        self.mesh, self.make = mesh, make
        self.parameters = [nn.Parameter(dtensor(mesh, 1.0 + i)) for i in range(3)]
        self.optimizer = make(self.parameters)
        step = lambda: self.optimizer.step()  # noqa: E731
        self.run = torch.compile(step, backend="dtensor_aten", fullgraph=True) if compiled else step

    def steps(self, count=2, but=()):
        for _ in range(count):
            for i, parameter in enumerate(self.parameters):
                size = parameter.to_local().numel()
                parameter.grad = None if i in but else dtensor(self.mesh, 0.1 * (i + 1), size)
            self.run()

    def values(self):
        state = [self.optimizer.state[p] for p in self.parameters]
        tensors = [
            *self.parameters,
            *(entry[name] for entry in state for name in sorted(entry) if entry[name] is not None),
        ]
        return [t.detach()._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def follows_eager(mesh, make, between):
    jobs = [Job(mesh, make, compiled) for compiled in (False, True)]
    for job in jobs:
        job.steps()
        between(job)
        job.steps()
    differences = compare_values("after the steps", *(job.values() for job in jobs))
    assert not differences, "\n".join(map(str, differences))


@of_each_kind
def test_state_is_loaded_in_another_order(mesh, name):
    def load(job):
        state = job.optimizer.state_dict()
        state["state"] = dict(reversed(state["state"].items()))
        job.optimizer.load_state_dict(state)

    follows_eager(mesh, MAKE[name], load)


@of_each_kind
def test_parameters_in_another_order(mesh, name):
    follows_eager(mesh, MAKE[name], lambda job: job.optimizer.param_groups[0]["params"].reverse())


def test_the_first_parameter_gets_its_state_last(mesh):
    def late(job):
        job.optimizer = job.make(job.parameters)
        job.steps(1, but=[0])

    follows_eager(mesh, MAKE["adamw foreach"], late)


def test_state_of_one_parameter_goes(mesh):
    follows_eager(mesh, MAKE["adamw foreach"], lambda job: job.optimizer.state.pop(job.parameters[1]))


def test_state_in_other_tensors(mesh):
    def renew(job):
        for entry in job.optimizer.state.values():
            entry["exp_avg"] = entry["exp_avg"].clone()

    follows_eager(mesh, MAKE["adamw foreach"], renew)


def test_a_parameter_is_replaced(mesh):
    def replace(job):
        job.parameters[1] = nn.Parameter(dtensor(mesh, 5.0))
        job.optimizer.param_groups[0]["params"][1] = job.parameters[1]

    follows_eager(mesh, MAKE["adamw foreach"], replace)


def test_a_parameter_of_another_size_takes_the_place_of_one(mesh):
    def replace(job):
        job.parameters[1] = nn.Parameter(dtensor(mesh, 5.0, size=6))
        job.optimizer.param_groups[0]["params"][1] = job.parameters[1]

    follows_eager(mesh, MAKE["adamw foreach"], replace)


def test_two_states_in_one_memory(mesh):
    """Which torch cannot see: such a step runs operator by operator."""

    def share(job):
        first, second = (job.optimizer.state[p] for p in job.parameters[:2])
        second["momentum_buffer"]._local_tensor = first["momentum_buffer"]._local_tensor

    follows_eager(mesh, MAKE["sgd"], share)


def test_gradients_that_are_placed_otherwise(mesh):
    def gather(job):
        for parameter in job.parameters:
            parameter.grad = DTensor.from_local(torch.full((8,), 0.3), mesh, [Replicate()], run_check=False)
        job.run()

    follows_eager(mesh, MAKE["adamw foreach"], gather)


def test_two_parameters_count_their_steps_in_one_tensor(mesh):
    def share(job):
        first, second = (job.optimizer.state[p] for p in job.parameters[:2])
        second["step"] = first["step"]

    follows_eager(mesh, MAKE["adamw foreach"], share)


@pytest.mark.parametrize("name", ["adam", "adamw foreach", "adamw fused"])
def test_parameters_that_count_their_steps_in_one_tensor_from_the_start(mesh, name):
    jobs = [Job(mesh, MAKE[name], compiled) for compiled in (False, True)]
    for job in jobs:
        step = torch.zeros(())
        for parameter in job.parameters:
            averages = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            job.optimizer.state[parameter] = {"step": step, **averages}
        job.steps(3)
    assert [job.optimizer.state[job.parameters[0]]["step"].item() for job in jobs] == [9.0, 9.0]
    differences = compare_values("after the steps", *(job.values() for job in jobs))
    assert not differences, "\n".join(map(str, differences))


def test_steps_are_counted_from_another_number(mesh):
    def jump(job):
        for i, entry in enumerate(job.optimizer.state.values()):
            entry["step"].fill_(10.0 * i)

    follows_eager(mesh, MAKE["adamw foreach"], jump)


def test_a_group_is_added(mesh):
    def add(job):
        job.parameters.append(nn.Parameter(dtensor(mesh, 7.0)))
        job.optimizer.add_param_group({"params": [job.parameters[-1]], "lr": 0.5})

    follows_eager(mesh, MAKE["adamw foreach"], add)


def test_state_that_is_placed_otherwise(mesh):
    def gather(job):
        entry = job.optimizer.state[job.parameters[1]]
        entry["exp_avg"] = DTensor.from_local(torch.full((8,), 0.2), mesh, [Replicate()], run_check=False)

    follows_eager(mesh, MAKE["adamw foreach"], gather)


def test_state_on_another_mesh_is_an_error(mesh):
    """As it is in eager."""
    other = make_mesh((2,), ("other",))
    for compiled in (False, True):
        job = Job(mesh, MAKE["adamw foreach"], compiled)
        job.steps()
        entry = job.optimizer.state[job.parameters[1]]
        entry["exp_avg"] = DTensor.from_local(torch.full((4,), 0.2), other, [Shard(0)], run_check=False)
        with pytest.raises(Exception, match="[Mm]esh"):
            job.steps()


def test_state_that_is_no_dtensor_any_more(mesh):
    for compiled in (False, True):
        job = Job(mesh, MAKE["adamw foreach"], compiled)
        job.steps()
        job.optimizer.state[job.parameters[1]]["exp_avg"] = torch.zeros(8)
        with pytest.raises(Exception, match="mixed torch.Tensor and DTensor|[Mm]ixed"):
            job.steps()


def test_state_of_one_parameter_is_empty(mesh):
    follows_eager(mesh, MAKE["adamw foreach"], lambda job: job.optimizer.state[job.parameters[1]].clear())


def scaled(mesh, make, compiled, infinite, between=lambda job: None, **arguments):
    """What there is after one step per entry of `infinite`, which says whether its gradients are."""
    job = Job(mesh, make, compiled=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.ones(()))

    def step():
        scaler.unscale_(job.optimizer)
        torch.nn.utils.clip_grad_norm_(job.parameters, 1.0)
        scaler.step(job.optimizer)
        scaler.update()

    job.run = torch.compile(step, backend="dtensor_aten", **arguments) if compiled else step
    values = []
    for i, some in enumerate(infinite):
        for place, parameter in enumerate(job.parameters):
            parameter.grad = dtensor(mesh, float("inf") if some and place == 1 else 0.1 * (i + place))
        job.run()
        state = {i: dict(job.optimizer.state.get(p, {})) for i, p in enumerate(job.parameters)}
        values.append(copy.deepcopy([job.parameters, state, scaler.state_dict(), [p.grad for p in job.parameters]]))
        between(job)
    return values


MAKE_SCALED = MAKE | {
    "sgd without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "sgd nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd damped": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, foreach=True),
    "adamw maximize": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.1, foreach=True, maximize=True, weight_decay=0.1
    ),
}


def scaler_follows_eager(*args, **arguments):
    mine, theirs = (scaled(args[0], args[1], compiled, *args[2:], **arguments) for compiled in (True, False))
    for (_, states, *_), (_, expected, *_) in zip(mine, theirs):
        for i, state in states.items():
            if not expected[i]:  # made by tracing, as zeros, before the first step that is made
                assert not any(
                    value.to_local().any() if isinstance(value, DTensor) else value.any() for value in state.values()
                )
                state.clear()
    differences = compare_values("after the steps", theirs, mine)
    assert not differences, "\n".join(map(str, differences))


@pytest.mark.parametrize(
    "name", mostly_slow(MAKE_SCALED, "sgd", "sgd without state", "adamw fused", "amsgrad", "adagrad")
)
@pytest.mark.parametrize("infinite", [pytest.param("-++--+-", marks=pytest.mark.slow), "+-++-"])
def test_scaler_leaves_steps_out(mesh, name, infinite):
    scaler_follows_eager(mesh, MAKE_SCALED[name], [sign == "+" for sign in infinite])


@pytest.mark.parametrize(
    "name",
    [
        "adamw foreach",
        "sgd",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "sgd nesterov", "sgd without state")),
    ],
)
def test_scaled_step_is_one_graph(mesh, name):
    scaler_follows_eager(mesh, MAKE_SCALED[name], [False, True, False], fullgraph=True)
    assert counters.graphs() == 1


def test_scaled_step_with_a_hook_is_left_out_too(mesh):
    """Its hook does not run: such a step stays with eager's branch."""
    seen = []

    def make(parameters):
        optimizer = MAKE["adamw foreach"](parameters)
        optimizer.register_step_post_hook(lambda *_: seen.append(len(seen)))
        return optimizer

    scaler_follows_eager(mesh, make, [False, True, False])
    assert len(seen) == 4  # two steps, eager and compiled


@pytest.mark.slow
def test_learning_rate_of_a_scaled_step_follows_a_scheduler(mesh):
    schedulers = {}

    def between(job):
        if job not in schedulers:
            schedulers[job] = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
        schedulers[job].step()

    scaler_follows_eager(mesh, MAKE["adamw foreach"], [False, False, True, False, False], between)


@pytest.mark.parametrize("name", [pytest.param("adamw foreach", marks=pytest.mark.slow), "sgd"])
@on_ranks(2)
def test_scaler_hears_of_infinite_gradients_of_other_ranks(name):
    mesh, rank = make_mesh((2,), ("tp",)), torch.distributed.get_rank()
    signs = [False, rank == 1, False, rank == 0, False]
    scaler_follows_eager(mesh, MAKE[name], signs)


def test_inputs_are_read_and_guarded_together(mesh):
    """No chain of instructions and no guard for each of them."""
    if guards.native() is None:
        pytest.skip("torch's own way")
    job = Job(mesh, MAKE["adamw foreach"], compiled=True)
    job.steps()
    (entry, *_) = _debug_get_cache_entry_list(inspect.unwrap(job.run).__code__)
    checks = str(entry.guard_manager)
    assert checks.count("check_all(") == 2 and "check_dtensor(" not in checks and "'exp_avg'" not in checks
    assert "UNPACK_SEQUENCE" in {instruction.opname for instruction in dis.get_instructions(entry.code)}


@needs_native
def test_walk():
    class Holder:
        pass

    holder = Holder()
    holder.tensors, holder.table = [torch.ones(2, requires_grad=True)], {"a": 1, "b": {"c": 2}}
    steps = [(-1, "attribute", "tensors", False), (0, "item", 0, True), (1, "gradient", "grad", True)]
    steps += [
        (-1, "attribute", "table", False),
        (3, "value_at", 1, False),
        (4, "item", "c", True),
        (3, "key_at", 1, True),
    ]
    plan = [(place, READS[step], key, wanted) for place, step, key, wanted in steps]
    fetch = native().Fetch(1, plan)
    assert fetch(holder) == (holder.tensors[0], None, 2, "b")
    guard = native().GuardAll(
        1, plan, [(1, native().Guard(holder.tensors[0], [2], [1], [], [], False)), (4, dict), (6, 6)]
    )
    assert guard(holder)
    del holder.table["a"]
    assert not guard(holder)
    with pytest.raises(IndexError):
        fetch(holder)
    holder.table, holder.tensors = {"a": 1, "b": {"c": 2}}, [torch.ones(3, requires_grad=True)]
    assert not guard(holder) and fetch(holder)[2:] == (2, "b")
    holder.tensors = []
    with pytest.raises(IndexError):
        fetch(holder)
    for bad in ([(0, 0, "x", True)], [(-2, 0, "x", True)], [(-1, 9, "x", True)]):
        with pytest.raises(ValueError, match="plan"):
            native().Fetch(1, bad)
    with pytest.raises(TypeError):
        fetch(holder, holder)
