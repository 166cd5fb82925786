"""Writes in ``torch.autograd._unsafe_preserve_version_counter`` leave the version of an input as eager leaves it."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import make_mesh, on_ranks
from tests.cases import mostly_slow

preserve = torch.autograd._unsafe_preserve_version_counter


def a_write(x, y):
    with preserve(x):
        x.mul_(2)
    return x + y


def a_write_before(x, y):
    x.add_(1)
    with preserve(x):
        x.mul_(2)
    return x + y


def a_write_after(x, y):
    with preserve(x):
        x.mul_(2)
    x.add_(1)
    return x + y


def two_inputs(x, y):
    with preserve((x, y)):
        x.mul_(2)
        y.mul_(3)
    return x + y


def one_of_two_inputs(x, y):
    with preserve(x):
        x.mul_(2)
        y.mul_(3)
    return x + y


def through_a_view(x, y):
    with preserve(x):
        x.view(-1).mul_(2)
    return x + y


def nested(x, y):
    with preserve(x):
        x.mul_(2)
        with preserve(y):
            x.add_(y)
            y.mul_(2)
    return x + y


def a_version_that_is_read(x, y):
    with preserve(x):
        x.mul_(2)
    return x + x._version


PROGRAMS = [
    a_write,
    a_write_before,
    a_write_after,
    two_inputs,
    one_of_two_inputs,
    through_a_view,
    nested,
    a_version_that_is_read,
]


def made(placed, interior, value):
    x = torch.full((4, 4), value)
    x = DTensor.from_local(x, make_mesh((2,), ("dp",)), [Shard(0)], run_check=False) if placed else x
    return x.requires_grad_() * 1 if interior else x


@pytest.mark.parametrize("backend", [pytest.param("dtensor", marks=pytest.mark.slow), "dtensor_aten"])
@pytest.mark.parametrize("placed", mostly_slow([False, True], False), ids=["tensor", "DTensor"])
@on_ranks(2)
def test_a_preserved_version_is_eagers(placed, backend):
    for program in PROGRAMS:
        for interior in (False, True):
            torch._dynamo.reset()
            counters.reset()
            compiled = torch.compile(program, backend=backend, fullgraph=True)
            eager, ours = ([made(placed, interior, value) for value in (1.0, 3.0)] for _ in range(2))
            for _ in range(2):
                want, got = program(*eager), compiled(*ours)
                for a, b in zip((want, *eager), (got, *ours)):
                    about = program.__name__, interior
                    assert torch.equal(*(t.to_local() if placed else t for t in (a, b))), about
                assert [x._version for x in ours] == [x._version for x in eager], about
