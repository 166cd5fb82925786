"""torch's other planner, which searches for the least time: it never sends fewer bytes with as few collectives as
torch's default.
"""

import concurrent.futures
import itertools
import math
import multiprocessing
import random

import pytest
from torch.distributed.tensor import Partial, Replicate

from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.planner.search import bytes_sent, cheapest_plan, collectives
from tests.planner.test_search import price

WORDS = ("R", "S(0)", "S(1)", "P(sum)")
CASES = [
    ((4,), (8, 8), 16),
    ((2, 4), (256, 64), 50),
    ((2, 4), (7, 300), 25),
    ((2, 2, 2), (64, 64), 20),
]


def sample(mesh_ndim, most):
    specs = ["".join(spec) for spec in itertools.product(WORDS, repeat=mesh_ndim)]
    every = list(itertools.product(specs, specs))
    return every if len(every) <= most else random.Random(2).sample(every, most)


def prices(mesh_shape, shape, pairs):
    """For each pair (collectives, elements) of torch's default and of its other planner; None where it refuses."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dtensor_compile.compat.dtensor.specs import make_spec

    dist.init_process_group("fake", rank=0, world_size=math.prod(mesh_shape), store=FakeStore())
    mesh = init_device_mesh("cpu", mesh_shape)

    def one(source, target, searched):
        specs = [make_spec(mesh, parse_spec(text), shape, torch.float32) for text in (source, target)]
        try:
            infos = _gen_transform_infos_non_cached(*specs, use_graph_based_transform=searched)
        except (RuntimeError, NotImplementedError):
            return None
        state, count, total = list(parse_spec(source)), 0, 0
        for info in infos:
            before, after = info.src_dst_placements
            if isinstance(after, Partial) and not isinstance(before, Replicate):
                return None
            kind, elements = price(state, mesh_shape, shape, info.mesh_dim, after, all_to_all=True)
            count, total = count + (kind != "nothing"), total + elements
            state[info.mesh_dim] = after
        return count, total

    answers = [(one(*pair, False), one(*pair, True)) for pair in pairs]
    dist.destroy_process_group()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape, shape, most", CASES, ids=str)
def test_no_more_bytes_than_either_planner(mesh_shape, shape, most):
    pairs = sample(len(mesh_shape), most)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        theirs = pool.submit(prices, mesh_shape, shape, pairs).result()
    assert any(searched is not None for _, searched in theirs)
    for (source, target), (default, searched) in zip(pairs, theirs):
        if default is None:
            continue
        steps = cheapest_plan(source, target, mesh_shape, shape)
        ours = collectives(steps), bytes_sent(steps, 1)
        assert ours[0] <= default[0] and ours[1] <= default[1], f"{source}->{target}: {ours}, default {default}"
        if searched is not None and searched[0] <= default[0]:
            assert ours[1] <= searched[1], f"{source}->{target}: {ours}, searched {searched}"
