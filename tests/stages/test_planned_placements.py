"""``options={"plan": "global"}``: eager's numbers with other placements inside."""

import contextlib
import copy
import dataclasses
import functools
import math
import re
import unittest.mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dtensor_compile
from dtensor_compile.compat.dtensor import planned_calls
from dtensor_compile.compat.dtensor.program_calls import record_program
from dtensor_compile.compat.dtensor.step_record import BACKWARD
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import columns_and_rows as columns_and_rows_of
from dtensor_compile.global_plan.choose_placements import Choice, choose_placements
from dtensor_compile.global_plan.equal_calls import classes_of_calls
from dtensor_compile.global_plan.message_passing import solve
from dtensor_compile.global_plan.pairwise_problem import IMPOSSIBLE, PairwiseProblem
from dtensor_compile.offline import job
from dtensor_compile.stages import planned_placements
from dtensor_compile.testing import on_ranks, run_on_ranks
from dtensor_compile.topology.devices import default_cluster
from dtensor_compile.topology.links import CLUSTERS
from tests.cases import mostly_slow

KIND = "global_plan"
slow = pytest.mark.slow


def distributed(module: nn.Module, mesh, placements) -> nn.Module:
    """The module with DTensor parameters, placed by name."""
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        placed = distribute_tensor(parameter.data, mesh, placements(name), src_data_rank=None)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(placed))
    return module


def gradients(run, model, *args):
    model.zero_grad()
    out = run(*args)
    results = out if isinstance(out, tuple) else (out,)
    sum((x**2).sum() for x in results).backward()
    return results, {name: p.grad for name, p in model.named_parameters()}


def compiled(model, *args, **options):
    torch._dynamo.reset()
    with dtensor_compile.record() as recording:
        run = torch.compile(model, backend="dtensor_aten", fullgraph=True, options=options)
        for _ in range(2):
            out, grads = gradients(run, model, *args)
    return out, grads, recording


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = RedistributesASum(), RedistributesASum()

    def forward(self, x):
        y = checkpoint(self.one, x, use_reentrant=False).tanh()
        return checkpoint(self.two, y, use_reentrant=False)


def greedy_results(model, *args, **options):
    """Placements of the results with DTensor's own choice."""
    return [x.placements for x in compiled(model, *args, **options)[0]]


def same(plain, model, *args, made_in=None, **options):
    """Compares with the plain model, placements of results with those of ``"greedy"`` (`made_in`), and of gradients
    with those of their parameters; returns the decisions about the plan, and the recording."""
    want, want_grads = gradients(plain, plain, *(x.full_tensor() for x in args))
    made_in = made_in or greedy_results(model, *args, **options)
    placed = {name: parameter.placements for name, parameter in model.named_parameters()}
    out, grads, recording = compiled(model, *args, plan="global", **options)
    assert [x.placements for x in out] == made_in
    for x, y in zip(out, want, strict=True):
        torch.testing.assert_close(x.full_tensor(), y)
    for name, grad in want_grads.items():
        torch.testing.assert_close(grads[name].full_tensor(), grad, msg=lambda text, name=name: f"{name}: {text}")
        assert grads[name].placements == placed[name]
    return [d.reason for d in recording.decisions if d.kind == KIND], recording


class Net(nn.Module):
    def __init__(self, dim=16, hidden=64):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def any_choice(seed, seconds=-1.0):
    """Stands in for the search: a possible choice at random, which seems to take so many seconds."""

    def choose(model, budget=None, overlaps=True):
        if all(len(variable.choices) == 1 for variable in model.variables if variable.kind == "call"):
            return choose_placements(model, budget, overlaps)  # of DTensor's own placements
        rng = np.random.default_rng(seed)
        problem = model.problem(0.0, 0.0, 0.0)
        own = [np.where(costs < IMPOSSIBLE, rng.random(len(costs)), IMPOSSIBLE) for costs in problem.own]
        noise = PairwiseProblem(own, problem.pairs)
        found = solve(noise, 0.1)
        assert found.cost < IMPOSSIBLE
        choice = [0] * len(problem.own)
        for i, x in zip(model.order(), found.choice):
            choice[i] = x
        return Choice(tuple(choice), seconds, 0.0, seconds, 0.0, 0.0, 0.0, True)

    return choose


def replicated(name):
    return [Replicate()]


def columns_and_rows(name):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.partition(".")[2])
    return [Replicate() if dim is None else Shard(dim)]


def sums_rows(name):
    return [{"down.weight": Shard(1), "up.weight": Shard(0)}.get(name, Replicate())]


def sums_rows_of_both(name):
    return sums_rows(name.partition(".")[2])


PROGRAMS = {
    "replicated": (lambda: nn.Sequential(Net(), Net()), replicated, (64, 16), Replicate()),
    "rows": (lambda: nn.Sequential(Net(), Net()), replicated, (64, 16), Shard(0)),
    "columns and rows": (lambda: nn.Sequential(Net(), Net()), columns_and_rows, (8, 16), Replicate()),
    "attention": (
        lambda: Attention(),
        lambda name: [Shard(0) if "out" not in name else Shard(1)],
        (4, 8, 16),
        Replicate(),
    ),
    "written to": (lambda: Written(), replicated, (8, 16), Shard(0)),
    "written through views": (lambda: WrittenThroughViews(), replicated, (8, 16), Replicate()),
    "returns what it wrote": (lambda: ReturnsWritten(), replicated, (8, 16), Shard(0)),
    "mixes plain tensors": (lambda: MixesPlainTensors(), replicated, (8, 16), Shard(0)),
    "looks up": (lambda: Looks(), replicated, (4, 8), Replicate()),
    "looks up once and reads twice": (lambda: LooksOnce(), replicated, (4, 8), Replicate()),
    "redistributes": (lambda: Redistributes(), replicated, (8, 16), Shard(0)),
    "uneven rows": (lambda: nn.Sequential(Net(), Net()), replicated, (7, 16), Shard(0)),
    "fewer rows than ranks": (lambda: nn.Sequential(Net(), Net()), replicated, (1, 16), Shard(0)),
    "uneven columns and rows": (lambda: nn.Sequential(Net(15, 7), Net(15, 7)), columns_and_rows, (7, 15), Replicate()),
    "uneven table": (lambda: LooksInUnevenRows(17), lambda name: [Shard(0)], (4, 8), Replicate()),
    "redistributes a sum": (lambda: RedistributesASum(), sums_rows, (8, 16), Replicate()),
    "redistributes in checkpointed regions": (lambda: Checkpointed(), sums_rows_of_both, (8, 16), Replicate()),
}


class Attention(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Written(nn.Module):
    """Writes to a tensor that it made."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = x @ self.weight
        z = y * 2
        z.add_(y).mul_(0.5)
        return z.relu() + y


class WrittenThroughViews(nn.Module):
    """Writes to views of a tensor, and reads the tensor and its views afterwards."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(16, 16))

    def forward(self, x):
        y = x @ self.weight
        turned, half = y.t(), y[:, :8]
        turned.mul_(2.0)
        half.add_(1.0)
        return y.relu() + y @ self.weight + (turned @ turned.t()).sum()


class ReturnsWritten(nn.Module):
    """Returns a tensor that it wrote to, and a view of one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = (x @ self.weight) * 1.5
        half = y[:, :8]
        z = y * 2
        y.mul_(0.5)
        return z.add_(y) + half.sum(), z, half


class MixesPlainTensors(nn.Module):
    """Makes plain tensors, as positions and masks are made."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = (x @ self.weight) * torch.arange(16, dtype=x.dtype) / 8
        return y.tanh() @ self.weight + torch.ones(1, 16, dtype=x.dtype)


class Looks(nn.Module):
    """Looks rows up in a table that may be cut by rows or columns."""

    def __init__(self, rows=16):
        super().__init__()
        self.table = nn.Embedding(rows, 16)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return self.table(x.abs().long() % self.table.num_embeddings) @ self.weight


class LooksInUnevenRows(Looks):
    def forward(self, x):
        return self.table(x.abs().long() % self.table.num_embeddings).tanh() @ self.weight


class LooksOnce(Looks):
    """Reads rows of a table in two calls, each of which may redistribute them."""

    def forward(self, x):
        y = self.table(x.abs().long() % 16)
        return y.tanh() @ self.weight + y.flatten(1).sum(1, keepdim=True)[..., None] + y


class Redistributes(nn.Module):
    """Redistributes and reads local tensors itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = (x @ self.weight).relu()
        if isinstance(y, DTensor):
            local = y.redistribute(placements=[Replicate()]).to_local() * 2
            y = DTensor.from_local(local, y.device_mesh, [Replicate()], run_check=False)
        else:
            y = y * 2
        return (y @ self.weight).tanh()


class RedistributesASum(nn.Module):
    """Redistributes a partial sum, whose gradient may come in any placements."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = self.down(x)
        y = y.redistribute(placements=[Replicate()]) if isinstance(y, DTensor) else y
        return self.up(y).tanh().sum(-1, keepdim=True) + (y @ self.weight).tanh() + x


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        PROGRAMS, "columns and rows", "written to", "written through views", "mixes plain tensors", "redistributes"
    ),
)
def test_any_placements_give_the_same_numbers(name):
    run_on_ranks(2, any_placements, name, (2,), range(2))


@slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_placements_give_the_same_numbers(name):
    run_on_ranks(2, any_placements, name, (2,), range(2, 10), timeout=280)


@slow
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_any_placements_of_uneven_tensors_on_more_ranks(mesh):
    run_on_ranks(math.prod(mesh), any_placements, "uneven columns and rows", mesh, range(2))


def any_placements(name, mesh_shape, seeds):
    make, placements, shape, of_input = PROGRAMS[name]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
    others = [Replicate()] * (mesh.ndim - 1)
    torch.manual_seed(0)
    plain = make().double()  # so that another order of a sum does not show
    model = distributed(copy.deepcopy(plain), mesh, lambda name: [*others, *placements(name)])
    x = distribute_tensor(torch.randn(shape, dtype=torch.float64), mesh, [*others, of_input])
    sent = set()
    with implicit_replication():
        made_in = greedy_results(model, x)
    for seed in seeds:
        chosen = unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(seed))
        with chosen, implicit_replication():
            reasons, recording = same(plain, model, x, made_in=made_in)
        assert len(reasons) == 1 and "together" in reasons[0], reasons
        sent.add(sum(c.bytes for c in recording.collectives))
    assert len(sent) > 1  # other placements send something else


@on_ranks(2)
def test_draws_keep_their_shards():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    model = distributed(copy.deepcopy(plain), mesh, replicated)
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
    found = []
    for plan in ("greedy", "global"):
        torch.manual_seed(3)
        with unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(1)):
            found.append(compiled(model, x, plan=plan)[0][0].full_tensor())
    torch.testing.assert_close(*found)


@on_ranks(2)
def test_replicated_parameters_and_rows():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), Net())
    model = distributed(copy.deepcopy(plain), mesh, lambda name: [Replicate()])
    x = distribute_tensor(torch.randn(64, 16), mesh, [Replicate()])
    reasons, _ = same(plain, model, x, topology="h100")
    assert len(reasons) == 1


def sends_less(mesh, layers):
    torch.manual_seed(0)
    plain = Llama(LlamaConfig(layers=layers, dim=64, ffn_dim=128, heads=4, kv_heads=4, vocab=128, sequence=32))
    model = columns_and_rows_of(copy.deepcopy(plain), mesh)
    batch = [Shard(0) if i < mesh.ndim - 1 else Replicate() for i in range(mesh.ndim)]
    tokens = distribute_tensor(torch.randint(0, 128, (4, 32)), mesh, batch)
    results, grads, greedy = compiled(model, tokens, topology="h100")
    made_in = [x.placements for x in results]
    reasons, recording = same(plain, model, tokens, made_in=made_in, topology="h100")
    assert len(reasons) == 1 and "together" in reasons[0], reasons
    sent, before = (sum(c.bytes for c in this.collectives) for this in (recording, greedy))
    before += sum(map(left_to_reduce, grads.values()))
    assert sent < 0.7 * before, (sent, before)


def left_to_reduce(grad):
    """Bytes that a ring sends to reduce a gradient as DTensor leaves it, which the planned graph has in it."""
    sizes = [n for n, placement in zip(grad.device_mesh.shape, grad.placements) if placement.is_partial()]
    return sum(2 * (n - 1) / n * grad.to_local().nbytes for n in sizes)


@slow
@on_ranks(2)
def test_weights_of_columns_and_rows_alone_are_enough():
    sends_less(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), 1)


@slow
@on_ranks(4)
def test_a_llama_over_two_mesh_dims():
    sends_less(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), 2)


@pytest.mark.parametrize(
    "loss",
    mostly_slow(["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"], "mse_loss"),
)
def test_gradients_of_means_are_those_of_the_whole(loss):
    gradient_of_a_mean(loss)


@on_ranks(2)
def gradient_of_a_mean(name):
    """DTensor's own gradient is twice as large, as it divides by the elements of a shard."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain = nn.Linear(16, 16)
    model = distributed(copy.deepcopy(plain), mesh, replicated)
    x, target = torch.randn(8, 16), torch.rand(8, 16)

    def run(model):
        return lambda x, target: getattr(F, name)(model(x).sigmoid(), target)

    run(plain)(x, target).backward()
    for plan, times in (("greedy", 2.0), ("global", 1.0)):
        model.zero_grad()
        torch._dynamo.reset()
        with dtensor_compile.record() as recording:
            compiled = torch.compile(run(model), backend="dtensor_aten", options={"plan": plan, "topology": "h100"})
            compiled(*(distribute_tensor(value, mesh, [Shard(0)]) for value in (x, target))).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.grad.full_tensor(), times * theirs.grad)
    reasons = [d.reason for d in recording.decisions if d.kind == KIND]
    assert any(f"{name}_backward: the gradient of the mean over the whole tensor" in reason for reason in reasons)


@slow
@on_ranks(2)
def test_without_a_topology_costs_are_those_of_the_assumed_cluster():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = distributed(nn.Sequential(Net(), Net()), mesh, columns_and_rows)
    x = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()])
    found = []
    for options in ({}, {"topology": default_cluster("cpu").name}):
        _, _, recording = compiled(model, x, plan="global", **options)
        found.append([d.reason for d in recording.decisions if d.kind == KIND])
    assert found[0] == found[1] and "together" in found[0][0]


@on_ranks(2)
def test_a_plan_that_dtensor_refuses_is_dropped():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain = Net()
    model = distributed(copy.deepcopy(plain), mesh, lambda name: columns_and_rows(f"0.{name}"))
    x = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()])
    refused = unittest.mock.patch.object(planned_calls, "_moved", side_effect=NotImplementedError("no such move"))
    with unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(1)), refused:
        reasons, recording = same(plain, model, x)
    assert len(reasons) == 1 and reasons[0].endswith("with planned placements: NotImplementedError: no such move")
    assert all(d.left_alone for d in recording.decisions if d.kind == KIND)


@on_ranks(2)
def test_a_program_without_dtensors_keeps_what_it_has():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    with dtensor_compile.record() as recording:
        torch.compile(model, backend="dtensor_aten", options={"plan": "global"})(torch.ones(2, 4)).sum().backward()
    (decision,) = {d for d in recording.decisions if d.kind == KIND}
    assert decision.left_alone and decision.reason.startswith("placements are DTensor's own")


@slow
@pytest.mark.parametrize(
    "name",
    [
        "columns and rows",
        "rows",
        "attention",
        "looks up",
        "written to",
        "uneven rows",
    ],
)
def test_any_placements_with_symbolic_sizes_give_the_same_numbers(name):
    run_on_ranks(2, any_placements_of_any_sizes, name)


def any_placements_of_any_sizes(name):
    make, placements, shape, of_input = PROGRAMS[name]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain = make().double()
    model = distributed(copy.deepcopy(plain), mesh, placements)
    for seed in range(2):
        torch._dynamo.reset()
        chosen = unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(seed))
        with chosen, implicit_replication(), dtensor_compile.record() as recording:
            run = torch.compile(model, backend="dtensor_aten", fullgraph=True, dynamic=True, options={"plan": "global"})
            for rows in (shape[0], shape[0] + 2, 2 * shape[0] + 3, shape[0] - 1):
                x = torch.randn(rows, *shape[1:], dtype=torch.float64)
                want, want_grads = gradients(plain, plain, x)
                out, grads = gradients(run, model, distribute_tensor(x, mesh, [of_input]))
                for y, z in zip(out, want, strict=True):
                    torch.testing.assert_close(y.full_tensor(), z)
                for of, grad in want_grads.items():
                    torch.testing.assert_close(grads[of].full_tensor(), grad)
        reasons = [d.reason for d in recording.decisions if d.kind == KIND]
        assert all("together" in reason for reason in reasons), reasons
        assert len(reasons) <= 2  # one for even shards, and one for others


@slow
@pytest.mark.parametrize("rows", [(8, 16), (7,), (7, 9)], ids=str)
def test_other_sizes_and_backward_twice(rows):
    run_on_ranks(2, several_sizes_backward_twice, rows)


def several_sizes_backward_twice(rows):
    """Rows of each call; the second makes sizes symbolic."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), Net()).double()
    model = distributed(copy.deepcopy(plain), mesh, columns_and_rows)
    of_input = Shard(0) if len(rows) == 1 else Replicate()
    with dtensor_compile.record() as recording:
        run = torch.compile(model, backend="dtensor_aten", options={"plan": "global"})
        for n in rows:
            x = torch.randn(n, 16, dtype=torch.float64)
            model.zero_grad()
            plain.zero_grad()
            out, want = run(distribute_tensor(x, mesh, [of_input])), plain(x)
            for result in (out, out, want, want):
                (result**2).sum().backward(retain_graph=True)
            torch.testing.assert_close(out.full_tensor(), want)
            for p, q in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    planned = [d for d in recording.decisions if d.kind == KIND]
    assert len(planned) == len(rows) and not any(d.left_alone for d in planned), planned


@slow
@on_ranks(2)
def test_forecasts_decide_where_estimates_are_close():
    """A bad plan that seems fast is not taken; a good one is, and nothing of the forecasts is left in the report."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), Net()).double()
    x = distribute_tensor(torch.randn(64, 16).double(), mesh, [Shard(0)])
    bad = unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(0, seconds=1e-12))
    close = unittest.mock.patch.object(planned_placements, "_CLEARLY", math.inf)
    sent = {}
    for name, chosen in (("own", contextlib.nullcontext()), ("bad", bad)):
        model = distributed(copy.deepcopy(plain), mesh, replicated)
        with chosen, close:
            (reason,), recording = same(plain, model, x)
        sent[name] = [(c.kind, c.bytes) for c in recording.collectives], len(recording.graphs)
    assert re.fullmatch(
        r"placements are DTensor's own: [\d.]+ ms a step by forecast of the lowered graphs, where those that are "
        r"faster by estimate take [\d.]+ ms",
        reason,
    )
    assert sent["bad"] == sent["own"], sent

    model = distributed(copy.deepcopy(plain), mesh, columns_and_rows)
    x = distribute_tensor(torch.randn(64, 16).double(), mesh, [Shard(0)])
    with close:
        (reason,), recording = same(plain, model, x)
    assert re.search(r"together: .*; by forecast of the lowered graphs [\d.]+ ms instead of [\d.]+ ms$", reason), reason
    assert len(recording.graphs) == sent["own"][1]


@slow
@on_ranks(4)
def test_ranks_whose_forecasts_would_differ_go_by_the_estimate():
    """With three ranks a host, one group of two is inside of a host, and the other one is not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    x = distribute_tensor(torch.randn(64, 16), mesh, [Shard(0)], src_data_rank=None)
    bad = unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(0, seconds=1e-12))
    close = unittest.mock.patch.object(planned_placements, "_CLEARLY", math.inf)
    for ranks_per_host, by_forecast in ((3, False), (2, True)):
        cluster = dataclasses.replace(CLUSTERS["cpu-1gbit"], ranks_per_host=ranks_per_host)
        model = distributed(nn.Sequential(Net(), Net()), mesh, replicated)
        with bad, close:
            _, _, recording = compiled(model, x, plan="global", topology=cluster)
        (reason,) = {d.reason for d in recording.decisions if d.kind == KIND}
        assert ("by forecast" in reason) is by_forecast is ("not forecast" not in reason), reason


@slow
@on_ranks(4)
def test_tensor_parallelism_beside_fully_shard_is_placed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), Net()).double()
    x = torch.randn(8, 16).double()
    rows = x.chunk(2)[mesh.get_local_rank("dp")]
    want = plain(x)
    (want**2).sum().div(2).backward()  # fully_shard's gradients are means over dp
    for seed in range(2):
        torch._dynamo.reset()
        model = distributed(copy.deepcopy(plain), mesh["tp"], columns_and_rows)
        fully_shard(model, mesh=mesh["dp"])
        chosen = unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(seed))
        with chosen, dtensor_compile.record() as recording:
            run = torch.compile(model, backend="dtensor_aten", fullgraph=True, options={"plan": "global"})
            (out,), _ = gradients(run, model, distribute_tensor(rows, mesh["tp"], [Replicate()]))
        torch.testing.assert_close(out.full_tensor(), want.chunk(2)[mesh.get_local_rank("dp")])
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        (decision,) = [d for d in recording.decisions if d.kind == KIND]
        assert decision.reason.startswith("placements for") and not decision.left_alone


@slow
@on_ranks(4)
def test_each_mesh_of_a_program_is_placed():
    """Both halves together in the backward pass; a mesh that cannot be placed does not keep the other from it."""
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    plain = nn.ModuleList([Net(), Net()]).double()
    x, y = torch.randn(2, 8, 16).double()

    def run(model, x, y):
        first = model[0](x)
        return first.full_tensor() if isinstance(first, DTensor) else first, model[1](y)

    want, other = run(plain, x, y)
    (want.square().sum() + other.square().sum()).backward()
    for mesh, placements in ((named["dp"], replicated), (unnamed, lambda name: [Replicate()] * 2)):
        torch._dynamo.reset()
        model = copy.deepcopy(plain)
        distributed(model[0], named["tp"], lambda name: columns_and_rows(f"0.{name}"))
        distributed(model[1], mesh, placements)
        given = distribute_tensor(x, named["tp"], [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)] * mesh.ndim)
        chosen = unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(0))
        with chosen, dtensor_compile.record() as recording:
            first, second = torch.compile(run, backend="dtensor_aten", fullgraph=True, options={"plan": "global"})(
                model, *given
            )
            (first.square().sum() + second.full_tensor().square().sum()).backward()
        torch.testing.assert_close(first, want)
        torch.testing.assert_close(second.full_tensor(), other)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        reasons = sorted(d.reason for d in recording.decisions if d.kind == KIND)
        assert len(reasons) == 2 and "over tp=2 together" in reasons[0 if mesh is unnamed else 1], reasons
        if mesh is unnamed:
            assert reasons[1] == "placements over dim_0=2, dim_1=2 are DTensor's own: the mesh dims have no names"
        else:
            assert "over dp=2 together" in reasons[0]


def test_a_region_that_is_checkpointed_by_a_policy_and_redistributes_is_left_alone():
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    class ByPolicy(RedistributesASum):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=policy)

    with job(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()])
        _, _, recording = compiled(distributed(ByPolicy(), mesh, sums_rows), x, plan="global")
    (reason,) = {d.reason for d in recording.decisions if d.kind == KIND and d.left_alone}
    assert reason == "placements are DTensor's own: a region that is checkpointed by a policy redistributes"


@on_ranks(2)
def test_calls_that_are_not_the_recorded_ones_are_compiled_without_a_plan():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = nn.Sequential(Net(), Net())
    model = distributed(copy.deepcopy(plain), mesh, columns_and_rows)
    x = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()])

    def other_step(*args):
        (step,) = record_program(*args)
        step.calls[3] = dataclasses.replace(step.calls[3], op=torch.ops.aten.neg.default)
        return [step]

    with (
        unittest.mock.patch.object(planned_placements, "record_program", other_step),
        unittest.mock.patch.object(planned_placements, "choose_placements", any_choice(0)),
    ):
        reasons, _ = same(plain, model, x)
    assert len(reasons) == 1 and "where aten.neg.default was expected" in reasons[0]


def recorded(make, placements, shape):
    """The step of a program that is compiled on two simulated ranks."""
    steps = []

    def kept(*args):
        steps.extend(record_program(*args))
        return steps

    with job(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.randn(shape), mesh, [Replicate()])
        with unittest.mock.patch.object(planned_placements, "record_program", kept):
            compiled(distributed(make(), mesh, placements), x, plan="global")
    (step,) = steps
    return step


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.one(x) * self.two(x)


def test_equal_views_of_a_tensor_are_one_tensor():
    """A linear layer views its input as a matrix. The backward passes of two that read one input get either view."""
    step = recorded(TwoLinears, replicated, (2, 4, 16))
    views = [i for i, call in enumerate(step.calls) if call.inputs == (step.inputs[0],) and call.name == "aten.view"]
    assert len(views) == 2 and len({step.calls[i].outputs for i in views}) == 1
    classes = classes_of_calls(step)
    assert classes[views[0]] == classes[views[1]]


def test_a_redistribution_reads_the_placements_of_its_gradient():
    """It gives what it redistributed another gradient for each, which the calls after it would not expect."""
    step = recorded(RedistributesASum, sums_rows, (8, 16))
    (sum_of_both,) = [call for call in step.calls if call.phase == BACKWARD and call.name == "aten.add"]
    assert step.placements[sum_of_both.outputs[0]] == step.pinned[sum_of_both.outputs[0]]
