"""No cliff, no silence: what a stage leaves alone is a decision with its cost, and the first screen of the report counts it."""

import contextlib
import dataclasses
import io
import re

import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_compile import record
from dtensor_compile.decisions import Decision
from dtensor_compile.offline.simulated_job import job
from dtensor_compile.report.build import decision_row, left_alone
from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import from_json, to_json
from dtensor_compile.report.table import print_report
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
    return dataclasses.replace(report, ours=dataclasses.replace(report.ours, decisions=rows, left_alone=left_alone(decisions)))


def test_the_first_screen_counts_stages_and_sums_up_costs():
    assert line_of(sample()) == "2 stages, 3.00 ms, 192 bytes"


def test_a_program_of_which_nothing_is_left_alone_says_so():
    assert line_of(sample(DECISIONS[3:])) == "-"


def test_costs_without_an_estimate_are_left_out():
    assert line_of(sample([Decision("capture", "", "torch decides", left_alone=True)])) == "1 stage"


def test_decisions_that_leave_something_alone_come_first_with_their_cost():
    text = first_screen(sample(DECISIONS[::-1]))
    assert "left alone (3.00 ms): sizes are symbolic" in text and "left alone (192 bytes): [8, 6] is cut unevenly" in text
    assert text.index("sizes are symbolic") < text.index("one sum instead of two")


def test_the_page_has_the_figure():
    figures = re.search(r'<dl class="figures">.*?</dl>', to_html(sample()), re.S)[0]
    assert re.search(r"<dt>left alone</dt>\s*<dd class=\"now\">2 stages, 3.00 ms, 192 bytes</dd>", figures)


def test_what_is_left_alone_goes_to_json_and_comes_back():
    report = from_json(to_json(sample()))
    assert report == sample()
    assert [(row.left_alone, row.seconds, row.bytes) for row in report.ours.decisions][0] == (True, None, 192)


# ---- every place ---------------------------------------------------------------------------------------------------------------


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
    recording = compiled(lambda x: gathered(x) * 2, sharded(mesh, 2, 4).requires_grad_(), calls=2, loss=partial_gradient)
    ((reason, seconds, _),) = left(recording, "gradient_placements")
    assert "comes as P(sum)" in reason and "runs in eager" in reason and seconds > 0


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_gradients_that_torch_redistributes_in_the_backward_pass(mesh):
    def draws(x):
        return torch.nn.functional.dropout(x, 0.5) * 2

    recording = compiled(draws, sharded(mesh, 2, 4).requires_grad_(), loss=partial_gradient)
    ((reason, _, sent),) = left(recording, "gradient_placements")
    assert "torch redistributes it" in reason and sent == 2 * 4 * 4
