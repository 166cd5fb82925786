"""Data-dependent scalars (``item()``, ``tolist()``), captured as unbacked SymInts and SymFloats while tracing for our
backend.

``item()``, ``tolist()`` and operators with a data-dependent output size (``bincount``, ``nonzero``) end a graph in
torch, unless a setting is on. Here they are part of the graph. Nothing can depend on their values, so ranks whose data
differ have the same graph.

The result of a collective depends on other ranks' data, even if each rank passes a constant, which may differ between
ranks. torch evaluates operators on constants while it traces, and would communicate: a rank that compiles alone would
wait for ever, and the result would be a constant of the graph. So no argument of a collective counts as a constant.

A program that counts with ``bincount(minlength=n)`` and reads the counts into Python (``tolist()``, a loop over them)
counts n things. If it needs the length, n is assumed, and the compiled program checks it each time
(``fixups/check_counts.py``).

If a program cannot do without the value (a loop over such a number, an operator that needs a size), tracing or the
backend raises. Eager would not, so the frame is traced again as torch does it, with a graph break where the number is
read.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo import config, convert_frame
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.symbolic_convert import tls
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch import config as functorch_config
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.symbol import SymT, symbol_is_type

from dtensor_compile.causes import cause
from dtensor_compile.compat.apply_patches import on_this_thread, patched, patched_entries
from dtensor_compile.compat.dynamo.tracing import backend_on_stack, compiles_for_us
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import METHODS, tensor_methods
from dtensor_compile.compat.dynamo.trackers.tracker_tools import graph_break
from dtensor_compile.compat.patches import hook, needs, patch

#: Settings of Dynamo in the first attempt to trace a frame, in the second, and in the last.
_ATTEMPTS: tuple[dict[str, bool], ...] = (
    {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True},
    {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": True},
    {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False},
)


def _has_numbers(shape_env: ShapeEnv) -> bool:
    """Whether tracing has created unbacked symbols."""
    return any(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for symbol in shape_env.var_to_range)


def _met_numbers(error: Exception) -> bool:
    """Whether the attempt to trace a frame that ended with `error` had created unbacked symbols."""
    output = getattr(getattr(error, "_torch_dynamo_tracer_output", None), "output_graph_for_cleanup", None)
    return output is not None and _has_numbers(output.shape_env)


def _first_lines(error: Exception) -> str:
    """The first line of an error, and the line of the program that it names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([*lines[:1], *(line for line in lines if line.startswith("Caused by:"))])


_TRACE = patch(
    "torch._dynamo.convert_frame:trace_frame",
    "code globals locals builtins closure compiler_fn tf_mode_stack one_graph speculation_log ...",
)
_FAKES = patch("torch._subclasses.fake_impls:op_implementations_dict")
_LOG = patch(
    "torch.fx.experimental.symbolic_shapes:ShapeEnv._log_real_tensor_propagation", "self orig_expr unsound_result"
)
_DISPATCH = patch("torch._subclasses.fake_tensor:FakeTensorMode._dispatch_impl", "self func types args kwargs")
_PROXY = patch("torch.fx.experimental.proxy_tensor:proxy_call", "proxy_mode func pre_dispatch args kwargs")


@needs(
    "data-dependent scalars in the graph",
    _TRACE,
    METHODS,
    patch("torch._dynamo.variables.tensor:TensorVariable.method_item", "self tx args kwargs", "self tx"),
    without="they break the graph, as in torch",
    upstream="pytorch/torchdynamo#1139",
    remove_when="Dynamo captures scalar outputs by default, and breaks the graph only where a value is needed",
)
@contextlib.contextmanager
def numbers_in_the_graph() -> Iterator[None]:
    """While active, frames that are compiled for our backend capture data-dependent scalars in their graph."""
    signature = inspect.signature(convert_frame.trace_frame)
    failed: list[
        tuple[Any, str]
    ] = []  # per attempt that needed a value: the frame's speculation log, and the error's text

    def messages_of(log: Any) -> list[str]:
        return [text for other, text in failed if other is log]

    def trace_frame(stock: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        log = given["speculation_log"]
        attempt = len(messages_of(log))
        try:
            with config.patch(_ATTEMPTS[attempt]):
                return stock(*args, **kwargs)
        except (RestartAnalysis, SkipFrame):
            raise
        except Exception as error:
            if given["one_graph"] or attempt + 1 == len(_ATTEMPTS) or not _met_numbers(error):
                raise
            failed.append((log, _first_lines(error)))
            log.clear()
            raise RestartAnalysis(restart_reason=cause("number-needed").title) from error

    def method_item(_: Any, self: TensorVariable, tx: Any, *args: Any, **kwargs: Any) -> None:
        if not tx.one_graph and not config.capture_scalar_outputs:
            graph_break("number-needed", f"{self}.item(); " + " ".join(messages_of(tx.speculation_log)))

    with patched(_TRACE, trace_frame), tensor_methods(item=method_item):
        yield


def backward_in_time() -> AbstractContextManager[Any]:
    """Reports an error in compiling a backward while the frame can still be traced another way.

    torch compiles a backward with symbolic sizes together with its forward, but raises its error when it runs.
    """
    tx = getattr(tls, "current_tx", None)
    if tx is None or tx.one_graph or not _has_numbers(tx.output.shape_env):
        return contextlib.nullcontext()
    return functorch_config.patch(force_non_lazy_backward_lowering=True)


@needs(
    "bincount with minlength",
    _FAKES,
    _LOG,
    without="a program that needs its length breaks the graph, as in torch",
    upstream="#192343",
    remove_when="the length of bincount(minlength=n) can be assumed to be n, with a check at run time",
)
@contextlib.contextmanager
def lengths_of_counts() -> Iterator[None]:
    """While active, ``bincount(minlength=n)`` on this thread has n counts for frames of ours that need the length.

    torch keeps a fallback value for an unbacked symbol; using it becomes a condition that the graph checks.
    """
    bincount = torch.ops.aten.bincount.default
    ours: weakref.WeakSet[ShapeEnv] = weakref.WeakSet()

    def fake(stock: Any, fake_mode: Any, func: Any, inputs: Any, weights: Any = None, minlength: Any = 0) -> Any:
        counts = stock(fake_mode, func, inputs, weights, minlength)
        if isinstance(minlength, int) and minlength > 0 and compiles_for_us(backend_on_stack()):
            ours.add(fake_mode.shape_env)
            fake_mode.shape_env.set_real_tensor_prop_unbacked_vals(counts.shape[0].node.expr, minlength)
        return counts

    def log(stock: Any, self: ShapeEnv, *args: Any) -> None:
        if self not in ours:  # the log warns about a value from example data, which this is not
            stock(self, *args)

    entry = {bincount: on_this_thread(op_implementations_dict[bincount], fake)}
    with patched_entries(_FAKES, entry), patched(_LOG, log):
        yield


#: Namespaces of operators that communicate, and of the waits.
_SENDING = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})


def _sends(op: Any) -> bool:
    """Whether an operator is a collective or a message, torch's or ours."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    namespace, _, name = op._schema.name.partition("::")
    return namespace in _SENDING or namespace == "dtensor_compile" and name.startswith(("c10d_", "redistribute"))


@contextlib.contextmanager
def _without_constants(op: Any, given: Any, holders: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """While active, the constants that ``holders(tensor)`` records are cleared; for good if `op` mutates arguments."""
    found = [holder for x in tree_leaves(given) if isinstance(x, torch.Tensor) and (holder := holders(x)) is not None]
    constants = [holder.constant for holder in found]
    for holder in found:
        holder.constant = None
    try:
        yield
    finally:
        for holder, constant in zip(found, constants) if not op._schema.is_mutable else ():
            holder.constant = constant


@needs(
    "collectives of constants",
    _DISPATCH,
    _PROXY,
    hook("torch.fx.experimental.proxy_tensor:get_proxy_slot", "obj tracer default transform"),
    without="they are sent while tracing",
    essential=True,
    upstream="#126846, for propagated real tensors",
    remove_when="constants of fake tensors and of proxies leave collectives out",
)
@contextlib.contextmanager
def collectives_of_constants() -> Iterator[None]:
    """While active, no collective is executed on a thread that traces a frame for our backend."""

    def of_fake(x: torch.Tensor) -> Any:
        return x if isinstance(x, FakeTensor) and x.constant is not None else None

    def dispatch(stock: Any, self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not _sends(func):
            return stock(self, func, types, args, kwargs)
        with _without_constants(func, (args, kwargs), of_fake):
            return stock(self, func, types, args, kwargs)

    def call(stock: Any, proxy_mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        def of_proxy(x: torch.Tensor) -> Any:
            slot = proxy_tensor.get_proxy_slot(x, proxy_mode.tracer, None)
            return slot if getattr(slot, "constant", None) is not None else None

        if not _sends(func):
            return stock(proxy_mode, func, pre_dispatch, args, kwargs)
        with _without_constants(func, (args, kwargs), of_proxy):
            return stock(proxy_mode, func, pre_dispatch, args, kwargs)

    with patched(_DISPATCH, dispatch), patched(_PROXY, call):
        yield
