"""A fault in any step: where numbers do not depend on it, the program runs with eager's numbers, a warning and a
decision; else it is an error that names the step, and the job goes on. And what every step adds: its time, and its
place in the key of caches."""

import dataclasses
import unittest.mock
import warnings

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtensor_compile import record
from dtensor_compile.options import Options
from dtensor_compile.stages import joint, kernels, lowered, program
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks
from tests.cases import mostly_slow

STAGES = {
    "ALWAYS": program,
    "CAPTURED": program,
    "PLAN": joint,
    "SHAPE": joint,
    "LOWER": lowered,
    "SCHEDULE": lowered,
    "FINISH": lowered,
}
#: Steps that run in the program of the test, or would where they are asked for.
ASKED = tuple(step.name for name, module in STAGES.items() for step in getattr(module, name) if step.asked)


def step(x):
    return (x.redistribute(placements=[Replicate()]) * 2).relu().redistribute(placements=[Shard(0)])


def argument():
    return distribute_tensor(torch.ones(4, 2), make_mesh((2,), ("tp",)), [Shard(0)]).requires_grad_()


def with_fault(steps, index):
    """The steps, of which one changes the graph and raises half way."""
    stock = steps[index].run

    def raises(graph, *args):
        stock(graph, *args)
        graph = getattr(graph, "graph", graph)
        first = next(node for node in graph.nodes if node.op == "call_function")
        if not steps[index].reads:
            first.replace_all_uses_with(first.all_input_nodes[0])
        raise ValueError("a bug")

    raises.__name__ = stock.__name__
    return (*steps[:index], dataclasses.replace(steps[index], run=raises), *steps[index + 1 :])


@pytest.mark.parametrize("name", mostly_slow(STAGES, *STAGES.keys() - {"PLAN"}))
@on_ranks(2)
def test_a_fault_in_each_step(name):
    module = STAGES[name]
    steps = getattr(module, name)
    for index, bad in enumerate(steps):
        torch._dynamo.reset()
        with (
            unittest.mock.patch.object(module, name, with_fault(steps, index)),
            warnings.catch_warnings(record=True) as caught,
            record() as recording,
        ):
            warnings.simplefilter("always")
            if bad.required:
                if bad.name == "send_contiguous":  # is for Inductor
                    continue
                with pytest.raises(Exception, match="a bug"):
                    torch.compile(step, backend="dtensor_aten", fullgraph=True)(argument())
                continue
            assert_parity(
                step,
                [argument()],
                loss=lambda out: out.full_tensor().square().sum(),
                backend="dtensor_aten",
                options={"enable_passes": ASKED},
            )
        warned = [str(warning.message) for warning in caught if "a bug" in str(warning.message)]
        made = [decision for decision in recording.decisions if "a bug" in decision.reason]
        if bad.name in recording.step_seconds:
            assert all(f"{bad.name}: pass dropped: ValueError: a bug" in text for text in warned) and warned, bad.name
            assert {decision.kind for decision in made} == {bad.name}
        else:
            assert bad.name in ELSEWHERE, f"{bad.name} did not run"


#: Steps that this program does not need: those for kernels of Inductor's, for CUDA graphs, and for shapes.
ELSEWHERE = ("report_shapes_left", "report_inductor_order", "forget_addresses")


@on_ranks(2)
def test_an_error_of_a_required_step_names_it_and_the_job_goes_on():
    names = [step.name for step in lowered.LOWER]
    faulty = with_fault(lowered.LOWER, names.index("lower_collectives"))
    with unittest.mock.patch.object(lowered, "LOWER", faulty), pytest.raises(Exception, match="a bug") as caught:
        torch.compile(step, backend="dtensor_aten", fullgraph=True)(argument())
    error = getattr(caught.value, "inner_exception", caught.value)  # Dynamo wraps what a backend raises
    assert error.__notes__ == ["dtensor_compile: raised by lower_collectives"]
    torch._dynamo.reset()
    assert (
        torch.compile(step, backend="dtensor_aten", fullgraph=True)(argument()).full_tensor().tolist()
        == [[2.0] * 2] * 4
    )


@on_ranks(2)
def test_a_kernel_order_that_raises_leaves_inductors():
    def fails(nodes, **kwargs):
        raise ValueError("a bug")

    with (
        torch._inductor.config.patch(fx_graph_cache=False),  # a graph from a cache has been ordered before
        torch._functorch.config.patch(enable_autograd_cache=False),
        unittest.mock.patch.object(kernels, "rearrange", fails),
        pytest.warns(UserWarning, match="schedule_kernels: pass dropped: ValueError: a bug"),
    ):
        assert_parity(step, [argument()], loss=lambda out: out.full_tensor().square().sum())


@on_ranks(2)
def test_every_step_that_runs_is_timed():
    with record() as recording:
        torch.compile(step, backend="dtensor_aten", fullgraph=True)(argument())
    assert {
        "check_program",
        "cancel_inverse_pairs",
        "order_collectives",
        "lower_redistributions",
        "schedule_graph",
    } <= set(recording.step_seconds)


def test_a_new_option_is_part_of_the_key_of_caches():
    @dataclasses.dataclass(frozen=True)
    class More(Options):
        brand_new: int = 0

    assert More().cache_key() != More(brand_new=1).cache_key()
    assert Options().cache_key() != Options(overlap_memory=0.5).cache_key()
    assert Options().cache_key() == Options(inductor={"max_autotune": True}).cache_key()
