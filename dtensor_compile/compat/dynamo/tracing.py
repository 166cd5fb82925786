"""Dynamo: the scope in which it traces for our backend, and the names that trackers are built from.

`install_while_tracing` puts trackers of ours in place while Dynamo traces for one backend, and takes them out again.
Three things about it are not obvious:

- *When.* ``torch.compile`` drops the ``backend_ctx_ctor`` of a backend that is given by name. So the scope is entered
  where Dynamo enters ``callback_handler.install_callbacks``, around each compilation. Its callbacks themselves will not
  do: ``torch._dynamo.reset()`` drops them, and they do not run for a compilation that starts while another one is under
  way, of a backward pass on another thread for instance.
- *For whom.* Nobody says there which backend the compilation is for. It is in the local variable ``compiler_fn`` of
  Dynamo's function ``_compile``, further up the stack.
- *Nested.* A compilation for another backend may run within one for ours. So every entry asks once more, of the frame
  that is being traced, for whom it is, and hands over to torch where it is not for us.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch._dynamo import convert_frame
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.callback import CallbackTrigger
from torch._dynamo.eval_frame import FrameAction, FrameExecStrategy, skip_code
from torch._dynamo.exc import RestartAnalysis, SkipFrame, raise_observed_exception, unimplemented
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.source import AttrSource, GlobalSource, GradSource, TypeSource, is_from_optimizer_source
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables import script_object
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Guard, GuardsContext, GuardsSet, Source
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils.weak import TensorWeakRef

from dtensor_compile.causes import break_title, cause
from dtensor_compile.compat.apply_patches import (
    ABSENT,
    STANDS_FOR,
    on_this_thread,
    patch_for_good,
    patched,
    patched_entries,
    patched_value,
    stock_torch,
)
from dtensor_compile.compat.dynamo.constant_objects import (
    OPAQUE,
    STOCK_CLASSES,
    ConstantClassVariable,
    ConstantObjectVariable,
    constant_classes,
    guard_constant,
    track_world,
)
from dtensor_compile.compat.patches import Patch, feature, hook, patch

Translator = InstructionTranslatorBase


def _named(module: types.ModuleType, *names: str) -> Any:
    """The first of `names` that the module has: releases call the same thing by different names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


#: What a tracker calls the slots that read an attribute and compare; every tracker of ours has both names of each.
READ = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"
COMPARE = "tp_richcompare_impl" if hasattr(VariableTracker, "tp_richcompare_impl") else "richcompare_impl"


def read_attribute(owner: Any, tx: Translator, name: str) -> VariableTracker:
    """``owner.name`` of a tracker, or of the ``super()`` of one."""
    return getattr(owner, READ)(tx, name)


#: Methods of tensors that are called while a program is traced; several features replace it.
CALL_METHOD = patch("torch._dynamo.variables.tensor:TensorVariable.call_method", "self tx name args kwargs")
_METHODS = patch("torch._dynamo.variables.tensor:TensorVariable.tp_methods", optional=True)


@contextmanager
def tensor_methods(**handlers: Callable[..., VariableTracker | None]) -> Iterator[None]:
    """While it is entered, calls of these methods of tensors go to these functions in place of
    ``TensorVariable.method_...``.
    """
    table = getattr(TensorVariable, "tp_methods", {})  # as of 2.14 it holds the functions themselves
    with ExitStack() as stack:
        for name, handler in handlers.items():
            row = patch(f"torch._dynamo.variables.tensor:TensorVariable.method_{name}")
            ours = on_this_thread(
                getattr(TensorVariable, f"method_{name}"), lambda _, *args, _h=handler, **k: _h(*args, **k)
            )
            stack.enter_context(patched_value(row, ours))
            if name in table:
                stack.enter_context(
                    patched_entries(_METHODS, {name: dataclasses.replace(table[name], handler=ours)}, table)
                )
        yield


#: Tracks an object that tensors and operators carry around without looking inside: meshes, groups, placements.
OpaqueVariable: Any = (
    _named(script_object, "TorchScriptObjectVariable", "CustomClassObjectVariable")
    if OPAQUE
    else ConstantObjectVariable
)
#: Tracks the class of such objects.
OpaqueClassVariable: Any = (
    _named(script_object, "OpaqueObjectClassVariable", "CustomClassVariable") if OPAQUE else ConstantClassVariable
)


def is_opaque_class(variable: VariableTracker) -> bool:
    """Whether `variable` is what torch tracks the class of such objects by."""
    return isinstance(variable, OpaqueClassVariable if OPAQUE else STOCK_CLASSES)


class MemberVariable(OpaqueVariable):
    """Tracks an opaque object: what Dynamo asks of it, under names that stay the same from release to release."""

    def read_member(self, tx: Translator, name: str) -> VariableTracker:
        """``object.name``"""
        raise NotImplementedError

    def text(self, tx: Translator, method: str) -> VariableTracker:
        """``repr(object)`` or ``str(object)``: `method` is ``"__repr__"`` or ``"__str__"``."""
        raise NotImplementedError

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        return self.read_member(tx, name)

    def repr_impl(self, tx: Translator) -> VariableTracker:
        return self.text(tx, "__repr__")

    def str_impl(self, tx: Translator) -> VariableTracker:
        return self.text(tx, "__str__")

    tp_getattro_impl, tp_repr_impl, tp_str_impl = var_getattr, repr_impl, str_impl  # as of 2.14


Backend = Callable[..., Any]
#: Makes a tracker of an opaque object: ``(tx, proxy, value, source, options)``.
Track = Callable[[Translator, Any, Any, "Source | None", Mapping[str, Any]], VariableTracker]
#: Makes a tracker of a value that tracing made: ``(tx, value)``.
TrackMade = Callable[[Translator, Any], VariableTracker]
#: Makes a tracker of one certain object from the one that torch makes.
Retrack = Callable[[VariableTracker], VariableTracker]
#: Makes a tracker of an object that the program was given: ``(builder, value)``.
TrackGiven = Callable[[VariableBuilder, Any], VariableTracker]
#: Makes the tracker of a tensor of one class, with its guards: ``(what makes torch's tracker and guards, source,
#: value)``.
TrackTensor = Callable[[Callable[[], VariableTracker], Source, Any], VariableTracker]


Objects = tuple[tuple[Any, Retrack], ...]
Contexts = tuple[Callable[[], AbstractContextManager[None]], ...]


@dataclass(frozen=True)
class Entries:
    """What is in place while Dynamo traces for our backend.

    Attributes:
        opaque: class of an opaque object (subclasses included) to what makes its tracker.
        made: class of a value that tracing made (subclasses excluded) to what makes its tracker.
        objects: pairs of one certain object, a class for instance, and what makes its tracker.
        contexts: make context managers that are entered meanwhile.
        tensors: class of a tensor with a source (subclasses excluded) to what makes its tracker and guards it.
        given: class of an object with a source (subclasses excluded) to what makes its tracker.
    """

    opaque: Mapping[type, Track]
    made: Mapping[type, TrackMade]
    objects: Objects
    contexts: Contexts = ()
    tensors: Mapping[type, TrackTensor] = field(default_factory=dict)
    given: Mapping[type, TrackGiven] = field(default_factory=dict)


def real_object(value: Any) -> Any:
    """The object itself: while tracing it may be wrapped."""
    return object.__getattribute__(value, "real_obj") if isinstance(value, FakeScriptObject) else value


_BUILDER = "torch._dynamo.variables.builder:"
_FACTORY = patch(f"torch._dynamo.variables.script_object:{OpaqueVariable.__name__}.create", "proxy value ...")
_BY_ID = patch(_BUILDER + "VariableBuilder._id_dispatch", "cls")
_BY_TYPE = patch(_BUILDER + "VariableBuilder._type_dispatch", "cls")
_MADE = patch(_BUILDER + "SourcelessBuilder._type_handlers")
#: The tables that these rows stand for.
_TABLES: dict[Patch, Callable[[], dict[Any, Any]]] = {
    _BY_ID: VariableBuilder._id_dispatch,
    _BY_TYPE: VariableBuilder._type_dispatch,
    _MADE: lambda: SourcelessBuilder._type_handlers,
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
    """The backend function inside what ``torch.compile`` wraps around it, and inside a ``functools.partial`` of it."""
    for wrapper, attribute in _UNWRAP:
        if isinstance(compiler_fn, wrapper):
            return unwrapped_backend(getattr(compiler_fn, attribute))
    return compiler_fn


def of_compilation_on_stack(name: str) -> Any:
    """An argument (``compiler_fn``, ``code``) of the innermost compilation that is under way on this thread; None where
    none is.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals is vars(convert_frame):
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None


def restarts_analysis(error: BaseException) -> bool:
    """Whether an error is Dynamo's way to begin a trace anew, or to leave a frame alone."""
    return isinstance(error, (RestartAnalysis, SkipFrame))


def _compiler_on_stack() -> Any:
    """What the innermost compilation that is under way on this thread compiles with; None where there is none."""
    return of_compilation_on_stack("compiler_fn")


def keep_ddp_graphs_whole() -> AbstractContextManager[None]:
    """From here on the innermost compilation on this thread makes one graph, where DDP would split it to overlap
    buckets.
    """
    optimizer = getattr(_compiler_on_stack(), "__self__", None)
    if isinstance(optimizer, DDPOptimizer):  # made for this one compilation
        optimizer.bucket_bytes_cap = optimizer.first_bucket_cap = sys.maxsize
    return nullcontext()


def backend_on_stack() -> Any:
    """The backend of the innermost compilation that is under way on this thread; None where there is none."""
    return unwrapped_backend(_compiler_on_stack())


def options_on_stack() -> Mapping[str, Any]:
    """The ``options`` that the innermost compilation on this thread was given for its backend."""
    compiler_fn = _compiler_on_stack()
    for wrapper, attribute in _UNWRAP[:3]:  # down to what holds the options
        if isinstance(compiler_fn, wrapper):
            compiler_fn = getattr(compiler_fn, attribute)
    given = getattr(compiler_fn, "kwargs", None) or getattr(compiler_fn, "keywords", None) or {}
    return given.get("options") or {}


@dataclass
class _Scope:
    """Entries of one backend, in place while `depth` compilations for it are under way."""

    backend: Backend
    entries: Entries
    depth: int = 0
    _in_place: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around one compilation for the backend. Dynamo compiles on one thread at a time, one within the other or one
        by one.
        """
        self.depth += 1
        try:
            if self.depth == 1:
                self.install()
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
        """torch makes every tracker of an opaque object, with a source or as the result of a node, in one static
        method.
        """
        track = self._track_of(type(real_object(value)))
        if track is None:
            return stock(proxy, value, *args, tx=tx, **options)
        source = options.pop("source", None)
        return track(tx or InstructionTranslator.current_tx(), proxy, value, source, options)

    def _enter_constants(self) -> None:
        """Where torch carries no such objects in graphs, it makes their trackers in several places; these are looked up
        before.
        """
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
        """Puts ``entry(stock, *args)`` into a table of Dynamo's, where ``stock(look_up, *args)`` is what torch does
        itself.
        """
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
    """From now on, `entries` are in place whenever Dynamo traces for `backend`, and at no other time. Once per
    backend.
    """
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
    """``install_callbacks(trigger, compile_id)`` with the scope of the backend inside, where one of ours compiles."""
    with ExitStack() as stack:
        stack.enter_context(stock(handler, trigger, *args, **kwargs))
        if trigger is CallbackTrigger.DYNAMO:
            backend = backend_on_stack()
            scope = next((scope for scope in _scopes if scope.backend is backend), None)
            stack.enter_context(scope.around() if scope is not None else stock_torch())
        yield


def installed_backends() -> list[Backend]:
    """The backends whose entries are in place right now."""
    return [scope.backend for scope in _scopes if scope.depth]


def traces_for_us(tx: Translator | None = None) -> bool:
    """Whether the frame that `tx` traces (the one that this thread traces now) is compiled by a backend of ours."""
    return any(scope.serves(tx) for scope in _scopes)


def compiles_for_us(compiler_fn: Any) -> bool:
    """Whether what Dynamo was given to compile a frame with is a backend of ours."""
    return any(scope.backend is unwrapped_backend(compiler_fn) for scope in _scopes)


# ---- what trackers need --------------------------------------------------------------------------------------------


def describe_fake(value: Any) -> None:
    """``str`` of a wrapped object is that of the real one; Dynamo asks the wrapper, and would bake in the wrapper's
    address.
    """
    if isinstance(value, FakeScriptObject):
        real = real_object(value)
        object.__setattr__(value, "__str__", lambda: str(real))


#: Code whose frames a backend of ours leaves to Python, and whether what they call is left to it, too.
_left: dict[types.CodeType, bool] = {}
_left_if: list[Callable[[types.CodeType], bool]] = []


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
    """Dynamo's ``_compile``, without the frames that a backend of ours leaves to Python.

    Nothing is noted on the code, as ``skip_code`` would: another backend may compile it.
    """
    if not is_left_to_python(code, compiler_fn):
        return stock(code, globals, locals, builtins, closure, compiler_fn, *args, **kwargs)
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if _left.get(code) else FrameAction.DEFAULT)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def is_left_to_python(code: types.CodeType, compiler_fn: Any) -> bool:
    """Whether a frame that Dynamo is about to compile with `compiler_fn` runs in Python as it is."""
    return (code in _left or any(leave(code) for leave in _left_if)) and compiles_for_us(compiler_fn)


@functools.cache
def leave_to_python(cls: type) -> None:
    """Frames of methods of `cls` that Python enters stay with Python under our backend; calls from what is traced are
    traced as ever.

    Dynamo does so itself for objects that it cannot look into: it cannot trace one that is half made, or half copied.
    """
    for member in vars(cls).values():
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(function, types.FunctionType):
            _left.setdefault(getattr(function, STANDS_FOR, function).__code__, False)


def leave_code_to_python(leave: Callable[[types.CodeType], bool]) -> None:
    """Frames whose code `leave` says so of stay with Python under our backend; calls from what is traced are traced."""
    _left_if.append(leave)


def leave_calls_to_python(function: types.FunctionType) -> None:
    """Frames of `function` that Python enters stay with Python under our backend, and so does what they call."""
    _left[function.__code__] = True


def leave_frames_to_python(function: types.FunctionType) -> None:
    """Frames of `function`, one of ours, stay with Python under any backend; what it calls may be compiled."""
    skip_code(function.__code__)


def graph_break(code: str, context: str, explanation: str = "", hint: str = "") -> NoReturn:
    """An ordinary graph break: an error with ``fullgraph=True``, otherwise this piece of the program runs in eager.

    Args:
        code: the cause, as in `dtensor_compile.causes`.
        context: what was met.
        explanation, hint: why it is not traced, what the user can do; where not given, what the cause says in general.
    """
    row = cause(code)
    unimplemented(
        gb_type=break_title(code), context=context, explanation=explanation or row.why, hints=[hint or row.instead]
    )


def raise_in_program(tx: Translator, error: Exception) -> NoReturn:
    """The traced program meets `error` here, as it would in eager: it may catch it."""
    raise_observed_exception(type(error), tx, args=[str(arg) for arg in error.args])


def constant_argument(argument: VariableTracker) -> Any:
    """The value of an argument; a size that became symbolic is fixed to what it is, under a guard.

    Raises:
        NotImplementedError: the value is only known when the program runs.
    """
    if isinstance(argument, SymNodeVariable):
        return argument.evaluate_expr()
    return argument.as_python_constant()


def build(tx: Translator, value: Any) -> VariableTracker:
    """A tracker for a value that was computed while tracing."""
    return VariableTracker.build(tx, value)


def member_function(
    owner: VariableTracker,
    name: str,
    call: Callable[[list[VariableTracker], dict[str, VariableTracker]], VariableTracker],
) -> VariableTracker:
    """The bound method `name` of `owner`, which calls `call` with the trackers of its arguments."""
    source = AttrSource(owner.source, name) if owner.source else None
    return LambdaVariable(lambda *args, **kwargs: call(list(args), kwargs), source=source)


def inline_member(owner: VariableTracker, tx: Translator, name: str) -> VariableTracker | None:
    """Member `name` of the object of `owner`, as of any Python object: data under guards, functions as code that is
    traced.

    None for what is neither data of the object itself nor Python code of its class.
    """
    real, source = owner.as_python_constant(), AttrSource(owner.source, name)
    found = inspect.getattr_static(type(real), name, None)
    if isinstance(found, types.FunctionType):
        if hasattr(found, STANDS_FOR):  # guards on it would look at what stands there now
            return UserMethodVariable(getattr(found, STANDS_FOR), owner)
        return UserMethodVariable(found, owner, source=source)
    if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
        return UserMethodVariable(found.fget, owner).call_function(tx, [], {})
    if name in getattr(real, "__dict__", ()):
        return build_member(owner, tx, name, vars(real)[name])
    return None


def build_member(owner: VariableTracker, tx: Translator, name: str, value: Any) -> VariableTracker:
    """Member `name` of the object of `owner` as data that is read there again when the program runs, under guards."""
    return VariableBuilder(tx, AttrSource(owner.source, name))(value)


def class_of(owner: VariableTracker, tx: Translator) -> VariableTracker:
    """The class of the object of `owner`."""
    return VariableBuilder(tx, TypeSource(owner.source))(type(owner.as_python_constant()))


def constant_source(tx: Translator, kind: str, value: Any) -> Source:
    """A source for an object that tracing made or found: the compiled code keeps it, and can load it."""
    return GlobalSource(tx.output.install_global_by_id(f"__dtensor_compile_{kind}", value))


def tracked(tx: Translator, value: Any) -> VariableTracker | None:
    """The tracker that `value` already has in this frame, if any."""
    known = tx.output.side_effects  # no dict
    return known[value] if value in known else None  # noqa: SIM401


def remember(tx: Translator, value: Any, tracker: VariableTracker) -> VariableTracker:
    """Whoever meets `value` again in this frame, from whatever source, gets `tracker` (and a guard that it is the same
    one).
    """
    if value in tx.output.side_effects:
        return tracker
    return tx.output.side_effects.track_object_existing(value, tracker)


@contextmanager
def _without_guards(context: GuardsContext) -> Iterator[None]:
    """While it is entered, no guards are installed."""
    if hasattr(context, "skip_guard_install"):
        with context.skip_guard_install():
            yield
        return
    installed, context.dynamo_guards = context.dynamo_guards, GuardsSet()  # before 2.13
    try:
        yield
    finally:
        context.dynamo_guards = installed


def build_unguarded(tx: Translator, value: Any, source: Source) -> VariableTracker:
    """A tracker with a source whose object cannot change."""
    with _without_guards(tx.output.tracing_context.guards_context):
        return VariableBuilder(tx, source)(value)


def guard_sizes(source: Source, value: torch.Tensor) -> None:
    """Guards type, dtype and the sizes and strides that are constants of the graph; sizes that are symbolic stay free.

    torch guards a DTensor by its local tensor and its spec, and compares specs without their shapes.
    """
    if isinstance(source, GradSource) and is_from_optimizer_source(source):
        return  # as torch does: the shape of a gradient is that of its parameter
    install_guard(source.make_guard(functools.partial(GuardBuilder.TENSOR_MATCH, value=TensorWeakRef(value))))


def fact_guard(name: str, facts: Callable[[Any], Any]) -> Callable[[Source], None]:
    """A kind of guard: what ``facts(object)`` says is the same as while tracing. The result installs one on a
    source.
    """

    def create(builder: Any, guard: Guard) -> None:
        recorded = facts(real_object(builder.get(guard)))
        code = f"{name}({guard.name}) == {recorded!r}"
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda value: facts(real_object(value)) == recorded, get_verbose_code_parts(code, guard), guard.user_stack
        )

    create.__name__ = name
    return lambda source: install_guard(source.make_guard(create))


__all__ = [
    "Backend", "Entries", "MemberVariable", "OpaqueClassVariable", "OpaqueVariable", "Source", "Translator",
    "UserFunctionVariable", "VariableTracker", "backend_on_stack", "build", "build_member", "build_unguarded",
    "class_of",
    "compiles_for_us", "constant_argument", "constant_source", "describe_fake", "fact_guard", "graph_break",
    "guard_sizes",
    "inline_member", "is_opaque_class", "install_while_tracing", "installed_backends", "keep_ddp_graphs_whole",
    "leave_calls_to_python",
    "leave_frames_to_python", "leave_to_python", "member_function", "options_on_stack", "raise_in_program",
    "read_attribute", "real_object",
    "remember", "tensor_methods", "traces_for_us", "tracked", "unwrapped_backend",
]  # fmt: skip
