"""Checkpointed regions in programs with annotations are sharded as what is around them."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_compile import record
from dtensor_compile.spmd import (
    Mesh,
    disable_manual_sharding,
    enable_manual_sharding,
    mark_sharding,
    set_global_mesh,
    shard_module,
)
from dtensor_compile.spmd.annotate import mark_of, note_mark
from dtensor_compile.testing import on_ranks
from tests.spmd.test_annotate import follows


def mesh22():
    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    mesh.to_device_mesh("cpu")
    set_global_mesh(mesh)
    return mesh


class Block(nn.Module):
    def __init__(self, dropout=0.0, mark=None):
        super().__init__()
        self.up, self.down, self.dropout, self.mark = nn.Linear(8, 16), nn.Linear(16, 8), dropout, mark

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.mark is not None:
            mark_sharding(h, *self.mark)
        return self.down(F.dropout(h, self.dropout) if self.dropout else h)


class Checkpointed(nn.Module):
    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False, **self.options) + x


class Plain(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x


def same(model, x, calls=2):
    """What was sent and decided, by a compiled program that gives what the plain one gives for the same seeds."""
    torch._dynamo.reset()
    plain, mark = copy.deepcopy(model), mark_of(x)
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    with record() as recording:
        for call in range(calls):
            results = []
            for module, run in ((plain, plain), (model, compiled)):
                module.zero_grad()
                given = x.clone().requires_grad_()
                if mark is not None:
                    note_mark(given, mark.mesh, mark.mark)
                torch.manual_seed(call)
                y = run(given)
                y.square().sum().backward()
                results.append([y.detach(), given.grad, *(p.grad for p in module.parameters()), torch.rand(2)])
            for want, got in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    ours = recording.report().ours
    assert not [d.reason for d in ours.decisions if d.kind == "replicate_fallback"]
    return ours


def marked(model, weight):
    mesh, x = mesh22(), torch.randn(4, 8)
    mark_sharding(model.get_parameter(weight), mesh, ("tp", None))
    return model, mark_sharding(x, mesh, ("dp", None))


def _random_numbers():
    """Dropout in a region sends what it sends without checkpointing."""
    sent = [same(*marked(kind(Block(0.5)), "inner.up.weight")).totals.all.bytes for kind in (Plain, Checkpointed)]
    assert sent[0] == sent[1] > 0, sent


def _marks_inside_alone():
    mesh = mesh22()
    found = follows(same(Checkpointed(Block(mark=(mesh, ("dp", "tp")))), torch.randn(4, 8)))
    of_block = {name.removeprefix("inner_modules_"): spec for name, spec in found.items()}
    want = {
        "L_x": "S(0)R",
        "up_parameters_weight": "RS(0)",
        "up_parameters_bias": "RS(0)",
        "down_parameters_weight": "RS(1)",
    }
    assert of_block == want, found


def _regions_in_regions():
    same(
        *marked(
            Checkpointed(nn.Sequential(nn.Linear(8, 8), Checkpointed(Block(0.5)), Checkpointed(Block(0.2)))),
            "inner.0.weight",
        )
    )


def _keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def _policies():
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    same(*marked(Checkpointed(Block(0.5), context_fn=contexts), "inner.up.weight"))


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        h = self.up(x).add_(1)
        flat = h.view(-1)
        h.mul_(2)
        return torch.sin(h) + flat.view(h.shape)


def _writes_in_place():
    same(*marked(Checkpointed(Writes()), "inner.up.weight"))


class Manual(nn.Module):
    """A manual region inside of a checkpointed one, and one around it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        h = checkpoint(self._inside, x, use_reentrant=False)
        rows = enable_manual_sharding(h, ("dp", None))
        rows = checkpoint(self._of_rows, rows, use_reentrant=False)
        return disable_manual_sharding(rows, ("dp", None), (4, 8))

    def _inside(self, x):
        a = enable_manual_sharding(self.up(x), ("dp", "tp"))
        return disable_manual_sharding(torch.sin(a), ("dp", "tp"), (4, 8))

    def _of_rows(self, rows):
        return torch.relu(self.up(rows)) if torch.compiler.is_compiling() else torch.relu(rows)


class Without(Manual):
    def forward(self, x):
        return torch.relu(self.up(torch.sin(self.up(x))))


def _manual_regions():
    mesh22()
    torch._dynamo.reset()
    model, x, grads = Manual(), torch.randn(4, 8), []
    for run in (
        torch.compile(model, backend="dtensor_aten", fullgraph=True),
        functools.partial(Without.forward, model),
    ):
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


def _stored_in_shards():
    model, x = marked(Checkpointed(Block()), "inner.up.weight")
    plain = copy.deepcopy(model)
    assert [row.spec for row in shard_module(model, x).placed] == ["RS(0)", "RS(0)", "RS(1)", "RR"]
    torch._dynamo.reset()
    y = torch.compile(model, backend="dtensor_aten", fullgraph=True)(x)
    (y.full_tensor() if isinstance(y, DTensor) else y).square().sum().backward()
    plain(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_checkpointed_regions():
    torch.manual_seed(0)
    try:
        _random_numbers()
        for case in (
            _marks_inside_alone,
            _regions_in_regions,
            _policies,
            _writes_in_place,
            _manual_regions,
            _stored_in_shards,
        ):
            case()
    finally:
        set_global_mesh(None)
