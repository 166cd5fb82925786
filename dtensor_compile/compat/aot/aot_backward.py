"""The backward that AOTAutograd traces and builds: errors during its trace, and unexpected tangents."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_capture_wrappers
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtensor_compile.compat.aot.autograd_functions import BUILD, IS_GENERATED, functions_built
from dtensor_compile.compat.aot.tangents import (
    TANGENTS,
    Tangents,
    assumed_tangents,
    current_call,
    gradients_in_eager,
    results_with_tangents,
)
from dtensor_compile.compat.apply_patches import is_called_from, patched
from dtensor_compile.compat.dtensor.specs import Spec
from dtensor_compile.compat.patches import hook, if_there, needs, patch

#: Gradients instead of an error: ``(error, inputs, tangents)``; None to raise the error.
StandIn = Callable[[Exception, Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor] | None]

#: Whether AOTAutograd saves what an input held before it was written to, where the backward reads it, as of 2.15.
#: Before, the backward would read the values after: an error for plain tensors, which know their versions, but not for
#: those in a DTensor.
SAVES_VALUES_BEFORE_WRITES = (
    if_there("torch._functorch._aot_autograd.subclass_utils:compute_inner_input_info_from_subclass_meta") is not None
)


_GRAD = patch("torch.autograd:grad", "outputs inputs grad_outputs ...")


@needs(
    "errors of a gradient formula in the backward pass, as in eager",
    _GRAD,
    hook("torch._functorch._aot_autograd:graph_capture_wrappers"),
    without="they are errors of the compilation",
    upstream="#104943",
    remove_when="AOTAutograd traces the backward lazily, or gives a backend the error of the joint trace",
)
@contextlib.contextmanager
def traced_backward_hook(stand_in: StandIn) -> Iterator[None]:
    """While active, an error of the backward that AOTAutograd traces on this thread goes to `stand_in`.

    AOTAutograd traces a backward by one call to ``torch.autograd.grad``, from its module ``graph_capture_wrappers``;
    all other calls, including the program's own, go to torch.
    """

    def grad(stock: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not is_called_from(graph_capture_wrappers) or not grad_outputs:
            return stock(outputs, inputs, grad_outputs, *args, **kwargs)
        try:
            return stock(outputs, inputs, grad_outputs, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a gradient formula raises
            gradients = stand_in(error, inputs, grad_outputs)
            if gradients is None:
                raise
            return tuple(gradients)

    with patched(_GRAD, grad):
        yield


@needs(
    "gradients of unused results, and gradients with unexpected placements",
    *BUILD,
    *TANGENTS,
    without="torch raises an error in the backward pass",
    upstream="#173123, #118600",
    remove_when="AOTAutograd takes a plain zero gradient of a DTensor, and gradients with unexpected placements",
)
@contextlib.contextmanager
def dtensor_tangents(program: Callable[..., Any], tangents: Tangents) -> Iterator[None]:
    """While active, backward passes that AOTAutograd builds on this thread take the gradients that DTensor outputs get.

    Stock refuses two kinds: the gradient of an output that the loss does not use (autograd makes plain zeros, without
    mesh and placements), and that of an output with an unbacked size (it compares that size with the gradient's).
    Gradients with other placements than expected are handled as described in `compat.aot.tangents`. The changes apply
    to the compiled code; torch's own functions are unchanged.

    Args:
        program: the traced program.
        tangents: the expected placements; records those that arrive.
    """

    def take(compiled: type[torch.autograd.Function], metadata: Any) -> None:
        if any(map(_of_dtensor, metadata.subclass_tangent_meta)):
            tangents.results = results_with_tangents(metadata)
            _accept_any_tangents(compiled, program, tangents)

    with functions_built(after=take), assumed_tangents(tangents), _tangents_of_inputs():
        yield
    if tangents.results and tangents.assumed is None:
        tangents.guard()


def _tangents_of_inputs() -> contextlib.AbstractContextManager[None]:
    """Traces the backward for the gradient that a DTensor input gets after the program has written to it.

    torch takes plain zeros for it, as if nothing read the input after the call: rules of operators refuse these beside
    DTensors, and the gradient that arrives is refused, too.
    """
    if not SAVES_VALUES_BEFORE_WRITES:
        return contextlib.nullcontext()
    return functorch_config.patch(disable_guess_zero_tangent_for_mutated_input_subclass=True)


def _of_dtensor(meta: Any) -> bool:
    if not isinstance(meta, SubclassCreationMeta):
        return False
    return issubclass(meta.original_subclass_type or type(meta.original_subclass), DTensor)


def _accept_any_tangents(compiled: Any, program: Callable[..., Any], tangents: Tangents) -> None:
    """Patches a compiled ``torch.autograd.Function``; see `dtensor_tangents`."""
    stock_forward, stock_backward = compiled.forward, compiled.backward

    def forward(ctx: Any, *args: Any) -> Any:
        outputs = stock_forward(ctx, *args)
        ctx.output_specs = [
            (out._spec, out._local_tensor.shape) if isinstance(out, DTensor) else None for out in outputs
        ]
        ctx.call = current_call(tangents, args)
        return outputs

    def backward(ctx: Any, *gradients: Any) -> Any:
        boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        values = gradients[0] if boxed else list(gradients)
        specs = ctx.output_specs
        given = [
            None if spec is not None and type(value) is torch.Tensor else value for value, spec in zip(values, specs)
        ]
        placements = [spec and spec[0].placements for spec in specs]
        if tangents.are_unexpected(given, placements):
            in_eager = (
                None
                if ctx.call is None or tangents.places is None
                else gradients_in_eager(program, ctx.call, tangents.places, given, tangents.sends)
            )
            tangents.report_mismatch(given, placements, in_eager is not None)
            if in_eager is not None:
                return in_eager
        for i, (value, spec) in enumerate(zip(values, specs)):
            if spec is not None and type(value) is torch.Tensor:
                values[i] = _zeros(value, *spec)
        return stock_backward(ctx, values) if boxed else stock_backward(ctx, *values)

    compiled.forward, compiled.backward = staticmethod(forward), staticmethod(backward)
    prologue = vars(compiled).get("_bw_prologue_fn")
    if prologue is not None:
        names = prologue.__globals__
        names["_process_tangent_"] = functools.partial(_process_tangent, names["_process_tangent_"])
    elif not IS_GENERATED:
        tangents_of = compiled.metadata.subclass_tangent_meta
        tangents_of[:] = [_of_any_size(meta) if _of_dtensor(meta) else meta for meta in tangents_of]


def _zeros(zeros: torch.Tensor, spec: Any, local_shape: torch.Size) -> DTensor:
    """A zero gradient for an output with that spec; replicated where the output is partial."""
    placements = [Replicate() if isinstance(p, Partial) else p for p in spec.placements]
    return DTensor.from_local(
        zeros.new_zeros(local_shape), spec.mesh, placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


class _SpecOfAnySize(Spec):
    """A spec that equals others of any size: torch 2.11 also compares the sizes, which are always those of the
    output."""

    __hash__ = Spec.__hash__

    def __eq__(self, other: object) -> bool:
        return self._check_equals(other, skip_shapes=True)


def _of_any_size(meta: SubclassCreationMeta) -> SubclassCreationMeta:
    spec, *rest = meta.meta
    meta, spec = copy.copy(meta), copy.copy(spec)
    spec.__class__ = _SpecOfAnySize
    meta.meta = (spec, *rest)
    return meta


def _process_tangent(stock: Callable[..., Any], tangent: Any, meta: Any, *args: Any) -> Any:
    """Calls torch's function with the sizes of the tangent, which it compares with those it traced."""
    if _of_dtensor(meta) and isinstance(tangent, DTensor):
        placements, _, *rest = meta.meta
        meta = copy.copy(meta)
        meta.meta = (placements, tangent._spec.tensor_meta, *rest)
    return stock(tangent, meta, *args)
