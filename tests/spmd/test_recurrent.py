"""Recurrent layers in programs with annotations: in the graph, on shards of the batch, with the plain program's
numbers.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtensor_compile import record
from dtensor_compile.causes import break_title
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.spmd import Mesh, mark_sharding, shard_module
from dtensor_compile.spmd.recurrent import recurrent_layer
from dtensor_compile.testing import on_ranks


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(8, 6, **options)
        wide = options.get("proj_size", 6) * (1 + options.get("bidirectional", False))
        self.up, self.out = nn.Linear(8, 8), nn.Linear(wide, 8)

    def forward(self, x, *states):
        y, last = self.layer(self.up(x), *states)
        return self.out(y), last


LAYERS = [
    ("LSTM", {"batch_first": True}),
    ("LSTM", {"num_layers": 2, "dropout": 0.5, "batch_first": True}),
    ("LSTM", {"proj_size": 3, "bidirectional": True}),
    ("GRU", {"num_layers": 2, "bidirectional": True}),
    ("GRU", {"num_layers": 3, "dropout": 0.3, "bidirectional": True}),
    ("RNN", {"bias": False, "batch_first": True}),
    ("RNN", {"nonlinearity": "relu"}),
]


def mesh22():
    return Mesh(range(4), (2, 2), ("dp", "tp"))


def leaves(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def same(model, plain, x, backend="dtensor_aten", calls=2, states=()):
    """What was decided, by a compiled program whose results and gradients are those of the plain one for the same
    seeds.
    """
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with record() as recording:
        for call in range(calls):
            results = []
            for module, run in ((plain, plain), (model, compiled)):
                module.zero_grad()
                torch.manual_seed(call)
                y = leaves(run(x, *states))
                sum(t.square().sum() for t in y).backward()
                results.append([*y, *(p.grad for p in module.parameters()), torch.rand(2)])
            for want, got in zip(*results, strict=True):
                torch.testing.assert_close(whole(got), want, rtol=1e-5, atol=1e-4)
    return recording.report().ours


def _marked_layers(layers):
    for kind, options in layers:
        batch = 0 if options.get("batch_first") else 1
        for n in (4, 3):  # of 3, a rank has none where both axes cut them
            model = Recurrent(kind, **options)
            plain = copy.deepcopy(model)
            x = torch.randn(*((n, 5) if batch == 0 else (5, n)), 8)
            spec = [None, None, None]
            spec[batch] = ("dp", "tp") if n == 3 else "dp"
            mark_sharding(x, mesh22(), tuple(spec))
            mark_sharding(model.up.weight, mesh22(), ("tp" if n == 4 else None, None))
            same(model, plain, x)


def _bytes_and_decisions():
    """Shards of the batch send the sums of gradients alone; a cut weight is gathered, and a decision tells the
    bytes.
    """
    model = nn.LSTM(8, 6, batch_first=True)
    plain, x = copy.deepcopy(model), torch.randn(4, 5, 8)
    mark_sharding(x, mesh22(), ("dp", None, None))
    ours = same(model, plain, x, calls=1)
    assert not [d for d in ours.decisions if d.kind == "replicate_fallback"]
    gradients, results = sum(p.numel() for p in model.parameters()) * 4, (4 * 5 * 6 + 2 * 4 * 6) * 4
    assert ours.totals.all.bytes == gradients + results // 2, ours.totals.all.bytes
    mark_sharding(model.weight_hh_l0, mesh22(), ("tp", None))
    (reason,) = {d.reason for d in same(model, plain, x, calls=1).decisions if d.kind == "replicate_fallback"}
    assert reason == f"lstm runs on shards of the batch, with {24 * 6 * 4:,} bytes of other shards gathered"


def _states_that_are_given():
    model = Recurrent("LSTM")
    plain, x, states = copy.deepcopy(model), torch.randn(5, 4, 8), (torch.randn(1, 4, 6), torch.randn(1, 4, 6))
    mark_sharding(x, mesh22(), (None, "dp", None))
    same(model, plain, x, states=(states,))
    x = torch.randn(5, 8)  # one sequence, no batch
    mark_sharding(x, mesh22(), (None, "tp"))
    same(model, plain, x)


def _stored_in_shards():
    torch.manual_seed(1)
    model = Recurrent("GRU", num_layers=2)
    plain, x = copy.deepcopy(model), torch.randn(5, 4, 8)
    mark_sharding(model.layer.weight_ih_l0, mesh22(), ("tp", None))
    mark_sharding(x, mesh22(), (None, "dp", None))
    rows = {row.name: row.spec for row in shard_module(model, x).placed}
    assert rows["layer.weight_ih_l0"] == "RS(0)" and rows["layer.weight_hh_l1"] == "RR"
    same(model, plain, x)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
    same(model, plain, x, calls=1)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(p), q, rtol=1e-5, atol=1e-5)


def _packed_sequences():
    """How long they are is in the data: the layer runs outside of the graph, as it does without annotations."""

    class Packed(Recurrent):
        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(self.up(x), lengths, batch_first=True)
            return self.out(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])

    model, x, lengths = Packed("LSTM", batch_first=True), torch.randn(4, 5, 8), torch.tensor([5, 4, 2, 1])
    plain = copy.deepcopy(model)
    mark_sharding(model.up.weight, mesh22(), ("tp", None))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="dtensor_aten")(x, lengths), plain(x, lengths))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(break_title("packed-sequence"))):
        torch.compile(model.layer, backend="dtensor_aten", fullgraph=True)(packed)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_recurrent_layers():
    torch.manual_seed(0)
    _marked_layers([LAYERS[i] for i in (1, 4, 5)])
    _bytes_and_decisions()
    _stored_in_shards()


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_other_recurrent_layers():
    torch.manual_seed(0)
    _marked_layers([LAYERS[i] for i in (0, 2, 3, 6)])
    _states_that_are_given()
    _packed_sequences()


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_recurrent_layers_through_inductor():
    torch.manual_seed(0)
    model = Recurrent("LSTM", num_layers=2, batch_first=True)
    plain, x = copy.deepcopy(model), torch.randn(4, 5, 8)
    mark_sharding(x, mesh22(), ("dp", None, None))
    same(model, plain, x, backend="dtensor")


@pytest.mark.parametrize("kind, options", LAYERS)
def test_operator_is_a_whole_layer(kind, options):
    """One operator for all steps and layers (one a layer with dropout between them), with torch's results, strides and
    gradients.
    """
    options = {**options, "dropout": 0.0}
    layer = getattr(nn, kind)(4, 6, **options).double()
    states = [
        torch.randn(layer.num_layers * (1 + layer.bidirectional), 3, n, dtype=torch.float64)
        for n in (layer.proj_size or 6, 6)
    ]
    states = states if kind == "LSTM" else states[:1]
    x = torch.randn(*((3, 5) if layer.batch_first else (5, 3)), 4, dtype=torch.float64).requires_grad_()
    name = kind.lower() if kind != "RNN" else f"rnn_{layer.nonlinearity}"
    given = (name, x, states, layer._flat_weights, layer.bias, layer.num_layers, layer.bidirectional, layer.batch_first)
    found = recurrent_layer(*given)
    y, last = layer(x, tuple(states) if kind == "LSTM" else states[0])
    grads = []
    for results in (found, (y, *(last if kind == "LSTM" else (last,)))):
        grads.append(torch.autograd.grad(sum(t.sin().sum() for t in results), [x, *layer.parameters()]))
        for t, want in zip(results, found, strict=True):
            torch.testing.assert_close(t, want)
            assert t.stride() == want.stride()
    torch.testing.assert_close(*grads)
    torch.library.opcheck(torch.ops.dtensor_compile.recurrent.default, given[:2] + ([s for s in states], *given[3:]))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_autocast(kind):
    with simulated_job(2, 0), torch.autocast("cpu", torch.bfloat16):
        layer, x = getattr(nn, kind)(4, 6), torch.randn(5, 3, 4)
        mark_sharding(layer.weight_hh_l0, Mesh(range(2), (2,), ("x",)), (None, None))
        torch._dynamo.reset()
        try:
            want = leaves(layer(x))
        except RuntimeError as error:
            if "could not create a primitive descriptor" not in str(error):
                raise
            pytest.skip(f"eager's oneDNN has no bfloat16 {kind} for this CPU")
        got = leaves(torch.compile(layer, backend="dtensor_aten", fullgraph=True)(x))
        torch.testing.assert_close(got, want)


def test_programs_without_annotations_are_left_to_torch():
    from dtensor_compile.spmd import annotate

    before = set(annotate._marked_meshes)
    annotate._marked_meshes.clear()
    try:
        with simulated_job(2, 0):
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
                torch.compile(nn.LSTM(4, 4), backend="dtensor_aten", fullgraph=True)(torch.randn(2, 2, 4))
    finally:
        annotate._marked_meshes.update(before)
