"""Lowered graphs: which functional collectives a node becomes, and what happens to a node that cannot become any."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.lowering import lower as lowering
from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.recording.recorder import collectives_in
from dtensor_compile.testing import graph_text, make_mesh, on_ranks, run_on_ranks


def traced(source, target, shape, local_shape, tracing_mode="fake"):
    mesh = mesh_text(make_mesh((2,)))
    local = torch.arange(torch.Size(local_shape).numel()).reshape(local_shape).float()
    sharded = {int(source[2])} if source.startswith("S") else set()

    def function(x):
        sizes = (
            [x.size(d) * (2 if d in sharded else 1) for d in range(x.dim())]
            if tracing_mode == "symbolic"
            else list(shape)
        )
        return redistribute_op(x, source, target, mesh, sizes) + 1

    return make_fx(function, tracing_mode=tracing_mode)(local), local


def lowered(source, target, shape, local_shape):
    gm, local = traced(source, target, shape, local_shape)
    wanted = gm(local)
    changed = copy.deepcopy(gm)
    assert lower_redistributions(changed.graph, strict=True) == []
    changed.graph.lint()
    changed.recompile()
    out = changed(local)
    assert torch.equal(out, wanted) and out.stride() == wanted.stride()
    return graph_text(changed.graph)


class Golden(TestCase):
    maxDiff = None

    def lowered(self, *args):
        first, second = run_on_ranks(2, lowered, *args)
        assert first == second
        return first

    def test_gather_of_dim_0_is_one_collective_and_nothing_else(self):
        self.assertExpectedInline(
            self.lowered("S(0)", "R", [4, 6], [2, 6]),
            """\
x_1: [2, 6]
all_gather_into_tensor: [4, 6] = all_gather_into_tensor(x_1, 2)
wait_tensor: [4, 6] = wait_tensor(all_gather_into_tensor)
add: [4, 6] = add(wait_tensor, 1)
return add
""",
        )

    def test_gather_of_dim_1_moves_the_ranks_with_one_permutation(self):
        text = self.lowered("S(1)", "R", [4, 6], [4, 3])
        assert "split" not in text and "cat" not in text
        self.assertExpectedInline(
            text,
            """\
x_1: [4, 3]
all_gather_into_tensor: [8, 3] = all_gather_into_tensor(x_1, 2)
wait_tensor: [8, 3] = wait_tensor(all_gather_into_tensor)
view: [2, 4, 3] = view(wait_tensor, [2, 4, 3])
permute: [4, 2, 3] = permute(view, [1, 0, 2])
clone: [4, 2, 3] = clone(permute, memory_format=torch.contiguous_format)
_unsafe_view: [4, 6] = _unsafe_view(clone, [4, 6])
add: [4, 6] = add(_unsafe_view, 1)
return add
""",
        )

    def test_partial_to_shard_is_a_reduce_scatter(self):
        self.assertExpectedInline(
            self.lowered("P(sum)", "S(0)", [4, 6], [4, 6]),
            """\
x_1: [4, 6]
reduce_scatter_tensor: [2, 6] = reduce_scatter_tensor(x_1, sum, 2)
wait_tensor: [2, 6] = wait_tensor(reduce_scatter_tensor)
add: [2, 6] = add(wait_tensor, 1)
return add
""",
        )

    def test_partial_to_replicate_is_an_all_reduce(self):
        self.assertExpectedInline(
            self.lowered("P(sum)", "R", [4, 6], [4, 6]),
            """\
x_1: [4, 6]
all_reduce: [4, 6] = all_reduce(x_1, sum)
wait_tensor: [4, 6] = wait_tensor(all_reduce)
add: [4, 6] = add(wait_tensor, 1)
return add
""",
        )

    def test_shard_to_shard_is_an_all_to_all(self):
        self.assertExpectedInline(
            self.lowered("S(0)", "S(1)", [4, 6], [2, 6]),
            """\
x_1: [2, 6]
view: [2, 2, 3] = view(x_1, [2, 2, 3])
permute: [2, 2, 3] = permute(view, [1, 0, 2])
clone: [2, 2, 3] = clone(permute, memory_format=torch.contiguous_format)
all_to_all_single: [2, 2, 3] = all_to_all_single(clone, [1, 1], [1, 1])
wait_tensor: [2, 2, 3] = wait_tensor(all_to_all_single)
permute_1: [2, 2, 3] = permute(wait_tensor, [0, 1, 2])
view_1: [4, 3] = view(permute_1, [4, 3])
add: [4, 3] = add(view_1, 1)
return add
""",
        )

    def test_replicate_to_shard_is_a_copy_of_its_slice(self):
        first, second = run_on_ranks(2, lowered, "R", "S(1)", [4, 6], [4, 6])
        assert first.replace("(x_1, 1, 0, 3)", "(x_1, 1, 3, 6)") == second
        self.assertExpectedInline(
            first,
            """\
x_1: [4, 6]
slice_1: [4, 3] = slice(x_1, 1, 0, 3)
clone: [4, 3] = clone(slice_1)
add: [4, 3] = add(clone, 1)
return add
""",
        )


def fail(*args, **kwargs):
    raise ValueError("no way")


@on_ranks(2)
def test_node_that_cannot_be_lowered_stays_and_runs():
    gm, local = traced("S(0)", "R", [4, 6], [2, 6])
    wanted, original = gm(local), lowering.carry_out
    lowering.carry_out = fail
    lowering._known.clear()
    try:
        with pytest.warns(
            UserWarning, match="S\\(0\\)->R.*runs through the operator's eager kernel: ValueError: no way"
        ):
            (decision,) = lower_redistributions(gm.graph)
        with pytest.raises(ValueError, match="no way"):
            lower_redistributions(gm.graph, strict=True)
    finally:
        lowering.carry_out = original
    assert decision.kind == "lower_redistributions" and "ValueError: no way" in decision.reason
    gm.graph.lint()
    gm.recompile()
    assert "redistribute" in gm.code and torch.equal(gm(local), wanted)


@on_ranks(2)
def test_new_nodes_keep_the_line_of_the_user():
    gm, _ = traced("S(1)", "R", [4, 6], [4, 3])
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = '  File "/user/model.py", line 7, in forward\n    y = x.redistribute()\n'
    lower_redistributions(gm.graph, strict=True)
    assert all("/user/model.py" in n.meta["stack_trace"] for n in gm.graph.nodes if n.op == "call_function")
    assert [c.where for c in collectives_in(gm.graph)] == ["/user/model.py:7: y = x.redistribute()"]


@on_ranks(2)
def test_symbolic_sizes_stay_symbolic():
    for source, target in [("S(0)", "R"), ("S(1)", "R"), ("P(sum)", "S(0)"), ("R", "S(1)"), ("S(0)", "S(1)")]:
        gm, _ = traced(source, target, None, [8, 10], tracing_mode="symbolic")
        changed, _ = traced(source, target, None, [8, 10], tracing_mode="symbolic")
        assert lower_redistributions(changed.graph, strict=True) == []
        changed.graph.lint()
        changed.recompile()
        for shape in [(8, 10), (4, 14), (12, 6)]:
            x = torch.arange(shape[0] * shape[1]).reshape(shape).float()
            assert torch.equal(changed(x), gm(x)), (source, target, shape)


@on_ranks(2)
def test_lowering_an_uneven_or_empty_shard_equals_the_operator():
    from torch.distributed import get_rank

    for rows in (0, 1, 3, 5):
        mine = [min((rows + 1) // 2, rows), rows // 2 if rows > 1 else 0][get_rank()]
        lowered("S(0)", "R", [rows, 6], [mine, 6])
        lowered("S(0)", "S(1)", [rows, 6], [mine, 6])
        lowered("P(sum)", "S(0)", [rows, 6], [rows, 6])


@on_ranks(2)
def test_record_counts_what_the_plan_says():
    from dtensor_compile.planner.search import bytes_sent, cheapest_plan

    for source, target, shape, local_shape in [
        ("S(0)", "R", [4, 6], [2, 6]),
        ("P(sum)", "S(0)", [5, 6], [5, 6]),
        ("S(0)", "S(1)", [4, 5], [2, 5]),
    ]:
        gm, _ = traced(source, target, shape, local_shape)
        lower_redistributions(gm.graph, strict=True)
        assert sum(c.bytes for c in collectives_in(gm.graph)) == bytes_sent(
            cheapest_plan(source, target, (2,), shape), 4
        )


def values_of(graph):
    return [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]


@on_ranks(2)
def test_what_was_traced_before_is_put_in_again_with_values_of_the_new_trace_alone():
    lowering._known.clear()
    first, local = traced("S(0)", "S(1)", [6, 4], [3, 4])
    wanted = first(local)
    lower_redistributions(first.graph, strict=True)
    with mock.patch.object(lowering, "trace_local", fail):
        second, local = traced("S(0)", "S(1)", [6, 4], [3, 4])
        lower_redistributions(second.graph, strict=True)
        other, _ = traced("S(0)", "S(1)", [6, 8], [3, 8])
        with pytest.raises(ValueError, match="no way"):
            lower_redistributions(other.graph, strict=True)
    second.graph.lint()
    second.recompile()
    assert torch.equal(second(local), wanted) and graph_text(second.graph) == graph_text(first.graph)
    (mode,) = {value.fake_mode for value in values_of(second.graph)}
    assert all(value.fake_mode is not mode for value in values_of(first.graph))
    assert not any(values_of(graph) for graph in lowering._known.values())


@on_ranks(2)
def test_what_a_graph_needs_is_traced_together():
    """Three expansions, two of them of one tensor, and one without a collective; none is there twice."""
    mesh, sizes = mesh_text(make_mesh((2,))), [6, 4]

    def function(x):
        whole, columns = (redistribute_op(x, "S(0)", target, mesh, sizes) for target in ("R", "S(1)"))
        return (
            whole * 2,
            columns,
            redistribute_op(whole + 1, "R", "S(0)", mesh, sizes),
            redistribute_op(x * 3, "S(0)", "R", mesh, sizes),
        )

    local = torch.arange(12.0).reshape(3, 4) + dist.get_rank()
    gm = make_fx(function, tracing_mode="fake")(local)
    wanted = gm(local)
    lowering._known.clear()
    with mock.patch.object(lowering, "trace_local", wraps=lowering.trace_local) as trace:
        lower_redistributions(gm.graph, strict=True)
    assert trace.call_count == 1 and len(lowering._known) == 3
    gm.graph.lint()
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(gm(local), wanted, strict=True))
    assert len({id(value) for value in values_of(gm.graph)}) == len(values_of(gm.graph))


@on_ranks(2)
def test_what_was_traced_for_another_process_group_is_not_put_in_again():
    names = []
    for _ in range(2):
        mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
        gm = make_fx(lambda x: redistribute_op(x, "S(0)", "R", mesh_text(mesh), [4, 2]), tracing_mode="fake")(
            torch.ones(2, 2)
        )
        lower_redistributions(gm.graph, strict=True)
        (gather,) = gm.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
        )
        names.append(gather.args[2])
        assert names[-1] == mesh.get_group().group_name
    assert names[0] != names[1]
