"""What happens around a compiled graph takes one step of Python for all parameters together, and gives what torch
gives.
"""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtensor_compile.compat.dtensor.specs import spec_of_parts
from dtensor_compile.compat.release import minor_release
from dtensor_compile.native.layouts import layouts
from dtensor_compile.native.loader import native
from dtensor_compile.testing import make_mesh
from dtensor_compile.testing.parity import compare_values
from tests.runtime import needs_native


class Scales(nn.Module):
    def __init__(self, mesh, count, local):
        super().__init__()
        self.local = local
        self.scales = nn.ParameterList(
            DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False) for _ in range(count)
        )

    def forward(self, x):
        for scale in self.scales:
            x = x + scale * scale
        return x.to_local() if self.local else x


def python_calls(call):
    """How many functions of Python a call enters, once it is compiled."""
    for _ in range(3):
        call()
    entered = 0

    def count(frame, event, argument):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@needs_native
@pytest.mark.parametrize("local", [True, False], ids=["plain result", "DTensor"])
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
def test_no_python_for_each_parameter(job, train, local):
    mesh, entered = make_mesh((2,), ("tp",)), []
    for count in (9, 15):
        torch._dynamo.reset()
        compiled = torch.compile(Scales(mesh, count, local), backend="dtensor", fullgraph=True)
        x = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)
        gradient = torch.ones(4) if local else DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)

        def call(compiled=compiled, x=x, gradient=gradient):
            with torch.set_grad_enabled(train):
                out = compiled(x)
            if train:
                out.backward(gradient)

        entered.append(python_calls(call))
    assert entered[0] == entered[1]


def wrapped(local, spec, requires_grad=False):
    extents = [
        tuple((False, value) for value in extent) for extent in (spec.tensor_meta.shape, spec.tensor_meta.stride)
    ]
    make = lambda mesh, shape, stride: spec  # noqa: E731
    (made,) = native().Wrap([(0, *extents, make, requires_grad)], False)([local, spec.mesh])
    return made


def facts(tensor):
    storage = tensor.untyped_storage()
    return {
        "type": type(tensor),
        "keys": str(torch._C._dispatch_keys(tensor)),
        "sizes": (tensor.size(), tensor.stride(), tensor.storage_offset()),
        "kind": (
            tensor.dtype,
            tensor.device,
            tensor.layout,
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.is_inference(),
        ),
        "bits": (tensor.is_conj(), tensor.is_neg()),
        "storage": (storage.nbytes(), storage.device, storage.resizable()),
        "version": None if tensor.is_inference() else tensor._version,
        "attributes": vars(tensor),
    }


LOCALS = {
    "float32": torch.randn(4, 3),
    "bfloat16": torch.randn(4, 3, dtype=torch.bfloat16),
    "transposed": torch.randn(3, 4).t(),
    "conjugate": torch.randn(4, 3, dtype=torch.complex64).conj(),
    "negative": torch.randn(4, 3, dtype=torch.complex64).conj().imag,
    "offset": torch.randn(6, 3)[2:],
    "nothing": torch.randn(0, 3),
    "one element": torch.randn(1, 1),
    "meta": torch.empty(4, 3, device="meta"),
    "sparse": torch.eye(4).to_sparse(),
    "requires a gradient": torch.randn(4, 3, requires_grad=True),
}


@needs_native
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", LOCALS)
def test_dtensors_are_made_as_torch_makes_them(job, name, requires_grad):
    local, mesh = LOCALS[name], make_mesh((2,), ("tp",))
    shape, stride = (2 * local.shape[0], local.shape[1]), (local.shape[1], 1)
    spec = spec_of_parts((Shard(0),), local.dtype, None, mesh, shape, stride)
    mine, theirs = wrapped(local, spec, requires_grad), DTensor(local, spec, requires_grad=requires_grad)
    assert facts(mine) == facts(theirs)
    assert mine._local_tensor is local and mine._spec is spec
    with torch.inference_mode():
        assert facts(wrapped(local, spec)) == facts(DTensor(local, spec, requires_grad=False))
    gone = weakref.ref(mine)
    del mine
    assert gone() is None


@needs_native
def test_what_is_kept_for_the_backward_pass():
    base = torch.ones(4, requires_grad=True)
    view, plain = (base * 2)[1:], torch.zeros(2)
    mine, theirs = native().detached_views((view, plain))
    assert theirs is plain and mine is not view and mine.grad_fn is None and mine.data_ptr() == view.data_ptr()
    with pytest.raises(TypeError, match="int"):
        native().detached_views([plain, 3])


@needs_native
def test_arguments_of_a_call():
    stays, goes, other = torch.zeros(2), torch.zeros(3), {"a": 1}
    for hold in (False, True):
        arguments = native().Arguments((stays, goes, other, 3), hold)
        found = arguments()
        assert found[0] is stays and found[1] is goes and found[2] is other and found[3] == 3
    kept, held = native().Arguments((stays, goes), False), native().Arguments((stays, goes), True)
    del goes, found, arguments
    assert len(held()) == 2 and len(kept()) == 2
    kept_too = native().Arguments((stays,), False)
    del held
    assert kept() is None and kept_too() == [stays]
    stays.add_(1)
    assert kept_too() is None
    with torch.inference_mode():
        made = torch.zeros(2)
    assert native().Arguments((made,), False)() == [made]


@needs_native
def test_arguments_in_a_cycle_go():
    tensor, holder = torch.zeros(2), {}
    holder["call"] = native().Arguments((tensor, holder), True)
    gone = weakref.ref(tensor)
    del tensor, holder
    gc.collect()
    assert gone() is None


@needs_native
def test_tensors_of_torch_func():
    seen = []
    torch.func.grad(lambda x: seen.append(x) or x.sum())(torch.ones(2))
    assert native().without_wrappers((torch.ones(2), 3)) and not native().without_wrappers((torch.ones(2), seen[0]))


@pytest.mark.parametrize("there", [True, False])
def test_layouts_of_inputs(monkeypatch, there):
    complain = torch._C._dynamo.guards.assert_size_stride
    if not there:
        monkeypatch.setattr("dtensor_compile.native.layouts.native", lambda: None)
    check = layouts([((4, 2), (2, 1)), ((), ()), ((1, 3), (3, 1))], complain)
    scalar = torch.zeros(())
    check(
        (torch.zeros(4, 2), scalar, torch.zeros(1, 3).as_strided((1, 3), (7, 1)))
    )  # the stride of a dim of size 1 is free
    for wrong in (torch.zeros(2, 4).t(), torch.zeros(4, 3), torch.zeros(8)):
        with pytest.raises(AssertionError, match="expected size|wrong number of dimensions"):
            check((wrong, scalar, torch.zeros(1, 3)))


def test_sizes_are_checked_where_guards_are_not(job):
    """As Inductor does for plain tensors."""
    mesh = make_mesh((2,), ("tp",))
    model = Scales(mesh, 9, True)
    compiled = torch.compile(model, backend="dtensor", fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(()))
        model.scales[3] = nn.Parameter(DTensor.from_local(torch.ones(5), mesh, [Shard(0)], run_check=False))
        with (
            torch.compiler.set_stance(skip_guard_eval_unsafe=True),
            pytest.raises(AssertionError, match="expected size 5==4"),
        ):
            compiled(torch.ones(()))


@pytest.mark.skipif(minor_release(torch.__version__) == "2.11", reason="2.11 refuses such a view")
def test_shards_that_a_view_left_strided(mesh):
    """Their specs name an order of shards too, which torch's own code for results and gradients refuses."""
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])

    def program(x, flat):
        return x.flatten() * 2, flat * 3

    def run(program):
        leaf = x.detach().flatten().requires_grad_()
        results = program(x, leaf)
        results[1].sum().backward()
        return *results, leaf.grad

    for found, wanted in zip(run(torch.compile(program, backend="dtensor_aten", fullgraph=True)), run(program)):
        assert found.placements == wanted.placements and found._spec.shard_order == wanted._spec.shard_order
        assert not (differs := compare_values("strided", wanted, found)), differs
