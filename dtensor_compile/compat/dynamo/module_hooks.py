"""Traces backward hooks of modules and tensors for our backend.

A hook of ``register_full_backward_hook`` or ``register_full_backward_pre_hook`` is a function of gradients. torch
traces it under compiled autograd only, which sees the backward as a program. Our backend traces forward and backward at
once. So Dynamo traces the code of the hooks into a graph of its own, and a node of the forward registers that graph
with the class that eager uses, ``torch.utils.hooks.BackwardHook``. The graph runs when the backward is traced, and
becomes part of it.

The behaviour of a hook may depend on its gradients: which of them are None, which are DTensors, and their placements.
Dynamo traces it for the expected gradients. If others arrive while the backward is traced, the frame is traced again
for those.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnknownPropertiesDuringBackwardTrace, Unsupported
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy, wrap_fx_proxy_cls
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.distributed import BackwardHookVariable
from torch._dynamo.variables.higher_order_ops import speculate_subgraph
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import RemovableHandleVariable
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.hooks import BackwardHook

from dtensor_compile.causes import cause
from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.dtensor.creation import compute_local_shape_and_global_offset
from dtensor_compile.compat.dynamo.trackers.calls import call_site
from dtensor_compile.compat.dynamo.trackers.constant_objects import OPAQUE
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, function_variable, graph_break, items_of
from dtensor_compile.compat.patches import needs, patch

#: Facts about a gradient on which a hook may depend: None if there is none, ``()`` for a plain tensor, the placements
#: of a DTensor.
Facts = tuple[Any, ...] | None


#: Extra arguments for tracing a subgraph: a hook may return the gradient that it gets, and write to it, which has to be
#: declared as of 2.15; before 2.13 it needs a target.
_NAMED: dict[str, Any] = {"supports_aliasing": True, "supports_input_mutation": True}
_NAMED |= {} if OPAQUE else {"source_target": torch.ops.higher_order.wrap}


class OtherGradients(TensorifyScalarRestartAnalysis):
    """Gradients arrived that a hook was not traced for.

    Of torch's exceptions that restart the trace of a frame, this is the one that it accepts from a backend.
    """


class _Attempts:
    """Facts about gradients from earlier attempts to trace a frame, by the place of the hook in the program."""

    def __init__(self, tx: Translator) -> None:
        self.log = tx.speculation_log
        self.seen: dict[Any, tuple[tuple[Facts, ...], ...]] = vars(self.log).setdefault("dtensor_compile_gradients", {})

    def trace_for(self, place: Any, facts: tuple[tuple[Facts, ...], ...]) -> None:
        """Makes the next attempt, which starts from scratch, trace the hook for these gradients."""
        self.log.clear()
        self.seen[place] = facts


def _others(compilation: TracingContext) -> list[Callable[[], None]]:
    """Functions that record the gradients of each hook that received unexpected ones in this compilation."""
    return vars(compilation).setdefault("dtensor_compile_other_gradients", [])


def check_gradients_of_hooks() -> None:
    """Checks the gradients of hooks after the backward was traced.

    Raises:
        OtherGradients: hooks were traced for other gradients than they got; Dynamo starts over.
    """
    notes = _others(TracingContext.get())
    for note in notes:
        note()
    if notes:
        raise OtherGradients(restart_reason="gradients that a backward hook was not traced for")


def _facts(gradient: torch.Tensor | None) -> Facts:
    if gradient is None:
        return None
    return tuple(gradient.placements) if isinstance(gradient, DTensor) else ()


def _expected(value: torch.Tensor, needs_gradient: bool) -> Facts:
    """The expected facts: a gradient is placed as its tensor, and replicated where that is partial."""
    if not needs_gradient:
        return None
    return tuple(Replicate() if isinstance(p, Partial) else p for p in _facts(value) or ())


def _gradient_like(value: torch.Tensor, facts: Facts) -> torch.Tensor:
    """A fake gradient of a fake tensor, with the given facts."""
    if not isinstance(value, DTensor) or not facts:
        return value.detach()
    local, mesh = value.to_local().detach(), real_mesh(value.device_mesh)
    if facts != _expected(value, True):
        shape, _ = compute_local_shape_and_global_offset(value.shape, mesh, facts)
        local = local.new_empty(shape)
    return DTensor.from_local(local, mesh, facts, run_check=False, shape=value.shape, stride=value.stride())


# ---- functions called by the graph ---------------------------------------------------------------------------------


def _open() -> BackwardHook:
    """A new object for the hooks of one call of a module."""
    return BackwardHook(None, [], [])


def _spread(tensors: Sequence[Any], where: Sequence[int], count: int) -> tuple[Any, ...]:
    """A tuple of `count` arguments with the tensors at the positions `where`, and None elsewhere."""
    arguments: list[Any] = [None] * count
    for place, tensor in zip(where, tensors):
        arguments[place] = tensor
    return tuple(arguments)


# ---- traced instead of torch's loops over hooks --------------------------------------------------------------------


def _run_hooks(module: Any, hooks: Sequence[Any], grad_inputs: Any, grad_outputs: Any) -> Any:
    for hook in hooks:
        result = hook(module, grad_inputs, grad_outputs)
        if result is not None:
            if len(result) != len(grad_inputs):
                raise RuntimeError(
                    f"Backward hook returned an invalid number of grad_input, got {len(result)}, but expected "
                    f"{len(grad_inputs)}"
                )
            grad_inputs = result
    return grad_inputs


def _run_pre_hooks(module: Any, hooks: Sequence[Any], grad_outputs: Any) -> Any:
    for hook in hooks:
        result = hook(module, grad_outputs)
        if result is not None:
            if len(result) != len(grad_outputs):
                raise RuntimeError(
                    f"Backward pre hook returned an invalid number of grad_output, got {len(result)}, "
                    f"but expected {len(grad_outputs)}"
                )
            grad_outputs = result
    return grad_outputs


def _run_hook(hook: Any, gradients: Any) -> Any:
    result = hook(gradients[0])
    return gradients if result is None else (result,)


# ---- the code of hooks as graphs -----------------------------------------------------------------------------------


class _Values:
    """Tensors and other values whose gradients hooks get: arguments or results of a module, or one tensor."""

    def __init__(self, items: Sequence[VariableTracker]) -> None:
        self.items = [item.realize() for item in items]
        self.where = [i for i, item in enumerate(self.items) if isinstance(item, TensorVariable)]
        self.tensors = [self.items[i] for i in self.where]
        self.fakes = [tensor.as_proxy().node.meta["example_value"] for tensor in self.tensors]

    def expected(self) -> tuple[Facts, ...]:
        """The expected facts about the gradient of every item."""
        facts = [_expected(fake, torch.is_grad_enabled() and fake.requires_grad) for fake in self.fakes]
        return _spread(facts, self.where, len(self.items))

    def examples(self, facts: Sequence[Facts]) -> list[torch.Tensor | None]:
        """Fake gradients with these facts."""
        fakes = _spread(self.fakes, self.where, len(self.items))
        return [None if fact is None else _gradient_like(fake, fact) for fake, fact in zip(fakes, facts)]

    def replaced(self, tensors: Sequence[VariableTracker]) -> TupleVariable:
        """The items with their tensors replaced."""
        items = list(self.items)
        for place, tensor in zip(self.where, tensors):
            items[place] = tensor
        return TupleVariable(items)


class _Body:
    """Code of hooks as a graph.

    Attributes:
        facts: about the gradients that it is traced for, per group (of the inputs, of the outputs of a module) and
            gradient.
        kept: whether each result is a tensor; the others are None.
        proxies: the graph, and the tensors that the hooks use besides their gradients.
    """

    def __init__(
        self,
        tx: Translator,
        kind: str,
        call: Callable[..., VariableTracker],
        groups: Sequence[_Values],
        tracer: Any = None,
    ) -> None:
        """Traces ``call(*groups)``, where a group is a tuple of gradients; the result is a tuple of gradients, too."""
        self.attempts, self.place = _Attempts(tx), (kind, *call_site(tx))
        self.facts = self.attempts.seen.get(self.place) or tuple(group.expected() for group in groups)
        self.kept: list[bool] = []

        def body() -> VariableTracker:
            gradients = [
                TupleVariable([_input(tx, example) for example in group.examples(facts)])
                for group, facts in zip(groups, self.facts)
            ]
            results = [result.realize() for result in items_of(call(*gradients))]
            self.kept = [isinstance(result, TensorVariable) for result in results]
            if not all(kept or result.is_constant_none() for kept, result in zip(self.kept, results)):
                graph_break("hook-not-traced", f"{kind} returns {results}")
            return TupleVariable([result for kept, result in zip(self.kept, results) if kept])

        try:
            with tx.strict_translation_mode(lambda v: v.is_tensor()):
                _, graph, free = speculate_subgraph(tx, LambdaVariable(body), [], {}, "backward hook", **_NAMED)
        except UnknownPropertiesDuringBackwardTrace as error:
            graph_break("hook-strides", str(error))
        except Unsupported as error:
            graph_break("hook-not-traced", kind, f"{cause('hook-not-traced').why} {error.msg}")
        modules = tx.output.tracing_context.module_context.copy_graphstate().nn_modules
        name = tx.output.install_subgraph("hook", torch.fx.GraphModule(modules, graph))
        self.proxies = ((tracer or tx.output).create_proxy("get_attr", name, (), {}), *free)

    def bound(self, graph: torch.fx.GraphModule, *free: Any) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        """The function that is called with the gradients when the backward is traced: ``(*groups)``."""

        def run(*groups: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
            facts = tuple(tuple(map(_facts, group)) for group in groups)
            compilation = TracingContext.try_get()
            if facts != self.facts and compilation is not None:
                _others(compilation).append(lambda: self.attempts.trace_for(self.place, facts))
                return groups[0]
            results = iter(graph(*(grad for group in groups for grad in group if grad is not None), *free))
            return tuple(next(results) if kept else None for kept in self.kept)

        return run


def _input(tx: Translator, example: torch.Tensor | None) -> VariableTracker:
    """A new input of the graph that is being traced."""
    if example is None:
        return ConstantVariable.create(None)
    proxy = tx.output.current_tracer.create_graph_input("gradient", type(example), example)
    return wrap_fx_proxy_cls(TensorVariable, tx, proxy, example_value=example)


# ---- hooks of modules ----------------------------------------------------------------------------------------------


class TracedModuleHooks(BackwardHookVariable):
    """The hooks of one call of a module: ``BackwardHook(module, hooks, pre_hooks)``."""

    @staticmethod
    def make(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        """The tracker of ``BackwardHook(module, user_hooks, user_pre_hooks)``."""
        proxy = tx.output.create_proxy("call_function", _open, (), {})
        proxy.node.meta["example_value"] = _open()
        named = dict(zip(("module", "user_hooks", "user_pre_hooks"), args)) | kwargs
        return TracedModuleHooks(proxy, **{name: argument.realize() for name, argument in named.items()})

    def call_method(
        self, tx: Translator, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if name == "setup_input_hook":
            self.inputs = _Values(items_of(args[0]))
            return self.inputs.replaced(self._emit(tx, name, self.inputs))
        if name == "setup_output_hook":
            result = args[0].realize()
            if not isinstance(result, (TensorVariable, TupleVariable)):
                return result
            values = _Values([result] if isinstance(result, TensorVariable) else result.items)
            tensors = self._emit(tx, name, values, *self._trace(tx, values))
            return tensors[0] if isinstance(result, TensorVariable) else values.replaced(tensors)
        return super().call_method(tx, name, args, kwargs)

    def _emit(
        self,
        tx: Translator,
        method: str,
        values: _Values,
        prepare: Callable[..., None] | None = None,
        free: Sequence[Any] = (),
    ) -> list[VariableTracker]:
        """Adds a node that calls a method of the hooks with `values`, after ``prepare(hooks, free)``; returns its
        tensors."""
        where, count = tuple(values.where), len(values.items)

        def call(
            hooks: BackwardHook, tensors: tuple[torch.Tensor, ...], free: tuple[Any, ...]
        ) -> tuple[torch.Tensor, ...]:
            if prepare is not None:
                prepare(hooks, free)
            results = getattr(hooks, method)(_spread(tensors, where, count))
            return tuple(results[place] for place in where)

        arguments = (self.as_proxy(), tuple(tensor.as_proxy() for tensor in values.tensors), tuple(free))
        results = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", call, arguments, {}))
        return list(items_of(results))

    def _trace(self, tx: Translator, outputs: _Values) -> tuple[Callable[..., None], list[Any]]:
        """Traces the hooks into graphs; returns the function that installs them when the node runs, and its
        arguments."""
        bodies = {
            kind: _Body(tx, kind, functools.partial(self._call, tx, run, hooks), groups)
            for kind, run, hooks, groups in (
                ("user_hooks", _run_hooks, self.user_hooks, (self.inputs, outputs)),
                ("user_pre_hooks", _run_pre_hooks, self.user_pre_hooks, (outputs,)),
            )
            if items_of(hooks)
        }

        def prepare(hooks: BackwardHook, free: tuple[Any, ...]) -> None:
            for (kind, body), values in zip(bodies.items(), free):
                run = body.bound(*values)
                setattr(hooks, kind, [lambda module, *groups, run=run: run(*groups)])

        return prepare, [body.proxies for body in bodies.values()]

    def _call(
        self, tx: Translator, run: Callable[..., Any], hooks: VariableTracker, *groups: VariableTracker
    ) -> VariableTracker:
        return function_variable(run).call_function(tx, [self.module, hooks, *groups], {})


# ---- hooks of tensors ----------------------------------------------------------------------------------------------


def _register_on(tx: Translator, tensor: TensorVariable, hook: VariableTracker) -> VariableTracker:
    """Handles ``tensor.register_hook(hook)`` of a DTensor that the frame computes."""
    tracer = tensor.as_proxy().tracer

    def call(*gradients: VariableTracker) -> VariableTracker:
        return function_variable(_run_hook).call_function(tx, [hook, *gradients], {})

    body = _Body(tx, "register_hook", call, (_Values([tensor]),), tracer)

    def register(value: torch.Tensor, *free: Any) -> torch.Tensor:
        run = body.bound(*free)
        value.register_hook(lambda gradient: run((gradient,))[0])
        return value

    proxy = tracer.create_proxy("call_function", register, (tensor.as_proxy(), *body.proxies), {})
    proxy.node.meta["example_value"] = tensor.as_proxy().node.meta["example_value"]
    tensor.proxy = proxy
    tensor.synchronize_attributes(tx)
    return RemovableHandleVariable(mutation_type=ValueMutationNew())


_REGISTER = patch("torch._dynamo.variables.tensor:TensorVariable._method_register_hook", "self tx name hook")


@needs(
    "hooks of tensors in the graph",
    _REGISTER,
    without="such hooks are handled by torch",
    upstream="#172020, #172126",
    remove_when="Dynamo traces hooks of intermediate tensors with compiled autograd on, and for DTensors whose "
    "gradient has other placements",
)
@contextlib.contextmanager
def hooks_in_the_graph() -> Iterator[None]:
    """While active, hooks on tensors that frames for our backend compute are traced into the graph.

    torch does so unless compiled autograd is on; then it leaves the hook to that, although the joint graph contains it
    already. It also assumes that the gradient of a DTensor is placed as the tensor is.
    """

    def register(stock: Any, self: TensorVariable, tx: Translator, name: str, hook: VariableTracker) -> VariableTracker:
        if name == "register_hook" and not self.source and self.python_type() is DTensor:
            return _register_on(tx, self, hook)
        with compiled_autograd._disable():
            return stock(self, tx, name, hook)

    with patched(_REGISTER, register):
        yield
