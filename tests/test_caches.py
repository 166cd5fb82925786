"""Compiled graphs that come from Inductor's caches belong to the rank that loads them."""

import os
import subprocess
import sys

SCRIPT = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = parallelize_module(nn.Embedding(11, 6), mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return sorted(result.stdout.split("\n"))


def test_a_cache_shared_by_the_ranks_gives_each_its_own_graph(tmp_path):
    # The lookup of a row-wise embedding differs between ranks, so one rank's graph on another gives wrong values.
    for _ in range(2):
        answers = run_job(tmp_path)
        assert "rank 0 equal" in answers and "rank 1 equal" in answers
