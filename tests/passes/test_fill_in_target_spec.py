import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, full, ones, zeros

from dtensor_compile import record
from dtensor_compile.passes.fill_in_target_spec import make_in_place
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import marked, move, rewritten, unchanged


def filled_and_gathered():
    def function(x):
        return (x * move(marked(torch.full((2, 6), 3.0), "S(0)", (4, 6)), "S(0)", "R"),)

    return rewritten(make_in_place, function, torch.ones(4, 6))


class Golden(TestCase):
    def test_it(self):
        _, after, decisions = run_on_ranks(2, filled_and_gathered)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [4, 6]
full_default: [4, 6] = full([4, 6], 3.0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
mul: [4, 6] = mul(x_1, full_default)
return [mul]
""",
        )
        assert decisions == [("make_in_place", "S(0)->R", "made as R")]


@on_ranks(2)
def test_zeros_owe_nothing():
    function = lambda x: (x + move(marked(torch.zeros(4, 6), "P(sum)", (4, 6)), "P(sum)", "R"),)  # noqa: E731
    assert rewritten(make_in_place, function, torch.ones(4, 6))[2]


@on_ranks(2)
def test_what_is_not_known_to_be_one_number_stays():
    """Nobody says that every rank has the same one; or each is a term of a sum."""
    unchanged(
        make_in_place, lambda x: (x + move(torch.full((2, 6), 3.0 + dist.get_rank()), "S(0)", "R"),), torch.ones(4, 6)
    )
    ones_ = lambda: marked(torch.ones(4, 6), "P(sum)", (4, 6))  # noqa: E731
    unchanged(make_in_place, lambda x: (x + move(ones_(), "P(sum)", "R"),), torch.ones(4, 6))


@on_ranks(3)
def test_factories_of_dtensors_send_nothing():
    mesh = make_mesh((3,))

    def function(x):
        a = full((5, 4), 2.5, device_mesh=mesh, placements=[Shard(0)]).redistribute(placements=[Replicate()])
        b = zeros((5, 4), device_mesh=mesh, placements=[Shard(1)]).redistribute(placements=[Replicate()])
        return x * a + b.redistribute(placements=[Shard(0)]) - ones((5, 4), device_mesh=mesh, placements=[Replicate()])

    x = distribute_tensor(torch.randn(5, 4), mesh, [Replicate()])
    assert_parity(function, [x], backend="dtensor_aten", options={"strict": True}, calls=2)
    torch._dynamo.reset()
    with record() as recording:
        torch.compile(function, backend="dtensor_aten")(x)
    assert recording.bytes_sent == 0


@on_ranks(2)
def test_a_number_that_the_program_makes_of_its_rank_is_gathered():
    mesh = make_mesh((2,))

    def function(x):
        mine = torch.full((2, 4), 1.0 + dist.get_rank())
        return x * DTensor.from_local(mine, mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()])

    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    assert_parity(function, [x], backend="dtensor_aten", options={"strict": True}, calls=1)
    assert torch.compile(function, backend="dtensor_aten")(x).to_local().sum() == 24
