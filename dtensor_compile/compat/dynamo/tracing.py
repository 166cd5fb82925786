"""The scope in which Dynamo traces for our backend.

`install_while_tracing` installs our trackers while Dynamo traces for one backend, and removes them afterwards. Three
things about it are not obvious:

- *When.* ``torch.compile`` drops the ``backend_ctx_ctor`` of a backend that is given by name. So the scope is entered
  where Dynamo enters ``callback_handler.install_callbacks``, around each compilation. Its callbacks are not sufficient:
  ``torch._dynamo.reset()`` drops them, and they do not run for a compilation that starts during another one, of a
  backward pass on another thread for instance.
- *For whom.* The backend of the compilation is not passed there. It is in the local variable ``compiler_fn`` of
  Dynamo's function ``_compile``, further up the stack.
- *Nested.* A compilation for another backend may run within one for ours. So every entry checks the backend of the
  frame that is being traced, and calls torch's version if it is not ours.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.callback import CallbackTrigger
from torch._dynamo.eval_frame import FrameAction, FrameExecStrategy
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder

from dtensor_compile.compat.apply_patches import (
    ABSENT,
    Place,
    patch_for_good,
    patched,
    patched_entries,
    seen_from,
    stock_torch,
    this_place,
)
from dtensor_compile.compat.dynamo.left_to_python import is_left
from dtensor_compile.compat.dynamo.recompile_limits import Fate, fate_of_frame, never_suppressed
from dtensor_compile.compat.dynamo.trackers.constant_objects import (
    OPAQUE,
    constant_classes,
    guard_constant,
    track_world,
)
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import OpaqueVariable
from dtensor_compile.compat.dynamo.trackers.tracker_entries import (
    Backend,
    Entries,
    Retrack,
    Track,
    TrackGiven,
    TrackMade,
    TrackTensor,
)
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, real_object
from dtensor_compile.compat.patches import Patch, feature, hook, patch

_BUILDER = "torch._dynamo.variables.builder:"
_FACTORY = patch(f"torch._dynamo.variables.script_object:{OpaqueVariable.__name__}.create", "proxy value ...")
_BY_ID = patch(_BUILDER + "VariableBuilder._id_dispatch", "cls")
_BY_TYPE = patch(_BUILDER + "VariableBuilder._type_dispatch", "cls")
_MADE = patch(_BUILDER + "SourcelessBuilder._type_handlers")
#: The tables of these rows.
_TABLES: dict[Patch, Callable[[], dict[Any, Any]]] = {
    _BY_ID: VariableBuilder._id_dispatch,
    _BY_TYPE: VariableBuilder._type_dispatch,
    _MADE: lambda: SourcelessBuilder._type_handlers,  # type: ignore[attr-defined]  # torch adds it to the class later
}
_CALLBACKS = patch(
    "torch._dynamo.callback:CompilationCallbackHandler.install_callbacks", "self trigger compile_id", lasting=True
)
_COMPILE = patch(
    "torch._dynamo.convert_frame:_compile",
    "code globals locals builtins closure compiler_fn one_graph ...",
    lasting=True,
)
_TRACKERS = feature(
    "meshes, groups, placements and DTensors in the graph",
    *((_FACTORY,) if OPAQUE else ()),
    _BY_ID,
    _BY_TYPE,
    hook(_BUILDER + "VariableBuilder._wrap", "self value"),
    _MADE,
    _COMPILE,
    _CALLBACKS,
    hook("torch._dynamo.types:ConvertFrameReturn", "frame_exec_strategy apply_to_code guarded_code ..."),
    without="most programs with them break, and guards would be missing",
    essential=True,
    upstream="#189136, for devices",
    remove_when="torch.compile lets a backend register VariableTrackers",
)

# ---- the scope -----------------------------------------------------------------------------------------------------

_UNWRAP: tuple[tuple[type, str], ...] = (
    (types.MethodType, "__self__"),  # DDPOptimizer.compile_fn, inside of the forward of a DDP module
    (DDPOptimizer, "backend_compile_fn"),
    (WrapBackendDebug, "_torchdynamo_orig_backend"),
    (torch._TorchCompileWrapper, "compiler_fn"),
    (functools.partial, "func"),
)


def unwrapped_backend(compiler_fn: Any) -> Any:
    """The backend function inside the wrappers of ``torch.compile``, or inside a ``functools.partial`` of it."""
    for wrapper, attribute in _UNWRAP:
        if isinstance(compiler_fn, wrapper):
            return unwrapped_backend(getattr(compiler_fn, attribute))
    return compiler_fn


def of_compilation_on_stack(name: str) -> Any:
    """An argument (``compiler_fn``, ``code``) of the innermost compilation on this thread; None if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals is vars(convert_frame):
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None


def restarts_analysis(error: BaseException) -> bool:
    """Whether an error makes Dynamo restart a trace, or skip a frame."""
    return isinstance(error, (RestartAnalysis, SkipFrame))


def _compiler_on_stack() -> Any:
    """The ``compiler_fn`` of the innermost compilation on this thread; None if there is none."""
    return of_compilation_on_stack("compiler_fn")


def keep_ddp_graphs_whole() -> AbstractContextManager[None]:
    """From here on, the innermost compilation on this thread makes one graph, where DDP would split it to overlap
    buckets."""
    optimizer = getattr(_compiler_on_stack(), "__self__", None)
    if isinstance(optimizer, DDPOptimizer):  # made for this one compilation
        optimizer.bucket_bytes_cap = optimizer.first_bucket_cap = sys.maxsize
    return nullcontext()


def backend_on_stack() -> Any:
    """The backend of the innermost compilation on this thread; None if there is none."""
    return unwrapped_backend(_compiler_on_stack())


def options_on_stack() -> Mapping[str, Any]:
    """The ``options`` of the innermost compilation on this thread."""
    compiler_fn = _compiler_on_stack()
    for wrapper, attribute in _UNWRAP[:3]:  # unwraps down to the object that holds the options
        if isinstance(compiler_fn, wrapper):
            compiler_fn = getattr(compiler_fn, attribute)
    given = getattr(compiler_fn, "kwargs", None) or getattr(compiler_fn, "keywords", None) or {}
    return given.get("options") or {}


@dataclass
class _Scope:
    """Entries of one backend, installed while `depth` compilations for it are running."""

    backend: Backend
    entries: Entries
    depth: int = 0
    _in_place: ExitStack = field(default_factory=ExitStack)
    _place: Place = (0, 0)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Wraps one compilation for the backend. Dynamo compiles on one thread at a time; compilations may nest."""
        self.depth += 1
        try:
            if self.depth == 1:
                self._place = this_place()
                self.install()
            with seen_from(self._place):  # another backend's compilation may be in between
                yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.remove()

    def serves(self, tx: Translator | None) -> bool:
        """Whether the frame that `tx` traces is compiled by our backend."""
        tx = tx if tx is not None else InstructionTranslator.current_tx()
        return unwrapped_backend(tx.output.compiler_fn) is self.backend

    def install(self) -> None:
        _TRACKERS.works()
        self.remove()
        if OPAQUE:
            self._in_place.enter_context(patched(_FACTORY, self._create))
        else:
            self._enter_constants()
        for cls, track in self.entries.made.items():
            self._enter(_MADE, cls, functools.partial(self._made, track))
        for thing, retrack in self.entries.objects:
            self._enter(_BY_ID, id(thing), functools.partial(self._object, retrack))
        for cls, track_tensor in self.entries.tensors.items():
            self._enter(_BY_TYPE, cls, functools.partial(self._tensor, track_tensor))
        for cls, track_given in self.entries.given.items():
            self._enter(_BY_TYPE, cls, functools.partial(self._given, track_given))
        for context in (*self.entries.contexts, *(() if OPAQUE else (track_world,))):
            self._in_place.enter_context(context())

    def remove(self) -> None:
        self._in_place.close()

    def _create(
        self, stock: Any, proxy: Any, value: Any, *args: Any, tx: Translator | None = None, **options: Any
    ) -> VariableTracker:
        """Makes a tracker of an opaque object; torch does so in one static method, for inputs and for results
        of nodes."""
        track = self._track_of(type(real_object(value)))
        if track is None:
            return stock(proxy, value, *args, tx=tx, **options)
        source = options.pop("source", None)
        return track(tx or InstructionTranslator.current_tx(), proxy, value, source, options)

    def _enter_constants(self) -> None:
        """Installs trackers where torch does not carry such objects in graphs, and makes their trackers in several
        places."""
        for cls in constant_classes():
            track = self._track_of(cls)
            if track is not None:
                made = functools.partial(self._made, functools.partial(_track_constant, track))
                self._enter(_MADE, cls, made)
                given = functools.partial(self._given, functools.partial(_track_given_constant, track))
                self._enter(_BY_TYPE, cls, given)

    def _track_of(self, cls: type) -> Track | None:
        return next((self.entries.opaque[base] for base in cls.__mro__ if base in self.entries.opaque), None)

    def _made(
        self, track: TrackMade, stock: Callable[..., VariableTracker], tx: Translator, value: Any
    ) -> VariableTracker:
        return track(tx, value) if self.serves(tx) else stock(SourcelessBuilder.create, tx, value)

    def _object(
        self, retrack: Retrack, stock: Callable[..., VariableTracker], builder: VariableBuilder, value: Any
    ) -> VariableTracker:
        variable = stock(builder._wrap, value)
        return retrack(variable) if self.serves(builder.tx) else variable

    def _tensor(
        self, track: TrackTensor, stock: Callable[..., VariableTracker], builder: VariableBuilder, value: torch.Tensor
    ) -> VariableTracker:
        by_torch = functools.partial(stock, builder._wrap, value)
        return track(by_torch, builder.get_source(), value) if self.serves(builder.tx) else by_torch()

    def _given(
        self, track: TrackGiven, stock: Callable[..., VariableTracker], builder: VariableBuilder, value: Any
    ) -> VariableTracker:
        return track(builder, value) if self.serves(builder.tx) else stock(builder._wrap, value)

    def _enter(self, row: Patch, key: Any, entry: Callable[..., VariableTracker]) -> None:
        """Puts ``entry(stock, *args)`` into a table of Dynamo's, where ``stock(look_up, *args)`` calls torch's own
        version."""
        table = _TABLES[row]()
        if key in table:
            return  # someone else's, torch.compiler.substitute_in_graph for instance

        def stock(look_up: Callable[..., VariableTracker], *args: Any) -> VariableTracker:
            with patched_entries(row, {key: ABSENT}, table):
                return look_up(*args)

        self._in_place.enter_context(patched_entries(row, {key: functools.partial(entry, stock)}, table))


def _track_constant(track: Track, tx: Translator, value: Any) -> VariableTracker:
    return track(tx, None, value, None, {})


def _track_given_constant(track: Track, builder: VariableBuilder, value: Any) -> VariableTracker:
    guard_constant(builder, value)
    return track(builder.tx, None, value, builder.get_source(), {})


_scopes: list[_Scope] = []


def install_while_tracing(backend: Backend, entries: Entries) -> None:
    """From now on, `entries` are installed whenever Dynamo traces for `backend`, and only then. Idempotent."""
    if any(scope.backend is backend for scope in _scopes):
        return
    _scopes.append(_Scope(backend, entries))
    if len(_scopes) == 1:
        patch_for_good(_CALLBACKS, _around_compilation)
        patch_for_good(_COMPILE, _leave_some_to_python)


@contextmanager
def _around_compilation(
    stock: Any, handler: Any, trigger: CallbackTrigger, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """``install_callbacks(trigger, compile_id)`` with the scope of our backend inside, if it is the one that
    compiles."""
    with ExitStack() as stack:
        stack.enter_context(stock(handler, trigger, *args, **kwargs))
        if trigger is CallbackTrigger.DYNAMO:
            backend = backend_on_stack()
            scope = next((scope for scope in _scopes if scope.backend is backend), None)
            stack.enter_context(scope.around() if scope is not None else stock_torch())
        yield


#: Called with each frame that Dynamo does not compile; the last one counts.
_at_failure: list[Callable[[types.CodeType, Exception, Fate], None]] = []


def at_failed_frames(failed: Callable[[types.CodeType, Exception, Fate], None]) -> None:
    """From now on, `failed` is called where Dynamo does not compile a frame for one of our backends; with its code, the
    error, which it may change, and its `Fate`. An error that it raises reaches the program."""
    _at_failure.append(failed)


def installed_backends() -> list[Backend]:
    """The backends whose entries are currently installed."""
    return [scope.backend for scope in _scopes if scope.depth]


def compiles_for_us(compiler_fn: Any) -> bool:
    """Whether the ``compiler_fn`` of a frame is a backend of ours."""
    return any(scope.backend is unwrapped_backend(compiler_fn) for scope in _scopes)


def _leave_some_to_python(
    stock: Any,
    code: types.CodeType,
    globals: Any,
    locals: Any,
    builtins: Any,
    closure: Any,
    compiler_fn: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Dynamo's ``_compile``, skipping frames that our backend leaves to Python.

    The code is not marked, as ``skip_code`` would: another backend may compile it.
    """
    if not is_left_to_python(code, compiler_fn):
        try:
            return stock(code, globals, locals, builtins, closure, compiler_fn, *args, **kwargs)
        except Exception as error:
            if _at_failure and compiles_for_us(compiler_fn):
                with never_suppressed(kwargs.get("convert_frame_box")):
                    _at_failure[-1](code, error, fate_of_frame(error, one_graph=bool(args[0])))
            raise
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def is_left_to_python(code: types.CodeType, compiler_fn: Any) -> bool:
    """Whether a frame that Dynamo is about to compile with `compiler_fn` is left to Python."""
    return is_left(code) and compiles_for_us(compiler_fn)
