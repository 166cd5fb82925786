"""``ProcessGroup``, ``group.WORLD`` and functions of groups in compiled code: members, identity, guards."""

import pytest
import torch
import torch.distributed as dist

from dtensor_compile.testing import on_ranks
from tests.variables.programs import assert_expression_like_eager, assert_like_eager, program

MEMBERS = """
group.rank()
group.size()
group._get_backend_name()
group.group_name
group.group_desc
group.name()
dist.get_rank()
dist.get_rank(group)
dist.get_rank(group=group)
dist.get_world_size()
dist.get_world_size(group)
dist.get_process_group_ranks(group)
dist.get_backend(group)
dist.get_group_rank(group, 1)
dist.get_global_rank(group, 1)
dist.distributed_c10d._get_default_group().size()
"""

OBJECTS = """
group
{"group": group}
group == group
group is group
group is dist.group.WORLD
group == dist.GroupMember.NON_GROUP_MEMBER
group is not dist.GroupMember.NON_GROUP_MEMBER
isinstance(group, dist.ProcessGroup)
type(group) is dist.ProcessGroup
type(group).__name__
"""

WORLD = """
dist.group.WORLD
dist.group.WORLD is not None
dist.group.WORLD.size()
dist.group.WORLD.group_name
dist.GroupMember.WORLD.rank()
dist.GroupMember.NON_GROUP_MEMBER
dist.get_rank(dist.group.WORLD)
"""


@pytest.mark.parametrize("expression", (MEMBERS + OBJECTS + WORLD).strip().splitlines())
@on_ranks(2)
def test_expression(expression):
    assert_expression_like_eager(expression)


@on_ranks(2)
def test_the_same_group_reuses_the_graph_and_another_does_not():
    pair, other_pair = dist.new_group([0, 1]), dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    x = torch.eye(3)
    function = program("(group.size(), group.group_name, dist.get_rank(group))")
    assert_like_eager(function, *((x, None, group) for group in (pair, pair, other_pair, alone, pair)), graphs=3)


@on_ranks(2)
def test_group_of_no_member_is_distinguished_from_a_group():
    x, group = torch.eye(3), dist.new_group([0])
    function = program("0 if group == dist.GroupMember.NON_GROUP_MEMBER else group.size()")
    assert_like_eager(function, (x, None, group), (x, None, dist.new_group([0, 1])))


@on_ranks(2)
def test_collective_over_a_group_argument():
    def program(x, group):
        y = x @ x
        dist.all_reduce(y, group=group)
        return y * group.size()

    pair = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    assert_like_eager(program, (torch.eye(3), pair), (torch.eye(3), alone), (torch.eye(3), pair), graphs=2)


@on_ranks(2)
def test_member_outside_the_table_breaks_the_graph_and_says_so():
    group = dist.new_group([0, 1])

    def program(x):
        y = x @ x
        group._has_hooks()
        return y @ y, group.size()

    assert_like_eager(program, (torch.eye(3),), fullgraph=False)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="backend='dtensor' does not trace the member '_has_hooks'"):
        torch.compile(program, backend="dtensor", fullgraph=True)(torch.eye(3))
