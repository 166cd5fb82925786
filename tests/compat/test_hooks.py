"""Private functions of torch are looked at when a feature first needs them; a missing one costs that feature and
nothing else.
"""

import contextlib
import warnings

import pytest
import torch

import dtensor_compile.backend  # noqa: F401 - all features are known once everything is imported
from dtensor_compile import UnsupportedTorchError
from dtensor_compile.compat import hooks
from dtensor_compile.compat.aot import partition
from dtensor_compile.compat.distributed.rank_threads import run_in_threads
from dtensor_compile.compat.hooks import FEATURES, MissingHookWarning, feature, hook, needs
from dtensor_compile.testing import make_mesh, on_ranks


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(hooks, "FEATURES", dict(FEATURES))


@contextlib.contextmanager
def _without(name):
    """A feature whose hook is missing."""
    of = FEATURES[name]
    before, of.hooks = of.hooks, (hook("torch._gone:gone"),)
    try:
        yield
    finally:
        of.hooks, of._told = before, False


@on_ranks(2)
def test_the_installed_release_has_every_hook_also_while_it_compiles():
    mesh = make_mesh((2,))
    x = torch.distributed.tensor.distribute_tensor(torch.ones(5, 4), mesh, [torch.distributed.tensor.Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissingHookWarning)
        torch.compile(lambda x: x.sum(), backend="dtensor_aten", fullgraph=True)(x)
    assert {name: found for name, of in FEATURES.items() if (found := of.problems())} == {}


def test_every_supported_parameter_list_is_told_apart():
    place = "torch._functorch.partitioners:functionalize_rng_ops"
    assert hook(place, "joint_module fw_module bw_module num_sym_nodes").problem() is None
    assert hook(place, "joint_module ...").problem() is None
    assert hook(place, "graph", "joint_module fw_module ...").problem() is None
    assert hook(place, "joint_module fw_module bw_module").problem() == (
        "has torch._functorch.partitioners:functionalize_rng_ops(joint_module, fw_module, bw_module, num_sym_nodes), "
        "and not (joint_module, fw_module, bw_module)"
    )
    assert hook("torch._functorch.partitioners:gone").problem() == "has no torch._functorch.partitioners:gone"
    assert hook("torch._gone:gone").problem() == "has no torch._gone:gone"
    assert hook("torch.nn:Module.gone", "self").problem() == "has no torch.nn:Module.gone"


def test_a_setting_is_a_hook_in_the_module_that_has_it():
    assert hook("torch._inductor.config:joint_custom_pre_pass").problem() is None
    assert hook("torch._inductor.config:gone").problem() == "has no torch._inductor.config:gone"


def test_a_scope_without_its_hook_is_not_entered_and_warns_once():
    entered = []

    @needs("wings", hook("torch._wings:flap", "self"), without="nothing flies")
    @contextlib.contextmanager
    def wings():
        entered.append(1)
        yield

    with pytest.warns(MissingHookWarning) as found, wings():
        pass
    assert [str(w.message) for w in found] == [
        f"dtensor_compile: wings: torch {torch.__version__} has no torch._wings:flap. Without it nothing flies"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wings():
            pass
    assert not entered


def test_an_essential_feature_without_its_hook_is_an_error_each_time():
    legs = feature("legs", hook("torch._legs:walk"), without="nobody walks", essential=True)
    for _ in range(2):
        with pytest.raises(
            UnsupportedTorchError, match=r"legs: torch .* has no torch\._legs:walk\. Without it nobody walks"
        ):
            legs.works()


def test_hooks_are_looked_at_once(monkeypatch):
    looked = []
    monkeypatch.setattr(hooks.Hook, "problem", lambda self: looked.append(self.place))
    arms = feature("arms", hook("torch:add"), without="")
    assert arms.works() and arms.works() and looked.count("torch:add") == 1


def test_what_a_scope_replaces_later_was_looked_at_before(monkeypatch):
    of = feature("legs", hook("torch.nn.functional:silu", "input inplace"), without="nobody walks", essential=True)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda *args: None)
    assert of.works()


@on_ranks(2)
def test_a_program_compiles_without_a_feature_that_it_does_not_need():
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    x = torch.distributed.tensor.distribute_tensor(torch.randn(5, 4), mesh, [torch.distributed.tensor.Shard(0)])
    compiled = torch.compile(lambda x: (x @ x.t()).sum(), backend="dtensor_aten", fullgraph=True)
    warned = pytest.warns(
        MissingHookWarning, match="in regions that are computed again: torch .* has no torch._gone:gone"
    )
    with _without("random numbers in regions that are computed again"), warned:
        found = compiled(x)
    torch.testing.assert_close(found.full_tensor(), (x @ x.t()).sum().full_tensor())
    with partition.place_random_states():
        assert torch._functorch.partitioners.functionalize_rng_ops.__module__ == partition.__name__


@on_ranks(2)
def test_kernels_stay_in_inductors_order_where_torch_takes_no_other():
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    x = torch.distributed.tensor.distribute_tensor(torch.randn(5, 4), mesh, [torch.distributed.tensor.Shard(0)])
    compiled = torch.compile(lambda x: (x @ x.t()).sum(), backend="dtensor", fullgraph=True)
    name = "an order of Inductor's kernels in which collectives run beside compute"
    with (
        _without(name),
        pytest.warns(MissingHookWarning, match="torch._gone:gone. Without it Inductor's own order stays"),
    ):
        found = compiled(x)
    torch.testing.assert_close(found.full_tensor(), (x @ x.t()).sum().full_tensor())


@on_ranks(2)
def test_a_program_compiles_without_marks_of_local_tensors():
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    x, w = (
        torch.distributed.tensor.distribute_tensor(torch.randn(n, 4), mesh, [torch.distributed.tensor.Shard(0)])
        for n in (5, 4)
    )
    w.requires_grad_()

    def loss(x):
        return (x @ w).relu().full_tensor().sum()

    with (
        _without("what local tensors are globally, between redistributions"),
        pytest.warns(MissingHookWarning, match="more bytes"),
    ):
        torch.compile(loss, backend="dtensor_aten", fullgraph=True)(x).backward()
    found, w.grad = w.grad, None
    loss(x).backward()
    torch.testing.assert_close(found.full_tensor(), w.grad.full_tensor())


def test_what_a_program_asks_for_by_name_is_an_error_without_its_hook():
    error = pytest.raises(
        UnsupportedTorchError, match="ranks as threads of one process: torch .* has no torch._gone:gone"
    )
    with _without("ranks as threads of one process"), error:
        run_in_threads(2, lambda rank: rank)
