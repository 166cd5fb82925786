"""DTensor's own collectives that nobody reads are not sent; those of the program are, whether read or not."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch.distributed.tensor import Shard, distribute_tensor

import dtensor_compile
from dtensor_compile.testing import assert_parity, captured_graph, make_mesh, on_ranks

ROWS = [Shard(0), Shard(0)]


def norm_read_twice(x):
    norm = torch.linalg.vector_norm(x, dim=1)
    (norm + norm).redistribute(placements=ROWS)
    return norm.redistribute(placements=ROWS)


def columns(count, grad=False):
    x = torch.arange(4.0 * count).reshape(4, count) + 1
    return distribute_tensor(x, make_mesh((1, 2), ("dp", "tp")), [Shard(0), Shard(1)]).requires_grad_(grad)


@on_ranks(2)
def test_a_norm_is_added_up_once():
    assert_expected_inline(
        captured_graph(norm_read_twice, columns(4)),
        """\
arg0_1: [4, 2]
arg1_1: FakeScriptObject
pow_1: [4, 2] = pow(arg0_1, 2)
sum_1: [4] = sum(pow_1, [1])
pow_2: [4] = pow(sum_1, 0.5)
pow_7: [4] = pow(pow_2, 2)
reduce_scatter_tensor_2: [2] = reduce_scatter_tensor(pow_7, sum, 2)
wait_tensor_2: [2] = wait_tensor(reduce_scatter_tensor_2)
pow_8: [2] = pow(wait_tensor_2, 0.5)
return [pow_8, arg1_1]
""",
    )


@pytest.mark.parametrize(
    "backend, alone",
    [
        pytest.param("dtensor", False, marks=pytest.mark.slow),
        ("dtensor", True),
        ("dtensor_aten", False),
        pytest.param("dtensor_aten", True, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_its_gradient(alone, backend):
    """Inductor's partitioner refused the graph: what was not read had been put into the backward pass (fuzz seed
    89496).
    """
    others = [name for name in dtensor_compile.options.PASS_NAMES["disable_passes"] if name != "make_in_place"]
    options = {"strict": True, "disable_passes": others if alone else ()}
    assert_parity(
        norm_read_twice,
        [columns(3, grad=True)],
        loss=lambda y: y.full_tensor().square().sum(),
        backend=backend,
        options=options,
    )


@pytest.mark.parametrize("grad", [False, True])
@on_ranks(2)
def test_what_the_program_sends_itself_stays(grad):
    group = make_mesh((2,)).get_group()

    def program(x):
        funcol.all_reduce(x * 3, "sum", group)
        return x * 2

    x = torch.ones(4, requires_grad=grad)
    with dtensor_compile.record() as recording:
        torch.testing.assert_close(torch.compile(program, backend="dtensor", fullgraph=True)(x), x * 2)
    assert [c.kind for graph in recording.graphs for c in graph.collectives] == ["all_reduce"]
