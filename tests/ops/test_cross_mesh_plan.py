"""Plans from one mesh to another: their text, and that everybody gets what it lacks and no more, counted element by
element.
"""

import itertools
import math
from collections import Counter

import pytest
from expecttest import TestCase

from dtensor_compile.errors import PlanError
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.ops.cross_mesh_plan import plan_across
from dtensor_compile.ops.expand import local_shape
from dtensor_compile.planner.shard_intervals import intervals

MESHES = {
    "front": "cpu[2:1]@2",
    "back": "cpu[2:1]@2.3",
    "middle": "cpu[2:1]@1.2",
    "three": "cpu[3:1]@3",
    "line": "cpu[4:1]@4",
    "square": "cpu[dp=2:2,tp=2:1]@4",
    "tp": "cpu[tp=2:1]@4",
    "dp": "cpu[dp=2:2]@4",
    "last": "cpu[1:1]@3.",
}


def planned(case, shape):
    source, target = (side.split() for side in case.split(" -> "))
    return plan_across(source[1], target[1], parse_mesh(MESHES[source[0]]), parse_mesh(MESHES[target[0]]), shape)


def text(case, shape):
    """The plan, and what each rank sends to each."""
    this = planned(case, shape)
    exchange = this.exchange
    source = parse_mesh(MESHES[case.split()[0]])
    sent = [
        f"{exchange.ranks[p]}->{exchange.ranks[q]}: {exchange.away[p, q]}"
        for p, q in itertools.product(range(len(exchange.ranks)), repeat=2)
        if exchange.away[p, q]
    ]
    lines = [f"{this.elements} elements of the busiest rank, {this.total} of all", *this.texts(source)]
    return "\n".join([*lines, *([", ".join(sent)] if sent else [])]) + "\n"


class Golden(TestCase):
    maxDiff = None

    def test_shards_go_to_other_ranks(self):
        self.assertExpectedInline(
            text("front S(0) -> back S(0)", (5, 4)),
            """\
12 elements of the busiest rank, 20 of all
exchange[0,1,2,3] S(0)->S(0)
0->2: 12, 1->3: 8
""",
        )

    def test_ranks_in_both_meshes_keep_what_they_have(self):
        self.assertExpectedInline(
            text("front S(0) -> middle R", (6, 4)),
            """\
24 elements of the busiest rank, 36 of all
exchange[0,1,2] S(0)->R
0->1: 12, 0->2: 12, 1->2: 12
""",
        )

    def test_holders_of_copies_share_the_load(self):
        self.assertExpectedInline(
            text("front R -> last R", (6, 4)),
            """\
12 elements of the busiest rank, 24 of all
exchange[0,1,3] R->R
0->3: 12, 1->3: 12
""",
        )

    def test_slices_of_a_mesh_are_holders_and_each_gets_its_part(self):
        self.assertExpectedInline(
            text("tp S(0) -> dp S(0)", (8, 4)),
            """\
8 elements of the busiest rank, 32 of all
exchange[0,1,2,3] S(0)->S(0)
0->1: 8, 1->2: 8, 2->1: 8, 3->2: 8
""",
        )

    def test_terms_of_a_sum_are_added_up_by_those_that_need_them(self):
        self.assertExpectedInline(
            text("front P(sum) -> back S(0)", (6, 4)),
            """\
24 elements of the busiest rank, 48 of all
exchange[0,1,2,3] P(sum)->S(0)
0->2: 12, 0->3: 12, 1->2: 12, 1->3: 12
""",
        )

    def test_a_sum_that_many_need_is_reduced_first(self):
        self.assertExpectedInline(
            text("square P(sum)S(1) -> line R", (8, 4)),
            """\
32 elements of the busiest rank, 128 of all
all_reduce[dp] P(sum)->R
exchange[0,1,2,3] RS(1)->R
0->1: 16, 1->0: 16, 2->3: 16, 3->2: 16
""",
        )

    def test_a_mean_is_reduced_first(self):
        self.assertExpectedInline(
            text("front P(avg) -> back S(0)", (6, 4)),
            """\
24 elements of the busiest rank, 48 of all
reduce_scatter[0] P(avg)->S(0)
exchange[0,1,2,3] S(0)->S(0)
0->2: 12, 1->3: 12
""",
        )

    def test_nothing_is_sent_where_everybody_has_it(self):
        self.assertExpectedInline(
            text("square RR -> front S(1)", (6, 4)),
            """\
0 elements of the busiest rank, 0 of all
keep RR->S(1)
""",
        )


def specs(mesh, partial):
    count = len(parse_mesh(MESHES[mesh]).dims)
    words = ["R", "S(0)", "S(1)", *(["P(sum)"] if partial else [])]
    return ["".join(chosen) for chosen in itertools.product(words, repeat=count)]


def held(spec, mesh, shape, rank):
    """Indices of the elements that a rank holds; none outside of the mesh."""
    layout = parse_mesh(MESHES[mesh])
    at = layout.coordinate(rank)
    if at is None:
        return set()
    ranges = [intervals(parse_spec(spec), layout.shape, d, size, at) for d, size in enumerate(shape)]
    indices = [[i for start, end in parts for i in range(start, end)] for parts in ranges]
    return set(itertools.product(*indices))


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (1, 7), (3, 1), (0, 4)])
def test_everybody_gets_what_it_lacks_and_nothing_else(shape):
    """For all pairs: each element that a rank lacks comes once from a rank that holds it, of a sum once per term."""
    pairs = 0
    for source, target in itertools.permutations(MESHES, 2):
        for before, after in itertools.product(specs(source, partial=True), specs(target, partial=False)):
            this = planned(f"{source} {before} -> {target} {after}", shape)
            exchange, middle = this.exchange, spec_text(this.middle)
            has = {rank: held(middle, source, shape, rank) for rank in exchange.ranks}
            terms = {term for rank, term in zip(exchange.ranks, exchange.terms) if has[rank]}
            for q, rank in enumerate(exchange.ranks):
                needs, came = held(after, target, shape, rank), Counter()
                for p, sender in enumerate(exchange.ranks):
                    if exchange.sent[p, q]:
                        parts = exchange.part(p, q)
                        box = set(
                            itertools.product(
                                *([i for s, e in parts[d] for i in range(s, e)] for d in range(len(shape)))
                            )
                        )
                        assert len(box) == exchange.sent[p, q] and box <= has[sender] and box <= needs
                        came.update((exchange.terms[p], index) for index in box)
                wanted = Counter(itertools.product(terms, needs))
                assert came == wanted, (source, before, target, after, rank)
                own = len(has[rank] & needs)
                assert exchange.away[:, q].sum() == len(terms) * len(needs) - own
            pairs += 1
    assert pairs > 1300


def test_local_shapes_follow_torch():
    layout = parse_mesh(MESHES["three"])
    this = planned("last R -> three S(0)", (4, 2))
    for q, rank in enumerate(this.exchange.ranks[:3]):
        needs = this.exchange.needs[q]
        sizes = [sum(end - start for start, end in needs[d]) for d in range(2)]
        assert sizes == local_shape(parse_spec("S(0)"), layout, layout.coordinate(rank), (4, 2))
    assert math.prod(sizes) == 0  # torch.chunk leaves nothing for the third


def test_load_is_shared_evenly():
    assert planned("line R -> last R", (8, 4)).elements == 0
    assert planned("three R -> last R", (9, 4)).elements == 12
    assert planned("front R -> back R", (8, 4)).elements == 32
    assert planned("three R -> back R", (9, 4)).elements == 12  # 2 has it; 3 gets a third from each


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "front S(2) -> back R",
            r"S\(2\) in spec S\(2\): the tensor has 2 dims, \(4, 4\); the nearest that it can have: S\(1\)",
        ),
        ("front R -> back P(sum)", r"nothing leads to P\(sum\) on another mesh; the nearest legal target is R"),
        ("square P(sum)P(max) -> back R", r"mixes reductions whose order matters: .* as in P\(sum\)R"),
        ("front RR -> back R", r"spec RR has 2 placements, but the mesh has 1 dims"),
    ],
)
def test_what_has_no_plan(case, message):
    with pytest.raises(PlanError, match=message):
        planned(case, (4, 4))
