"""``dtensor-compile report``: what it says of functions, steps and scripts, its exit status, and one clear line for bad
input.
"""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import textwrap

import jsonschema
import pytest
import torch.distributed as dist

from dtensor_compile.cli import main
from dtensor_compile.report.model import from_json, schema
from tests.report.test_model import ROOT

PROGRAM = """\
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Layer(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, \
[Shard(0)] + [Replicate()] * (mesh.ndim - 1)))

    def forward(self, x):
        x = DTensor.from_local(x, self.weight.device_mesh, [Replicate()] * self.weight.device_mesh.ndim)
        y = x @ self.weight
        return y.redistribute(placements=[Replicate()] * self.weight.device_mesh.ndim).to_local()


class Stack(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(mesh) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def build():
    return Stack(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))), torch.ones(4, 8)


def on_mesh(mesh):
    return Stack(mesh), {"x": torch.ones(4, 8)}


def breaks():
    model, x = build()

    def step(x):
        y = model(x)
        if y.sum() > 0:
            y = y + 1
        return model(y)

    return step, (x,)


def only_ours():
    def step(x, names):
        dist.all_gather_object(names, dist.get_rank())
        return x + 1

    return step, (torch.ones(4), [None] * dist.get_world_size())


def one_graph(mesh):
    @torch.compile(backend="dtensor_aten", fullgraph=True)
    def step(x):
        if x.sum() > 0:
            x = x + 1
        return x

    step(torch.ones(4))


def step():
    model, x = build()
    torch.compile(model, backend="dtensor_aten")(x).sum().backward()


def makes_step():
    model, x = build()
    return lambda: model(x)


def needs_arguments(path, size):
    return None


def raises():
    raise RuntimeError("no weights here")


def raises_when_called():
    return lambda: {}["missing"], ()


def nothing():
    return 3


def on_gpu():
    return torch.nn.Linear(4, 4).to("cuda"), torch.ones(4, 4)


VALUE = 3
"""

SCRIPT = """\
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

if len(sys.argv) != 3:
    sys.exit("usage: script.py BACKEND ROWS")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
x = distribute_tensor(torch.ones(int(sys.argv[2]), 4), mesh, [Shard(0)])


@torch.compile(backend=sys.argv[1])
def gather(x):
    y = x.redistribute(placements=[Replicate()])
    torch._dynamo.graph_break()
    return y * 2


print("the program prints")
gather(x)
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "a_program.py").write_text(PROGRAM)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "imports.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("a_program", "broken", "imports", "plain"):
        sys.modules.pop(name, None)


def report_of(*argv):
    """Exit status and report of the command."""
    status = main(
        ["report", *argv, "--json", "out.json"] if ":" in argv[0] else ["report", "--json", "out.json", *argv]
    )
    text = pathlib.Path("out.json").read_text()
    jsonschema.validate(json.loads(text), schema())
    return status, from_json(text)


def test_model_and_inputs(program, capsys):
    status, report = report_of("a_program.py:build", "--world", "4")
    out = capsys.readouterr().out
    assert status == 0 and report.world == 4 and report.simulated
    assert "a_program.py:build: rank 0 of 4 (simulated)" in out and "\x1b" not in out
    assert report.stock is not None
    assert report.ours.totals.all.bytes == report.stock.totals.all.bytes > 0
    forward = [r for r in report.ours.redistributions if r.phase == "forward" and r.bytes]
    explicit = [r for r in forward if r.explicit]
    assert [r.module for r in explicit] == ["layers.0", "layers.1"]
    for r in explicit:
        assert r.source.code.startswith("return y.redistribute") and "y = x @ self.weight" in r.source.before[-1]
        assert (r.before, r.after, r.mesh_dims, r.fate, r.shape) == ("P(sum)", "R", ("tp",), "sent", (4, 8))
        assert r.plan == ("all_reduce[tp] P(sum)->R",) and r.bytes == 2 * 3 * 4 * 8 * 4 // 4
        assert r.seconds > 0 and 0 < r.exposed_seconds <= r.seconds * 1.0001
    assert {c.phase for c in report.ours.collectives} == {"forward", "backward"}
    assert sum(t.bytes for t in report.ours.totals.by_module) == report.ours.totals.all.bytes
    assert sum(len(g.spans) for g in report.ours.graphs) > len(report.ours.collectives)


@pytest.mark.slow
def test_profile(program, capsys):
    """Of both sides, with kernels unless aten is asked for."""
    status, report = report_of("a_program.py:build", "--profile")
    out = capsys.readouterr().out
    assert status == 0 and "compile time by stage" in out and "compile time by layer (measured)" in out
    assert re.search(r"\| layers\.0 +\|( +\d+\.\d+ s \|)+", out)
    for side in (report.ours, report.stock):
        assert {"Dynamo", "joint trace", "code generation"} <= {row.stage for row in side.stages}
    assert "dtensor_compile" in {row.stage for row in report.ours.stages} - {row.stage for row in report.stock.stages}
    assert report.stock.outside is not None and report.stock.totals.all.bytes == report.ours.totals.all.bytes
    _, report = report_of("a_program.py:build", "--profile", "--kernels", "aten", "--no-backward")
    assert {row.stage for row in report.ours.stages} & {"Dynamo", "code generation"} == {"Dynamo"}
    assert not report.stock.stages  # without kernels it is not what stock does


def test_implicit_redistribution_names_the_operator(program):
    _, report = report_of("a_program.py:build", "--no-stock")
    operators = {r.operator for r in report.ours.redistributions if not r.explicit}
    assert operators and all(op.startswith("aten.") for op in operators)


def test_mesh_argument(program):
    status, report = report_of("a_program:on_mesh", "--mesh", "dp=4,tp=2", "--no-stock", "--rank", "3")
    assert status == 0 and (report.world, report.rank, report.stock) == (8, 3, None)
    assert {t.name for t in report.ours.totals.by_mesh_dim} == {"dp"}
    assert all(c.ranks == 4 for c in report.ours.collectives)


def test_graph_break_with_its_cause_and_what_it_splits(program, capsys):
    status, report = report_of("a_program.py:breaks", "--max-breaks", "0", "--no-backward")
    output = capsys.readouterr()
    (this,) = report.ours.breaks
    assert status == 1 and (this.cause, this.breaks_under, this.error) == ("value-of-data", "every backend", False)
    assert this.source.code == "if y.sum() > 0:" and this.source.before[-1].strip() == "y = model(x)"
    assert this.graphs == 2 and (this.collectives_before, this.collectives_after) == (2, 2)
    first, second = output.err.splitlines()[-2:]
    assert first == "--max-breaks 0: graph breaks 1, at most 0"
    assert re.search(r"a_program.py:\d+: \[value-of-data\] if y.sum\(\) > 0:", second)
    assert "graph break [value-of-data]" in output.out and "splits the function into 2 graphs" in output.out


def test_stock_fails_where_this_backend_does_not(program, capsys):
    status, report = report_of("a_program.py:only_ours")
    (ours,), (stock,) = report.ours.breaks, report.stock.breaks
    assert status == 0 and not report.ours.failed and "unregistered member" in report.stock.failed
    assert (ours.cause, ours.error, stock.error) == ("object-collective", False, True)
    assert ours.source == stock.source and ours.source.code == "dist.all_gather_object(names, dist.get_rank())"
    out = capsys.readouterr().out
    assert re.search(r"ended with an error +\| +- +\| +InternalTorchDynamoError", out)
    assert "under stock torch:" in out and "error [member-not-registered]" in out


def test_compilation_that_ends_with_an_error_is_shown_with_its_cause(program, capsys):
    status, report = report_of("a_program.py:one_graph")
    (this,) = report.ours.breaks
    assert status == 2 and (this.cause, this.error, this.count) == ("value-of-data", True, 1)
    assert this.source.code == "if x.sum() > 0:"
    output = capsys.readouterr()
    assert "error [value-of-data]" in output.out
    assert output.err == f"dtensor-compile report: a_program.py:one_graph raises: {report.ours.failed}\n"


@pytest.mark.parametrize("function", ["step", "makes_step"])
def test_steps(program, function):
    status, report = report_of(f"a_program.py:{function}", "--no-stock")
    assert status == 0 and report.ours.totals.all.count >= 2


@pytest.mark.parametrize("backend", ["dtensor_aten", "aot_eager", "eager"])
def test_script_with_arguments_whatever_the_backend(program, capsys, backend):
    status, report = report_of("--world", "4", "script.py", backend, "8")
    assert status == 0 and report.world == 4
    assert "the program prints" not in capsys.readouterr().out
    assert [b.cause for b in report.ours.breaks] == ["break-asked-for"]
    if backend != "eager":
        (gather,) = report.ours.collectives
        assert (gather.kind, gather.bytes) == ("all_gather", 3 * 2 * 4 * 4)
        assert gather.mesh_dim == ("dp" if backend == "dtensor_aten" else "world")  # the mesh has the job's own group
        assert gather.source.code.startswith("y = x.redistribute")


MISPLACED = [
    ["--html", "out.html"],
    ["--html=out.html"],
    ["aot_eager", "8", "--save", "out.html"],
    ["--kernels", "aten", "--all"],
]


@pytest.mark.parametrize("behind", MISPLACED, ids=" ".join)
def test_an_option_behind_a_script_is_an_error_that_names_it(program, capsys, behind):
    assert main(["report", "script.py", *behind]) == 2
    output = capsys.readouterr()
    named = " and ".join(text.partition("=")[0] for text in behind if text.startswith("--"))
    assert output.err.startswith(f"dtensor-compile report: {named} behind script.py: put options of this")
    assert output.err.count("\n") == 1 and output.out == "" and not (program / "out.html").exists()


@pytest.mark.parametrize(
    "behind, gets",
    [
        (["--", "--html", "8"], ["--html", "8"]),
        (["--", "--", "--all"], ["--", "--all"]),
        (["--lr", "8"], ["--lr", "8"]),
        (["a", "--", "--all"], ["a", "--", "--all"]),
    ],
    ids=lambda texts: " ".join(texts),
)
def test_a_script_gets_what_is_its_own(program, behind, gets):
    call = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))"
    writes = "pathlib.Path('argv').write_text(repr(sys.argv[1:]))"
    (program / "prints.py").write_text(f"import sys, torch, pathlib\n{call}\n{writes}\n")
    assert main(["report", "--html", "out.html", "prints.py", *behind]) == 0
    assert (program / "argv").read_text() == repr(gets) and (program / "out.html").exists()


def test_save_and_compare(program, capsys):
    assert main(["report", "a_program.py:build", "--no-stock", "--save", "base.json"]) == 0
    capsys.readouterr()
    same = [
        "report",
        "a_program.py:build",
        "--no-stock",
        "--compare",
        "base.json",
        "--max-bytes",
        "+0%",
        "--max-exposed",
        "+1%",
    ]
    assert main(same) == 0
    assert re.search(r"bytes sent +\| ([\d,]+) bytes +\| \1 bytes", capsys.readouterr().out)
    (program / "a_program.py").write_text(PROGRAM.replace("torch.ones(4, 8)", "torch.ones(6, 8)"))
    sys.modules.pop("a_program")
    assert main(same) == 1
    output = capsys.readouterr()
    assert "+ " in output.out and "of [6, 8] float32" in output.out
    assert "--max-bytes +0%: bytes sent" in output.err and "return y.redistribute" in output.err


def test_times_that_are_compared_are_of_one_machine(program, capsys):
    assert main(["report", "a_program.py:build", "--no-stock", "--save", "base.json", "--cluster", "v100"]) == 0
    status, report = report_of("a_program.py:build", "--no-stock", "--compare", "base.json", "--max-exposed", "+1%")
    assert (status, report.cluster) == (0, "v100")
    assert report_of("a_program.py:build", "--no-stock")[1].cluster == "cpu-1gbit"


BAD = [
    (["nowhere.py:build"], "there is no file 'nowhere.py'"),
    (["nowhere.py"], "there is no file 'nowhere.py'"),
    (["no.such.module:build"], "there is no module 'no.such.module'"),
    (["a_program.py:biuld"], "a_program.py has no 'biuld': did you mean 'build'?"),
    (["a_program.py:VALUE"], "is of type int, not a function"),
    ([":build"], "is not a target"),
    (["broken.py:build"], "broken.py does not import: SyntaxError"),
    (["imports:build"], "imports does not import: ModuleNotFoundError: No module named 'no_such_package' (at"),
    (["a_program.py:needs_arguments"], "needs arguments (path, size): write a function that takes none"),
    (["a_program.py:raises"], "a_program.py:raises raises: RuntimeError: no weights here (at"),
    (["a_program.py:raises_when_called"], "raises: KeyError: 'missing'"),
    (["a_program.py:nothing"], "never calls a function compiled by torch.compile: return the model and its inputs"),
    (["plain.py"], "never calls a function compiled by torch.compile"),
    (["script.py"], "says 'usage: script.py BACKEND ROWS': does it need arguments?"),
    (["script.py", "no_backend", "4"], "script.py raises: InvalidBackend"),
    (["a_program.py:on_gpu"], "it needs a device that is not available"),
    (["a_program.py:build", "--mesh", "4y2"], "--mesh 4y2 is not a mesh"),
    (["a_program.py:build", "--rank", "2"], "--rank 2 is no rank of a job of 2 ranks"),
    (["a_program.py:on_mesh", "--mesh", "4x2", "--world", "4"], "the mesh has more devices than --world 4 has ranks"),
    (["a_program.py:build", "--real"], "--real needs ranks: torchrun"),
    (["a_program.py:build", "--max-bytes", "+0%"], "needs --compare BASE.json"),
    (["a_program.py:build", "--max-exposed", "10 parsecs"], "'10 parsecs' is not a limit: write"),
    (["a_program.py:build", "--compare", "none.json"], "there is no base 'none.json'"),
    (["a_program.py:build", "--compare", "script.py"], "script.py: not JSON"),
]


@pytest.mark.parametrize("argv, says", BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_is_one_clear_line_and_status_2(program, capsys, argv, says):
    assert main(["report", *argv]) == 2
    output = capsys.readouterr()
    assert says in output.err and output.err.count("\n") == 1 and output.err.startswith("dtensor-compile report: "), (
        output.err
    )
    assert "Traceback" not in output.err and output.out == ""


def test_verbose_shows_the_traceback(program, capsys):
    assert main(["report", "a_program.py:raises", "--verbose"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and 'raise RuntimeError("no weights here")' in err and "a_program.py:raises raises" in err


def test_no_target_shows_how_to_use_it(capsys):
    assert main(["report"]) == 2
    assert "usage: dtensor-compile report [options] TARGET" in capsys.readouterr().out
    assert main(["report", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--max-bytes" in out and "+0%" in out


def test_nothing_of_a_report_stays_in_the_process(program):
    before = dist.init_process_group, dist.new_group, dict(os.environ)
    main(["report", "a_program.py:raises"])
    assert (dist.init_process_group, dist.new_group, dict(os.environ)) == before and not dist.is_initialized()


def test_the_tool_is_the_same_command(program, monkeypatch, capsys):
    tool = str(ROOT / "tools" / "graph_break_report.py")
    monkeypatch.setattr(sys, "argv", [tool, "nowhere.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(tool, run_name="__main__")
    *_, output = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and output.startswith("graph_break_report.py: there is no file 'nowhere.py'"), output


@pytest.mark.slow
def test_torch_logs_prints_decisions_as_they_are_made(program):
    code = textwrap.dedent(
        """
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from dtensor_compile.compat.distributed.fake_group import simulated_job
        with simulated_job(2, 0):
            x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
            f = lambda x: x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)]) + 1
            torch.compile(f, backend="dtensor_aten")(x)
        """
    )
    environment = {**os.environ, "TORCH_LOGS": "dtensor_compile"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert result.returncode == 0 and "[cancel_inverse_pairs] S(0)->R->S(0) -> nothing" in result.stderr, result.stderr[
        -2000:
    ]


@pytest.mark.slow
def test_a_real_job_under_torchrun(program):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "dtensor_compile.cli",
    ]
    command += ["report", "--real", "--no-stock", "--json", "real.json", "a_program.py:build"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=250, cwd=program, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("a_program.py:build: rank 0 of 2 (real)") == 1
    assert from_json((program / "real.json").read_text()).ours.totals.all.bytes > 0
