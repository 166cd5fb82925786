"""Compiled graphs that come from Inductor's caches belong to the rank that loads them."""

import os
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from dtensor_compile import offline
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.compat.inductor.repair_libraries import is_whole_library
from dtensor_compile.testing import make_mesh

SCRIPT = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(0)
style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
model = parallelize_module(nn.Embedding(11, 6), mesh, style)
tokens = torch.randint(11, (3, 4))
eager = model(tokens)
compiled = torch.compile(model, backend="dtensor", fullgraph=True)
out = compiled(tokens)
torch.testing.assert_close(out, eager)
out.sum().backward()
torch._dynamo.reset()
torch.testing.assert_close(compiled(tokens), eager)  # compiled again, from what the first time left in the cache
print(f"rank {dist.get_rank()} equal\\n", end="", flush=True)
dist.destroy_process_group()
"""


def run_job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return sorted(result.stdout.split("\n"))


@pytest.mark.slow
def test_a_cache_shared_by_the_ranks_gives_each_its_own_graph(tmp_path):
    # The lookup of a row-wise embedding differs between ranks, so one rank's graph on another gives wrong values.
    for _ in range(2):
        answers = run_job(tmp_path)
        assert "rank 0 equal" in answers and "rank 1 equal" in answers


def step(x, w):
    loss = (x @ w).redistribute(placements=[Replicate()]).square().mean()
    loss.backward()
    return loss.detach()


def batch_and_weight(mesh, rows):
    """A batch with so many rows on each rank, and a replicated weight."""
    return (
        DTensor.from_local(torch.randn(size, 4), mesh, [placement], run_check=False).requires_grad_()
        for size, placement in ((rows, Shard(0)), (4, Replicate()))
    )


@pytest.mark.slow
def test_a_graph_whose_global_sizes_follow_from_local_ones_is_found_again():
    # Of such sizes the graph gets `2*s3` as an input, and `s3` by the local tensor alone.
    def run(*batches):
        torch._dynamo.reset()
        counters.reset()
        compiled = torch.compile(step, backend="dtensor", fullgraph=True)
        for rows in batches:
            x, w = batch_and_weight(mesh, rows)
            compiled(x, w)
            assert x.grad.shape == x.shape and x.grad.placements == x.placements
        found = torch._dynamo.utils.counters["inductor"]
        return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]

    with offline.job(2), fresh_caches():
        mesh = make_mesh((2,), ("dp",))
        assert run(2, 3) == (0, 2)
        assert run(2, 3, 5) == (2, 0)
        # The kernel for up to 512 rows sums in another way than that for more: it is guarded by the local size.
        assert run(2, 600) == (1, 1)


def _plain(x, w):
    return (x @ w).redistribute(placements=[Replicate()]).tril().sum()


def _sharded(x, w):
    return (x @ w).sin()


@pytest.mark.slow
@pytest.mark.parametrize("program", [_plain, _sharded])
def test_a_graph_over_symbolic_sizes_is_kept_whole(program):
    def run(*batches):
        torch._dynamo.reset()
        counters.reset()
        compiled = torch.compile(program, backend="dtensor", fullgraph=True, dynamic=True)
        for rows in batches:
            x, w = batch_and_weight(mesh, rows)
            results, grads = [], []
            for function in (compiled, program):
                out = function(x, w)
                results.append(out.to_local())
                grads.append([grad.to_local() for grad in torch.autograd.grad(out, (x, w), torch.ones_like(out))])
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*grads)
        found = torch._dynamo.utils.counters["aot_autograd"]
        return found["autograd_cache_hit"], found["autograd_cache_miss"]

    with offline.job(2), fresh_caches():
        mesh = make_mesh((2,), ("dp",))
        assert run(5, 6) == (0, 1)
        assert run(6, 9, 5) == (1, 0)


@pytest.mark.parametrize(
    ("by_chance", "apart"),
    [(((4, 4),), ((6, 4),)), pytest.param(((3, 5), (3, 7)), ((3, 5), (9, 7)), marks=pytest.mark.slow)],
    ids=["sizes of one tensor", "sizes of two"],
)
def test_local_sizes_that_are_equal_by_chance(by_chance, apart):
    with offline.job(2), fresh_caches():
        mesh = make_mesh((2,), ("dp",))

        def program(*tensors):
            return tuple(x * 2 for x in tensors)

        compiled = torch.compile(program, backend="dtensor", fullgraph=True, dynamic=True)
        for sizes in (by_chance, apart):
            tensors = [DTensor.from_local(torch.randn(size), mesh, [Shard(0)], run_check=False) for size in sizes]
            for got, want in zip(compiled(*tensors), program(*tensors)):
                assert got.shape == want.shape and torch.equal(got.to_local(), want.to_local())


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: torch.randn(4, 4).t(), id="transposed"),
        pytest.param(lambda: torch.randn(3, 4), id="smaller"),
        pytest.param(lambda: torch.randn(4, 4, dtype=torch.complex64).conj().imag, id="negative"),
    ],
)
def test_local_tensors_of_one_spec(other):
    """A DTensor with the spec of a cached graph's, whose local tensor is another kind, has a graph of its own."""
    with offline.job(2), fresh_caches():
        mesh = make_mesh((2,), ("dp",))
        for make in (lambda: torch.randn(4, 4), other):
            torch._dynamo.reset()
            compiled = torch.compile(torch.sin, backend="dtensor", fullgraph=True)
            x = DTensor.from_local(make(), mesh, [Shard(0)], run_check=False, shape=torch.Size([7, 4]), stride=(4, 1))
            assert torch.allclose(compiled(x).to_local(), x.to_local().sin())


def test_parts_of_a_tensor_that_all_ranks_have_share_a_graph():
    with offline.job(2), fresh_caches():
        mesh = make_mesh((2,), ("dp",))
        whole = torch.randn(8, 4)
        for part in whole.chunk(2):
            torch._dynamo.reset()
            counters.reset()
            x = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            assert torch.equal(torch.compile(torch.neg, backend="dtensor", fullgraph=True)(x).to_local(), -part)
        assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1


class Rows(TwoTensor):
    """A tensor of somebody else's, whose context has a size that it reads where it is given a gradient."""

    expected = []

    def __tensor_flatten__(self):
        return ["a", "b"], (self.a.shape[0],)

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Rows(inner["a"], inner["b"], size, stride)

    def __coerce_same_metadata_as_tangent__(self, context, expected_type=None):
        self.expected.append(context)
        return self


def test_contexts_of_other_tensors_keep_their_sizes():
    with offline.job(2):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x.sin(), backend="dtensor_aten", dynamic=True)
        for rows in (5, 6):
            x = Rows(torch.ones(rows, 2), torch.ones(rows, 2)).requires_grad_()
            out = compiled(x)
            out.backward(torch.ones_like(out))
            assert torch.equal(x.grad.a, torch.ones(rows, 2).cos())
    assert (None,) not in Rows.expected


ALONE = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (1,)), [Shard(0)])
out = torch.compile(lambda x: x.sin() * 2, backend="dtensor", fullgraph=True)(x)
torch.testing.assert_close(out.to_local(), torch.arange(8.0).sin() * 2)
"""


@pytest.mark.slow
def test_an_unfinished_library_in_the_cache_is_built_again(tmp_path):
    # A process that is killed while the compiler runs leaves an empty file, or a part of one.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    libraries = []
    for run, kept in enumerate((1.0, 0.0, 0.6)):
        for library in libraries:
            content = library.read_bytes()
            library.unlink()  # another process may have the file in its memory
            library.write_bytes(content[: int(kept * len(content))])
            assert not is_whole_library(library)
        command = [sys.executable, "-c", ALONE, str(tmp_path / f"store{run}")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        libraries = [p for p in (tmp_path / "cache").rglob("*.so") if p.parent.name != "lock"]
        assert libraries and all(is_whole_library(library) for library in libraries)


@pytest.mark.parametrize("content, whole", [(b"", False), (bytes(4096), False), (b"MZ" + bytes(100), True)])
def test_what_counts_as_a_whole_library(tmp_path, content, whole):
    path = tmp_path / "x.so"
    path.write_bytes(content)
    assert is_whole_library(str(path)) is whole


KEYS = """
import contextlib
import torch
from torch._inductor.codecache import FxGraphCachePickler
from dtensor_compile.compat.inductor.cache_keys import keys_of_any_process

for scope in (keys_of_any_process, contextlib.nullcontext):
    with scope():
        print(FxGraphCachePickler(torch.fx.symbolic_trace(torch.nn.Identity())).get_hash(torch.ones(2, 3)))
"""


#: As `multiprocessing` does with the program of a process that it spawns.
EARLIER = """
import sys, types

program = sys.modules["__mp_main__"] = types.ModuleType("__mp_main__")
import torch
program.torch = torch
"""


@pytest.mark.slow
def test_keys_do_not_depend_on_who_imported_torch_first():
    def keys(script):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.check_output([sys.executable, "-c", script], text=True, env=environment, timeout=120).split()

    (mine, stock), (again, other) = keys(KEYS), keys(EARLIER + KEYS)
    assert again == mine
    assert other != stock, "torch mends it by itself now"


SAVED = """
import pathlib, sys
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from dtensor_compile import offline

with offline.job(2, rank=1):
    x = distribute_tensor(torch.arange(16.0).reshape(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    compiled = torch.compile(lambda x: x.redistribute(placements=[Replicate()]).sin(), backend="dtensor")
    path = pathlib.Path(sys.argv[1])
    if path.exists():
        torch.compiler.load_cache_artifacts(path.read_bytes())
    compiled(x)
    if not path.exists():
        path.write_bytes(torch.compiler.save_cache_artifacts()[0])
    print("found", counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_what_torch_saves_of_its_caches_is_found_in_another_folder(tmp_path):
    found = []
    for folder in ("first", "second"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SAVED, str(tmp_path / "saved")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        found.append(result.stdout.splitlines()[-1])
    assert found == ["found 0", "found 1"]
