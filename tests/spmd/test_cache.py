"""Programs with annotations are kept in AOTAutograd's cache, under a key that has the marks."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.spmd import Mesh, mark_sharding


@pytest.mark.slow
def test_the_same_marks_hit_and_other_marks_miss():
    def program(x, w):
        h = torch.relu(x @ w)
        mark_sharding(h, mesh, ("tp", None))
        return h * 2

    with simulated_job(2, 0), fresh_caches(), torch.no_grad():
        mesh = Mesh(range(2), (2,), ("tp",))
        mesh.to_device_mesh("cpu")
        x, w, hits = torch.randn(4, 4), torch.randn(4, 4), []
        for spec in ((None, "tp"), (None, "tp"), ("tp", None)):
            mark_sharding(w, mesh, spec)
            torch._dynamo.reset()
            counters.clear()
            torch.compile(program, backend="dtensor", fullgraph=True)(x, w)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
        assert hits == [0, 1, 0]
    torch._dynamo.reset()


SCRIPT = """
import sys, torch
from torch._dynamo.utils import counters
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.spmd import Mesh, mark_sharding

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        h = torch.nn.functional.dropout(self.up(self.norm(x)), 0.5)
        h[0] = 1
        return self.down(h)

with simulated_job(4, 0):
    mesh = Mesh([0, 1, 3, 2], (2, 2), ("dp", "tp"))
    model, x = Block(), torch.ones(4, 8)
    mark_sharding(model.up.weight, mesh, (sys.argv[1], None))
    mark_sharding(x, mesh, ("dp", None))
    torch.compile(model, backend="dtensor", fullgraph=True)(x).sum().backward()
    print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


@pytest.mark.slow
def test_another_process_hits_and_other_marks_miss(tmp_path):
    root = str(pathlib.Path(__file__).parents[2])
    counts = []
    for axis in ("tp", "tp", "dp"):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, axis], env=env, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        counts.append(done.stdout.split()[-2:])
    assert counts == [["0", "1"], ["1", "0"], ["0", "1"]], counts
