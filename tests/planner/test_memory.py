"""Plans within a bound of memory: what they hold at once, what is chosen instead, and what is said where none is within
it.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dtensor_compile
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.inductor.compile import trace_local
from dtensor_compile.errors import MemoryBudgetError, PlanError
from dtensor_compile.ir.mesh import mesh_text, parse_mesh
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops.cross_mesh_plan import plan_across
from dtensor_compile.ops.expand import local_shape
from dtensor_compile.ops.redistribute import carry_out, plan_of
from dtensor_compile.planner.memory import peak_elements
from dtensor_compile.planner.search import bytes_sent, cheapest_plan
from dtensor_compile.testing import make_mesh, run_on_ranks
from tests.cases import mostly_slow

SPECS = ["R", "S(0)", "S(1)", "P(sum)"]


def held(steps, mesh_shape, shape, itemsize=4):
    """Bytes that a plan holds at once, as the planner counts them."""
    return itemsize * peak_elements(steps, mesh_shape, shape).most


# ---- what is counted is what is held -------------------------------------------------------------------------------


def live_bytes(graph):
    """The most bytes that a graph of local tensors holds at once besides its input, every tensor freed after its last
    use.
    """
    nodes, memory = list(graph.nodes), {}
    for node in nodes:
        name = str(node.target)
        shares = getattr(node.target, "is_view", False) or any(
            part in name for part in ("_unsafe_view", "wait_tensor", "getitem")
        )
        memory[node] = memory[node.all_input_nodes[0]] if shares and node.op == "call_function" else node
    last = {memory[source]: i for i, node in enumerate(nodes) for source in node.all_input_nodes}
    live, most = {}, 0
    for i, node in enumerate(nodes):
        if node.op == "call_function" and memory[node] is node:
            live[node] = node.meta["val"].numel() * node.meta["val"].element_size()
        most = max(most, sum(live.values()))
        live = {buffer: size for buffer, size in live.items() if last.get(buffer, -1) > i}
    return most


def traced(local, *node):
    return trace_local(lambda x: carry_out(x, *node), [local]).graph


@pytest.mark.parametrize(
    ("world", "mesh_shape", "shape"),
    [
        (4, (4,), (16, 8)),
        (4, (4,), (5, 3)),
        *mostly_slow([(4, (2, 2), (5, 3)), (4, (2, 2), (16, 8)), (8, (2, 4), (16, 8)), (8, (2, 4), (5, 3))]),
    ],
)
def test_no_plan_holds_more_than_is_counted(world, mesh_shape, shape):
    mode, plans = FakeTensorMode(), 0
    with simulated_job(world, 0):
        dist.init_process_group("gloo")
        text = mesh_text(init_device_mesh("cpu", mesh_shape))
        layout = parse_mesh(text)
        for source, target in itertools.product(itertools.product(SPECS, repeat=len(mesh_shape)), repeat=2):
            specs = "".join(source), "".join(target)
            try:
                steps = plan_of(*specs, layout, shape, 4)
            except PlanError:
                continue
            if not steps:
                continue
            with mode:
                local = torch.empty(local_shape(parse_spec(specs[0]), layout, layout.coordinate(0), shape))
                graph = traced(local, *specs, text, shape)
            counted = held(steps, mesh_shape, shape)
            assert live_bytes(graph) <= counted, (specs, shape, [str(step) for step in steps], counted)
            plans += 1
        dist.destroy_process_group()
    assert plans > (7 if len(mesh_shape) == 1 else 125)


# ---- what is chosen ------------------------------------------------------------------------------------------------


class Golden(TestCase):
    maxDiff = None

    def within(self, source, target, mesh_shape, shape, *bounds):
        lines = []
        for bound in bounds:
            steps = cheapest_plan(source, target, mesh_shape, shape, memory=bound)
            texts = "; ".join(map(str, steps))
            lines.append(f"{bound}: {texts}: sends {bytes_sent(steps, 4)}, holds {held(steps, mesh_shape, shape)}")
        return "\n".join(lines) + "\n"

    def test_a_gather_of_columns_goes_by_rows_where_the_whole_fits_once_only(self):
        self.assertExpectedInline(
            self.within("S(0)S(1)", "S(0)R", (2, 4), (16, 8), None, 512, 511, 320),
            """\
None: all_gather[1] S(1)->R: sends 192, holds 512
512: all_gather[1] S(1)->R: sends 192, holds 512
511: all_to_all[1] S(1)->S(0); all_gather[1] S(0)->R: sends 240, holds 320
320: all_to_all[1] S(1)->S(0); all_gather[1] S(0)->R: sends 240, holds 320
""",
        )

    def test_a_sum_is_reduced_before_its_terms_are_received(self):
        self.assertExpectedInline(
            self.within("S(0)P(sum)", "S(1)S(1)", (2, 2), (16, 8), None, 511),
            """\
None: exchange[0,1] S(0)P(sum)->S(1)S(1): sends 192, holds 512
511: reduce_scatter[1] P(sum)->S(0); exchange[0,1] S(0)S(0)->S(1)S(1): sends 224, holds 384
""",
        )


@pytest.mark.parametrize(
    ("shapes", "mesh_shapes", "least"),
    [
        pytest.param([(16, 8)], [(2, 2)], 1, id="one shape"),
        pytest.param([(16, 8), (5, 3)], [(2, 2), (2, 4)], 51, id="all", marks=pytest.mark.slow),
    ],
)
def test_memory_first_then_bytes_as_before(shapes, mesh_shapes, least):
    """Whatever the bound: nothing over it, never fewer bytes for less memory, and the same plan where it does not
    bind.
    """
    changed = 0
    for shape, mesh_shape in itertools.product(shapes, mesh_shapes):
        for source, target in itertools.product(
            itertools.product(SPECS, repeat=2), itertools.product(SPECS[:3], repeat=2)
        ):
            specs, sent = ("".join(source), "".join(target)), 0
            free = cheapest_plan(*specs, mesh_shape, shape)
            if not free:
                continue
            most = held(free, mesh_shape, shape)
            assert cheapest_plan(*specs, mesh_shape, shape, memory=most) == free
            for bound in range(most - 4, 0, -max(4, most // 8)):
                try:
                    steps = cheapest_plan(*specs, mesh_shape, shape, memory=bound)
                except MemoryBudgetError:
                    break
                assert held(steps, mesh_shape, shape) <= bound
                assert bytes_sent(steps, 4) >= sent
                sent = bytes_sent(steps, 4)
                changed += steps != free
    assert changed >= least


@pytest.mark.parametrize(
    ("source", "target", "mesh_shape", "bound", "message"),
    [
        (
            "S(0)",
            "R",
            (4,),
            384,
            r"holds 512 bytes .* allows 384: allow 512, or redistribute to S\(1\), the largest within the bound",
        ),
        ("S(0)", "S(1)", (4,), 200, r"holds 256 bytes .* allows 200: allow 256, or leave it S\(0\)"),
        (
            "P(sum)",
            "R",
            (4,),
            500,
            r"cheapest plan \(all_reduce\[0\] P\(sum\)->R\) holds 512 .* allow 512, or leave it P\(sum\)",
        ),
        ("P(sum)", "R", (4,), 640, None),
        (
            "S(0)S(0)",
            "RR",
            (2, 2),
            384,
            r"from S\(0\)S\(0\) to RR: .* allow 512, or redistribute to RS\(1\), the largest",
        ),
    ],
)
def test_what_is_said_where_no_plan_is_within_the_bound(source, target, mesh_shape, bound, message):
    if message is None:
        assert cheapest_plan(source, target, mesh_shape, (16, 8), memory=bound)
        return
    with pytest.raises(MemoryBudgetError, match=message):
        cheapest_plan(source, target, mesh_shape, (16, 8), memory=bound)


def test_the_budget_that_an_error_names_is_the_smallest():
    for source, target in itertools.product(itertools.product(SPECS, repeat=2), itertools.product(SPECS[:3], repeat=2)):
        specs = "".join(source), "".join(target)
        try:
            cheapest_plan(*specs, (2, 2), (16, 8), memory=4)
        except MemoryBudgetError as error:
            least = int(str(error).partition(": allow ")[2].partition(", or")[0].replace(",", ""))
            assert cheapest_plan(*specs, (2, 2), (16, 8), memory=least)
            with pytest.raises(MemoryBudgetError):
                cheapest_plan(*specs, (2, 2), (16, 8), memory=least - 4)


def test_between_meshes():
    front, back = parse_mesh("cpu[2:1]@2"), parse_mesh("cpu[2:1]@2.3")
    free = plan_across("P(sum)", "S(0)", front, back, (16, 8))
    assert [len(free.steps), free.held * 4] == [0, 4 * 256]  # two terms of half a tensor, as they come and put together
    bound = plan_across("P(sum)", "S(0)", front, back, (16, 8), 4, 800)
    assert [str(step) for step in bound.steps] == ["reduce_scatter[0] P(sum)->S(0)"] and bound.held * 4 <= 800
    with pytest.raises(
        MemoryBudgetError, match=r"to R on cpu.* holds 1,024 .* allow 1,024, or redistribute to S\(0\), the largest"
    ):
        plan_across("S(0)", "R", front, back, (16, 8), 4, 600)


# ---- compiled ------------------------------------------------------------------------------------------------------


def compiled(program, memory, *args):
    options = {"redistribution_memory": memory, "kernels": "aten"}
    return torch.compile(program, backend="dtensor", fullgraph=True, options=options)(*args)


def bounded():
    """A gather of columns within a bound, forward and backward: numbers, plans and what is sent."""
    mesh, full = make_mesh((2, 2), ("dp", "tp")), torch.arange(128.0).reshape(16, 8)
    rows = []
    for memory in (None, 511):
        torch._dynamo.reset()
        x = distribute_tensor(full, mesh, [Shard(0), Shard(1)]).requires_grad_()
        with dtensor_compile.record() as recording:
            y = compiled(lambda x: x.redistribute(placements=[Shard(0), Replicate()]) * 2, memory, x)
            y.backward(distribute_tensor(full, mesh, [Shard(0), Replicate()]))
        assert torch.equal(y.full_tensor(), full * 2) and torch.equal(x.grad.full_tensor(), full * 2)
        forward = next(r for r in recording.redistributions if not r.backward)
        rows.append((forward.plan, [c.kind for c in recording.graphs[0].collectives]))
    return rows


def test_a_compiled_program_stays_within_its_bound():
    first, *others = run_on_ranks(4, bounded)
    assert all(other == first for other in others)
    assert first == [
        (("all_gather[tp] S(1)->R",), ["all_gather"]),
        (("all_to_all[tp] S(1)->S(0)", "all_gather[tp] S(0)->R"), ["all_to_all", "all_gather"]),
    ]


class Model(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.head = torch.nn.Linear(8, 6, bias=False)
        self.head.weight = torch.nn.Parameter(distribute_tensor(self.head.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x):
        weight = self.head.weight.redistribute(placements=[Replicate()])
        return x @ weight.t()


def over_budget():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(4, 8), mesh, [Replicate()])
    answers = []
    meshes = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
    y = DTensor.from_local(torch.ones(4, 8), meshes[0], [Replicate()], run_check=False, shape=(4, 8), stride=(8, 1))
    programs = [
        (Model(mesh), x),
        (lambda x: x.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()]) * 2, x),
        (lambda x: x.sum(0) * 2, x),
        (lambda y: dtensor_compile.redistribute(y, meshes[1], [Replicate()]), y),
    ]
    for program, arg in programs:
        torch._dynamo.reset()
        try:
            compiled(program, 100, arg)
            answers.append("")
        except Exception as error:
            answers.append(str(error).split("\n\nSet TORCH")[0])
    return answers


def test_over_budget_is_an_error_with_the_tensor_its_module_and_the_line_on_every_rank():
    answers, others = run_on_ranks(2, over_budget)
    assert answers == others
    model, through_shards, local, across = answers
    assert "PlanError" in model and "float32 [6, 8], at" in model and "test_memory.py" in model
    assert "weight = self.head.weight.redistribute(placements=[Replicate()])" in model
    assert (
        "holds 192 bytes at once besides its input, and redistribution_memory allows 100: allow 192, or leave it S(0)"
        in model
    )
    assert (through_shards, local) == ("", "")  # passes take the pair out, and a local sum is no redistribution
    assert "from R on cpu[1:1]@1 to R on cpu[1:1]@1.: the cheapest plan" in across and "allows 100" in across
    assert "dtensor_compile.redistribute(y, meshes[1], [Replicate()])" in across
