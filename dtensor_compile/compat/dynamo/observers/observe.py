"""Observes Dynamo: compilations and their cost, graph breaks, the graphs of other backends.

`watch_dynamo` and `watch_graphs_of_others` are active during a recording and then remove themselves; they do not change
what is compiled. The watcher is called on the thread that compiles.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._dynamo import exc
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import _dispatch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.observers.module_names import root_names
from dtensor_compile.compat.dynamo.tracing import is_left_to_python
from dtensor_compile.compat.inductor.compile import GraphPass
from dtensor_compile.compat.patches import feature, hook, needs, patch

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>\w+)_at_\d+")


@dataclass
class FrameCompilation:
    """A compilation of a frame by Dynamo.

    Attributes:
        number: counts the compilations of a recording.
        function, file, line: name and first line of the function as written; a frame that resumes after a graph break
        has the name of its function.
        reason: the guard that failed, if the function was compiled before; else empty.
        seconds: measured, nested compilations included; 0 until it has ended.
        outermost: whether no other compilation contains it.
        names: the program's names of modules for which Dynamo has others (`module_names.root_names`).
        calls: number of runs of its graphs, as far as their backend reports it; of all graphs of the frame together.
    """

    number: int
    function: str
    file: str
    line: int
    reason: str = ""
    seconds: float = 0.0
    outermost: bool = True
    names: dict[str, str] = field(default_factory=dict, repr=False)
    calls: int = 0

    def counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, the compiled graph, with its calls counted."""

        def call(*args: Any) -> Any:
            self.calls += 1
            return run(*args)

        return call


@dataclass(frozen=True)
class Break:
    """A graph break, or an error that ended a compilation.

    Attributes:
        kind: Dynamo's name for this sort of break; for other errors the name of their class.
        message: Dynamo's full message.
        stack: ``(file, line, code)`` of the user's frames, outermost first.
        compilation: during which it happened.
        error: whether it was raised to the caller.
    """

    kind: str
    message: str
    stack: tuple[tuple[str, int, str], ...]
    compilation: FrameCompilation | None
    error: bool


class Watcher(Protocol):
    """Receives events of Dynamo."""

    def compiling(self, compilation: FrameCompilation) -> None: ...

    def broke(self, event: Break) -> None: ...

    def compiled_backward(self, seconds: float) -> None: ...


_local = threading.local()
#: Numbers of compilations.
_count = itertools.count(1)


def current_compilation() -> FrameCompilation | None:
    """The current compilation on this thread, while it is watched."""
    under_way = getattr(_local, "under_way", None)
    return under_way[-1] if under_way else None


def name_modules(gm: torch.fx.GraphModule) -> None:
    """Replaces Dynamo's names of modules by the program's in the metadata of the graph that is being compiled."""
    this = current_compilation()
    if this is None or not this.names:
        return
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack")
            if stack:
                node.meta["nn_module_stack"] = {key: (name_in_program(path), of) for key, (path, of) in stack.items()}


def name_in_program(name: str) -> str:
    """Dynamo's name of a module, or of something inside of it, with the root's name in the program if Dynamo has
    another, in the frame that is being compiled."""
    this = current_compilation()
    for root, known in this.names.items() if this is not None else ():
        if name.startswith(root):
            return f"L['{known}']{name[len(root) :]}"
    return name


def forget_fixed_address(node: torch.fx.Node) -> bool:
    """Clears the mark that an input of a graph has a fixed address; returns whether it was set."""
    return node.meta.get("tensor_dict", {}).pop("_dynamo_static_input_type", None) is not None


_COMPILE = patch(
    "torch._dynamo.convert_frame:_compile", "code globals locals builtins closure compiler_fn one_graph ..."
)
_REASONS = patch("torch._dynamo.convert_frame:get_and_maybe_log_recompilation_reasons")
_BREAK = patch(
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase.log_graph_break", "self code_options reason exc"
)
_SIMPLIFIED = patch("torch._dynamo.backends.common:aot_module_simplified", "mod args fw_compiler ...")


@needs(
    "compilations and graph breaks, in the report",
    _COMPILE,
    _REASONS,
    _BREAK,
    hook("torch._dynamo.callback:CallbackTrigger.LAZY_BACKWARD"),
    without="the report has no graph breaks, no recompilations and no compile times",
    upstream="not reported: an extension point, torch has no listener for graph breaks",
    remove_when="torch._dynamo.callback reports graph breaks, reasons of recompilations and backends",
)
@contextlib.contextmanager
def watch_dynamo(watcher: Watcher) -> Iterator[None]:
    """While active, `watcher` receives every compilation and every graph break in this process."""

    watching = _Watching(watcher)
    replaced = ((_COMPILE, watching.compile), (_REASONS, watching.reasons), (_BREAK, watching.log_graph_break))
    callbacks = (
        (callback_handler.start_callbacks, watching.start),
        (callback_handler.end_callbacks, watching.end),
    )
    for known, ours in callbacks:
        known.append(ours)
    try:
        with contextlib.ExitStack() as stack:
            for row, replacement in replaced:
                stack.enter_context(patched(row, replacement, every_thread=True))
            yield
    finally:
        for known, ours in callbacks:
            if ours in known:  # torch._dynamo.reset() removes all of them
                known.remove(ours)


class _Watching:
    """Replacements and callbacks that report to one watcher."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.starts: list[float] = []

    def compile(
        self,
        stock: Any,
        code: Any,
        global_values: Any,
        local_values: Any,
        builtins: Any,
        closure: Any,
        compiler_fn: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replaces ``_compile``: a compilation of a frame."""
        given = (code, global_values, local_values, builtins, closure, compiler_fn, *args)
        if is_left_to_python(code, compiler_fn):
            return stock(*given, **kwargs)
        under_way = _local.__dict__.setdefault("under_way", [])
        resumed = _RESUMED.fullmatch(code.co_name)
        name = resumed["name"] if resumed else code.co_name
        this = FrameCompilation(next(_count), name, code.co_filename, code.co_firstlineno, outermost=not under_way)
        this.names = root_names(code, name, local_values, closure)
        self.watcher.compiling(this)
        under_way.append(this)
        began = time.perf_counter()
        try:
            return stock(*given, **kwargs)
        except Exception as error:
            if _ends_compilation(error):
                self.watcher.broke(_break(error, this, error=True))
            raise
        finally:
            this.seconds = time.perf_counter() - began
            under_way.pop()

    def reasons(self, stock: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Records why the frame is recompiled."""
        found: list[str] = stock(*args, **kwargs)
        this = current_compilation()
        if this is not None:
            this.reason = found[0] if found else "a guard of an earlier compilation"
        return found

    def log_graph_break(self, stock: Any, translator: Any, code_options: Any, reason: str, exc: Any) -> None:
        if not getattr(exc, "logged", False):
            self.watcher.broke(_break(exc, current_compilation(), error=False))
        stock(translator, code_options, reason, exc)

    def start(self, args: CallbackArgs) -> None:
        """A compilation starts, possibly of a backward."""
        self.starts.append(time.perf_counter())

    def end(self, args: CallbackArgs) -> None:
        if args.callback_trigger is CallbackTrigger.LAZY_BACKWARD and self.starts:
            self.watcher.compiled_backward(time.perf_counter() - self.starts[-1])
        self.starts.clear()


def _ends_compilation(error: Exception) -> bool:
    """Whether an exception really ends a compilation, rather than leaving the frame to Python or starting over."""
    return not isinstance(error, (exc.SkipFrame, exc.RestartAnalysis)) and not getattr(error, "logged", False)


#: A frame in a stack that torch keeps as text.
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def _break(event: Exception, compilation: FrameCompilation | None, *, error: bool) -> Break:
    stack = getattr(event, "real_stack", None) or torch._guards.TracingContext.extract_stack()
    frames = tuple((frame.filename, frame.lineno or 0, frame.line or "") for frame in stack or ())
    if not frames:  # an error inside of Dynamo, with the frames in its text
        frames = tuple((m["file"], int(m["line"]), m["code"].strip()) for m in FRAME.finditer(str(event)))
    kind = getattr(event, "gb_type", None) or type(event).__name__
    return Break(str(kind), str(getattr(event, "msg", None) or event), frames, compilation, error)


# ---- redistributions -----------------------------------------------------------------------------------------------


_FORCING = feature(
    "the operator that forced a redistribution, in the report",
    hook(
        "torch.distributed.tensor._dispatch:OpDispatcher.redistribute_local_args",
        "op_info suggested_input_schema use_val_from_redistribute_schema",
    ),
    without="the report names the line only",
)


def forcing_operator() -> str:
    """The operator whose inputs DTensor is redistributing on this thread (``aten.add.Tensor``); empty if there
    is none."""
    frame = sys._getframe(1) if _FORCING.works() else None
    while frame is not None:
        if frame.f_code.co_name == "redistribute_local_args" and frame.f_globals is vars(_dispatch):
            info = frame.f_locals.get("op_info")
            schema = getattr(info, "schema", None) or frame.f_locals.get("suggested_input_schema")
            return str(getattr(schema, "op", ""))
        frame = frame.f_back
    return ""


def newest_node() -> torch.fx.Node | None:
    """The last node of the graph that this thread traces with proxies; None if it traces none."""
    mode = get_proxy_mode()
    return next(iter(reversed(mode.tracer.graph.nodes)), None) if mode is not None else None


def nodes_since(before: torch.fx.Node | None) -> list[torch.fx.Node]:
    """The nodes after `before` (all for None) of the graph that this thread traces with proxies; empty if it traces
    none."""
    mode = get_proxy_mode()
    nodes = reversed(mode.tracer.graph.nodes) if mode is not None else ()
    return list(itertools.takewhile(lambda node: node is not before, nodes))


def node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node of a tensor in the graph that this thread traces with proxies; None if there is none."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


# ---- graphs --------------------------------------------------------------------------------------------------------

Graphs = Callable[[torch.fx.Graph], None]


@needs(
    "graphs of other backends, in the report",
    _SIMPLIFIED,
    hook("torch._inductor.config:post_grad_custom_post_pass"),
    without="the report has no comparison with stock torch",
    upstream="not reported: an extension point",
    remove_when="AOTAutograd has a listener for the graphs that it passes to a compiler",
)
@contextlib.contextmanager
def watch_graphs_of_others(on_graph: Graphs) -> Iterator[None]:
    """While active, `on_graph` gets every forward and backward graph that other backends get from AOTAutograd.

    Inductor's graphs are seen after its post-grad passes, others as AOTAutograd made them; they must not be changed.
    Inductor takes no graph out of its caches meanwhile.
    """
    from torch._inductor import config

    def observed(compiler: Any) -> Any:
        def compile_(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            on_graph(gm.graph)
            return compiler(gm, inputs)

        return compile_

    def aot_module_simplified(stock: Any, gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("partition_fn"), "__module__", "").startswith("dtensor_compile."):
            return stock(gm, example_inputs, **kwargs)
        name_modules(gm)
        for name in ("fw_compiler", "bw_compiler", "inference_compiler"):
            compiler = kwargs.get(name)
            if compiler is not None and not isinstance(compiler, SerializableAOTDispatchCompiler):
                kwargs[name] = observed(compiler)
        return stock(gm, example_inputs, **kwargs)

    def of_inductor(graph: torch.fx.Graph) -> None:
        if not isinstance(config.post_grad_custom_pre_pass, GraphPass):  # ours reports its own graphs
            on_graph(graph)

    after = GraphPass(of_inductor, None, config.post_grad_custom_post_pass)
    with (
        patched(_SIMPLIFIED, aot_module_simplified, every_thread=True),
        config.patch(post_grad_custom_post_pass=after),
    ):
        yield


def uncompiled(function: Any) -> Any:
    """The function that ``torch.compile`` was given; `function` itself if it is not compiled."""
    return getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None) or function
