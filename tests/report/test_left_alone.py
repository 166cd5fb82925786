"""No cliff, no silence: what a stage leaves alone is a decision with its cost, and the first screen of the report
counts it.
"""

import contextlib
import dataclasses
import io
import re

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile import record, redistribute
from dtensor_compile.decisions import Decision
from dtensor_compile.fixups.uncompiled import runs_uncompiled
from dtensor_compile.graph import measured_kernels
from dtensor_compile.ir import mesh as capture_mesh
from dtensor_compile.lowering import lower
from dtensor_compile.native import loader as native
from dtensor_compile.offline.simulated_job import job
from dtensor_compile.ops.groups import GROUP, REDISTRIBUTES, Group
from dtensor_compile.report.build import decision_row, left_alone
from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import from_json, to_json
from dtensor_compile.report.table import print_report
from dtensor_compile.schedule import kernel_order
from dtensor_compile.schedule.found_order import KernelOrder
from dtensor_compile.schedule.left_alone import kernels_left, left_out_of_buckets
from dtensor_compile.schedule.simulated_device import Buffer, Task, simulate
from dtensor_compile.stages import compilation
from dtensor_compile.topology.links import CLUSTERS, startup_seconds
from tests.passes.graphs import run_alone
from tests.report.samples import sample_report

#: Left alone by two stages, one of them twice; and something that was done.
DECISIONS = [
    Decision("order_rows", "", "[8, 6] is cut unevenly", left_alone=True, bytes=192),
    Decision("bucket_collectives", "", "sizes are symbolic", left_alone=True, seconds=2e-3),
    Decision("bucket_collectives", "", "sizes are symbolic", left_alone=True, seconds=1e-3),
    Decision("merge_sums", "", "one sum instead of two"),
]


def first_screen(report):
    """The lines of the table at the top, as printed where there is no terminal."""
    out = io.StringIO()
    print_report(report, Console(file=out, width=200, color_system=None), everything=True)
    return out.getvalue()


def line_of(report):
    """The cell of our side in the line ``left alone``."""
    return re.search(r"^[| ]*left alone +\|? *(.*?)[ |]*$", first_screen(report), re.M)[1].split("  ")[0]


def sample(decisions=DECISIONS):
    report = sample_report(stock=False)
    rows = tuple(map(decision_row, decisions))
    return dataclasses.replace(
        report, ours=dataclasses.replace(report.ours, decisions=rows, left_alone=left_alone(decisions))
    )


def test_the_first_screen_counts_stages_and_sums_up_costs():
    assert line_of(sample()) == "2 stages, 3.00 ms, 192 bytes"


def test_a_program_of_which_nothing_is_left_alone_says_so():
    assert line_of(sample(DECISIONS[3:])) == "-"


def test_costs_without_an_estimate_are_left_out():
    assert line_of(sample([Decision("capture", "", "torch decides", left_alone=True)])) == "1 stage"


def test_decisions_that_leave_something_alone_come_first_with_their_cost():
    text = first_screen(sample(DECISIONS[::-1]))
    assert (
        "left alone (3.00 ms): sizes are symbolic" in text and "left alone (192 bytes): [8, 6] is cut unevenly" in text
    )
    assert text.index("sizes are symbolic") < text.index("one sum instead of two")


def test_the_page_has_the_figure():
    figures = re.search(r'<dl class="figures">.*?</dl>', to_html(sample()), re.S)[0]
    assert re.search(r"<dt>left alone</dt>\s*<dd class=\"now\">2 stages, 3.00 ms, 192 bytes</dd>", figures)


def test_what_is_left_alone_goes_to_json_and_comes_back():
    report = from_json(to_json(sample()))
    assert report == sample()
    assert [(row.left_alone, row.seconds, row.bytes) for row in report.ours.decisions][0] == (True, None, 192)


# ---- every place ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    """A mesh of two ranks, of which this process is one."""
    torch._dynamo.reset()
    with job(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def sharded(mesh, *local_shape, dim=0):
    return DTensor.from_local(torch.ones(local_shape), mesh, [Shard(dim)], run_check=False)


def gathered(x):
    return x.redistribute(placements=[Replicate()])


def left(recording, kind):
    """What a stage left alone: reasons and costs; the first screen counts that stage, with the costs of all stages."""
    side = recording.report().ours
    rows = [row for row in side.decisions if row.left_alone and row.kind == kind]
    assert rows, [str(d) for d in recording.decisions]
    kinds = {row.kind for row in side.decisions if row.left_alone}
    line = line_of(dataclasses.replace(sample_report(stock=False), ours=side))
    assert line.startswith(f"{len(kinds)} stage")
    if any(row.seconds for row in rows):
        assert re.search(r"[1-9][\d.]* (us|ms|s)\b", line)
    if sent := sum(row.bytes or 0 for row in side.decisions if row.left_alone):
        assert f"{sent:,} bytes" in line
    return [(row.reason, row.seconds, row.bytes) for row in rows]


def compiled(function, *args, calls=1, backend="dtensor_aten", options=None, loss=None, **about):
    """The recording of some calls, and of the backward passes of `loss`."""
    run = torch.compile(function, backend=backend, options=options, **about)
    with record() as recording:
        for _ in range(calls):
            result = run(*args)
            if loss is not None:
                loss(result).backward()
    return recording


def test_a_redistribution_that_torch_traces_itself(mesh):
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("p",))
    ((reason, _, sent),) = left(compiled(gathered, sharded(mesh, 2, 4)), "capture")
    assert "process groups" in reason and "another order of ranks" in reason and sent == 2 * 4 * 4


def test_a_redistribution_that_torch_traces_itself_and_that_sends_nothing(mesh):
    """torch's rule for a convolution over a sharded image calls the gradient of its input replicated."""
    image = sharded(mesh, 1, 2, 8, 4, dim=3).requires_grad_()
    weight = DTensor.from_local(torch.ones(2, 2, 3, 3), mesh, [Replicate()]).requires_grad_()
    with record() as recording, contextlib.suppress(RuntimeError):  # no other rank sends its columns
        torch.compile(lambda x, w: torch.nn.functional.conv2d(x, w, padding=1), backend="dtensor_aten")(image, weight)
    assert any("does not fit" in reason and sent == 0 for reason, _, sent in left(recording, "capture"))


def test_calls_whose_inputs_share_memory_run_in_eager(mesh):
    memory = torch.ones(2, 4)
    x, y = (DTensor.from_local(memory, mesh, [Shard(0)], run_check=False) for _ in range(2))

    def writes(x, y):
        x.add_(1)
        return gathered(y)

    ((reason, seconds, _),) = left(compiled(writes, x, y, calls=2), "aliased_inputs")
    assert "share memory" in reason and seconds > 0


def partial_gradient(y):
    return (y.to_local(grad_placements=[Partial()]) ** 2).sum()


def test_a_backward_pass_in_eager_for_gradients_that_come_otherwise(mesh):
    recording = compiled(
        lambda x: gathered(x) * 2, sharded(mesh, 2, 4).requires_grad_(), calls=2, loss=partial_gradient
    )
    ((reason, seconds, _),) = left(recording, "gradient_placements")
    assert "has placements P(sum)" in reason and "runs in eager" in reason and seconds > 0


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_gradients_that_torch_redistributes_in_the_backward_pass(mesh):
    def draws(x):
        return torch.nn.functional.dropout(x, 0.5) * 2

    recording = compiled(draws, sharded(mesh, 2, 4).requires_grad_(), loss=partial_gradient)
    ((reason, _, sent),) = left(recording, "gradient_placements")
    assert "torch redistributes it" in reason and sent == 2 * 4 * 4


def raises(*args):
    raise NotImplementedError("no such collective")


@pytest.mark.filterwarnings("ignore:dtensor_compile")
def test_a_redistribution_that_cannot_be_lowered(mesh, monkeypatch):
    monkeypatch.setattr(lower, "carry_out", raises)
    monkeypatch.setattr(lower, "_known", {})
    recording = compiled(lambda x, y: (gathered(x), gathered(y)), sharded(mesh, 2, 4), sharded(mesh, 3, 4))
    found = left(recording, "lower_redistributions")
    assert [sent for reason, _, sent in found if "eager kernel" in reason] == [2 * 4 * 4, 3 * 4 * 4]
    assert sum("traced one by one" in reason for reason, *_ in found) == 1


def test_rows_that_are_cut_unevenly(mesh):
    x = DTensor.from_local(
        torch.ones(2, 3, 4), mesh, [Shard(1)], run_check=False, shape=torch.Size((2, 5, 4)), stride=(20, 4, 1)
    )
    recording = compiled(lambda x, w: gathered(x).to_local() @ w, x, torch.ones(4, 3))
    ((reason, _, copied),) = left(recording, "order_rows")
    assert "[2, 5, 4] is cut unevenly" in reason and copied == 2 * 5 * 4 * 4


def test_columns_that_are_cut_unevenly(mesh):
    w = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(1)], run_check=False, shape=torch.Size((3, 7)), stride=(7, 1))
    recording = compiled(lambda x, w: x @ gathered(w).to_local().t(), torch.ones(5, 7), w)
    ((reason, _, copied),) = left(recording, "send_transposed")
    assert "[3, 7] is cut unevenly" in reason and copied == 3 * 7 * 4


def test_layouts_beside_a_redistribution_between_meshes():
    """Ranks of one of the meshes alone have another graph."""
    torch._dynamo.reset()
    with job(3):
        mesh, other = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [0, 1, 2]))

        def program(x, w, y, v, z):
            sent = redistribute(z, other, [Replicate()]).to_local()
            return gathered(x).to_local() @ w, y @ gathered(v).to_local().t(), sent + 1

        args = (
            sharded(mesh, 2, 3, 4, dim=1),
            torch.ones(4, 3),
            torch.ones(5, 8),
            sharded(mesh, 3, 4, dim=1),
            sharded(mesh, 6, 1),
        )
        recording = compiled(program, *args)
        ((reason, _, copied),) = left(recording, "order_rows")
        assert "another graph" in reason and copied == 2 * 6 * 4 * 4
        ((reason, _, copied),) = left(recording, "send_transposed")
        assert "another graph" in reason and copied == 3 * 8 * 4


def beside_uneven(function, mesh):
    """`function`, with another argument: one more redistribution, of a tensor that is cut unevenly."""
    odd = DTensor.from_local(
        torch.ones(2, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 4)), stride=(4, 1)
    )
    return (lambda odd, *args: (function(*args), gathered(odd) * 2)), odd


def test_rows_of_tables_that_are_not_exchanged_beside_uneven_shards(mesh):
    def look_up(table, ids):
        return torch.nn.functional.embedding(ids, gathered(table).to_local())

    function, odd = beside_uneven(look_up, mesh)
    args, options = (sharded(mesh, 64, 4), torch.tensor([3, 5])), {"enable_passes": ("exchange_rows",)}
    ((reason, _, sent),) = left(compiled(function, odd, *args, options=options), "exchange_rows")
    assert "uneven" in reason and sent == 64 * 4 * 4


def test_sums_that_stay_whole_beside_uneven_shards(mesh):
    def layer(x):
        return torch.relu(gathered(x))

    function, odd = beside_uneven(layer, mesh)
    x = DTensor.from_local(torch.ones(8, 4), mesh, [Partial()], run_check=False)
    options = {"enable_passes": ("sequence_parallel",)}
    ((reason, *_),) = left(compiled(function, odd, x, options=options), "sequence_parallel")
    assert "1 sums and their readers stay whole" in reason


def test_meshes_whose_ranks_do_not_come_for_groups_over_several_dims(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(capture_mesh, "all_arrive", lambda *about: False)
    with job(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        x = DTensor.from_local(torch.ones(2, 4), mesh, [Replicate(), Shard(0), Shard(0)], run_check=False)
        ((reason, *_),) = left(compiled(lambda x: x.redistribute(placements=[Replicate()] * 3) * 2, x), "merge_groups")
    assert "did not all come" in reason


def test_operators_that_cannot_be_measured(mesh, monkeypatch):
    monkeypatch.setattr(measured_kernels, "_measured", {})
    monkeypatch.setattr(measured_kernels, "_measure", lambda *about: None)
    recording = compiled(independent, sharded(mesh, 2, 4), torch.ones(64, 64), options={"kernel_costs": "measured"})
    ((reason, *_),) = left(recording, "kernel_costs")
    assert reason.startswith("1 operators cannot be measured") and "aten.mm" in reason


def test_calls_without_the_module_in_cpp(mesh, monkeypatch):
    monkeypatch.setattr(native, "native", lambda: None)
    ((reason, *_),) = left(compiled(lambda x: gathered(x) * 2, sharded(mesh, 2, 4)), "native_calls")
    assert "handled in Python" in reason


def test_matmuls_beside_collectives_of_uneven_shards(mesh):
    def matmul(x, w):
        return gathered(x).to_local() @ w

    x = DTensor.from_local(torch.ones(256, 64), mesh, [Shard(0)], run_check=False)
    odd = DTensor.from_local(
        torch.ones(2, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 4)), stride=(4, 1)
    )
    options = {"enable_passes": ("decompose_matmuls",)}
    recording = compiled(lambda x, w, odd: (matmul(x, w), odd * 2), x, torch.ones(64, 64), odd, options=options)
    ((reason, seconds, _),) = left(recording, "decompose_matmuls")
    assert "uneven" in reason and seconds > 0


def test_collectives_of_symbolic_sizes_are_not_merged(mesh):
    recording = compiled(
        lambda x, y: (gathered(x) * 2, gathered(y) * 3), sharded(mesh, 4, 4), sharded(mesh, 4, 6), dynamic=True
    )
    ((reason, seconds, _),) = left(recording, "bucket_collectives")
    assert "symbolic" in reason and seconds == startup_seconds(CLUSTERS["cpu-1gbit"], "all_gather", (0, 1))


def test_a_group_of_the_program_with_something_between_its_collectives(mesh):
    c10d, group = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def program(x, y):
        first = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))
        own = c10d.wait_tensor(c10d.all_reduce(first, "sum", group))
        return own, c10d.wait_tensor(c10d.all_gather_into_tensor(y, 2, group))

    graph = make_fx(program, tracing_mode="fake")(torch.ones(2, 4), torch.ones(3, 4)).graph
    for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        node.meta |= {REDISTRIBUTES: True, GROUP: Group("parameters")}
    (decision,) = left_out_of_buckets(graph, CLUSTERS["h100"], further=False)
    assert decision.left_alone and "the program groups them" in decision.reason
    assert decision.seconds == startup_seconds(CLUSTERS["h100"], "all_gather", (0, 1))
    assert line_of(sample([decision])).startswith("1 stage, ")


def test_the_order_of_a_program_without_the_schedule(mesh):
    recording = compiled(lambda x: gathered(x) * 2, sharded(mesh, 2, 4), options={"schedule": False})
    ((reason, seconds, _),) = left(recording, "schedule")
    assert "'schedule': False" in reason and seconds > 0


def with_collective_of_its_own(x, y):
    y = y.relu()
    dist.all_reduce(y)
    return gathered(x) * 2, y + 1


@pytest.mark.parametrize("name, kind", [("dtensor_aten", "schedule"), ("dtensor", "schedule_kernels")])
def test_collectives_of_the_program_keep_their_order(mesh, name, kind):
    recording = compiled(with_collective_of_its_own, sharded(mesh, 2, 4), torch.ones(4, 4), backend=name)
    ((reason, seconds, _),) = left(recording, kind)
    assert "1 collectives are the program's own" in reason and seconds > 0


def with_a_barrier(x):
    y = gathered(x) * 2
    dist.barrier()
    return y + 1


def test_operators_that_communicate_where_they_stand(mesh):
    found = left(compiled(with_a_barrier, sharded(mesh, 2, 4)), "schedule")
    assert any("communicate synchronously" in reason for reason, *_ in found)


@pytest.mark.filterwarnings("ignore:dtensor_compile")
def test_kernels_that_communicate_where_they_stand(mesh, monkeypatch):
    monkeypatch.setattr(lower, "carry_out", raises)
    monkeypatch.setattr(lower, "_known", {})
    found = left(
        compiled(with_collective_of_its_own, sharded(mesh, 2, 4), torch.ones(4, 4), backend="dtensor"),
        "schedule_kernels",
    )
    assert any("1 operators communicate synchronously" in reason for reason, *_ in found)


def test_kernels_of_collectives_whose_node_is_not_known(mesh, monkeypatch):
    monkeypatch.setattr(kernel_order, "_collective_origin", lambda node: None)
    found = left(compiled(lambda x: gathered(x) * 2, sharded(mesh, 2, 4), backend="dtensor"), "schedule_kernels")
    assert any("whose node of the graph is not known" in reason for reason, *_ in found)


def test_a_torch_without_an_order_of_kernels(mesh, monkeypatch):
    monkeypatch.setattr(compilation, "orders_kernels", lambda: False)
    found = left(compiled(lambda x: gathered(x) * 2, sharded(mesh, 2, 4), backend="dtensor"), "schedule_kernels")
    assert any("no hooks for an order of kernels" in reason for reason, *_ in found)


def independent(x, w):
    return gathered(x).to_local() * 2, w @ w


def test_a_faster_order_of_kernels_that_needs_more_memory(mesh):
    """A matmul after the gather hides it, and both results are there at once."""
    tasks = [
        Task(makes=(first := Buffer(100, 100),), seconds=1.0),
        Task(makes=(sent := Buffer(50, 50),), reads=(first,), seconds=1.0, link="wire", after=(0,)),
        Task(waits_for=1, reads=(first, sent), after=(1,)),
        Task(reads=(sent,), after=(2,)),
        Task(makes=(Buffer(100, 100),), seconds=1.0),
    ]
    given = list(range(len(tasks)))
    found = simulate(tasks, given)
    (decision,) = kernels_left(KernelOrder(tasks, given, found, found, 0.0, {}, {}))
    assert "a faster one has a peak of" in decision.reason and decision.seconds == pytest.approx(1.0)
    assert line_of(sample([decision])) == "1 stage, 1.00 s"


def test_a_program_of_which_nothing_is_left_alone(mesh):
    recording = compiled(independent, sharded(mesh, 2, 4), torch.ones(64, 64), backend="dtensor")
    assert recording.decisions and not any(decision.left_alone for decision in recording.decisions)


@pytest.mark.filterwarnings("ignore:dtensor_compile")
def test_a_pass_that_raises():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x)).graph
    (decision,) = run_alone(graph, [raises])
    assert decision.left_alone and line_of(sample([decision])) == "1 stage"


@pytest.mark.filterwarnings("ignore:dtensor_compile")
def test_a_graph_with_a_kernel_that_does_not_compile():
    decision = runs_uncompiled("forward", "error: no such instruction")
    assert decision.left_alone and line_of(sample([decision])) == "1 stage"


def test_a_graph_that_stays_out_of_the_caches_on_disk(mesh):
    table = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
    ids = DTensor.from_local(torch.tensor([0, 5]), mesh, [Replicate()])
    ((reason, *_),) = left(compiled(torch.nn.functional.embedding, ids, table), "cache")
    assert "cannot write" in reason
