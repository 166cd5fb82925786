"""What holds compiled code to a parameter or an input: another one compiles again, and never runs the wrong graph."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.dynamo.observers.host_time import checks_of_guards
from dtensor_compile.testing import make_mesh
from tests.runtime import needs_native

pytestmark = pytest.mark.parametrize("mesh", [pytest.param("native", marks=needs_native), "torch"], indirect=True)
LOCAL = torch.arange(1.0, 9.0).reshape(4, 2)


class Scale(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x * self.weight + self.weight.shape[0]


def dtensor(mesh, placement=Shard(0), local=LOCAL, **sizes):
    return DTensor.from_local(local.clone(), mesh, [placement], run_check=False, **sizes)


def local_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(compiled, function, *args, graphs):
    """The result and its spec are eager's, and `graphs` were made so far."""
    out, expected = compiled(*args), function(*args)
    assert type(out) is type(expected) and out.shape == expected.shape and out.dtype == expected.dtype
    if isinstance(out, DTensor):
        assert out.placements == expected.placements and out.device_mesh == expected.device_mesh
        assert out._spec == expected._spec
    assert torch.equal(local_of(out), local_of(expected)) and out.requires_grad == expected.requires_grad
    assert counters.graphs() == graphs


def parameter_changes(mesh, change, graphs=2):
    """Compiles, changes the parameter or replaces it, and compares with eager."""
    model = Scale(dtensor(mesh))
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    check(compiled, model, torch.tensor(2.0), graphs=1)
    check(compiled, model, torch.tensor(2.0), graphs=1)
    change(model)
    check(compiled, model, torch.tensor(2.0), graphs=graphs)
    check(compiled, model, torch.tensor(2.0), graphs=graphs)


def test_one_guard_for_a_dtensor(mesh):
    model = Scale(dtensor(mesh))
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    x = dtensor(mesh)
    compiled(x)
    assert checks_of_guards(Scale.forward, {"self": model, "x": x})()


def test_parameter_with_the_same_spec_in_another_object(mesh):
    parameter_changes(
        mesh, lambda model: setattr(model, "weight", nn.Parameter(dtensor(mesh, local=LOCAL + 1))), graphs=1
    )


def test_parameter_on_an_equal_mesh(mesh):
    parameter_changes(
        mesh, lambda model: setattr(model, "weight", nn.Parameter(dtensor(make_mesh((2,), ("tp",))))), graphs=1
    )


def test_parameter_is_replicated(mesh):
    parameter_changes(mesh, lambda model: setattr(model, "weight", nn.Parameter(dtensor(mesh, Replicate()))))


def test_parameter_is_sharded_otherwise(mesh):
    parameter_changes(mesh, lambda model: setattr(model, "weight", nn.Parameter(dtensor(mesh, Shard(1)))))


def test_parameter_moves_to_another_mesh(mesh):
    parameter_changes(mesh, lambda model: setattr(model, "weight", nn.Parameter(dtensor(make_mesh((2,), ("other",))))))


def test_parameter_is_resized(mesh):
    parameter_changes(mesh, lambda model: setattr(model, "weight", nn.Parameter(dtensor(mesh, local=torch.ones(3, 2)))))


def test_parameter_of_another_global_size_over_the_same_local_one(mesh):
    other = dtensor(mesh, shape=(7, 2), stride=(2, 1))
    parameter_changes(mesh, lambda model: setattr(model, "weight", nn.Parameter(other)))


def test_parameter_becomes_a_plain_tensor(mesh):
    parameter_changes(mesh, lambda model: setattr(model, "weight", nn.Parameter(LOCAL.clone())))


def test_parameter_no_longer_requires_a_gradient(mesh):
    parameter_changes(mesh, lambda model: model.weight.requires_grad_(False))


def test_parameter_that_another_backend_took_for_static(mesh):
    """As torch does with the parameters of an optimizer whose step it compiles."""
    model = Scale(dtensor(mesh))
    torch._dynamo.mark_static_address(model.weight, guard=True)
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    check(compiled, model, torch.tensor(2.0), graphs=1)
    model.weight = nn.Parameter(dtensor(mesh, local=LOCAL * 9))
    check(compiled, model, torch.tensor(2.0), graphs=1)  # torch takes marks of parameters away


def test_module_in_another_dtype(mesh):
    parameter_changes(mesh, lambda model: model.to(torch.bfloat16))


def test_data_is_replaced(mesh):
    """Which leaves the local tensor of a DTensor as it was, in eager too."""
    parameter_changes(mesh, lambda model: setattr(model.weight, "data", dtensor(mesh, local=LOCAL + 1)), graphs=1)


def test_local_tensor_with_other_strides(mesh):
    def change(model):
        model.weight._local_tensor = LOCAL.t().contiguous().t()

    parameter_changes(mesh, change)


def test_spec_is_replaced(mesh):
    def change(model):
        model.weight = nn.Parameter(dtensor(mesh, Replicate()))
        model.weight._spec = dtensor(mesh, Replicate())._spec

    parameter_changes(mesh, change)


def inputs(mesh, first, second, graphs=2, function=lambda x: x * 2 + x.shape[0], **options):
    compiled = torch.compile(function, backend="dtensor_aten", fullgraph=True, **options)
    check(compiled, function, first, graphs=1)
    check(compiled, function, second, graphs=graphs)
    check(compiled, function, first, graphs=graphs)


def test_input_with_an_equal_spec_of_its_own(mesh):
    inputs(mesh, dtensor(mesh), dtensor(mesh, local=LOCAL * 3), graphs=1)


def test_input_is_sharded_otherwise(mesh):
    inputs(mesh, dtensor(mesh), dtensor(mesh, Shard(1)))


def test_input_is_a_partial_sum_of_another_kind(mesh):
    inputs(mesh, dtensor(mesh, Partial("sum")), dtensor(mesh, Partial("avg")), function=lambda x: x * 2)


def test_input_on_another_mesh(mesh):
    inputs(mesh, dtensor(mesh), dtensor(make_mesh((2,), ("other",))))


@pytest.mark.parametrize("dynamic", [False, None])
def test_input_is_resized(mesh, dynamic):
    """The second graph is for that size, or for every size."""
    inputs(mesh, dtensor(mesh), dtensor(mesh, local=torch.arange(6.0).reshape(3, 2)), dynamic=dynamic)


def test_local_tensor_of_an_input_is_resized(mesh):
    """As large a whole, cut otherwise: rank 0 has one row more."""
    five = {"shape": (5, 2), "stride": (2, 1)}
    first, second = (dtensor(mesh, local=torch.arange(2.0 * rows).reshape(rows, 2), **five) for rows in (3, 2))
    inputs(mesh, first, second, dynamic=False)


def test_input_of_another_global_size_over_the_same_local_one(mesh):
    inputs(mesh, dtensor(mesh), dtensor(mesh, shape=(7, 2), stride=(2, 1)), dynamic=False)


def test_input_of_another_dtype(mesh):
    inputs(mesh, dtensor(mesh), dtensor(mesh, local=LOCAL.double()))


def test_input_that_requires_a_gradient(mesh):
    inputs(mesh, dtensor(mesh), dtensor(mesh).requires_grad_())


def test_input_is_a_plain_tensor(mesh):
    inputs(mesh, dtensor(mesh), LOCAL)


def test_input_with_free_sizes(mesh):
    inputs(mesh, dtensor(mesh), dtensor(mesh, local=torch.ones(6, 2)), graphs=1, dynamic=True)


def test_input_with_free_sizes_is_sharded_otherwise(mesh):
    inputs(mesh, dtensor(mesh), dtensor(mesh, Shard(1), local=torch.ones(6, 2)), dynamic=True)


def test_input_that_is_marked_dynamic_later(mesh):
    function = lambda x: x * 2  # noqa: E731
    compiled = torch.compile(function, backend="dtensor_aten", fullgraph=True)
    check(compiled, function, dtensor(mesh), graphs=1)
    marked = dtensor(mesh)
    torch._dynamo.mark_dynamic(marked, 0)
    compiled(marked)
    assert counters.graphs() == 2


@pytest.mark.parametrize("guard, graphs", [(True, 2), (False, 1)])
def test_input_whose_address_is_static(mesh, guard, graphs):
    """As CUDA graphs want it: with a guard, the tensor is part of the graph, which is for it alone."""

    def static(local):
        tensor = dtensor(mesh, local=local)
        torch._dynamo.mark_static_address(tensor, guard=guard)
        return tensor

    inputs(mesh, static(LOCAL), static(LOCAL * 3), graphs=graphs)


def test_inputs_that_are_one(mesh):
    function = lambda x, y: x.add_(1) + y  # noqa: E731
    compiled = torch.compile(function, backend="dtensor_aten", fullgraph=True)
    a, b = dtensor(mesh), dtensor(mesh)
    assert torch.equal(local_of(compiled(a, b)), 2 * LOCAL + 1)
    both = dtensor(mesh)
    assert torch.equal(local_of(compiled(both, both)), 2 * LOCAL + 2)


def test_input_and_its_local_tensor(mesh):
    function = lambda y, x: x._local_tensor * 2 + y  # noqa: E731
    compiled = torch.compile(function, backend="dtensor_aten", fullgraph=True)
    x = dtensor(mesh)
    assert torch.equal(compiled(x._local_tensor, x), 3 * LOCAL)
    assert torch.equal(compiled(LOCAL + 1, x), 3 * LOCAL + 1)


def test_inference_mode(mesh):
    model = Scale(dtensor(mesh))
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    with torch.inference_mode():
        out = compiled(torch.tensor(2.0))
        assert out.is_inference() and not out.requires_grad
    assert compiled(torch.tensor(2.0)).requires_grad
