"""Programs with annotations are kept in AOTAutograd's cache, under a key that has the marks."""

import torch
from torch._dynamo.utils import counters

from dtensor_compile.compat.fake_group import simulated_job
from dtensor_compile.compat.inductor import fresh_caches
from dtensor_compile.spmd import Mesh, mark_sharding


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
