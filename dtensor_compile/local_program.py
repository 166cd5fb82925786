"""``dtensor_compile.export``: the program of one rank as a ``torch.export.ExportedProgram``, without DTensors in it.

Input: a module with DTensor parameters, and example arguments. Output: a program over local tensors (parameters,
buffers, inputs and outputs), with functional collectives in place of redistributions. It computes what the module
computes because the module itself is traced: each operator on a DTensor is recorded as DTensor's own dispatch
decomposes it.

A backend cannot help ``torch.export.export`` itself, which does not call one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtensor_compile.compat import pytree
from dtensor_compile.compat.aot.export import dynamic_dims, local_and_spec, trace_to_local, wrap_local


def export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> torch.export.ExportedProgram:
    """Exports the program of this rank; every rank calls it.

    Args:
        model: a module whose parameters, buffers and inputs may be DTensors.
        args: example inputs. For a DTensor the program takes its local tensor.
        kwargs: the same, by name.
        dynamic_shapes: as for ``torch.export.export``; sizes are those of local tensors.
        strict: as for ``torch.export.export``.

    Returns:
        A program with the names of the model's parameters. DTensor outputs are local tensors in it. Once saved and
        loaded, it finds the process groups of its collectives by name: create the same meshes in the same order before
        it runs.
    """
    program = LocalProgram(model, tuple(args), dict(kwargs or {}), dynamic_shapes)
    return torch.export.export(program, *program.local_inputs, dynamic_shapes=dynamic_shapes, strict=strict)


class LocalProgram(nn.Module):
    """A module over local tensors that computes what a module over DTensors computes.

    Its parameters and buffers have the names that they have in the model.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> None:
        super().__init__()
        self._specs: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            self._register(name, nn.Parameter(self._local(name, parameter), requires_grad=parameter.requires_grad))
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            self._register(name, self._local(name, buffer), persistent=name in saved)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        pairs = [local_and_spec(leaf) if isinstance(leaf, DTensor) else (leaf, None) for leaf in leaves]
        self.local_inputs = pytree.tree_unflatten([local for local, _ in pairs], structure)
        self._trace(model, structure, [spec for _, spec in pairs], dynamic_shapes)
        function: Any = functools.partial(LocalProgram._run, self)
        function.__signature__ = inspect.signature(model.forward)  # torch.export names inputs by it
        self.forward = function

    def _local(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        local, self._specs[name] = local_and_spec(tensor)
        return local

    def _register(self, name: str, tensor: torch.Tensor, persistent: bool = True) -> None:
        *path, last = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor, persistent=persistent)

    def _trace(self, model: nn.Module, structure: Any, specs: list[Any], dynamic_shapes: Any) -> None:
        """Traces the graph, whose inputs are the state of this module and the leaves of the arguments."""
        state, (args, kwargs) = self._state(), self.local_inputs

        def run(*values: Any) -> list[Any]:
            tensors = [wrap_local(t, self._specs[name]) if name in self._specs else t for name, t in zip(state, values)]
            inputs = [t if spec is None else wrap_local(t, spec) for t, spec in zip(values[len(state) :], specs)]
            call_args, call_kwargs = pytree.tree_unflatten(inputs, structure)
            out = torch.func.functional_call(model, dict(zip(state, tensors)), call_args, call_kwargs, tie_weights=True)
            local = pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), out)
            leaves, self._out_structure = pytree.tree_flatten(local)
            return leaves

        dims: list[frozenset[int]] = [frozenset()] * len(state) + dynamic_dims(
            model.forward, args, kwargs, dynamic_shapes
        )
        graph_module = trace_to_local(run, [*state.values(), *pytree.tree_leaves((args, kwargs))], dims)
        self._graph = [graph_module]  # in a list, so that it is not a submodule of this module

    def _state(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._graph[0](*self._state().values(), *pytree.tree_leaves((args, kwargs)))
        return pytree.tree_unflatten(leaves, self._out_structure)
