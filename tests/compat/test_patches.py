"""Private functions of torch are looked at when a feature first needs them; a missing one costs that feature and
nothing else.
"""

import ast
import contextlib
import importlib
import pathlib
import pkgutil
import sys
import threading
import warnings

import pytest
import torch

import dtensor_compile
import dtensor_compile.backend  # noqa: F401 - all features are known once everything is imported
from dtensor_compile import UnsupportedTorchError, compat
from dtensor_compile.compat import patches
from dtensor_compile.compat.aot import partition
from dtensor_compile.compat.apply_patches import (
    ABSENT,
    STANDS_FOR,
    is_called_from,
    on_this_thread,
    patched,
    patched_entries,
    patched_value,
    seen_from,
    stock_torch,
    this_place,
)
from dtensor_compile.compat.distributed.rank_threads import run_in_threads
from dtensor_compile.compat.patches import FEATURES, MissingHookWarning, Patch, feature, hook, needs, patch
from dtensor_compile.testing import make_mesh, on_ranks

for _module in pkgutil.walk_packages(compat.__path__, f"{compat.__name__}."):
    importlib.import_module(_module.name)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(patches, "FEATURES", dict(FEATURES))


@contextlib.contextmanager
def _without(name):
    """A feature whose hook is missing."""
    of = FEATURES[name]
    before, of.hooks = of.hooks, (hook("torch._gone:gone"),)
    try:
        yield
    finally:
        of.hooks, of._warned = before, False


@on_ranks(2)
def test_the_installed_release_has_every_hook_also_while_it_compiles():
    mesh = make_mesh((2,))
    x = torch.distributed.tensor.distribute_tensor(torch.ones(5, 4), mesh, [torch.distributed.tensor.Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissingHookWarning)
        torch.compile(lambda x: x.sum(), backend="dtensor_aten", fullgraph=True)(x)
    assert {name: found for name, of in FEATURES.items() if (found := of.problems())} == {}


def test_every_supported_parameter_list_is_distinguished():
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
    monkeypatch.setattr(patches.Hook, "problem", lambda self: looked.append(self.place))
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
        MissingHookWarning, match="random numbers in recomputed regions: torch .* has no torch._gone:gone"
    )
    with _without("random numbers in recomputed regions"), warned:
        found = compiled(x)
    torch.testing.assert_close(found.full_tensor(), (x @ x.t()).sum().full_tensor())
    with partition.place_random_states():
        assert hasattr(torch._functorch.partitioners.functionalize_rng_ops, STANDS_FOR)


@on_ranks(2)
def test_kernels_stay_in_inductors_order_where_torch_takes_no_other():
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    x = torch.distributed.tensor.distribute_tensor(torch.randn(5, 4), mesh, [torch.distributed.tensor.Shard(0)])
    compiled = torch.compile(lambda x: (x @ x.t()).sum(), backend="dtensor", fullgraph=True)
    name = "an order of Inductor's kernels that overlaps collectives with compute"
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
        _without("specs of local tensors between redistributions"),
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


# ---- how a row is applied ------------------------------------------------------------------------------------------


class Shelf:
    """Stands for a class of torch's."""

    table = {"a": 1}

    def method(self, x):
        return x, "stock"

    @classmethod
    def of_class(cls, x):
        return cls.__name__, x

    @staticmethod
    def of_nothing(x):
        return x

    @property
    def read(self):
        return "stock"


class Lower(Shelf):
    """Inherits all of it."""


def row(name, **options):
    return patch(f"{__name__}:{name}", **options)


def test_each_kind_of_function_is_replaced_and_put_back():
    before, shelf = dict(vars(Shelf)), Shelf()
    with (
        patched(row("Shelf.method"), lambda stock, self, x: (*stock(self, x), "ours")),
        patched(row("Shelf.of_class"), lambda stock, cls, x: stock(cls, x + 1)),
        patched(row("Shelf.of_nothing"), lambda stock, x: stock(x) + 1),
        patched(row("Shelf.read"), lambda stock, self: stock(self).upper()),
    ):
        assert shelf.method(1) == (1, "stock", "ours") and Shelf.of_nothing(1) == Shelf().of_nothing(1) == 2
        assert Shelf.of_class(1) == ("Shelf", 2) and Lower.of_class(1) == ("Lower", 2) and shelf.read == "STOCK"
    assert dict(vars(Shelf)) == before


def test_an_inherited_method_is_replaced_for_one_class():
    with patched(row("Lower.method"), lambda stock, self, x: "ours"):
        assert Lower().method(1) == "ours" and Shelf().method(1) == (1, "stock")
    assert "method" not in vars(Lower)


def test_scopes_on_one_function_nest_and_the_innermost_is_called_first():
    shelf = Shelf()
    with patched(row("Shelf.method"), lambda stock, self, x: stock(self, x * 2)):
        with patched(row("Shelf.method"), lambda stock, self, x: stock(self, x + 1)):
            assert shelf.method(1) == (4, "stock")
        assert shelf.method(1) == (2, "stock")


def test_other_threads_call_what_torch_has_unless_the_patch_is_for_all():
    shelf, found = Shelf(), []

    def other():
        found.append(shelf.method(1))

    for every_thread in (False, True):
        with patched(row("Shelf.method"), lambda stock, self, x: "ours", every_thread=every_thread):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert shelf.method(1) == "ours"
    assert found == [(1, "stock"), "ours"]


def test_scopes_of_two_threads_end_in_any_order():
    shelf, entered, leave, found = Shelf(), threading.Event(), threading.Event(), []
    before = vars(Shelf)["method"]

    def other():
        with patched(row("Shelf.method"), lambda stock, self, x: "theirs"):
            entered.set()
            leave.wait(10)
            found.append(shelf.method(1))

    thread = threading.Thread(target=other)
    with patched(row("Shelf.method"), lambda stock, self, x: "ours"):
        thread.start()
        assert entered.wait(10) and shelf.method(1) == "ours"
    assert shelf.method(1) == (1, "stock")
    leave.set()
    thread.join()
    assert found == ["theirs"] and vars(Shelf)["method"] is before


def test_a_scope_that_ended_is_not_called_by_the_one_above_it():
    shelf, called = Shelf(), []

    def note(name):
        return lambda stock, self, x: called.append(name) or stock(self, x)

    for every_thread in (False, True):
        first = patched(row("Shelf.method"), note("first"), every_thread=every_thread)
        second = patched(row("Shelf.method"), note("second"), every_thread=every_thread)
        first.__enter__()
        second.__enter__()
        shelf.method(1)
        first.__exit__(None, None, None)
        shelf.method(1)
        second.__exit__(None, None, None)
        assert shelf.method(1) == (1, "stock") and called == ["second", "first", "second"]
        called.clear()


def test_another_backend_sees_stock_torch_inside_of_ours():
    shelf = Shelf()
    with patched(row("Shelf.method"), lambda stock, self, x: "ours"):
        with stock_torch():
            assert shelf.method(1) == (1, "stock")
            with patched(row("Shelf.method"), lambda stock, self, x: "within"):
                assert shelf.method(1) == "within"
        assert shelf.method(1) == "ours"


def test_our_backend_inside_of_another_one_inside_of_ours_sees_our_patches():
    shelf = Shelf()
    entry = {"a": on_this_thread(lambda: "stock", lambda stock: "ours")}
    with patched(row("Shelf.method"), lambda stock, self, x: "ours"), patched_entries(row("Shelf.table"), entry):
        place = this_place()
        with stock_torch():
            assert shelf.method(1) == (1, "stock") and Shelf.table["a"]() == "stock"
            with seen_from(place):
                assert shelf.method(1) == "ours" and Shelf.table["a"]() == "ours"
            with stock_torch():
                assert shelf.method(1) == (1, "stock")
        assert shelf.method(1) == "ours" and Shelf.table["a"]() == "ours"


def test_a_patch_ends_with_an_error():
    before = vars(Shelf)["method"]
    with pytest.raises(ZeroDivisionError), patched(row("Shelf.method"), lambda stock, self, x: 1 / 0):
        Shelf().method(1)
    assert vars(Shelf)["method"] is before


def test_a_function_that_somebody_wrapped_meanwhile_is_left_to_him_and_is_torchs():
    with patched(row("Shelf.method"), lambda stock, self, x: "ours"):
        inner = vars(Shelf)["method"]
        Shelf.method = lambda self, x: ("theirs", inner(self, x))
    try:
        assert Shelf().method(1) == ("theirs", (1, "stock"))
    finally:
        Shelf.method = getattr(inner, STANDS_FOR)


def test_values_and_entries_are_put_back_in_any_order():
    first, second = patched_value(row("Shelf.table"), 1), patched_value(row("Shelf.table"), 2)
    table = Shelf.table
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Shelf.table == 2
    second.__exit__(None, None, None)
    assert Shelf.table is table
    with patched_entries(row("Shelf.table"), {"a": ABSENT, "b": 2}):
        assert Shelf.table == {"b": 2}
        with patched_entries(row("Shelf.table"), {"a": 3}):
            assert Shelf.table == {"a": 3, "b": 2}
    assert Shelf.table == {"a": 1}


def test_what_torch_may_lack_is_not_replaced_or_is_added():
    assert row("Shelf.gone", optional=True).problem() is None and row("Shelf.gone").problem() is not None
    with patched(row("Shelf.gone", optional=True), lambda stock: None):
        assert not hasattr(Shelf, "gone")
    with patched_value(row("Shelf.gone", optional=True), 1):
        assert Shelf.gone == 1
    assert not hasattr(Shelf, "gone")


def test_a_replacement_can_ask_who_calls():
    found = []
    with patched(row("Shelf.method"), lambda stock, self, x: found.append(is_called_from(sys.modules[__name__]))):
        Shelf().method(1)
        map(Shelf().method, [1]).__next__()
        exec("shelf.method(1)", {"shelf": Shelf()})
    assert found == [True, True, False]


def test_a_feature_with_patches_says_where_it_was_reported_and_when_it_can_go():
    with pytest.raises(TypeError, match="wings: a feature with patches needs `upstream` and `remove_when`"):
        feature("wings", patch("torch._wings:flap"), without="nothing flies")


def test_nothing_else_assigns_to_torch():
    """Every ``setattr``, ``mock.patch`` and assignment to an attribute of something imported from torch."""
    package = pathlib.Path(dtensor_compile.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        if path.name != "apply_patches.py":
            found += [
                f"{path.relative_to(package)}:{line}" for line in _assignments_to_torch(ast.parse(path.read_text()))
            ]
    assert found == []


def _assignments_to_torch(tree):
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"}
            assert all(a.name != "unittest.mock" for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert (node.module, *(a.name for a in node.names)) != ("unittest", "mock")
            if (node.module or "").split(".")[0] == "torch":
                imported |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and _root(part) in imported:
                    yield node.lineno
        called = node.func if isinstance(node, ast.Call) else None
        if getattr(called, "id", None) in ("setattr", "delattr") and _root(node.args[0]) in imported:
            yield node.lineno


def _root(node):
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_private_names_of_torch_are_imported_in_compat_alone():
    package, found = pathlib.Path(dtensor_compile.__file__).parent, []
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] != "compat":
            names = _imported_from_torch(ast.parse(path.read_text()))
            private = [name for name in names if any(part.startswith("_") for part in name.split("."))]
            found += [f"{path.relative_to(package)}: {name}" for name in private]
    assert found == []


def _imported_from_torch(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_a_module_replaces_is_in_the_table():
    """Every row that is made where a module of compat is loaded belongs to a feature, but those of other releases."""
    rows = {
        value.place
        for name, module in sys.modules.items()
        if name.startswith(f"{compat.__name__}.")
        for value in _rows(list(vars(module).values()))
    }
    known = {hook.place for of in FEATURES.values() for hook in of.hooks}
    of_other_releases = {
        "torch._functorch._aot_autograd.runtime_wrappers:RuntimeWrapper.post_compile",
        "torch._functorch._aot_autograd.runtime_wrappers:_HANDLER_MAP",
        "torch._dynamo.variables.functions:UserMethodVariable.call_function",
    }
    assert rows - known <= of_other_releases


def _rows(values):
    for value in values:
        if isinstance(value, Patch):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _rows(value)
        elif isinstance(value, dict):
            yield from _rows([*value.keys(), *value.values()])


def test_every_lasting_patch_is_known():
    lasting = {h.place for of in FEATURES.values() for h in of.hooks if isinstance(h, Patch) and h.lasting}
    assert lasting == {
        "torch._dynamo.backends.registry:_COMPILER_FNS",
        "torch._dynamo.callback:CompilationCallbackHandler.install_callbacks",
        "torch._dynamo.convert_frame:_compile",
        "torch.distributed.distributed_c10d:ProcessGroupGloo",
    }
