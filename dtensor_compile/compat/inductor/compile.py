"""Compiles a graph with Inductor and our passes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.compat.aot.partition import HeldNodes
from dtensor_compile.compat.inductor.cache_keys import GUARDS_LOCAL_SIZES, guards_of_local_sizes, keys_of_any_process
from dtensor_compile.compat.inductor.collective_lowerings import masks_are_sent_as_they_are, waits_are_not_run
from dtensor_compile.compat.inductor.fake_values import KnownValues
from dtensor_compile.compat.inductor.graph_patterns import possible_patterns
from dtensor_compile.compat.inductor.input_layouts import inputs_checked_at_once
from dtensor_compile.compat.inductor.kept_collectives import collectives_kept
from dtensor_compile.compat.inductor.repair_libraries import rebuild_damaged_libraries
from dtensor_compile.compat.inductor.start_costs import quick_starts
from dtensor_compile.compat.inductor.uncompiled_kernels import LoweredGraph, run_lowered, run_uncompiled
from dtensor_compile.compat.inductor.wrapper_header import Header, begins_with
from dtensor_compile.compat.patches import feature, hook, if_there
from dtensor_compile.garbage_collection import rare_collections

if TYPE_CHECKING:
    from torch.utils._config_module import ConfigModule

GraphFunction = Callable[[torch.fx.Graph], None]

#: Inductor's settings for eager numerics: roundings that the program asks for (``x.bfloat16().float()``) and those
#: between fused operators are kept, and random numbers come from eager's generators.
EAGER_NUMBERS: Mapping[str, Any] = {"emulate_precision_casts": True, "fallback_random": True}

log = logging.getLogger("dtensor_compile")

_PASSES = feature(
    "our passes inside of Inductor",
    hook("torch._inductor.config:joint_custom_pre_pass"),
    hook("torch._inductor.config:joint_custom_post_pass"),
    hook("torch._inductor.config:post_grad_custom_pre_pass"),
    hook("torch._inductor.config:emulate_precision_casts"),
    hook("torch._inductor.config:fallback_random"),
    hook("torch._inductor.compile_fx:compile_fx", "model_ example_inputs_ inner_compile config_patches ..."),
    without='redistributions would stay in the graph; `options={"kernels": "aten"}` works without Inductor',
    essential=True,
)
_CACHEABLE = feature(
    "our functions in cached graphs",
    hook("torch._inductor.config:unsafe_marked_cacheable_functions"),
    without="graphs that call them are recompiled in each process",
)
_DRAWS = feature(
    "random numbers in the order of the program",
    hook("torch._inductor.fx_passes.control_dependencies:preserve_node_ordering", "graph additional_deps_map ..."),
    without="a graph could draw other numbers than eager",
    essential=True,
)
#: Since 2.13, Inductor itself makes each random operator depend on the one before it.
_TIES_DRAWS = if_there("torch._inductor.fx_passes.post_grad:_chain_random_ops_for_ordering") is not None
_REFUSALS = feature(
    "reasons why a graph is not cached, in the report",
    hook("torch._functorch._aot_autograd.autograd_cache:BypassAOTAutogradCache"),
    hook("torch._functorch._aot_autograd.autograd_cache:check_cacheable", "gm"),
    without="the report lacks the reason",
)


@functools.cache
def package_digest() -> str:
    """Digest of the package's source, part of cache keys: a changed pass must not find results of its previous
    version."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


#: Settings for our passes over the joint graph, before and after Inductor's, and over lowered graphs.
_GRAPH_PASSES = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass")

#: Reorders Inductor's kernels.
KernelPass = Callable[[list[Any]], list[Any]]


class GraphPass(CustomGraphPass):
    """A graph function that Inductor calls, with a key for its caches.

    Args:
        run: changes a graph in place.
        key: everything besides the graph that determines what `run` does; None keeps the graph out of the caches.
        then: the user's own pass for the same place, which runs after ours.
    """

    def __init__(self, run: GraphFunction, key: tuple[Any, ...] | None, then: Any = None) -> None:
        self.run = run
        self.key = key
        self.then = tuple(then) if isinstance(then, (list, tuple)) else (then,) if then is not None else ()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.run(graph)
        for follower in self.then:
            follower(graph)

    def uuid(self) -> Any:
        ids = [follower.uuid() if hasattr(follower, "uuid") else None for follower in self.then]
        return None if self.key is None or None in ids else (package_digest(), self.key, tuple(ids))


@functools.cache
def inductor_keys() -> frozenset[str]:
    """Every key of Inductor's configuration."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def inductor_config_error(key: str, value: Any) -> str | None:
    """The reason why a value for a key of Inductor's configuration is invalid; None if it is valid."""
    from torch._inductor import config

    expected = cast("ConfigModule", config).get_type(key)
    if isinstance(expected, type) and not isinstance(value, expected):
        return f"takes {expected.__name__}, not {value!r}"
    return None


def uses_cuda_graphs(options: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs with these settings."""
    from torch._inductor import config

    return bool(options.get("triton.cudagraphs", config.triton.cudagraphs))


def mode_options(mode: str) -> Mapping[str, Any]:
    """Inductor's settings for a ``mode`` of ``torch.compile``.

    Raises:
        OptionError: torch has no such mode.
    """
    from torch._inductor import list_mode_options

    from dtensor_compile.errors import OptionError

    modes = list_mode_options()
    if mode not in modes:
        raise OptionError(f"unknown mode {mode!r}; modes: {', '.join(['default', *modes])}")
    return modes[mode]


def compile_with_inductor(  # noqa: PLR0913 - one keyword per hook of Inductor
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint_pass: GraphFunction,
    post_grad_pass: GraphFunction,
    kernel_passes: tuple[KernelPass, KernelPass] | None,
    key: tuple[Any, ...] | None,
    settings: Mapping[str, Any],
    cacheable: Sequence[Callable[..., Any]] = (),
    uncompiled: Callable[[str, str], None] | None = None,
    collectives: tuple[Callable[[], str], Callable[[str], None]],
    header: Header,
    kernels: bool = True,
) -> Callable[..., Any]:
    """Runs AOTAutograd and Inductor on a Dynamo graph, with our passes at their places.

    Args:
        joint_pass: runs on the joint graph (on the forward graph if there is no backward).
        post_grad_pass: runs on the forward and on the backward graph before Inductor's own post-grad passes.
        kernel_passes: run over Inductor's kernels before and after fusion; None keeps Inductor's order.
        key: everything that the passes depend on besides the graph; part of cache keys. None: no cache is used.
        settings: Inductor's configuration for this graph, on top of `EAGER_NUMBERS` and the current one.
        cacheable: functions that depend on nothing but their arguments, so that caches may keep graphs that call them.
        uncompiled: called with the graph (``"forward"``, ``"backward"``) whose kernels do not compile, and the
            compiler's message; the graph then runs operator by operator. None: that is an error.
        collectives: the text about the graph that was lowered last, which caches keep with it, and the function that
            gets the text of one that comes from a cache.
        header: the statements with which the code of a graph begins.
        kernels: whether Inductor generates kernels; if not, each graph runs operator by operator once it is lowered.
    """
    from torch._inductor.compile_fx import compile_fx

    _PASSES.works()
    lowered, held, values = LoweredGraph(), HeldNodes(), KnownValues()

    def plan(graph: torch.fx.Graph) -> None:
        joint_pass(graph)
        held.remember(graph)
        values.trust(graph)

    def lower(graph: torch.fx.Graph) -> None:
        post_grad_pass(graph)
        values.keep(graph)
        if uncompiled is not None:
            lowered.keep(graph)
        _spell_out_alpha(graph)
        _keep_draws_in_order(graph)

    key = key if GUARDS_LOCAL_SIZES.works() else None
    patches = {**EAGER_NUMBERS, **settings}
    patches |= _cacheable(cacheable, patches)
    for place, run in zip(_GRAPH_PASSES, (plan, held.restore, lower)):
        patches[place] = GraphPass(run, key, _configured(patches, place))
    patches |= _kernel_settings(kernel_passes, key, patches)
    keep = functools.partial(collectives_kept, *collectives)
    inner = keep()(begins_with(header)(_graph_compiler(lowered, values, uncompiled))) if kernels else run_lowered(lower)
    inner = keys_of_any_process()(guards_of_local_sizes()(inner))
    with _scopes(), keep():
        return cast("Callable[..., Any]", compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches))


@contextlib.contextmanager
def _scopes() -> Iterator[None]:
    """What holds while a program is compiled."""
    scopes = (keys_of_any_process, guards_of_local_sizes, quick_starts, rebuild_damaged_libraries, possible_patterns)
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope())
        yield


def _graph_compiler(
    lowered: LoweredGraph, values: KnownValues, uncompiled: Callable[[str, str], None] | None
) -> Callable[..., Any]:
    """Inductor's function that compiles one graph, in the scopes that must also be active when a backward graph is
    compiled at its first run."""
    from torch._inductor.compile_fx import compile_fx_inner

    from dtensor_compile.compat.inductor.kernel_nodes import waits_are_kept

    inner = waits_are_kept()(inputs_checked_at_once()(masks_are_sent_as_they_are()(compile_fx_inner)))
    inner = waits_are_not_run()(inner)
    inner = rare_collections()(values.hold()(possible_patterns()(inner)))
    return inner if uncompiled is None else run_uncompiled(inner, lowered, uncompiled)


def _kernel_settings(
    ours: tuple[KernelPass, KernelPass] | None, key: tuple[Any, ...] | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Inductor's settings for passes over kernels."""
    from dtensor_compile.compat.inductor.kernel_nodes import ORDER, SchedulerPass

    found: dict[str, Any] = {
        place: SchedulerPass(run, key and (package_digest(), key), _configured(settings, place))
        for place, run in _passes_over_kernels(ours).items()
    }
    if ours is not None and ORDER.works():
        found["reorder_for_peak_memory"] = False  # included in the pass after fusion
    return found


def _passes_over_kernels(ours: tuple[KernelPass, KernelPass] | None) -> dict[str, KernelPass]:
    """Per setting of Inductor, the kernel pass that runs there: `ours`, and the one that keeps random operators in
    order."""
    from dtensor_compile.compat.inductor.kernel_nodes import ORDER, TIES, tie_draws

    found: dict[str, KernelPass] = {"_pre_fusion_custom_pass": tie_draws} if TIES.works() else {}
    if ours is not None and ORDER.works():
        before, after = ours
        found["_pre_fusion_custom_pass"] = lambda nodes: before(tie_draws(nodes))
        found["_post_fusion_custom_pass"] = after
    return found


def _cacheable(functions: Sequence[Callable[..., Any]], settings: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The setting that allows calls of `functions` in AOTAutograd's cache: their names, and a key that changes with
    their source."""
    if not _CACHEABLE.works():
        return {}
    setting = "unsafe_marked_cacheable_functions"
    ours = {f"{function.__module__}.{function.__name__}": package_digest() for function in functions}
    return {setting: {**_configured(settings, setting), **ours}}


def _traced_at(place: torch.fx.Node, target: torch._ops.OpOverload, *args: Any) -> torch.fx.Node:
    """A new call with the metadata of `place`."""
    made = place.graph.call_function(target, args)
    made.meta = {**place.meta, "val": target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))}
    return made


def _cast(place: torch.fx.Node, term: Any, dtype: torch.dtype) -> torch.fx.Node:
    if term.meta["val"].dtype == dtype:
        return term  # type: ignore[no-any-return]
    return _traced_at(place, torch.ops.prims.convert_element_type.default, term, dtype)


def _spell_out_alpha(graph: torch.fx.Graph) -> None:
    """``add(a, b, alpha=c)`` becomes ``add(a, mul(b, c))``.

    Inductor 2.13 fuses an addition to a matmul into ``addmm`` and ignores ``alpha``: the SGD step
    ``weight.add_(mm(x, y), alpha=-lr)`` would add the whole gradient. Narrow types are added in float32, as in eager's
    kernels. Those for the CPU round the factor first (and at the end of a row each product, which is not reproduced).
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        alpha, value = node.kwargs.get("alpha", 1), node.meta["val"]
        if alpha == 1 or not value.is_floating_point():
            continue
        narrow = value.dtype in (torch.bfloat16, torch.float16)
        computed = torch.float32 if narrow else value.dtype
        if narrow and value.device.type == "cpu" and isinstance(alpha, (int, float)):
            with unset_fake_temporarily():
                alpha = torch.tensor(alpha, dtype=value.dtype).item()
        with graph.inserting_before(node):
            left, right = (_cast(node, term, computed) for term in node.args)
            scaled = _traced_at(node, aten.mul.Tensor, right, alpha)
            result = _cast(node, _traced_at(node, aten.add.Tensor, left, scaled), value.dtype)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _keep_draws_in_order(graph: torch.fx.Graph) -> None:
    """Keeps operators that draw from torch's generator in the order of the graph; before 2.13 Inductor treats them as
    independent."""
    draws = [n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    if len(draws) > 1 and not _TIES_DRAWS and _DRAWS.works():
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
        from torch.utils._ordered_set import OrderedSet

        preserve_node_ordering(graph, {later: OrderedSet([node]) for node, later in itertools.pairwise(draws)})


def compile_as_stock(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compiles as ``backend="inductor"`` does."""
    from torch._inductor.compile_fx import compile_fx

    return cast("Callable[..., Any]", compile_fx(gm, example_inputs, config_patches=dict(settings)))


def _configured(settings: Mapping[str, Any], key: str) -> Any:
    from torch._inductor import config

    return settings.get(key, getattr(config, key))


def cache_refusal(gm: torch.fx.GraphModule, cacheable: Sequence[Callable[..., Any]] = ()) -> str:
    """The reason why AOTAutograd keeps a Dynamo graph out of its cache on disk, ignoring calls of `cacheable`; empty if
    it does not."""
    if not _REFUSALS.works():
        return ""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable
    from torch._inductor import config

    known = {"unsafe_marked_cacheable_functions": _cacheable(cacheable, {})} if _CACHEABLE.works() else {}
    try:
        with config.patch(known):
            check_cacheable(gm)
    except BypassAOTAutogradCache as refusal:
        return " ".join(str(refusal).split())
    return ""


@contextlib.contextmanager
def fresh_caches(kernels: str | None = None) -> Iterator[None]:
    """While active, Inductor's caches on disk are an empty folder, which goes at the end, after an error too.

    Args:
        kernels: folder of Triton's cache, which stays; None: an empty one too.
    """
    from torch._inductor.utils import fresh_cache

    failed: Exception | None = None
    with fresh_cache():
        if kernels is not None:
            os.environ["TRITON_CACHE_DIR"] = kernels  # `fresh_cache` has set it, and restores it
        try:
            yield
        except Exception as error:  # torch keeps the folder where one passes
            failed = error
    if failed is not None:
        raise failed


def trace_local(
    function: Callable[..., torch.Tensor | list[torch.Tensor]], args: Sequence[Any]
) -> torch.fx.GraphModule:
    """The graph of aten operators that `function` runs on fake `args` (tensors, symbolic and plain integers)."""
    with enable_python_dispatcher():
        return make_fx(function, tracing_mode="real")(*args)
