"""``print``, ``warnings`` and ``logging`` in compiled code: the same text as eager, in the same order, on every
call.
"""

import contextlib
import io
import logging
import logging.handlers
import sys
import warnings
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values

log = logging.getLogger("tests.printing")


def _heard(function, *argument_sets):
    """Results, and what was printed, logged and warned about, of some calls."""
    out, records, results = io.StringIO(), logging.handlers.BufferingHandler(1000), []
    log.addHandler(records)
    log.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for arguments in argument_sets:
                results.append(function(*arguments))
    finally:
        log.removeHandler(records)
    warned = [(str(w.message), w.category, w.filename, w.lineno) for w in warned if "tests" in w.filename]
    logged = [(r.getMessage(), r.levelname, r.filename, r.lineno, r.funcName) for r in records.buffer]
    return results, out.getvalue(), logged, warned


def assert_says_the_same(function, *argument_sets, fullgraph=True):
    torch._dynamo.reset()
    eager = _heard(function, *argument_sets)
    compiled = _heard(torch.compile(function, backend="dtensor_aten", fullgraph=fullgraph), *argument_sets)
    assert not compare_values("result", eager[0], compiled[0])
    assert eager[1:] == compiled[1:], (eager[1:], compiled[1:])
    assert any(eager[1:])


def _sharded(mesh, rows=4):
    return distribute_tensor(torch.arange(2.0 * rows).reshape(rows, 2), mesh, [Shard(0)])


@on_ranks(2)
def test_dtensor_mesh_and_placements():
    mesh = make_mesh((2,), ("tp",))

    def program(d):
        y = d * 2
        print("y is", y, d.placements, sep=" | ")
        print("mesh", d.device_mesh, mesh["tp"], Shard(1), f"{d.placements} {mesh} {tuple(y.shape)}")
        return y + 1

    assert_says_the_same(program, (_sharded(mesh),), (_sharded(mesh),), (_sharded(mesh, 6),), (_sharded(mesh, 8),))


@on_ranks(2)
def test_values_are_those_of_the_call():
    mesh = make_mesh((2,), ("tp",))

    def program(d):
        y = d * 2
        text = f"formatted {y}"
        parts = [y.to_local(), {"scale": y}]
        print("before", y, parts)
        y.add_(1)
        parts.append(3)
        print("after", y, text, parts)
        return y

    assert_says_the_same(program, (_sharded(mesh),), (_sharded(mesh),))


@on_ranks(2)
def test_order_of_print_logging_and_warnings_through_functions_and_modules():
    mesh = make_mesh((2,), ("tp",))

    class Layer(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.mesh = name, mesh

        def forward(self, d):
            print(self.name, self.mesh)
            log.info("%s: mesh %s placements %s", self.name, d.device_mesh, d.placements)
            return d + 1

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(f"layer {i}") for i in range(3))

        def forward(self, d):
            for layer in self.layers:
                d = layer(d)
                print(layer.name, "gives", d)
                log.debug("not heard %s", d)
            if d.placements[0].is_shard():
                warnings.warn(f"sharded on {d.placements}")  # noqa: B028 - as programs write it
                warnings.warn("old", DeprecationWarning, stacklevel=1)
            return d

    assert_says_the_same(Model(), (_sharded(mesh),), (_sharded(mesh),))


@on_ranks(2)
def test_warning_with_a_stacklevel_names_the_caller():
    mesh = make_mesh((2,), ("tp",))

    def complain(d):
        warnings.warn(f"{d.placements} is not what I like", stacklevel=2)

    def program(d):
        complain(d)
        return d * 2

    assert_says_the_same(program, (_sharded(mesh),))


@on_ranks(2)
def test_gradients_do_not_notice():
    mesh = make_mesh((2,), ("tp",))

    def program(d):
        y = d * d
        print(y)
        log.info("%s", y.redistribute(placements=[Replicate()]).to_local())
        return y.sin()

    results = []
    for run in (program, torch.compile(program, backend="dtensor_aten", fullgraph=True)):
        d = _sharded(mesh).detach().requires_grad_()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            y = run(d)
        y.to_local().sum().backward()
        results.append((y, d.grad, out.getvalue()))
    assert not compare_values("step", *results)


@on_ranks(2)
def test_level_of_a_logger_is_guarded():
    mesh = make_mesh((2,), ("tp",))

    def program(d):
        return d * 2 if log.isEnabledFor(logging.INFO) else d * 3

    run = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    for level in (logging.INFO, logging.ERROR, logging.INFO):
        log.setLevel(level)
        assert not compare_values("result", program(_sharded(mesh)), run(_sharded(mesh)))


@on_ranks(1)
def test_printing_to_stderr_and_without_newline():
    mesh = make_mesh((1,), ("tp",))

    def program(d):
        print("a", end="")
        print("b", file=sys.stderr, flush=True)
        return d * 2

    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert_says_the_same(program, (_sharded(mesh),))
    assert err.getvalue() == "b\nb\n"


class _Pair(NamedTuple):
    mesh: object
    placement: object


@on_ranks(1)
def test_texts_of_containers():
    mesh = make_mesh((1,), ("tp",))

    def program(d):
        pair = _Pair(mesh, Shard(0))
        print({"mesh": mesh, "placements": [Shard(0), Replicate()]}, (mesh, Shard(1)), pair.placement, repr(pair.mesh))
        print("%s and %r" % (d.placements, mesh))  # noqa: UP031 - one of the forms that a program may use
        print(f"{mesh} {Shard(0)!r}", str(mesh) + repr(d.placements))
        return d * 2

    assert_says_the_same(program, (_sharded(mesh),))


@on_ranks(1)
def test_what_cannot_be_held_back_breaks_the_graph_and_says_so():
    mesh = make_mesh((1,), ("tp",))

    class Thing:
        def __init__(self):
            self.count = 0

    thing = Thing()

    def program(d):
        thing.count += 1
        print(thing)
        return d * 2

    assert_says_the_same(program, (_sharded(mesh),), fullgraph=False)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="backend='dtensor' calls print after the graph has run"):
        torch.compile(program, backend="dtensor_aten", fullgraph=True)(_sharded(mesh))


@on_ranks(1)
def test_a_tensor_of_a_checkpointed_region_is_not_held_back():
    mesh = make_mesh((1,), ("tp",))

    def block(d):
        y = d.sin()
        print("in the block", y)
        return y.cos()

    def program(d):
        return checkpoint(block, d, use_reentrant=False) * 2

    assert_says_the_same(program, (_sharded(mesh),), fullgraph=False)
