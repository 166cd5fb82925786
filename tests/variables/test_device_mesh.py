"""``DeviceMesh`` in compiled code: members, slices, identity, guards, and what is left to Python."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_compile.testing import make_mesh, on_ranks
from tests.variables.programs import assert_expression_like_eager, assert_like_eager, program

MEMBERS = """
mesh.ndim
mesh.device_type
mesh.mesh_dim_names
mesh.shape
mesh.size()
mesh.size(1)
mesh.size(mesh_dim=0)
mesh.get_coordinate()
mesh.get_rank()
mesh.get_local_rank("tp")
mesh.get_local_rank(mesh_dim=1)
mesh.get_group("tp")
mesh.get_group(1).rank()
mesh.get_all_groups()
mesh._is_current_rank_part_of_mesh()
mesh._sym_get_coordinate(1)
mesh._get_mesh_dim_by_name("tp")
mesh._dim_group_names
mesh._get_root_mesh()
mesh.mesh
mesh.mesh.tolist()
getattr(mesh, "ndim")
hasattr(mesh, "ndim")
hasattr(mesh, "not_there")
"""

SLICES = """
mesh["tp"]
mesh["tp"].size()
mesh["dp", "tp"].shape
mesh["dp", "tp"] == mesh
mesh["tp"] == mesh["tp"]
mesh["tp"] == mesh["dp"]
mesh["tp"].mesh.tolist()
mesh["tp"].get_group()
mesh["tp"].get_group().size()
mesh["tp"].get_local_rank()
mesh["tp"]._get_root_mesh()
mesh._flatten().size()
mesh._flatten("flat").mesh_dim_names
mesh._flatten("flat").get_group().size()
"""

OBJECTS = """
mesh
(mesh, mesh["tp"])
{"mesh": mesh, "tp": mesh["tp"], "group": mesh.get_group("dp")}
{mesh: 1}[mesh]
mesh == mesh
mesh is mesh
mesh in [mesh["tp"], mesh]
hash(mesh) == hash(mesh)
bool(mesh)
isinstance(mesh, DeviceMesh)
isinstance(mesh["tp"], DeviceMesh)
type(mesh) is DeviceMesh
type(mesh).__name__
mesh.__class__.__name__
repr(mesh)
str(mesh)
f"{mesh}"
"""


@pytest.mark.parametrize("expression", (MEMBERS + SLICES + OBJECTS).strip().splitlines())
@on_ranks(2)
def test_expression(expression):
    assert_expression_like_eager(expression)


@on_ranks(2)
def test_equal_mesh_reuses_the_graph_and_another_does_not():
    mesh, equal = (init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")) for _ in range(2))
    turned, renamed = make_mesh((2, 1), ("dp", "tp")), make_mesh((2, 1), ("a", "b"))
    x = torch.eye(3)
    assert_like_eager(program("mesh.shape"), (x, mesh), (x, equal), (x, mesh), graphs=1)
    assert_like_eager(
        program("(mesh.shape, mesh.mesh_dim_names)"), (x, mesh), (x, turned), (x, renamed), (x, mesh), graphs=3
    )


@on_ranks(2)
def test_slice_follows_the_mesh():
    x = torch.eye(3)
    meshes = make_mesh((1, 2), ("dp", "tp")), make_mesh((2, 1), ("dp", "tp"))
    assert_like_eager(program('mesh["tp"].size()'), *((x, mesh) for mesh in meshes), graphs=2)


@on_ranks(2)
def test_mesh_dim_that_becomes_symbolic_is_fixed():
    mesh = make_mesh((1, 2), ("dp", "tp"))
    program = lambda x, dim: (x @ x, mesh.size(dim), mesh.get_group(dim))  # noqa: E731
    assert_like_eager(program, *((torch.eye(3), dim) for dim in (0, 1, 0)), graphs=2)


@on_ranks(2)
def test_mesh_of_a_module_a_global_and_a_closure_is_one_input():
    mesh = make_mesh((1, 2), ("dp", "tp"))

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mesh = mesh

        def forward(self, x, other):
            return x @ x, self.mesh.size(), other.size() + mesh.size(), self.mesh is other

    assert_like_eager(Module(), (torch.eye(3), mesh), (torch.eye(3), mesh), graphs=1)


@on_ranks(2)
def test_first_flatten_happens_in_the_compiled_program():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    run = torch.compile(lambda x: (x @ x, mesh._flatten("both")), backend="dtensor", fullgraph=True)
    flat = run(torch.eye(3))[1]
    assert type(flat) is DeviceMesh and flat.mesh_dim_names == ("both",) and flat.size() == 2
    assert mesh["both"] == flat


@on_ranks(2)
def test_error_of_a_member_is_the_programs_to_catch():
    def program(x, mesh):
        try:
            return x @ x, mesh["not there"]
        except KeyError:
            return x @ x, mesh.ndim

    assert_like_eager(program, (torch.eye(3), make_mesh((1, 2), ("dp", "tp"))), graphs=1)


@on_ranks(2)
def test_member_outside_the_table_breaks_the_graph_and_says_so():
    mesh = make_mesh((1, 2), ("dp", "tp"))

    def program(x):
        y = x @ x
        return y @ y, str(mesh._get_slice_mesh_layout(("tp",)))

    assert_like_eager(program, (torch.eye(3),), fullgraph=False)
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="backend='dtensor' does not trace the member '_get_slice_mesh_layout'"
    ):
        torch.compile(program, backend="dtensor", fullgraph=True)(torch.eye(3))


@on_ranks(2)
def test_data_that_the_user_put_on_a_mesh_is_guarded():
    mesh = init_device_mesh("cpu", (2,))
    run = torch.compile(lambda x: x * mesh.scale, backend="dtensor", fullgraph=True)
    for scale in (2, 3):
        mesh.scale = scale
        assert run(torch.ones(2)).tolist() == [scale, scale]
