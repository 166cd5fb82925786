"""Trackers of random generators, while tracing for our backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.distributed.tensor._ops import _math_ops
from torch.nn import init

from dtensor_compile.compat.dynamo.trackers.after_graph import call_after_graph, is_export
from dtensor_compile.compat.dynamo.trackers.module_calls import happens_once
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import CALL_METHOD, MethodCall, calls_of_methods
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, graph_break, read_attribute, source_of
from dtensor_compile.compat.patches import needs

#: The function behind ``nn.init.trunc_normal_``: ``(tensor, mean, std, a, b, generator)``.
trunc_normal_function: Callable[..., torch.Tensor] = init._no_grad_trunc_normal_

#: Whether eager's ``trunc_normal_`` of shards redraws on every rank until all ranks are done. Since 2.14 DTensor
#: gathers a tensor before ``any``; up to 2.13 each rank evaluates it on its own shard.
DRAWS_TOGETHER = hasattr(_math_ops, "NON_LINEAR_BOOL_REDUCTION_OPS")


def generator_of_state(state: torch.Tensor) -> torch.Generator:
    """A new generator with that state."""
    generator = torch.Generator()
    generator.set_state(state)
    return generator


class GeneratorVariable(UserDefinedObjectVariable):
    """A generator whose state is a tensor of the graph; a generator from outside gets its new state when the graph has
    run.

    Attributes:
        state: None until it is read.
    """

    value: torch.Generator

    def __init__(self, value: torch.Generator, state: VariableTracker | None = None, **options: Any) -> None:
        super().__init__(value, **options)
        self.state = state
        self.leaving: list[VariableTracker] | None = None

    @classmethod
    def track(cls, builder: VariableBuilder, value: torch.Generator) -> VariableTracker:
        """The tracker of a generator that is an input."""
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return builder.tx.output.side_effects.track_object_existing(value, cls(value, source=builder.source))

    def is_default(self) -> bool:
        """Whether it is torch's default generator."""
        return self.value is torch.default_generator

    def read(self, tx: Translator) -> VariableTracker:
        """The state at this point of the program."""
        if tx.output.current_tracer.parent is not None:
            graph_break("generator-inner", str(self.source))
        if self.state is None:
            source = CallFunctionNoArgsSource(AttrSource(source_of(self), "get_state"))
            self.state = VariableBuilder(tx, source)(self.value.get_state())
        return self.state

    def write(self, tx: Translator, state: VariableTracker) -> None:
        """Sets the state from this point of the program on."""
        if tx.output.current_tracer.parent is not None:
            graph_break("generator-inner", str(self.source))
        happens_once(tx, "it draws from a generator of its own")
        self.state = state
        if self.source is None or is_export(tx):
            return
        if self.leaving is None:
            self.leaving = call_after_graph(tx, torch.Generator.set_state, [self, state])
        self.leaving[1] = state

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        if name in _methods:
            return LambdaVariable(lambda *args, **kwargs: self.call_method(tx, name, list(args), kwargs))
        return read_attribute(super(), tx, name)

    tp_getattro_impl = var_getattr  # since 2.14

    def call_method(
        self, tx: Translator, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if name in _methods:
            return _methods[name](tx, self, args, kwargs)
        return super().call_method(tx, name, args, kwargs)

    def reconstruct(self, codegen: Any) -> None:
        if self.source is not None:
            return super().reconstruct(codegen)
        codegen.add_push_null(lambda: codegen.load_import_from(__name__, "generator_of_state"))
        codegen(self.state)
        codegen.extend_output(create_call_function(1, False))


#: ``(tx, generator, args, kwargs)``
Method = Callable[[Translator, GeneratorVariable, list[VariableTracker], dict[str, VariableTracker]], VariableTracker]
_methods: dict[str, Method] = {}


def handle_generator_methods(methods: Mapping[str, Method]) -> None:
    """Registers handlers of methods of generators."""
    _methods.update(methods)


@needs(
    "random numbers from an explicit generator",
    CALL_METHOD,
    without="they break the graph",
    upstream="#88576",
    remove_when="Dynamo traces methods that draw from a generator",
)
@contextlib.contextmanager
def handle_draws(call: MethodCall) -> Iterator[None]:
    """While active, tensor methods that are called with a generator go to `call`; None leaves the call to torch."""

    def of_generator(
        tx: Translator, tensor: TensorVariable, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> VariableTracker | None:
        return call(tx, tensor, name, args, kwargs) if "generator" in kwargs else None

    with calls_of_methods(CALL_METHOD, of_generator):
        yield
