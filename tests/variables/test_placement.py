"""Placements in compiled code: members, construction, equality, what is returned, guards."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtensor_compile.testing import on_ranks
from tests.variables.programs import assert_expression_like_eager, assert_like_eager, program

MEMBERS = """
placement.dim
placement.is_shard()
placement.is_shard(0)
placement.is_shard(dim=1)
placement.is_partial()
placement.is_replicate()
Partial("avg").reduce_op
Partial().reduce_op
Partial("avg").is_partial("avg")
Shard(-1).dim
repr(placement)
str(placement)
f"{placement} {Replicate()}"
"""

OBJECTS = """
placement
Shard(1)
Shard(dim=x.dim() - 1)
Replicate()
Partial()
(Shard(0), Replicate(), Partial("max"))
{"a": Shard(0), "b": [placement]}
{Shard(0): 1, Replicate(): 2}[placement]
placement == Shard(0)
placement != Shard(0)
placement == Replicate()
placement is placement
Shard(0) is placement
placement in (Shard(0), Shard(1))
[Shard(1), Shard(0)].index(placement)
hash(placement) == hash(Shard(0))
len({placement, Shard(0), Shard(1)})
[q for q in (placement, Partial("sum"), Replicate()) if not q.is_partial()]
"""

CLASSES = """
isinstance(placement, Shard)
isinstance(placement, Placement)
isinstance(placement, (Replicate, Partial))
isinstance(Shard(1), Shard)
type(placement) is Shard
type(placement).__name__
placement.__class__ is Shard
Shard.__name__
issubclass(Shard, Placement)
(Shard, placement)
"""


@pytest.mark.parametrize("expression", (MEMBERS + OBJECTS + CLASSES).strip().splitlines())
@on_ranks(2)
def test_expression(expression):
    assert_expression_like_eager(expression)


@on_ranks(1)
def test_equal_placement_reuses_the_graph_and_another_does_not():
    placements = Shard(0), Shard(0), Shard(1), Replicate(), Partial(), Partial("avg"), Shard(0), Partial()
    program = lambda x, p: (x @ x, p, p.is_shard(0))  # noqa: E731
    assert_like_eager(program, *((torch.eye(3), p) for p in placements), graphs=5)


@on_ranks(1)
def test_the_same_placement_twice_is_distinguished_from_two_equal_ones():
    same = Shard(0)
    program = lambda x, p, q: (x @ x, p == q, p is q)  # noqa: E731
    assert_like_eager(program, (torch.eye(3), same, same), (torch.eye(3), Shard(0), Shard(0)))


@on_ranks(1)
def test_dim_that_becomes_symbolic_is_fixed():
    program = lambda x, dim: (x @ x, Shard(dim), Shard(1).is_shard(dim))  # noqa: E731
    assert_like_eager(program, *((torch.eye(3), dim) for dim in range(3)), graphs=3)


@on_ranks(1)
def test_placement_from_a_value_of_the_data_breaks_the_graph():
    def program(x):
        y = x @ x
        return y + 1, Shard(x.sum().item())

    x = torch.zeros(2, 2, dtype=torch.int64)
    assert_like_eager(program, (x,), fullgraph=False)


@on_ranks(1)
def test_placements_of_a_user_are_placements():
    class Own(Shard):
        pass

    assert_like_eager(
        program("(placement.is_shard(), placement.dim, placement)"), (torch.eye(3), None, None, Own(1)), graphs=1
    )
