"""Small graphs for the tests of passes: traced on real ranks, run before and after on the same tensors."""

import contextlib
import copy
import dataclasses

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile import passes
from dtensor_compile.compat.dynamo.observers.observe import node_of
from dtensor_compile.graph.global_annotations import MARK, Mark
from dtensor_compile.graph.rank_uniformity import spread_marks
from dtensor_compile.graph.runner import GraphStep, run_steps
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.options import Options
from dtensor_compile.testing import graph_text, make_mesh

SHAPE = [4, 6]


def mesh():
    return mesh_text(make_mesh((2,)))


def move(x, source, target, shape=SHAPE, on=None):
    return redistribute_op(x, source, target, on or mesh(), list(shape))


@dataclasses.dataclass
class Alone:
    """A compilation of one graph by some steps."""

    options: Options
    made: list = dataclasses.field(default_factory=list)

    def decided(self, decisions):
        self.made += decisions

    def timing(self, name):
        return contextlib.nullcontext()


def run_alone(graph, run=None, disabled=(), enabled=(), strict=False):
    """Runs steps, or passes, on a graph; those that all redistributions get where there are none. Returns what they
    decided.
    """
    marks = [GraphStep(spread_marks, required=True, reads=True)]
    steps = (
        [*marks, *passes.steps()]
        if run is None
        else [one if isinstance(one, GraphStep) else GraphStep(one) for one in run]
    )
    this = Alone(Options(disable_passes=tuple(disabled), enable_passes=tuple(enabled), strict=strict))
    run_steps(graph, steps, this)
    return this.made


def unchanged(run_pass, function, *args):
    before, after, decisions = rewritten(run_pass, function, *args)
    assert before == after and decisions == []


def local(*sizes):
    return torch.arange(torch.Size(sizes).numel()).reshape(sizes).float() + 100 * dist.get_rank()


def rewritten(run_pass, function, *args):
    """(text before, text after, decisions) of a pass on the graph of a function; results are compared and must not
    alias more.
    """
    mesh()  # process groups are made outside the trace
    gm = make_fx(function, tracing_mode="fake")(*args)
    before = graph_text(gm.graph)
    changed = copy.deepcopy(gm)
    decisions = run_pass(changed.graph)
    changed.graph.lint()
    changed.recompile()
    wanted, out = (g(*[a.clone() for a in args]) for g in (gm, changed))
    assert [o.stride() for o in wanted] == [o.stride() for o in out]
    assert all(torch.equal(a, b) for a, b in zip(wanted, out, strict=True))
    inputs = [a.clone() for a in args]
    results = [*inputs, *changed(*inputs)]
    pointers = [r.untyped_storage().data_ptr() for r in results]
    assert len(set(pointers)) == len(pointers), "an output aliases an input or another output"
    return before, graph_text(changed.graph), [(d.kind, d.before, d.after) for d in decisions]


def marked(x, spec, shape):
    """`x`, of whose node in the trace the program says what it is globally."""
    node_of(x).meta[MARK] = Mark(spec, mesh(), tuple(shape))
    return x
