"""`record` and `explain`, on real ranks: what is recorded of this backend and of others, and that nothing of it
stays.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dtensor_compile
from dtensor_compile.report.model import from_json, to_json
from dtensor_compile.testing import make_mesh, on_ranks


class Gathers(torch.nn.Module):
    """Gathers its weight twice, the second time for nothing; what a sum over a sharded dim needs is implicit."""

    def __init__(self, mesh):
        super().__init__()
        self.weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))

    def forward(self, x):
        whole = self.weight.redistribute(placements=[Replicate()])
        again = self.weight.redistribute(placements=[Replicate()])
        return ((whole + again) @ x).to_local()


def on_mesh():
    mesh = make_mesh((2,), ("tp",))
    return Gathers(mesh), DTensor.from_local(torch.ones(4, 3), mesh, [Replicate()])


@on_ranks(2)
def test_explain_gives_the_report_of_a_call():
    model, x = on_mesh()
    report = dtensor_compile.explain(model, stock=True)(x)
    assert (report.world, report.simulated, report.target) == (2, False, "Gathers")
    assert report.ours.breaks == () and report.stock.breaks == ()
    assert from_json(to_json(report)) == report
    assert model.weight.grad is not None


@on_ranks(2)
def test_what_the_passes_did_to_a_redistribution():
    model, x = on_mesh()
    ours = dtensor_compile.explain(model, backward=False)(x).ours
    sent, shared = (r for r in ours.redistributions if r.phase == "forward")
    assert (sent.fate, sent.bytes_before, sent.bytes) == (
        "sent",
        4 * 4 * 4,
        4 * 3 * 4,
    )  # behind the product, which is smaller
    assert (shared.fate, shared.bytes_before, shared.bytes) == ("removed", 4 * 4 * 4, 0)
    assert shared.decided_by == "share_equal_redistributions" and "equal to" in shared.reason
    assert [(r.fate, r.plan) for r in ours.redistributions if r.phase == "backward"][0] == (
        "local",
        ("slice[tp] R->S(0)",),
    )
    assert shared.source.code.startswith("again =") and sent.source.code.startswith("whole =")
    decision = ours.decisions[0]
    assert (decision.kind, decision.source.line) == ("share_equal_redistributions", shared.source.line)


@on_ranks(2)
def test_stock_and_ours_are_counted_by_the_same_code():
    model, x = on_mesh()
    report = dtensor_compile.explain(model, stock=True)(x)
    assert report.stock.totals.all.count == report.ours.totals.all.count
    assert report.stock.redistributions == () and {c.kind for c in report.stock.collectives} >= {"all_gather"}


@on_ranks(2)
def test_a_recording_sees_breaks_and_recompiles_of_any_backend():
    def steps(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    torch._dynamo.reset()
    compiled = torch.compile(steps, backend="eager", dynamic=False)
    with dtensor_compile.record() as rec:
        compiled(torch.ones(4))
        compiled(torch.ones(5))
    side = rec.report().ours
    (this,) = side.breaks
    assert (this.cause, this.count, this.source.code) == ("break-asked-for", 2, "torch._dynamo.graph_break()")
    assert [r.cause for r in side.recompiles] == ["size", "size"]
    assert all(r.measured_seconds > 0 and r.function == "steps" for r in side.recompiles)
    assert side.compile_seconds >= max(r.measured_seconds for r in side.recompiles)


@on_ranks(2)
def test_a_function_that_was_compiled_again_counts_once():
    torch._dynamo.reset()
    mesh = make_mesh((2,), ("tp",))
    compiled = torch.compile(
        lambda x: x.redistribute(placements=[Replicate()]) + 1, backend="dtensor_aten", dynamic=False
    )
    with dtensor_compile.record() as rec:
        for rows in (4, 6):
            compiled(distribute_tensor(torch.ones(rows, 4), mesh, [Shard(0)]))
    side = rec.report().ours
    assert len(rec.graphs) == 2 and len(side.graphs) == 1
    assert [r.shape for r in side.redistributions] == [(6, 4)] and side.totals.all.count == 1


@on_ranks(2)
def test_nothing_of_a_recording_stays():
    from torch._dynamo import convert_frame, symbolic_convert
    from torch._dynamo.backends import common
    from torch._inductor import config

    def state():
        translator = symbolic_convert.InstructionTranslatorBase.log_graph_break
        return convert_frame._compile, translator, common.aot_module_simplified, config.post_grad_custom_post_pass

    before = state()
    with dtensor_compile.record(others=True), dtensor_compile.record():
        assert state() != before
    assert state() == before


def two_layers(x, w):
    for _ in range(2):
        x = torch.nn.functional.relu(x @ w)
    return x


@on_ranks(2)
def test_the_operator_that_forced_a_redistribution_is_named():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    w = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    ours = dtensor_compile.explain(two_layers)(x, w).ours
    forced = {(r.before, r.after, r.operator) for r in ours.redistributions if not r.explicit}
    assert ("P(sum)", "R", "aten.relu.default") in forced, forced
    assert all("relu(x @ w)" in r.source.code for r in ours.redistributions)


@on_ranks(2)
def test_a_graph_that_is_kept_out_of_the_caches_says_why():
    mesh = make_mesh((2,), ("tp",))
    table = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([0, 5]), mesh, [Replicate()])
    ours = dtensor_compile.explain(torch.nn.functional.embedding, backward=False)(rows, table).ours
    (decision,) = [d for d in ours.decisions if d.kind == "cache"]
    assert "every process compiles it: a result has a placement that a cache cannot write" in decision.reason
    model, x = on_mesh()
    assert not [d for d in dtensor_compile.explain(model)(x).ours.decisions if d.kind == "cache"]
