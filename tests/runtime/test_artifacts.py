"""Graphs that are the same on every rank, and programs that were compiled in advance: eager's numbers on ranks that
compile nothing, and a reason where artifacts are not used."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.capture.cacheable import name_constants
from dtensor_compile.compat.distributed.device_meshes import group_exists, group_named
from dtensor_compile.errors import NotSavedError, OptionError
from dtensor_compile.ir.known_groups import know_group, know_groups_of_this_job
from dtensor_compile.ir.mesh import forget_meshes, mesh_text, parse_mesh
from dtensor_compile.ir.rank_free import dims_of_name, name_on_all_ranks, rank_free
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.offline.simulated_job import job
from dtensor_compile.ops.expand import local_shape
from dtensor_compile.ops.redistribute import carry_out
from dtensor_compile.options import Options
from dtensor_compile.recording.recorder import record, watch_graphs
from dtensor_compile.report.build_command import share
from dtensor_compile.runtime import artifacts
from dtensor_compile.runtime.artifacts import MANIFEST, ArtifactsError, made_for, shared_rank, write
from dtensor_compile.stages import program
from dtensor_compile.stages.compiling import code_header
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks
from tests.cases import mostly_slow

RANKS = 4
OPTIONS = {"artifacts": "nothing was built here"}


class Words(nn.Module):
    """A lookup in a table that is sharded by rows, two matmuls, and a loss."""

    def __init__(self, rows):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(rows, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        return self.down(self.up(self.table(tokens)).relu()).square().mean()


def words(mesh, rows=16):
    torch.manual_seed(0)
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    return parallelize_module(Words(rows), mesh, plan), torch.arange(24).reshape(2, 12) % rows


def keep_a_shard(x):
    """Of replicated values each rank keeps a shard."""
    return (x * 2).redistribute(placements=[Shard(1)])


def lowered(program, options, rank):
    """The lowered graphs of a program on one simulated rank."""
    texts = []
    torch._dynamo.reset()
    with job(RANKS, rank), watch_graphs(lambda stage, graph: texts.append(str(graph)) if stage == "lowered" else None):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        program(mesh, lambda function: torch.compile(function, backend="dtensor_aten", options=options))
    assert texts
    return texts


def trained(mesh, compiled, rows=16):
    model, tokens = words(mesh, rows)
    loss = compiled(model)(tokens)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def sliced(mesh, compiled):
    x = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Replicate()]).requires_grad_()
    out = compiled(keep_a_shard)(x)
    out.sum().backward()
    return [out, x.grad]


@pytest.mark.parametrize("program", [trained, sliced])
def test_graphs_are_the_same_on_all_ranks(program):
    first, *others = (lowered(program, OPTIONS, rank) for rank in range(RANKS))
    assert all(texts == first for texts in others)
    assert lowered(program, None, 0) != lowered(program, None, 1), "the test is of something"


def test_torchs_setting_makes_graphs_rank_free():
    configs = [getattr(place, "config", None) for place in (torch.compiler, torch.distributed)]
    config = next((c for c in configs if hasattr(c, "compile_on_one_rank")), None)
    if config is None:
        pytest.skip("this torch has no such setting")
    with config.patch(compile_on_one_rank=True):
        assert lowered(sliced, None, 0) == lowered(sliced, None, 1) == lowered(sliced, OPTIONS, 0)
    assert lowered(sliced, None, 0) != lowered(sliced, None, 1)


def test_graphs_of_uneven_shards_are_those_of_the_rank():
    def program(mesh, compiled):
        return trained(mesh, compiled, rows=18)

    assert lowered(program, OPTIONS, 0) != lowered(program, OPTIONS, 3)


@pytest.mark.parametrize("rows", mostly_slow([16, 18], 18), ids=["even", "uneven"])
@pytest.mark.parametrize("program", [trained, sliced])
def test_graphs_that_read_their_rank_have_eagers_numbers(program, rows):
    run_on_ranks(RANKS, numbers_of_eager, program, rows)


def numbers_of_eager(program, rows):
    mesh = make_mesh((RANKS,), ("tp",))
    more = {"rows": rows} if program is trained else {}
    want = program(mesh, lambda f: f, **more)
    got = program(mesh, lambda f: torch.compile(f, backend="dtensor_aten", fullgraph=True, options=OPTIONS), **more)
    for mine, eagers in zip(got, want, strict=True):
        torch.testing.assert_close(*(x.full_tensor() if isinstance(x, DTensor) else x for x in (mine, eagers)))


@on_ranks(RANKS)
def test_every_redistribution_of_even_shards_is_the_same_read_at_run_time():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    text, shape = mesh_text(mesh), [4, 8]
    specs = ["".join(pair) for pair in itertools.product(("R", "S(0)", "S(1)", "P(sum)"), repeat=2)]
    torch.manual_seed(torch.distributed.get_rank())
    for source, target in itertools.product(specs, specs):
        size = local_shape(parse_spec(source), parse_mesh(text), mesh.get_coordinate(), shape)
        x = torch.randn(size)
        want = carry_out(x, source, target, text, shape)
        with rank_free():
            got = carry_out(x, source, target, text, shape)
        assert torch.equal(got, want) and got.stride() == want.stride(), (source, target)


@on_ranks(2)
def test_a_process_group_has_one_name_on_all_ranks():
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))
    name = name_on_all_ranks(mesh_text(mesh), (0,))
    assert dims_of_name(name) == ("cpu[dp=2:1,tp=1:1]@2", (0,)) and dims_of_name("0") is None
    assert not group_exists(name)
    know_group(name)
    assert group_named(name) is mesh.get_group("dp")
    forget_meshes()
    know_group(name)  # found again by its ranks
    assert group_named(name).size() == 2


def sharded_by_a_wrapper(mesh, compiled):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh)
    compiled(model)(torch.ones(2, 8)).sum().backward()


def test_a_program_is_the_same_whatever_the_addresses_of_its_objects():
    seen = []
    with mock.patch.object(program, "shared_rank", lambda folder, digest: seen.append(digest)):
        kept = [lowered(sharded_by_a_wrapper, OPTIONS, rank) for rank in (0, 1, 0)]
    assert len(seen) == 3 and len(set(seen)) == 1, seen
    assert kept[0] == kept[1]


def test_constants_are_named_by_kind_and_order():
    graph = torch.fx.Graph()
    names = ["G_dtensor_compile_mesh_env_140107978396624_c0_", "l_x_", "G_dtensor_compile_mesh_1234_c12_"]
    graph.output([graph.placeholder(name) for name in [*names, "G_dtensor_compile_mesh_99_c0_"]])
    gm = torch.fx.GraphModule({}, graph)
    name_constants(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    assert [node.target for node in inputs] == ["constant_mesh_env_0", "l_x_", "constant_mesh_0", "constant_mesh_1"]
    assert [node.name for node in inputs] == [node.target for node in inputs]


def test_code_makes_known_what_it_needs():
    name = name_on_all_ranks("cpu[tp=2:1]@2", (0,))

    def code(*arguments, operator=torch.ops._c10d_functional.all_reduce.default):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(operator, (graph.placeholder("x"), *arguments)))
        return code_header(torch.fx.GraphModule({}, graph))

    assert code("sum", "0") == []
    assert code("sum", name) == ["from dtensor_compile.ir.known_groups import know_group", f"know_group({name!r})"]
    shard = torch.ops.dtensor_compile.shard_of.default
    assert code(0, "cpu[tp=2:1]@2", 0, operator=shard) == ["import dtensor_compile.backend"]


def test_groups_are_known_again_in_the_next_job_of_a_process():
    name = name_on_all_ranks("cpu[tp=2:1]@2", (0,))
    for _ in range(2):
        with job(2, 1):
            know_groups_of_this_job()
            know_group(name)
            assert group_named(name).rank() == 1
    with job(2, 0):
        assert not group_exists(name)
        know_groups_of_this_job()
        assert group_named(name).rank() == 0


def test_graphs_differ_where_a_tensor_that_they_hold_or_a_subgraph_differs():
    def text(value, inner=torch.sin):
        gm = torch.fx.symbolic_trace(lambda x: x + 1)
        gm.register_buffer("held", torch.tensor([1, value]))
        gm.part = torch.fx.symbolic_trace(lambda x: inner(x))
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.get_attr("held")
            gm.graph.get_attr("part")
        gm.recompile()
        return artifacts._text(gm, "val")

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1) != text(1, torch.cos)


def test_ranks_share_graphs_that_are_equal():
    name = name_on_all_ranks("cpu[tp=4:1]@4", (0,))
    tp, job_group = {name: [0, 1, 2, 3]}, {"0": [0, 1, 2, 3]}
    lowered = {
        0: {"a": ("x", tp), "b": ("z", job_group)},
        1: {"a": ("y", tp), "b": ("z", job_group)},
        2: {"a": ("x", tp), "b": ("z", {"0": [2, 3]})},
    }
    assert share(lowered) == {"a": {0: 0, 1: 1, 2: 0}, "b": {0: 0, 1: 0, 2: 2}}


def test_the_option_takes_a_folder(tmp_path):
    assert Options.parse(None, {"artifacts": tmp_path}).artifacts == str(tmp_path)
    for wrong in (3, "", ["x"]):
        with pytest.raises(OptionError, match="takes the path of a folder"):
            Options.parse(None, {"artifacts": wrong})


# ---- what does not fit ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one program for two ranks, whose caches hold one file, and an empty cache folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    built = tmp_path / "built"
    (built / "ab").mkdir(parents=True)
    (built / "ab" / "kernel").write_text("code")
    with job(2, 1):
        write(tmp_path / "artifacts", 2, {"a.b.c": {0: 0, 1: 0}}, {"a.b.c": {0: {"0": [0, 1]}}}, {0: built})
        yield tmp_path / "artifacts"


def refused(folder, digest="a.b.c"):
    artifacts._read.cache_clear()
    artifacts._unpacked.cache_clear()
    with pytest.raises(ArtifactsError) as caught:
        shared_rank(str(folder), digest)
    return str(caught.value)


def test_a_rank_takes_the_caches_of_the_rank_whose_graphs_it_shares(folder):
    assert shared_rank(str(folder), "a.b.c") == 0
    assert (folder.parent / "own" / "ab" / "kernel").read_text() == "code"


def test_a_program_that_was_not_built(folder):
    message = "it is not among the programs that were built; the most similar has other "
    assert refused(folder, "a.b.x") == message + "code"
    assert refused(folder, "x.y.c") == message + "options and shapes, placements or meshes of its inputs"


def test_what_is_part_of_a_program():
    def digest(rows=4, options=None):
        seen = []
        torch._dynamo.reset()
        with job(2, 0), mock.patch.object(program, "shared_rank", lambda folder, digest: seen.append(digest)):
            x = distribute_tensor(torch.ones(rows, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
            torch.compile(lambda x: x + 1, backend="dtensor_aten", options={**OPTIONS, **(options or {})})(x)
        return seen[0].split(".")

    mine = digest()
    assert digest() == mine
    assert [a == b for a, b in zip(mine, digest(options={"schedule": False}))] == [False, True, True]
    assert [a == b for a, b in zip(mine, digest(rows=6))] == [True, False, False]


def test_a_process_group_of_other_ranks(folder):
    text = (folder / MANIFEST).read_text()
    for name, ranks in (("0", [0]), ("7", [0, 1])):
        manifest = json.loads(text)
        manifest["programs"]["a.b.c"]["groups"]["0"] = {name: ranks}
        (folder / MANIFEST).write_text(json.dumps(manifest))
        assert f"the process group {name} was that of the ranks {', '.join(map(str, ranks))}" in refused(folder)


@pytest.mark.parametrize(
    "key, value, message",
    [("torch", "1.0", "torch 1.0, here"), ("ranks", 8, "ranks 8, here 2"), ("CPU threads", 99, "CPU threads 99, here")],
)
def test_another_release_job_or_machine(folder, key, value, message):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["made_for"][key] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert message in refused(folder)


def test_a_damaged_or_missing_manifest(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])
    assert "manifest.json is damaged" in refused(folder)
    (folder / MANIFEST).write_text("{}")
    assert "manifest.json is damaged: KeyError" in refused(folder)
    (folder / MANIFEST).unlink()
    assert "manifest.json cannot be read" in refused(folder)


def test_damaged_caches_are_never_unpacked(folder):
    path = folder / "caches-0.tar"
    path.write_bytes(path.read_bytes()[:-700])
    assert "caches-0.tar is damaged" in refused(folder)
    assert not (folder.parent / "own" / "ab").exists()
    path.unlink()
    assert "cannot be unpacked" in refused(folder)


def test_an_archive_that_would_write_elsewhere(folder):
    import tarfile

    path = folder / "caches-0.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(folder / MANIFEST, "../outside")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["caches"]["0"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "../outside is no file of a cache" in refused(folder)
    assert not (folder.parent / "outside").exists()


def test_a_cache_folder_that_cannot_be_written(folder, monkeypatch):
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder.parent / "file"))
    assert "cache folder cannot be made" in refused(folder)


def test_a_program_without_artifacts_is_compiled_and_says_why(monkeypatch):
    monkeypatch.setattr(artifacts, "_reported", set())
    with job(2, 0), record() as recording, mock.patch.object(artifacts.log, "warning") as warning:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        torch._dynamo.reset()
        for _ in range(2):
            torch.compile(lambda x: x + 1, backend="dtensor_aten", options={"artifacts": "not there"})(x)
    (decision,) = [d for d in recording.decisions if d.kind == "artifacts"]
    assert decision.left_alone and "manifest.json cannot be read" in decision.reason
    assert [call.args for call in warning.call_args_list] == [("%s", decision.reason)]
    assert set(made_for(2)) >= {"torch", "dtensor_compile", "machine", "ranks"}


def test_a_graph_without_kernels_has_no_artifacts(monkeypatch):
    monkeypatch.setattr(program, "shared_rank", lambda folder, digest: 0)
    with job(2, 0), record() as recording:
        torch._dynamo.reset()
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        torch.compile(lambda x: x + 1, backend="dtensor_aten", options=OPTIONS)(x)
    (decision,) = [d for d in recording.decisions if d.kind == "artifacts"]
    assert decision.left_alone and "compiles nothing" in decision.reason


# ---- torch's own way to save a program -----------------------------------------------------------------------------

AHEAD = """
    import sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    place = torch.compiler if hasattr(torch.compiler.config, "compile_on_one_rank") else torch.distributed
    place.config.compile_on_one_rank = True
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"0": RowwiseParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    layers = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8))
    torch.manual_seed(0)
    model, tokens = parallelize_module(layers, mesh, plan), torch.arange(24).reshape(2, 12) % 16


    def run(model, tokens):
        return model(tokens)


    def results(call):
        out = call(model, tokens)
        out.sum().backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad()
        return [out.detach(), *gradients]


    want = results(run)
    if sys.argv[1] == "save":
        call = torch.compile(run, backend="dtensor", fullgraph=True).aot_compile(((model, tokens), {}))
        if dist.get_rank() == 0:
            call.save_compiled_function("program")
    else:
        call = torch.compiler.load_compiled_function(open("program", "rb"))
    for _ in range(2):
        torch.testing.assert_close(results(call), want)
    print(f"rank {dist.get_rank()} equal\\n", end="")
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.compiler, "load_compiled_function"), reason="this torch saves no programs")
def test_what_aot_compile_saves_on_one_rank_runs_on_all(tmp_path):
    (tmp_path / "job.py").write_text(textwrap.dedent(AHEAD))
    for what in ("save", "load"):
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "job.py", what]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / what)},
        )  # fmt: skip
        assert sorted(done.stdout.splitlines()) == ["rank 0 equal", "rank 1 equal"], done.stderr[-3000:]


@pytest.mark.skipif(not hasattr(torch.compiler, "load_compiled_function"), reason="this torch saves no programs")
def test_aot_compile_refuses_a_program_that_needs_code_around_its_graph():
    def writes(x):
        x.add_(1)
        return x * 2

    with job(2, 0):
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        compiled = torch.compile(writes, backend="dtensor", fullgraph=True)
        with pytest.raises(NotSavedError, match="it writes to inputs, which may share memory"):
            compiled.aot_compile(((x,), {}))


# ---- from end to end -----------------------------------------------------------------------------------------------

TARGET = """
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, tokens):
            return self.down(self.up(self.table(tokens)).relu())


    def built(mesh):
        torch.manual_seed(0)
        plan = {"table": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(Net(), mesh, plan), torch.arange(24).reshape(2, 12) % 16
"""

JOB = """
    import json, sys
    import torch, torch.distributed as dist
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from target import built

    dist.init_process_group("gloo")


    def results(wrap):
        model, tokens = built(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        out = wrap(model)(tokens)
        out.sum().backward()
        return [out.detach(), *(p.grad.full_tensor() for p in model.parameters())]


    want = results(lambda model: model)
    got = results(lambda model: torch.compile(model, backend="dtensor", options={"artifacts": sys.argv[1]}))
    torch.testing.assert_close(got, want)
    found = json.dumps([dist.get_rank(), counters["aot_autograd"]["autograd_cache_hit"]])
    print(f"{found}\\n", end="")  # in one piece: two ranks print
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_was_built_without_a_job_serves_the_ranks_of_one(tmp_path):
    (tmp_path / "target.py").write_text(textwrap.dedent(TARGET))
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))

    def run(*command):
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    monkeypatched = pytest.MonkeyPatch()
    with monkeypatched.context() as context:
        context.setenv("OMP_NUM_THREADS", "1")
        message = run("dtensor_compile.cli", "build", "target.py:built", "--mesh", "tp=2", "-o", "artifacts")
        assert "1 program for 2 ranks" in message and "1 with the same graphs on all ranks, 1 compiled" in message
        context.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))
        printed = run("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "job.py", "artifacts")
    found = sorted(json.loads(line) for line in printed.splitlines() if line.startswith("["))
    assert found == [[0, 1], [1, 1]]
