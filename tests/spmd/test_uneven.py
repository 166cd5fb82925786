"""Marks that cut unevenly, so that ranks hold other shapes or nothing: the plain program's numbers, and one decision
for all ranks.
"""

import pytest
import torch
import torch.nn.functional as F

from dtensor_compile import record
from dtensor_compile.spmd import Mesh, mark_sharding
from dtensor_compile.testing import on_ranks, run_on_ranks

PROGRAMS = {
    "amax": lambda x: (x * 2).amax(0),
    "max": lambda x: (x * 2).max(),
    "min": lambda x: x.min(0)[0] + 1,
    "argmax": lambda x: x.argmax(0),
    "aminmax": lambda x: x.aminmax(dim=0).max,
    "median": lambda x: x.median(0)[0],
    "softmax": lambda x: torch.softmax(x, 0).sum(1),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(0),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(0),
    "sort": lambda x: x.sort(0)[0],
    "cumsum": lambda x: torch.cumsum(x, 0),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long)),
    "pooled": lambda x: F.adaptive_avg_pool1d(x[None], 2),
    "flat": lambda x: x.flatten().view(-1, 4),
}
#: Those that fall back to whole tensors where a rank has no rows.
NEED_ROWS = {"amax", "max", "min", "argmax", "aminmax", "median"}


def _decided(rows, names):
    mesh, found = Mesh(range(4), (2, 2), ("dp", "tp")), {}
    for name in names:
        program = PROGRAMS[name]
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        mark_sharding(x, mesh, (("dp", "tp"), None))
        torch._dynamo.reset()
        with record() as recording:
            got = torch.compile(program, backend="dtensor_aten", fullgraph=True)(x)
        torch.testing.assert_close(got, program(x), msg=lambda text: f"{name} of {rows} rows: {text}")
        ours = recording.report().ours
        found[name] = (
            [d.reason for d in ours.decisions if d.kind == "replicate_fallback"],
            ours.totals.all.count,
            ours.totals.all.bytes,
        )
    return found


@pytest.mark.slow
def test_all_ranks_fall_back_or_none():
    """3 rows on 4 ranks: the last one has none, and could not run what the others can; with 5 rows each has some."""
    for rows in (3, 5):
        found = run_on_ranks(4, _decided, rows, tuple(PROGRAMS), timeout=280)
        for other in found[1:]:
            assert {name: row[:2] for name, row in other.items()} == {name: row[:2] for name, row in found[0].items()}
        fell = {
            name
            for name, (reasons, *_) in found[0].items()
            if any("runs on full tensors" in reason for reason in reasons)
        }
        assert (fell >= NEED_ROWS) == (rows == 3), (rows, found[0])


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("amax", "max", "std", "softmax", "logsumexp", "prod"), marks=pytest.mark.slow, id="all"),
        pytest.param(("amax", "softmax"), id="some"),
    ],
)
@on_ranks(4, timeout=280)
def test_gradients_where_a_rank_has_nothing(names):
    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    for name in names:
        grads = []
        for compiled in (False, True):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
            torch._dynamo.reset()
            if compiled:
                mark_sharding(x, mesh, (("dp", "tp"), None))
            run = torch.compile(PROGRAMS[name], backend="dtensor_aten", fullgraph=True) if compiled else PROGRAMS[name]
            run(x).square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, msg=lambda text: f"{name}: {text}")
