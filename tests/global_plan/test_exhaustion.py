"""Plans of small random programs against an exact solver (HiGHS's branch and bound) of the same costs, and, where they
are few, against all plans."""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile.compat.dtensor.step_record import record_step
from dtensor_compile.global_plan.choose_placements import choose_placements
from dtensor_compile.global_plan.place import build_variables, sum_of_results
from dtensor_compile.offline import job
from dtensor_compile.topology.links import CLUSTERS
from tests.cases import mostly_slow

#: How much slower than the best a plan may be that sends less.
AS_FAST = 0.005
#: Tolerance of the exact solver.
EXACT = 2e-5
#: How much slower than the best within a budget of memory, where the search is none of branches.
WITHIN_A_BUDGET = 0.03
SIZE = 2048


@pytest.fixture(scope="module")
def mesh():
    with job(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Random(nn.Module):
    """A program of up to 12 operators on matrices."""

    def __init__(self, seed: int, most: int) -> None:
        super().__init__()
        self.seed, self.calls = seed, random.Random(seed).randint(2, most)
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(SIZE, SIZE, device="meta")) for _ in range(2))

    def forward(self, x):
        rng = random.Random(self.seed)
        known = [x, x @ self.weights[0]]
        for _ in range(self.calls - 1):
            a, b = rng.choice(known), rng.choice(known)
            known.append(rng.choice([
                lambda a, b: a @ self.weights[rng.randrange(2)],
                lambda a, b: a @ b.t(),
                lambda a, b: a + b,
                lambda a, b: a * b,
                lambda a, b: torch.relu(a),
                lambda a, b: torch.softmax(a, -1),
                lambda a, b: a - a.mean(0, keepdim=True),
                lambda a, b: a * b.sum(1, keepdim=True),
                lambda a, b: a.t(),
            ])(a, b))  # fmt: skip
        return known[-1] @ self.weights[0] + known[-2]


def model_of(mesh, seed: int, most: int, trained: bool):
    """The costs of a random program on few (forward) or many variables (with its backward pass)."""
    program = Random(seed, most)
    step = record_step(
        program, (torch.empty(SIZE, SIZE, device="meta"),), {}, sum_of_results if trained else None, torch.device("cpu")
    )
    return build_variables(step, mesh, CLUSTERS["h100"])[0].model


def exact(model, budget=None) -> float:
    """The least seconds of a step whose memory is within a budget of bytes."""
    sizes = [len(variable.choices) for variable in model.variables]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    exposed, hidden, memory = [np.zeros(starts[-1])], [np.zeros(starts[-1])], [np.concatenate(model.memory)]
    upper, rows, columns, values, equals = [np.ones(starts[-1])], [], [], [], []
    for i, size in enumerate(sizes):
        rows += [len(equals)] * size
        columns += range(starts[i], starts[i] + size)
        values += [1.0] * size
        equals.append(1.0)
    at = int(starts[-1])
    for (i, j), pair in model.pairs.items():
        if i == j:
            exposed[0][starts[i] : starts[i + 1]] += np.where(np.isfinite(d := pair.exposed.diagonal()), d, 0.0)
            upper[0][starts[i] : starts[i + 1]] *= np.isfinite(d)
            hidden[0][starts[i] : starts[i + 1]] += pair.hidden.diagonal()
            memory[0][starts[i] : starts[i + 1]] += pair.memory.diagonal()
            continue
        possible = np.isfinite(pair.exposed) & np.isfinite(pair.hidden)
        exposed.append(np.where(possible, pair.exposed, 0.0).ravel())
        hidden.append(np.where(possible, pair.hidden, 0.0).ravel())
        memory.append(np.where(possible, pair.memory, 0.0).ravel())
        upper.append(possible.ravel().astype(float))
        numbers = at + np.arange(possible.size).reshape(possible.shape)
        at += possible.size
        for side, start in ((numbers, starts[i]), (numbers.T, starts[j])):  # sums of a pair are its variables
            for x, of_choice in enumerate(side):
                rows += [len(equals)] * (len(of_choice) + 1)
                columns += [*of_choice.tolist(), int(start + x)]
                values += [*[1.0] * len(of_choice), -1.0]
                equals.append(0.0)
    exposed, hidden, memory, upper = map(np.concatenate, (exposed, hidden, memory, upper))
    compute = np.concatenate([*model.compute, np.zeros(at - starts[-1])])
    busy = coo_array(np.stack([compute + model.contention * hidden, hidden]))
    equal = coo_array((values, (rows, columns)), shape=(len(equals), at + 1))
    beside = coo_array((busy.data, busy.coords), shape=(2, at + 1)).tolil()
    beside[:, at] = -1.0  # the last variable is at least both
    scale = 1e6  # microseconds
    found = milp(
        np.append(exposed, 1.0) * scale,
        integrality=np.append(np.arange(at) < starts[-1], 0),
        bounds=Bounds(0.0, np.append(upper, np.inf)),
        constraints=[
            LinearConstraint(equal.tocsr(), equals, equals),
            LinearConstraint(beside.tocsr(), -np.inf, 0.0),
            LinearConstraint(np.append(memory, 0.0)[None] / (budget or 1.0), -np.inf, 1.0 if budget else np.inf),
        ],
        options={"mip_rel_gap": 1e-9 if budget is None else 1e-4},
    )
    assert found.success, found.message
    return found.fun / scale


def check(model) -> None:
    """Compares with the exact solver."""
    choice, best = choose_placements(model), exact(model)
    assert choice.bound <= best * (1 + EXACT)
    assert best <= choice.seconds * (1 + EXACT)
    assert choice.seconds <= best * (1 + AS_FAST) + 1e-12


@pytest.mark.parametrize("seed", mostly_slow(range(5), 0))
def test_small_programs_are_placed_as_well_as_can_be(mesh, seed):
    check(model_of(mesh, seed, 12, False))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_many_small_programs_are_placed_as_well_as_can_be(mesh, seed):
    check(model_of(mesh, seed, 12, False))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_small_programs_with_a_backward_pass(mesh, seed):
    check(model_of(mesh, seed, 4, True))


def check_within_budgets(model) -> None:
    """Compares at budgets between the least memory and that of the fastest plan."""
    fast, least = choose_placements(model), choose_placements(model, 0.0)
    assert not least.fits
    assert least.memory <= fast.memory
    for part in (0.1, 0.5, 0.9):
        budget = least.memory + part * (fast.memory - least.memory)
        choice, best = choose_placements(model, budget), exact(model, budget)
        assert choice.fits
        assert choice.memory <= budget
        assert choice.bound <= best * (1 + 2e-4)
        assert choice.seconds <= best * (1 + WITHIN_A_BUDGET)


@pytest.mark.slow
def test_a_small_program_within_a_budget(mesh):
    check_within_budgets(model_of(mesh, 1, 4, True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_small_programs_within_a_budget(mesh, seed):
    check_within_budgets(model_of(mesh, seed, 4, True))


def test_all_plans_of_a_tiny_program(mesh):
    program = nn.Linear(SIZE, SIZE, bias=False, device="meta")
    step = record_step(program, (torch.empty(SIZE, SIZE, device="meta"),), {}, None, torch.device("cpu"))
    model = build_variables(step, mesh, CLUSTERS["h100"], fixed={"0": (torch.distributed.tensor.Shard(0),) * 2})[
        0
    ].model
    every = itertools.product(*(range(len(variable.choices)) for variable in model.variables))
    best = min(
        exposed + max(compute + model.contention * hidden, hidden)
        for compute, exposed, hidden, _ in map(model.parts, every)
    )
    assert best == pytest.approx(exact(model), rel=1e-6)
    assert choose_placements(model).seconds <= best * (1 + AS_FAST)
