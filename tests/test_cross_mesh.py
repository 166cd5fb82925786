"""Redistributions from one mesh to another: values, gradients and bytes against what full tensors say; eager and
compiled.
"""

import itertools
import math
import os
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import dtensor_compile
from dtensor_compile.compat.dtensor.specs import make_spec, with_local
from dtensor_compile.errors import NoProcessGroupError
from dtensor_compile.ir import mesh as mesh_module
from dtensor_compile.ir.mesh import mesh_layout
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.testing import on_ranks, run_on_ranks
from tests.cases import mostly_slow


def meshes_of_four():
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    return {
        "square": square,
        "whole": DeviceMesh("cpu", [0, 1, 2, 3]),
        "front": DeviceMesh("cpu", [0, 1]),
        "back": DeviceMesh("cpu", [2, 3]),
        "middle": DeviceMesh("cpu", [1, 2]),
        "three": DeviceMesh("cpu", [0, 1, 2]),
        "last": DeviceMesh("cpu", [3]),
        "tp": square["tp"],
        "dp": square["dp"],
    }


def distinct(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) * 7 % 31 - 15


def term(full, place):
    """What a rank at `place` of the mesh dims that are partial adds to a sum."""
    return full.roll(sum(place), 0) * (1 + 2 * sum(place)) if full.numel() else full


def local_at(full, mesh_shape, placements, at):
    """The local tensor at a coordinate, cut by hand; terms of a sum differ."""
    pending = [c for p, c in zip(placements, at) if isinstance(p, Partial)]
    local = term(full, pending) if pending else full
    for p, n, c in zip(placements, mesh_shape, at):
        if isinstance(p, Shard):
            chunks = local.chunk(n, p.dim) if local.size(p.dim) else ()
            local = chunks[c] if c < len(chunks) else local.narrow(p.dim, 0, 0)
    return local.clone(memory_format=torch.contiguous_format)


def value_of(full, mesh_shape, placements):
    """The global value that such local tensors stand for."""
    pending = [range(n) if isinstance(p, Partial) else (0,) for p, n in zip(placements, mesh_shape)]
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if not ops:
        return full
    dims = [i for i, p in enumerate(placements) if isinstance(p, Partial)]
    terms = torch.stack([term(full, [at[i] for i in dims]) for at in itertools.product(*pending)])
    (op,) = ops
    return {"sum": terms.sum, "avg": terms.mean, "max": terms.amax, "min": terms.amin}[op](0)


def absent(full):
    """The local tensor of a rank that is not part of the mesh, as torch's operators make it."""
    return full.new_empty(0) if full.dim() else full.new_zeros(())


def placed(full, mesh, placements, requires_grad=False):
    """The DTensor on this rank; without a local tensor where the rank is not part of the mesh."""
    layout, rank = mesh_layout(mesh), dist.get_rank()
    at = layout.coordinate(rank)
    local = absent(full) if at is None else local_at(full, layout.shape, placements, at)
    return with_local(local, make_spec(mesh, placements, full.shape, full.dtype)).requires_grad_(requires_grad)


def is_placed(x, full, mesh, placements):
    """Complaints about a DTensor that should hold `full` there."""
    at = mesh_layout(mesh).coordinate(dist.get_rank())
    wanted = absent(full) if at is None else local_at(full, mesh_layout(mesh).shape, placements, at)
    local = x.to_local()
    if x.device_mesh != mesh or tuple(x.placements) != tuple(placements) or x.shape != full.shape:
        return f"{x.device_mesh} {x.placements} {x.shape}"
    if local.shape != wanted.shape or not torch.equal(local, wanted):
        return f"{local} instead of {wanted}"
    return "" if local.is_contiguous() else f"strides {local.stride()}"


CASES = [
    (case, shape)
    for case, shapes in {
        "front S(0) -> back S(0)": [(8, 4), (5, 3), (1, 6), (0, 4)],
        "front S(0) -> back S(1)": [(5, 3), (1, 1)],
        "front S(0) -> middle R": [(5, 3), (8,)],
        "front R -> back R": [(5, 3), ()],
        "front R -> whole S(1)": [(4, 7), (3, 2)],
        "three S(0) -> middle S(0)": [(5, 3), (7, 2), (2, 2)],
        "middle S(1) -> three S(0)": [(5, 3)],
        "square S(0)S(1) -> whole S(0)": [(8, 4), (5, 3), (3, 1)],
        "whole S(0) -> square S(1)S(0)": [(8, 4), (5, 3)],
        "square S(0)S(0) -> front S(0)": [(7, 3), (9, 2)],
        "square RS(0) -> last R": [(5, 3)],
        "last R -> square S(0)R": [(5, 3)],
        "tp S(0) -> square S(0)S(1)": [(5, 4)],
        "square RS(1) -> tp R": [(3, 5)],
        "tp S(0) -> dp S(0)": [(5, 2)],
        "dp R -> whole S(0)": [(6, 2)],
        "front P(sum) -> back S(0)": [(5, 3), (4,)],
        "front P(sum) -> back R": [(5, 3)],
        "front P(max) -> middle S(1)": [(5, 3)],
        "square P(sum)S(0) -> back S(0)": [(5, 3)],
        "square P(sum)P(sum) -> last R": [(6, 2)],
        "front P(avg) -> whole S(0)": [(4, 2)],
        "tp P(min) -> whole R": [(4, 3)],
        "last P(sum) -> front S(0)": [(4, 3)],
    }.items()
    for shape in shapes
]


def parsed(case, meshes):
    source, target = (side.split() for side in case.split(" -> "))
    return meshes[source[0]], parse_spec(source[1]), meshes[target[0]], parse_spec(target[1])


def of_cases(compile_):
    """Complaints of this rank about all cases, forward and backward, in one program; bytes sent per case."""
    meshes, complaints = meshes_of_four(), []
    parts = [(*parsed(case, meshes), distinct(shape)) for case, shape in CASES]
    xs = [placed(full, mesh, spec, requires_grad=True) for mesh, spec, _, _, full in parts]

    def program(*xs):
        return [dtensor_compile.redistribute(x * 1, other, goal) for x, (_, _, other, goal, _) in zip(xs, parts)]

    with dtensor_compile.record() as recording:
        run = torch.compile(program, backend="dtensor_aten", fullgraph=True) if compile_ else program
        for _ in range(2):
            ys = run(*xs)
            tangents = [placed(distinct(full.shape) + 1, other, goal) for _, _, other, goal, full in parts]
            for x in xs:
                x.grad = None
            torch.autograd.backward(ys, tangents)
    for (case, shape), x, y, (mesh, spec, other, goal, full) in zip(CASES, xs, ys, parts):
        back = tuple(
            Replicate() if isinstance(p, Partial) and n > 1 else p for p, n in zip(spec, mesh_layout(mesh).shape)
        )
        back = tuple(Replicate() if isinstance(p, Partial) else p for p in back)
        found = is_placed(y, value_of(full, mesh_layout(mesh).shape, spec), other, goal)
        complaints += [f"{case} {shape}: {found}"] if found else []
        found = is_placed(x.grad, distinct(full.shape) + 1, mesh, back)
        complaints += [f"gradient of {case} {shape}: {found}"] if found else []
    return complaints, len(recording.breaks), len(recording.compilations)


@pytest.mark.parametrize("compile_", mostly_slow([False, True], False))
def test_values_and_gradients(compile_):
    answers = run_on_ranks(4, of_cases, compile_, timeout=300)
    assert [complaints for complaints, _, _ in answers] == [[]] * 4
    assert all(breaks == 0 and compilations == compile_ for _, breaks, compilations in answers)


def in_inductor():
    """The first cases through Inductor, kernels and all."""
    meshes = meshes_of_four()
    parts = [(*parsed(case, meshes), distinct(shape)) for case, shape in CASES[::9]]
    xs = [placed(full, mesh, spec, requires_grad=True) for mesh, spec, _, _, full in parts]

    def program(*xs):
        return [dtensor_compile.redistribute(x * 1, other, goal) * 2 for x, (_, _, other, goal, _) in zip(xs, parts)]

    ys = torch.compile(program, backend="dtensor", fullgraph=True)(*xs)
    torch.autograd.backward(ys, [placed(distinct(full.shape), other, goal) for _, _, other, goal, full in parts])
    found = []
    for x, y, (mesh, spec, other, goal, full) in zip(xs, ys, parts):
        found.append(is_placed(y, 2 * value_of(full, mesh_layout(mesh).shape, spec), other, goal))
        back = tuple(Replicate() if isinstance(p, Partial) else p for p in spec)
        found.append(is_placed(x.grad, 2 * distinct(full.shape), mesh, back))
    return found


@pytest.mark.slow
def test_through_inductor():
    for found in run_on_ranks(4, in_inductor, timeout=300):
        assert found == [""] * len(found)


def a_factor_of_one():
    """The factor, which Inductor leaves out, makes what comes back over the meshes the gradient itself."""
    front, back = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
    x = placed(distinct((3,)), front, (Replicate(),), requires_grad=True)

    def program(x):
        return dtensor_compile.redistribute(x * torch.ones_like(x), back, [Replicate()]) * 2

    y = torch.compile(program, backend="dtensor", fullgraph=True)(x)
    y.backward(placed(distinct((3,)) + 1, back, (Replicate(),)))
    return is_placed(x.grad, 2 * (distinct((3,)) + 1), front, (Replicate(),))


def test_what_is_sent_in_backward_stays_there_where_inductor_drops_its_only_use():
    assert run_on_ranks(2, a_factor_of_one, timeout=100) == ["", ""]


def meshes_made_later():
    """Ranks 0 and 1 make a group for what they send each other, rank 2 does not; then all three make a mesh of 1 and
    2.
    """
    x = placed(distinct((3,)), DeviceMesh("cpu", [0]), (Replicate(),))
    dtensor_compile.redistribute(x, DeviceMesh("cpu", [1]), [Replicate()])
    later = DeviceMesh("cpu", [1, 2])
    total = torch.ones(())
    if dist.get_rank():
        dist.all_reduce(total, group=later.get_group())
    return total.item()


def test_all_ranks_can_make_a_mesh_after_some_have_sent():
    assert run_on_ranks(3, meshes_made_later, timeout=60) == [1, 2, 2]


# ---- bytes ---------------------------------------------------------------------------------------------------------


def indices(mesh, placements, shape, rank):
    """Indices of the elements that a rank holds of a tensor without partial terms; none outside of the mesh."""
    layout = mesh_layout(mesh)
    at = layout.coordinate(rank)
    full = torch.arange(math.prod(shape)).reshape(shape)
    return set() if at is None else set(local_at(full, layout.shape, placements, at).flatten().tolist())


def bytes_of_cases():
    """Per case what all ranks together have to receive, and what this rank sends."""
    meshes, rows = meshes_of_four(), []
    for case, shape in CASES:
        mesh, spec, other, goal = parsed(case, meshes)
        if any(isinstance(p, Partial) for p in spec):
            continue
        lacking = [indices(other, goal, shape, rank) - indices(mesh, spec, shape, rank) for rank in range(4)]
        torch._dynamo.reset()
        with dtensor_compile.record() as recording:
            f = torch.compile(
                lambda x, other=other, goal=goal: dtensor_compile.redistribute(x, other, goal), backend="dtensor_aten"
            )
            f(placed(distinct(shape), mesh, spec))
        rows.append((case, shape, 8 * sum(map(len, lacking)), recording.bytes_sent, len(recording.collectives)))
    return rows


@pytest.mark.slow
def test_nobody_receives_an_element_twice_or_one_that_it_has():
    ranks = run_on_ranks(4, bytes_of_cases, timeout=300)
    assert len(ranks[0]) > 20
    for rows in zip(*ranks):
        case, shape, needed, _, _ = rows[0]
        assert sum(sent for _, _, _, sent, _ in rows) == needed, (case, shape, rows)
        members = sum(calls > 0 for *_, calls in rows)
        assert members == 0 if not needed else members >= 2, (case, shape, rows)


# ---- loads, programs -----------------------------------------------------------------------------------------------


def stages():
    """Two stages of a pipeline, the first on ranks 0 and 1, the second on ranks 1 to 3: loss, gradients,
    collectives.
    """
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2, 3])
    torch.manual_seed(3)
    fulls = [torch.randn(5, 6), torch.randn(6, 7), torch.randn(7, 4)]
    weights = [placed(fulls[1], first, (Shard(1),)), placed(fulls[2], second, (Shard(0),))]
    x = placed(fulls[0], first, (Replicate(),))

    def step(x, w, v):
        h = (x @ w).relu()
        h = dtensor_compile.redistribute(h, second, [Shard(1)])
        return (h @ v).redistribute(placements=[Replicate()]).square().mean()

    answers = []
    for run in (step, torch.compile(step, backend="dtensor_aten", fullgraph=True)):
        parameters = [w.detach().clone().requires_grad_() for w in weights]
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            loss = run(x, *parameters)
            loss.backward()
        answers.append((loss.full_tensor().item(), [(p.grad.placements, p.grad.to_local()) for p in parameters]))
    plain = [full.clone().requires_grad_() for full in fulls[1:]]
    wanted = ((fulls[0] @ plain[0]).relu() @ plain[1]).square().mean()
    wanted.backward()
    complaints = []
    for loss, gradients in answers:
        if dist.get_rank() != 0 and abs(loss - wanted.item()) > 1e-6:  # rank 0 is not part of the second mesh
            complaints.append(f"{loss} instead of {wanted.item()}")
        for (placements, local), full, mesh in zip(gradients, plain, (first, second)):
            at = mesh_layout(mesh).coordinate(dist.get_rank())
            mine = absent(full) if at is None else local_at(full.grad, mesh_layout(mesh).shape, placements, at)
            if local.shape != mine.shape or not torch.allclose(local, mine, atol=1e-6):
                complaints.append(f"{local} instead of {mine}")
    return complaints


def test_stages_of_a_pipeline_in_one_program():
    assert run_on_ranks(4, stages) == [[]] * 4


def unused_and_equal():
    """Two equal redistributions, and one whose result nobody uses: the same collectives on ranks that have or use
    nothing.
    """
    front, back = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1, 2])
    full = distinct((5, 2))

    def program(x, y):
        dtensor_compile.redistribute(y, back, [Replicate()])
        return dtensor_compile.redistribute(x, back, [Shard(0)]) + dtensor_compile.redistribute(y, back, [Shard(0)])

    arguments = [placed(full, front, (Replicate(),)), placed(full * 2, front, (Replicate(),))]
    with dtensor_compile.record() as recording:
        out = torch.compile(program, backend="dtensor_aten", fullgraph=True)(*arguments)
    return is_placed(out, full * 3, back, (Shard(0),)), [c.kind for c in recording.collectives]


def test_ranks_of_one_mesh_alone_drop_nothing():
    assert run_on_ranks(3, unused_and_equal) == [("", ["all_to_all"] * 3)] * 3


def dtypes():
    front, back = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1])
    complaints = []
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8):
        full = distinct((5, 3)).to(dtype)
        x = placed(full, front, (Shard(0),))
        out = torch.compile(
            lambda x: dtensor_compile.redistribute(x, back, [Replicate()]), backend="dtensor_aten", fullgraph=True
        )(x)
        complaints.append(is_placed(out, full, back, (Replicate(),)))
        back_again = dtensor_compile.redistribute(out, front, [Shard(1)])
        complaints.append(is_placed(back_again, full, front, (Shard(1),)))
    return complaints


def test_dtypes():
    assert run_on_ranks(2, dtypes) == [[""] * 10] * 2


def own_mesh():
    mesh = DeviceMesh("cpu", [0, 1])
    x = placed(distinct((4, 2)), mesh, (Shard(0),))
    compiled = torch.compile(
        lambda x: dtensor_compile.redistribute(x, mesh, [Replicate()]), backend="dtensor_aten", fullgraph=True
    )
    with dtensor_compile.record() as recording:
        out = compiled(x)
    return (
        is_placed(out, distinct((4, 2)), mesh, (Replicate(),)),
        recording.redistributions[0].plan,
        recording.redistributions[0].mesh,
    )


def test_on_its_own_mesh_it_is_the_ordinary_redistribution():
    assert run_on_ranks(2, own_mesh) == [("", ("all_gather[0] S(0)->R",), "cpu[2:1]@2")] * 2


def twice_differentiated():
    front, back = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0])
    x = placed(torch.tensor([2.0, 3.0]), front, (Shard(0),), requires_grad=True)
    y = dtensor_compile.redistribute(x, back, [Replicate()])
    (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return second.full_tensor().tolist()


def test_second_derivative_in_eager():
    assert run_on_ranks(2, twice_differentiated) == [[12.0, 18.0]] * 2


# ---- the report ----------------------------------------------------------------------------------------------------


def reported():
    front, back = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    x = placed(distinct((6, 4)), front, (Partial(),))
    report = dtensor_compile.explain(lambda x: dtensor_compile.redistribute(x, back, [Replicate()]))(x)
    (row,) = report.ours.redistributions
    return (
        row.before,
        row.after,
        row.mesh,
        row.plan,
        row.bytes_before,
        row.bytes,
        row.explicit,
        row.fate,
        row.source.line > 0,
    )


def test_report_names_both_meshes_the_plan_and_the_bytes():
    plan = ("reduce_scatter[0] P(sum)->S(0)", "exchange[0,1,2] S(0)->R")
    row = "P(sum)", "R", "cpu[2:1]@2->cpu[2:1]@1.2", plan, 288
    assert run_on_ranks(3, reported) == [
        (*row, 288, True, "sent", True),
        (*row, 192, True, "sent", True),
        (*row, 0, True, "sent", True),
    ]


# ---- what cannot work ----------------------------------------------------------------------------------------------


def refused():
    """Types and texts of errors, eager and compiled."""
    front, back = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    square, meta = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("meta", [1, 2])
    down = DeviceMesh("cpu", [3, 2])
    x = placed(distinct((4, 6)), front, (Shard(0),))
    mixed = placed(distinct((4, 6)), square, (Partial("sum"), Partial("max")))
    cases = {
        "a dim that is not there": (x, back, [Shard(2)]),
        "too few placements": (x, square, [Shard(0)]),
        "partial target": (x, back, [Partial()]),
        "two reductions": (mixed, back, [Replicate()]),
        "another device type": (x, meta, [Shard(0)]),
        "descending ranks": (x, down, [Shard(0)]),
    }
    answers = {}
    for name, (value, mesh, placements) in cases.items():
        torch._dynamo.reset()

        def program(value, mesh=mesh, placements=placements):
            return dtensor_compile.redistribute(value, mesh, placements)

        for run in (program, torch.compile(program, backend="dtensor_aten", fullgraph=True)):
            try:
                run(value)
                answers.setdefault(name, []).append(("", ""))
            except Exception as error:
                answers.setdefault(name, []).append((type(error).__name__, str(error)))
    return answers


REFUSALS = {
    "a dim that is not there": "a tensor of shape [4, 6] cannot be Shard(dim=2) over mesh dim 0 of cpu[2:1]@1.2: it "
    "has 2 dims",
    "too few placements": "the mesh cpu[2:2,2:1]@4 has 2 dims, and every mesh dim takes one placement",
    "partial target": "nothing leads to P(sum) on another mesh; the nearest legal target is R",
    "two reductions": "mixes reductions whose order matters: reduce the one before the other becomes partial, as in "
    "P(sum)R",
    "another device type": "a tensor does not change from 'cpu' to 'meta'",
    "descending ranks": "the ranks of cpu[2:1]@3.2 do not ascend with their coordinates",
}


def test_what_is_refused_is_named_with_the_users_line_on_every_rank():
    answers = run_on_ranks(4, refused)
    for name, text in REFUSALS.items():
        assert len({answer[name][0] for answer in answers}) == 1  # eager; what Dynamo adds names local tensors
        for (eager_type, eager), (_, compiled) in (answer[name] for answer in answers):
            assert text in eager and text in compiled, (name, eager, compiled)
            assert eager_type in ("PlacementError", "PlanError", "MeshError")
            assert (
                "test_cross_mesh.py" in compiled and "dtensor_compile.redistribute(value, mesh, placements)" in compiled
            )


def by_method():
    front, back = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    x = placed(distinct((4, 6)), front, (Shard(0),))
    answers = []
    for run in (lambda x: x.redistribute(back, [Replicate()]),) * 2:
        run = torch.compile(run, backend="dtensor_aten", fullgraph=True) if answers else run
        try:
            run(x)
            answers.append("")
        except Exception as error:
            answers.append(str(error))
    return answers


def test_the_method_of_dtensor_raises_what_eager_raises():
    for eager, compiled in run_on_ranks(3, by_method):
        assert eager == "Cross device mesh comm not supported yet!" and eager in compiled


@on_ranks(3)
def test_a_rank_that_does_not_come_ends_in_an_error():
    front, back = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [2])
    x = placed(distinct((4,)), front, (Replicate(),))
    if dist.get_rank() == 0:
        with mock.patch.object(mesh_module, "JOIN_PATIENCE", 0.5):
            for run in (lambda x: dtensor_compile.redistribute(x, back, [Shard(0)]),) * 2:
                with pytest.raises(NoProcessGroupError, match=r"not all of the ranks \[0, 2\] came within 0.5 s"):
                    run(x)
                run = torch.compile(run, backend="dtensor_aten", fullgraph=True)
                with pytest.raises(Exception, match=r"not all of the ranks \[0, 2\] came within 0.5 s"):
                    run(x)
    dist.barrier()
    out = dtensor_compile.redistribute(x, back, [Shard(0)])  # now it comes
    assert is_placed(out, distinct((4,)), back, (Shard(0),)) == ""


@on_ranks(2)
def test_ranks_that_take_a_tensor_for_other_placements_raise():
    front, back = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
    full = distinct((4,))
    x = placed(full, front, (Replicate() if dist.get_rank() else Shard(0),))
    assert (
        is_placed(dtensor_compile.redistribute(x, back, [Shard(0)]), full, back, (Shard(0),)) == ""
    )  # in eager rank 0 tells
    with pytest.raises(
        Exception, match=r"AgreementError: ranks .* has all_to_all_single float64 R->S\(0\) from cpu\[1:1\]@1 to"
    ):
        torch.compile(
            lambda x: dtensor_compile.redistribute(x, back, [Shard(0)]), backend="dtensor_aten", fullgraph=True
        )(x)


def cached():
    """The same code for other meshes and placements, again and again, with torch's caches on disk: results, and what
    was found there.
    """
    from torch._dynamo.utils import counters

    front, targets = DeviceMesh("cpu", [0, 1]), (DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [2, 3]))
    full, found, hits = distinct((6, 4)), [], []
    for _ in range(2):
        for other, goal in itertools.product(targets, (Shard(0), Shard(1))):
            torch._dynamo.reset()
            counters.clear()
            x = placed(full, front, (Shard(0),), requires_grad=True)
            compiled = torch.compile(
                lambda x, mesh, goal: dtensor_compile.redistribute(x, mesh, [goal]) * 2, backend="dtensor"
            )
            y = compiled(x, other, goal)
            y.backward(placed(full, other, (goal,)))
            found += [is_placed(y, full * 2, other, (goal,)), is_placed(x.grad, full * 2, front, (Shard(0),))]
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    return found, hits


@pytest.mark.slow
def test_caches_tell_meshes_and_placements_apart():
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        for found, hits in run_on_ranks(4, cached, timeout=300):
            assert found == [""] * 16
            assert hits[4:] == [1] * 4
