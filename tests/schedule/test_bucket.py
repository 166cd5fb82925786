"""Small collectives become one: which, where, and with the same numbers."""

import torch
import torch.distributed as dist
from expecttest import TestCase

from dtensor_compile.schedule.bucket import FULL, bucket_collectives
from dtensor_compile.schedule.schedule_graph import schedule_graph
from dtensor_compile.testing import graph_text, on_ranks, run_on_ranks
from dtensor_compile.topology.links import Cluster, Device, Link
from tests.schedule.test_schedule_graph import UNIT, changed, gathered, traced

#: A link on which 256 bytes take as long as starting.
SLOW = Cluster("slow to start", 1, Link(1.0, 256.0), Link(1.0, 256.0), Device(((4, 1.0),), 1e9, 0.0))
_c10d = torch.ops._c10d_functional


def summed(x):
    return _c10d.wait_tensor(_c10d.all_reduce(x, "sum", dist.group.WORLD.group_name))


def gathers(x, w, v):
    return x @ gathered(w) @ gathered(v * 2)


def gradients(x, y):
    a = x @ y
    first = summed(a)
    b = a @ y
    return first.view(-1), summed(b)


def chain(x):
    return summed(summed(x).relu())


def own(x, y):
    return summed(x), summed(y)


def bucketed(function, *shapes, cluster=SLOW, **about):
    return changed(lambda graph: bucket_collectives(graph, cluster), function, *shapes, **about)


def count(text):
    return text.count("= all_gather") + text.count("= all_reduce")


class Golden(TestCase):
    maxDiff = None

    def bucketed(self, *args, **about):
        first, second = run_on_ranks(2, bucketed, *args, **about)
        assert first == second
        return first

    def test_gathers_of_inputs_go_with_the_first(self):
        text, reasons = self.bucketed(gathers, (8, 8), (4, 8), (4, 8))
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 8]
w_1: [4, 8]
v_1: [4, 8]
mul: [4, 8] = mul(v_1, 2)
all_gather_into_tensor_coalesced_default: list = all_gather_into_tensor_coalesced([w_1, mul], 2)
getitem: [8, 8] = getitem(all_gather_into_tensor_coalesced_default, 0)
getitem_1: [8, 8] = getitem(all_gather_into_tensor_coalesced_default, 1)
wait_tensor: [8, 8] = wait_tensor(getitem)
mm: [8, 8] = mm(x_1, wait_tensor)
wait_tensor_1: [8, 8] = wait_tensor(getitem_1)
mm_1: [8, 8] = mm(mm, wait_tensor_1)
return mm_1
""",
        )
        assert reasons == [
            "256 bytes in one message: a collective of that size still takes as long to start as to send"
        ]

    def test_reductions_nobody_waits_for_go_with_the_last(self):
        text, _ = self.bucketed(gradients, (8, 8), (8, 8))
        self.assertExpectedInline(
            text,
            """\
x_1: [8, 8]
y_1: [8, 8]
mm: [8, 8] = mm(x_1, y_1)
mm_1: [8, 8] = mm(mm, y_1)
all_reduce_coalesced_default: list = all_reduce_coalesced([mm, mm_1], sum)
getitem: [8, 8] = getitem(all_reduce_coalesced_default, 0)
getitem_1: [8, 8] = getitem(all_reduce_coalesced_default, 1)
wait_tensor: [8, 8] = wait_tensor(getitem)
view: [64] = view(wait_tensor, [-1])
wait_tensor_1: [8, 8] = wait_tensor(getitem_1)
return [view, wait_tensor_1]
""",
        )


@on_ranks(2)
def test_what_depends_on_it_or_is_large_or_fast_to_start_stays():
    assert count(bucketed(chain, (8, 8))[0]) == 2
    assert count(bucketed(gathers, (8, 8), (4, 8), (4, 8), cluster=UNIT)[0]) == 2
    rows = int(FULL) * 32
    assert count(bucketed(gathers, (8, 2 * rows), (rows, 8), (4, 8))[0]) == 2


@on_ranks(2)
def test_the_programs_own_stay():
    gm = traced(own, (4, 4), (4, 4), redistributes=False)
    before = graph_text(gm.graph)
    assert bucket_collectives(gm.graph, SLOW) == [] and graph_text(gm.graph) == before


@on_ranks(2)
def test_other_dtypes_have_buckets_of_their_own():
    def mixed(x, y):
        return summed(x), summed(y), summed(x.bfloat16()), summed(y.bfloat16())

    text, reasons = bucketed(mixed, (4, 4), (2, 4))
    assert count(text) == 2 and len(reasons) == 2


def four(x, y):
    return summed(x), summed(y), gathered(x), gathered(y)


def test_four_ranks():
    texts = run_on_ranks(4, bucketed, four, (8, 3), (5, 2))
    assert all(count(text) == 2 for text, _ in texts)


@on_ranks(2)
def test_scheduling_after_it_keeps_every_wait():
    def run(graph):
        return bucket_collectives(graph, SLOW) + schedule_graph(graph, SLOW, float("inf"))

    for function, shapes in (
        (gathers, ((8, 8), (4, 8), (4, 8))),
        (gradients, ((8, 8), (8, 8))),
        (own, ((4, 4), (4, 4))),
    ):
        text, _ = changed(run, function, *shapes)
        assert text.count("wait_tensor(") == 2
