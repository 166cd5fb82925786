"""Marks on parameters, inputs and intermediates: same numbers as the plain program, in one graph."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from dtensor_compile import record
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.spmd import (
    Mesh,
    clear_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_as,
    shard_module,
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)
from dtensor_compile.testing import on_ranks


class Mlp(nn.Module):
    def __init__(self, inside=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inside = inside

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.inside is not None:
            h = self.inside(h)
        return self.down(h)


def step(model, x):
    for p in (x, *model.parameters()):
        p.grad = None
    y = model(x)
    y.square().sum().backward()
    return y, [None if p.grad is None else p.grad for p in (x, *model.parameters())]


def compare(model, *inputs, backend="dtensor_aten", calls=2, rtol=1e-5):
    """The redistributions of the compiled model, whose results and gradients are those of the plain one."""
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with record() as recording:
        for _ in range(calls):
            for x in inputs:
                want, wanted = step(eager, x)
                y, grads = step(compiled, x)
                assert type(y) is torch.Tensor
                torch.testing.assert_close(y, want, rtol=rtol, atol=1e-5)
                for grad, other in zip(grads, wanted, strict=True):
                    torch.testing.assert_close(grad, other, rtol=rtol, atol=1e-5)
    return recording.report().ours


def follows(ours):
    return {
        d.reason.split()[0].removeprefix("L_self_modules_"): d.after
        for d in ours.decisions
        if d.kind == "spread_annotations"
    }


def mesh22():
    return Mesh(range(4), (2, 2), ("dp", "tp"))


# ---- in a compiled program -----------------------------------------------------------------------------------------


def _parameters_and_input():
    model, x = Mlp(), torch.randn(4, 8)
    mark_sharding(model.up.weight, mesh22(), ("tp", None))
    mark_sharding(x, mesh22(), ("dp", None))
    want = {"up_parameters_bias": "RS(0)", "down_parameters_weight": "RS(1)"}
    assert follows(compare(model, x)) == want


def _input_with_a_gradient():
    model, x = Mlp(), torch.randn(4, 8, requires_grad=True)
    mark_sharding(x, mesh22(), (("tp", "dp"), None))
    compare(model, x)


def _uneven_and_other_sizes():
    model, x = Mlp(), torch.randn(5, 8)
    mark_sharding(x, mesh22(), (("dp", "tp"), None))
    compare(model, x, torch.randn(3, 8), torch.randn(1, 8), torch.randn(8, 8))


def _intermediate(mark):
    mesh = mesh22()
    mesh.to_device_mesh("cpu")

    def inside(h):
        if mark == "in place":
            mark_sharding(h, mesh, ("dp", "tp"))
        elif mark == "result":
            h = mark_sharding(h, mesh, ("dp", "tp"))
        else:
            h = mark_sharding_with_gradients(h, mesh, ("dp", "tp"))
        return h * 2

    model, x = Mlp(inside), torch.randn(4, 8)
    found = follows(compare(model, x))
    want = {
        "up_parameters_weight": "RS(0)",
        "up_parameters_bias": "RS(0)",
        "down_parameters_weight": "RS(1)",
        "L_x": "S(0)R",
    }
    assert found == want, found


def _marks_inside_place_parameters():
    """`shard_module` follows what the module marks on its way, too."""
    mesh = mesh22()
    mesh.to_device_mesh("cpu")

    def marks(h):
        mark_sharding(h, mesh, (None, "tp"))
        return h

    x = mark_sharding(torch.randn(4, 8), mesh, (None, None))
    for inside in (marks, lambda h: mark_sharding_with_gradients(h, mesh, (None, "tp")) * 2):
        model = Mlp(inside)
        rows = {row.name: (row.spec, row.why) for row in shard_module(model, x).placed}
        assert rows["up.weight"] == ("RS(0)", "follows") and rows["down.weight"] == ("RS(1)", "follows"), rows
        assert isinstance(model.up.weight, DTensor)


def _values_that_agree():
    mesh = mesh22()

    def inside(h):
        a, b = shard_as(h, torch.ones_like(h) * 3)
        return a * b

    model, x = Mlp(inside), torch.randn(4, 8)
    mark_sharding(model.down.weight, mesh, (None, "tp"))
    assert follows(compare(model, x))["up_parameters_weight"] == "RS(0)"


def _closed_and_open_dims():
    model, x = Mlp(), torch.randn(4, 8)
    mark_sharding(model.up.weight, mesh22(), ("tp", None))
    mark_sharding(model.down.weight, mesh22(), (None, None))
    assert "down_parameters_weight" not in follows(compare(model, x))
    mark_sharding(model.down.weight, mesh22(), (None, None), open_dims=(1,))
    rows = {row.name: (row.spec, row.why) for row in shard_module(model, x).placed}
    assert rows["down.weight"] == ("RS(1)", "marked") and rows["up.bias"] == ("RS(0)", "follows")


def _priorities_decide():
    # Both marks want the rows of the product on axis tp: the hidden dim from up, the batch from x.
    for first in (0, 2):
        model, x = Mlp(), torch.randn(4, 8)
        mark_sharding(model.up.bias, mesh22(), ("tp",), priority=first)
        mark_sharding(x, mesh22(), ("tp", None), priority=1)
        clear = {row.name: row.spec for row in shard_module(model, x).placed}
        assert clear["up.weight"] == ("RS(0)" if first == 0 else "RR"), clear


def _sharded_module_trains():
    torch.manual_seed(3)
    model, x = Mlp(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    mark_sharding(model.up.weight, mesh22(), ("tp", None))
    mark_sharding(x, mesh22(), ("dp", None))
    placed = shard_module(model, x)
    assert [row.spec for row in placed.placed] == ["RS(0)", "RS(0)", "RS(1)", "RR"]
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        losses = []
        for run, optimizer in zip((compiled, plain), optimizers):
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(unwrap_sharded_tensor(loss.detach()))
        torch.testing.assert_close(*losses)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements == p.placements, name
        torch.testing.assert_close(p.full_tensor(), q)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_marks_in_compiled_programs():
    _parameters_and_input()
    _input_with_a_gradient()
    _uneven_and_other_sizes()
    for mark in ("in place", "result", "both ways"):
        _intermediate(mark)
    _marks_inside_place_parameters()
    _values_that_agree()
    _closed_and_open_dims()
    _priorities_decide()
    _sharded_module_trains()
    _outside_of_programs()
    _programs_without_marks()
    _errors()


# ---- other modules and ways to run ---------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.output.weight = self.embedding.weight
        self.tokens = torch.arange(24).reshape(4, 6) % 16

    def forward(self, x):
        return self.output(self.embedding(self.tokens) + x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False) + x


def _modules():
    yield "normed", nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)), "0.weight", (4, 8)
    yield "batch norm", nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)), "2.weight", (4, 8)
    yield "tied", Tied(), "embedding.weight", (4, 1, 8)
    yield "attention", Attention(), "attention.in_proj_weight", (4, 6, 16)
    yield "layer", nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), "linear1.weight", (4, 6, 16)
    yield "convolutions", nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), "0.weight", (4, 4, 8, 8)
    yield (
        "convolutions of rows",
        nn.Sequential(nn.Conv1d(4, 8, 3, padding=1, bias=False), nn.ConvTranspose1d(8, 4, 3)),
        "1.weight",
        (4, 4, 8),
    )
    yield "recomputed", Recomputed(), "inner.up.weight", (4, 8)


def _module(module, name, shape):
    x = torch.randn(*shape)
    if x.dim() == 3 and x.shape[1] == 1:
        x = x.expand(4, 6, 8).contiguous()
    weight = module.get_parameter(name)
    mark_sharding(weight, mesh22(), ("tp", *[None] * (weight.dim() - 1)))
    mark_sharding(x, mesh22(), ("dp", *[None] * (x.dim() - 1)))
    compare(module, x)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_convolutions_run_on_shards_of_the_batch():
    """Gradients of the weights are all that is sent; a cut weight is gathered, and a decision tells the bytes."""
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(4, 4, 8, 8)
    mark_sharding(x, mesh22(), ("dp", None, None, None))
    ours = compare(model, x, calls=1)
    whole = {d.reason for d in ours.decisions if d.kind == "replicate_fallback"}
    assert not whole, whole
    sent = sum(p.numel() for p in model.parameters()) * 4
    assert ours.totals.all.bytes - sent == 4 * 4 * 4 * 4 * 4 // 2, (
        ours.totals.all.bytes,
        sent,
    )  # and the result is made whole
    mark_sharding(model[0].weight, mesh22(), ("tp", None, None, None))
    whole = {d.reason for d in compare(model, x, calls=1).decisions if d.kind == "replicate_fallback"}
    assert whole == {f"conv2d runs on shards of the batch, with {8 * 4 * 9 * 4:,} bytes of other shards gathered"}, (
        whole
    )
    one = nn.Conv2d(4, 8, 3)
    image = mark_sharding(torch.randn(4, 8, 8), mesh22(), ("dp", None, None))  # no batch: its first dim is the channels
    compare(one, image, calls=1)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_other_modules():
    failed = []
    for label, module, name, shape in _modules():
        try:
            _module(module, name, shape)
        except Exception as error:  # noqa: BLE001 - each is reported
            failed.append(f"{label}: {type(error).__name__}: {str(error)[:600]}")
    assert not failed, "\n".join(failed)


def _program_over_local_tensors():
    mesh = mesh22()
    model, x = Mlp(), torch.randn(4, 8)
    mark_sharding(model.up.weight, mesh, ("tp", None))
    shard_module(model)

    def moves(x):
        d = wrap_as_sharded_tensor(x, mesh, ("dp", None)) if not torch.compiler.is_compiling() else x
        return model(d)

    torch._dynamo.reset()
    assert torch.compile(moves, backend="dtensor_aten")(x).shape == (4, 8)
    with pytest.raises(Exception, match="apply to global tensors"):
        torch.compile(lambda x: model(x).to_local() * 2, backend="dtensor_aten")(x)
    other = torch.compile(
        lambda x: model(x).redistribute(mesh.to_device_mesh(), [Shard(0), Shard(1)]) * 2, backend="dtensor_aten"
    )(x)
    assert other.placements == (Shard(0), Shard(1))


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_other_ways_to_run():
    _program_over_local_tensors()
    model, x = Mlp(), torch.randn(4, 8)
    mark_sharding(model.up.weight, mesh22(), ("tp", None))
    mark_sharding(x, mesh22(), ("dp", None))
    compare(model, x, backend="dtensor")
    flat = Mesh(range(4), (1, 4, 1), ("a", "b", "c"))
    model, x = Mlp(), torch.randn(4, 8)
    mark_sharding(model.up.weight, flat, (("a", "b"), "c"))
    mark_sharding(x, flat, ("c", None))
    compare(model, x)
    model, x = Mlp().double(), torch.randn(4, 8, dtype=torch.float64)
    mark_sharding(x, mesh22(), (None, ("dp", "tp")))
    compare(model, x)
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, backend="dtensor_aten")(x), model(x))
    wrong = torch.compile(model, backend="dtensor_aten", options={"fallback": "error"})
    odd = Attention()
    mark_sharding(odd.attention.in_proj_weight, mesh22(), ("tp", None))
    with pytest.raises(Exception, match="unevenly sharded"):
        torch.compile(odd, backend="dtensor_aten", options={"fallback": "error"})(torch.randn(4, 6, 16))
    assert torch.allclose(wrong(x), model(x))


# ---- outside -------------------------------------------------------------------------------------------------------


def _outside_of_programs():
    mesh = mesh22()
    t = torch.arange(24.0).reshape(6, 4)
    assert mark_sharding(t, mesh, (("tp", "dp"), None)) is t and type(t) is torch.Tensor
    d = wrap_if_sharded(t)
    assert isinstance(d, DTensor) and torch.equal(unwrap_sharded_tensor(d), t) and wrap_as_sharded_tensor(d) is d
    shard = mesh.device_shards((("tp", "dp"), None), (6, 4))[torch.distributed.get_rank()]
    (begin, end), _ = shard.index
    assert torch.equal(d.to_local(), t[begin:end])
    assert wrap_if_sharded(clear_sharding(t)) is t and wrap_if_sharded(3) == 3
    assert wrap_as_sharded_tensor(t, mesh, (None, "dp")).placements == (Shard(1), Replicate())
    a, b = shard_as(wrap_as_sharded_tensor(t, mesh, ("dp", None)), t)
    assert a.placements == b.placements and torch.equal(b.full_tensor(), t)
    assert all(torch.equal(x, t) for x in shard_as(t, t)) and mark_sharding_with_gradients(t, mesh, ("dp", None)).equal(
        t
    )


def _programs_without_marks():
    """They mix plain tensors with DTensors where eager does, whatever else is marked in the process."""
    mesh = mesh22()
    plain = torch.ones(4, 4)
    mark_sharding(torch.ones(4, 4), mesh, ("dp", None))
    placed, noted = (
        distribute_tensor(plain, mesh.to_device_mesh(), [Shard(0), Replicate()]),
        wrap_as_sharded_tensor(plain, mesh, ("dp", None)),
    )
    torch._dynamo.reset()
    double = torch.compile(lambda x, y: x + y, backend="dtensor_aten", fullgraph=True)
    assert torch.equal(double(noted, plain).full_tensor(), plain * 2)
    for _ in range(2):
        with pytest.raises(Exception, match="mixed torch.Tensor and DTensor"):
            double(placed, plain)
    with implicit_replication():
        assert torch.equal(double(placed, plain).full_tensor(), plain * 2)
        assert torch.equal((placed + plain).full_tensor(), plain * 2), "compiling has ended the setting of the program"
    for refuses in (double, torch.add):  # the compiled code has not outlived the setting
        with pytest.raises(Exception, match="mixed torch.Tensor and DTensor"):
            refuses(placed, plain)


def _errors():
    mesh, t = mesh22(), torch.ones(4, 4)
    with pytest.raises(PlacementError, match="1 entries, the tensor has 2 dims"):
        mark_sharding(t, mesh, ("dp",))
    with pytest.raises(PlacementError, match="open dim 2"):
        mark_sharding(t, mesh, ("dp", None), open_dims=(2,))
    with pytest.raises(PlacementError, match="already has placements"):
        mark_sharding(wrap_as_sharded_tensor(t, mesh), mesh, ("dp", None))
    with pytest.raises(PlacementError, match="one shape"):
        shard_as(t, torch.ones(2))
    with pytest.raises(MeshError, match="needs a mesh"):
        wrap_as_sharded_tensor(t)
    with pytest.raises(MeshError, match="nothing is marked"):
        shard_module(Mlp())
    model = Mlp()
    mark_sharding(model.up.weight, mesh, ("dp", None))
    mark_sharding(model.down.weight, Mesh(range(4), (4,), ("x",)), ("x", None))
    with pytest.raises(MeshError, match="several meshes"):
        shard_module(model)
    with pytest.raises(Exception, match="several meshes"):
        torch.compile(model, backend="dtensor_aten")(torch.ones(4, 8))
