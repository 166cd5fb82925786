"""The operator on real ranks: what torch's own redistribution gives, value for value and stride for stride, fake as
eager.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.compat.dtensor.specs import make_spec, stock_redistribute_local
from dtensor_compile.errors import PlanError
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks
from tests.cases import mostly_slow


def distinct(shape, dtype):
    """A tensor whose elements differ from their neighbours; small integers, so that sums are exact in every dtype."""
    n = torch.Size(shape).numel()
    return (torch.arange(n) * 7 % 31 - 15).to(dtype).reshape(shape)


def local_of(full, mesh, placements):
    """Local tensor of this rank, cut by hand; a partial one differs from rank to rank."""
    local = full
    for i, (placement, coordinate) in enumerate(zip(placements, mesh.get_coordinate())):
        if isinstance(placement, Partial):
            local = local + torch.arange(local.numel()).reshape(local.shape).remainder(3 + i).mul(coordinate + 1).to(
                local.dtype
            )
        elif isinstance(placement, (Shard, _StridedShard)):
            pieces = [local] if isinstance(placement, Shard) else local.chunk(placement.split_factor, placement.dim)
            mine = []
            for piece in pieces:
                chunks = piece.chunk(mesh.size(i), placement.dim)
                mine.append(chunks[coordinate] if coordinate < len(chunks) else piece.narrow(placement.dim, 0, 0))
            local = torch.cat(mine, placement.dim)
    return local.clone(memory_format=torch.contiguous_format)


def of_torch(local, source, target, mesh, shape):
    specs = [make_spec(mesh, placements, shape, local.dtype) for placements in (source, target)]
    out = stock_redistribute_local(local, *specs)
    return out.wait() if hasattr(out, "wait") else out


def facts(x):
    return tuple(x.shape), tuple(x.stride()), x.dtype


def same_layout(out, wanted):
    """Strides equal torch's; contiguous where torch's result is a view of a padded buffer. Dims of size 1 have no
    layout.
    """
    if wanted.numel() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(wanted):
        return out.is_contiguous()
    return all(a == b for a, b, size in zip(out.stride(), wanted.stride(), out.shape) if size > 1)


def _is_split(source, target):
    """Whether shards become parts of a sum, of which torch (as of 2.14) may leave others on a rank: it is the sum that
    counts.
    """
    return any(isinstance(a, (Shard, _StridedShard)) and isinstance(b, Partial) for a, b in zip(source, target))


def compare(mesh, source, target, full, layout=lambda x: x):
    """Complaints about one redistribution, eager and fake against torch."""
    shape = list(full.shape)
    local = layout(local_of(full, mesh, source))
    text = spec_text(source), spec_text(target), mesh_text(mesh), shape
    case = f"{text[0]}->{text[1]} {tuple(shape)} {str(full.dtype)[6:]} local {tuple(local.shape)}{local.stride()}"
    try:
        wanted = of_torch(local.clone(), source, target, mesh, shape)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        try:
            redistribute_op(local, *text)
        except (RuntimeError, ValueError):
            return []
        if _is_split(source, target):
            return []  # right here (test_every_pair.py), while torch has no such change before 2.14
        return [f"{case}: torch refuses ({error}), the operator does not"]
    before = local.clone()
    out = redistribute_op(local, *text)
    wrong = []
    if out.shape != wanted.shape or out.dtype != wanted.dtype or not same_layout(out, wanted):
        wrong.append(f"{case}: {facts(out)}, torch {facts(wanted)}")
    elif _is_split(source, target):
        ours, theirs = (redistribute_op(x, text[1], "R" * len(target), *text[2:]) for x in (out, wanted))
        if not torch.equal(ours, theirs):
            wrong.append(f"{case}: the sum is {ours.flatten()[:8].tolist()}, torch {theirs.flatten()[:8].tolist()}")
    elif not torch.equal(out, wanted):
        wrong.append(f"{case}: values differ: {out.flatten()[:8].tolist()}, torch {wanted.flatten()[:8].tolist()}")
    if not torch.equal(local, before):
        wrong.append(f"{case}: the input changed")
    kept = out.clone()
    local.fill_(99)
    if not torch.equal(out, kept):
        wrong.append(f"{case}: the result aliases the input")
    with FakeTensorMode() as mode:
        fake = redistribute_op(mode.from_tensor(before), *text)
    if facts(fake) != facts(out):
        wrong.append(f"{case}: fake {facts(fake)}, eager {facts(out)}")
    return wrong


def reversed_strides(x):
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def every_other(x):
    wide = torch.stack([x, x], -1).flatten(-2)
    return wide[..., ::2]


LAYOUTS = {"contiguous": lambda x: x, "reversed": reversed_strides, "every other": every_other}


def compare_all(mesh_shape, words, shapes, dtypes, layouts):
    mesh = make_mesh(mesh_shape)
    specs = ["".join(s) for s in itertools.product(words, repeat=len(mesh_shape))]
    wrong, count = [], 0
    for shape, dtype, layout in itertools.product(shapes, dtypes, layouts):
        full = distinct(shape, dtype)
        for source, target in itertools.product(specs, specs):
            placements = parse_spec(source), parse_spec(target)
            if any(
                isinstance(p, (Shard, _StridedShard)) and p.dim >= len(shape) for p in (*placements[0], *placements[1])
            ):
                continue
            if source != target:
                count += 1
                wrong += compare(mesh, *placements, full, LAYOUTS[layout])
    assert count
    return wrong


def assert_like_torch(world, *args):
    wrong = dict.fromkeys(line for lines in run_on_ranks(world, compare_all, *args) for line in lines)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(list(wrong)[:60])


UNEVEN = [(8, 8), (5, 6, 3), (3, 4), (1, 5), (4, 1), (0, 4), (2, 0)]
WORDS = ("R", "S(0)", "S(1)", "P(sum)", "P(max)")


@pytest.mark.parametrize("world", mostly_slow([2, 4], 2))
def test_every_change_on_one_mesh_dim_for_even_uneven_and_empty_shards(world):
    assert_like_torch(world, (world,), (*WORDS, "S(2)"), UNEVEN, [torch.float32], ["contiguous"])


@pytest.mark.parametrize("world", [2, 4])
def test_locals_that_are_not_contiguous(world):
    assert_like_torch(
        world, (world,), (*WORDS, "S(2)"), [(8, 4), (5, 6, 3)], [torch.float32], ["reversed", "every other"]
    )


@pytest.mark.parametrize("world", mostly_slow([2, 4], 2))
def test_other_dtypes(world):
    dtypes = [torch.bfloat16, torch.float64, torch.int64, torch.uint8]
    assert_like_torch(world, (world,), WORDS, [(8, 4), (5, 6)], dtypes, ["contiguous"])


def test_booleans_and_complex_numbers_move():
    assert_like_torch(2, (2,), ("R", "S(0)", "S(1)"), [(8, 4), (5, 6)], [torch.bool, torch.complex64], ["contiguous"])


@pytest.mark.parametrize("op", ["avg", "min", "product", "band", "bor", "bxor"])
def test_other_reductions_do_what_torch_does_or_refuse_where_it_refuses(op):
    dtype = torch.int32 if op.startswith("b") else torch.float32
    assert_like_torch(2, (2,), ("R", "S(0)", "S(1)", f"P({op})"), [(4, 6), (5, 3)], [dtype], ["contiguous"])


def test_scalars():
    assert_like_torch(2, (2,), ("R", "P(sum)", "P(max)"), [()], [torch.float32], ["contiguous"])


@pytest.mark.parametrize(
    "shape", [(8, 8), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((5, 6, 3), (3, 1)))], ids=str
)
def test_every_change_on_two_mesh_dims(shape):
    assert_like_torch(4, (2, 2), ("R", "S(0)", "S(1)", "P(sum)"), [shape], [torch.float32], ["contiguous"])


@pytest.mark.slow
def test_two_mesh_dims_and_locals_that_are_not_contiguous():
    assert_like_torch(4, (2, 2), ("R", "S(0)", "S(1)", "P(sum)"), [(4, 6)], [torch.float32], ["reversed"])


def test_partials_of_different_kinds_are_refused_as_torch_does():
    assert_like_torch(4, (2, 2), ("R", "P(sum)", "P(max)"), [(4, 4)], [torch.float32], ["contiguous"])


def test_mesh_dims_of_size_one():
    assert_like_torch(2, (1, 2), ("R", "S(0)", "S(1)"), [(4, 6), (5, 3)], [torch.float32], ["contiguous"])


def compare_strided(mesh_shape, words, shapes):
    """Against shards cut by hand: torch's own results are wrong for many of these changes."""
    mesh, wrong = make_mesh(mesh_shape), []
    specs = [parse_spec("".join(s)) for s in itertools.product(words, repeat=len(mesh_shape))]
    for shape, (source, target) in itertools.product(shapes, itertools.product(specs, specs)):
        full = distinct(shape, torch.float32)
        local, wanted = local_of(full, mesh, source), local_of(full, mesh, target)
        text = spec_text(source), spec_text(target), mesh_text(mesh), list(shape)
        out = redistribute_op(local, *text)
        with FakeTensorMode() as mode:
            fake = redistribute_op(mode.from_tensor(local), *text)
        if not torch.equal(out, wanted) or facts(out) != facts(fake) or not out.is_contiguous():
            wrong.append(f"{text[0]}->{text[1]} {shape}: {facts(out)}, fake {facts(fake)}, by hand {facts(wanted)}")
    return wrong


@pytest.mark.parametrize(
    ("world", "mesh_shape", "words"),
    [
        (2, (2,), ("R", "S(0)", "_S(0,2)", "_S(1,3)", "_S(0,5)")),
        (4, (4,), ("R", "_S(0,2)")),
        pytest.param(4, (2, 2), ("R", "S(0)", "_S(0,2)", "S(1)"), marks=pytest.mark.slow),
    ],
)
def test_strided_shards_to_and_fro(world, mesh_shape, words):
    answers = run_on_ranks(world, compare_strided, mesh_shape, words, [(8, 8), (7, 5), (1, 3)])
    assert [line for lines in answers for line in lines] == []


def test_strided_shards_as_torch_has_them():
    assert_like_torch(2, (2,), ("R", "_S(0,2)"), [(8, 4), (7, 5)], [torch.float32], ["contiguous"])


@on_ranks(4)
def test_shards_of_two_dims_in_the_order_of_fsdp_over_tensor_parallel():
    mesh, full = make_mesh((2, 2)), distinct((8, 4), torch.float32)
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert compare(mesh, placements, (Replicate(), Replicate()), full) == []
    assert compare(mesh, (Replicate(), Replicate()), placements, full) == []
    assert compare(mesh, placements, (Replicate(), Shard(0)), full) == []


def compare_other_meshes():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # its own: it is flattened
    meshes = [grid["dp"], grid["tp"], grid._flatten("flat"), DeviceMesh("cpu", [[0, 2], [1, 3]])]
    wrong = []
    for mesh in meshes:
        for source, target in itertools.product(
            itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=mesh.ndim), repeat=2
        ):
            if source != target:
                wrong += [
                    f"{mesh_text(mesh)}: {line}"
                    for line in compare(mesh, source, target, distinct((5, 6), torch.float32))
                ]
    return wrong


@pytest.mark.slow
def test_slices_flattened_meshes_and_other_orders_of_ranks():
    assert [line for lines in run_on_ranks(4, compare_other_meshes) for line in lines] == []


@on_ranks(4)
def test_rank_outside_the_mesh_keeps_its_empty_tensor_and_waits_for_nobody():
    mesh = DeviceMesh("cpu", [1, 3])
    full = distinct((5, 4), torch.float32)
    if mesh.get_coordinate() is not None:
        assert compare(mesh, (Shard(0),), (Replicate(),), full) == []
        return
    empty = torch.empty(0)
    out = redistribute_op(empty, "S(0)", "R", mesh_text(mesh), [5, 4])
    assert facts(out) == facts(of_torch(empty, (Shard(0),), (Replicate(),), mesh, (5, 4))) and out is not empty
    with FakeTensorMode() as mode:
        assert facts(redistribute_op(mode.from_tensor(empty), "S(0)", "R", mesh_text(mesh), [5, 4])) == facts(out)


@on_ranks(2)
def test_result_equals_the_input_and_is_a_copy_where_nothing_changes():
    x, mesh = distinct((4, 4), torch.float32), mesh_text(make_mesh((2,)))
    out = redistribute_op(x, "R", "R", mesh, [4, 4])
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()


@on_ranks(2)
def test_local_that_does_not_fit_the_spec_is_an_error():
    mesh = mesh_text(make_mesh((2,)))
    for local in (torch.ones(3, 4), torch.ones(2, 4, 1)):
        with pytest.raises(PlanError, match=r"local tensor of shape .* does not fit S\(0\) of \[4, 4\]"):
            redistribute_op(local, "S(0)", "R", mesh, [4, 4])


@on_ranks(2)
def test_opcheck():
    mesh = mesh_text(make_mesh((2,)))
    for source, target, shape in [
        ("S(0)", "R", [4, 6]),
        ("R", "S(1)", [4, 6]),
        ("P(sum)", "S(0)", [5, 6]),
        ("S(0)", "S(1)", [5, 6]),
    ]:
        local = local_of(distinct(shape, torch.float32), make_mesh((2,)), parse_spec(source))
        torch.library.opcheck(redistribute_op, (local, source, target, mesh, shape))


@functools.cache
def symbolic_graph(source, target, shape):
    mesh = mesh_text(make_mesh((2,)))
    local = local_of(distinct(shape, torch.float32), make_mesh((2,)), parse_spec(source))
    sharded = {p.dim for p in parse_spec(source) if isinstance(p, Shard)}

    def program(x):
        sizes = [x.size(d) * (2 if d in sharded else 1) for d in range(x.dim())]
        return redistribute_op(x, source, target, mesh, sizes).sum(0)

    return program, make_fx(program, tracing_mode="symbolic")(local)


@on_ranks(2)
def test_symbolic_sizes_in_one_graph_serve_other_sizes():
    for source, target in itertools.permutations(["R", "S(0)", "S(1)"], 2):
        program, graph = symbolic_graph(source, target, (8, 6))
        assert "redistribute" in graph.code
        for shape in [(8, 6), (4, 10), (12, 2)]:
            local = local_of(distinct(shape, torch.float32), make_mesh((2,)), parse_spec(source))
            assert torch.equal(graph(local), program(local)), (source, target, shape)
    for target in ("R", "S(0)", "S(1)"):
        program, graph = symbolic_graph("P(sum)", target, (8, 6))
        local = distinct((4, 10), torch.float32) + dist.get_rank()
        assert torch.equal(graph(local), program(local)), target


@on_ranks(2)
def test_symbolic_uneven_shards_have_the_shapes_of_torch():
    mesh = make_mesh((2,))

    def program(x):
        return redistribute_op(x, "R", "S(0)", mesh_text(mesh), [x.size(0), x.size(1)])

    graph = make_fx(program, tracing_mode="symbolic")(distinct((5, 6), torch.float32))
    for rows in (5, 7, 9):
        full = distinct((rows, 4), torch.float32)
        assert torch.equal(graph(full), of_torch(full, (Replicate(),), (Shard(0),), mesh, (rows, 4)))
