"""Placements of the parameters and inputs of a model, chosen for a whole training step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from dtensor_compile.capture.sharding_rules import rules_anywhere
from dtensor_compile.compat import pytree
from dtensor_compile.compat.dtensor.module_state import replace_tensors
from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements
from dtensor_compile.compat.dtensor.rules.sharding_decisions import fallback_reports
from dtensor_compile.compat.dtensor.specs import MaskPartial
from dtensor_compile.compat.dtensor.step_record import FORWARD, RecordedStep, record_step
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.global_plan.candidates import pieces_of_dims
from dtensor_compile.global_plan.choose_placements import Choice, best_of, choose_placements
from dtensor_compile.global_plan.connect_calls import connected_variables
from dtensor_compile.global_plan.equal_calls import pattern
from dtensor_compile.global_plan.known_plans import Alternative, known_plans
from dtensor_compile.global_plan.step_variables import CostSettings, StepVariables
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.topology.devices import default_cluster
from dtensor_compile.topology.files import topology as read_topology
from dtensor_compile.topology.links import Cluster
from dtensor_compile.topology.network import plans_for

#: Gap from which a plan is compared with known ones.
_CLOSE = 0.01


@dataclass(frozen=True)
class PlacementPlan:
    """Placements for a step.

    Attributes:
        mesh: of the placements.
        parameters, buffers: placements of each, by name.
        inputs: placements of each tensor among the arguments, in the order of their leaves.
        choice: estimates of time, memory and bytes, and the bound.
        budget: bytes that a rank may hold; None for no limit.
        step: the step as recorded.
        variables: its variables, with all choices that there were.
        without_rule: operators for which DTensor has no rule: they run on replicated tensors.
        modules: name of the class of each module, by path; ``"Linear"`` and ``"Embedding"`` also of their subclasses.
    """

    mesh: DeviceMesh
    parameters: Mapping[str, Placements]
    buffers: Mapping[str, Placements]
    inputs: Sequence[Placements]
    choice: Choice
    budget: float | None
    step: RecordedStep = field(repr=False)
    variables: StepVariables = field(repr=False)
    without_rule: frozenset[str] = frozenset()
    modules: Mapping[str, str] = field(default_factory=dict, repr=False)

    def with_choice(self, choice: Choice) -> PlacementPlan:
        """The plan with another choice for the same variables."""
        step, variables = self.step, self.variables
        return replace(
            self,
            parameters={name: variables.placements_of(choice.choice, n) for name, n in step.parameters.items()},
            buffers={name: variables.placements_of(choice.choice, n) for name, n in step.buffers.items()},
            inputs=[variables.placements_of(choice.choice, n) for n in step.inputs],
            choice=choice,
        )

    @functools.cached_property
    def known(self) -> Sequence[Alternative]:
        """The best plans of the kinds that people write; each takes a search."""
        return known_plans(self.variables, self.mesh.mesh_dim_names or (), self.budget)

    @property
    def results(self) -> dict[str, Placements]:
        """Placements in which the first result of each module is made, by pattern of paths (``blocks.*.mlp``)."""
        made = self.step.makers()
        found: dict[str, Placements] = {}
        for path, numbers in self.step.results.items():
            if numbers and numbers[0] in made:
                call, place = made[numbers[0]]
                strategy = self.variables.strategy(self.choice.choice, call)
                found.setdefault(pattern(path), strategy.outputs[place])
        return found

    @functools.cached_property
    def arguments(self) -> dict[str, tuple[Placements | None, ...]]:
        """Placements in which the modules of the model read the tensors that they are given, by path, in the order of
        the leaves; None where they do not themselves, or where a redistribution cannot make them."""
        wanted: dict[tuple[str, int], Placements] = {}
        for number, call in enumerate(self.step.calls):
            if call.phase == FORWARD:
                strategy = self.variables.strategy(self.choice.choice, number)
                for place, tensor in enumerate(call.inputs):
                    if (number, place) not in self.variables.stays and _can_be_made(strategy.inputs[place]):
                        wanted.setdefault((call.module, tensor), strategy.inputs[place])
        found = {path: tuple(wanted.get((path, x)) for x in given) for path, given in self.step.arguments.items()}
        return {path: placements for path, placements in found.items() if path and any(placements)}

    @functools.cached_property
    def lookups(self) -> dict[str, Placements]:
        """By path of a module that looks up rows of a table: placements in which its result is read first, replicated
        where a redistribution cannot make them. torch's views of a sum that waits for the mask of a lookup keep the
        mask of the whole, and fail where they are reduced."""
        made = {call.outputs[0]: call.module for call in self.step.calls if call.name == "aten.embedding"}
        found: dict[str, Placements] = {}
        for number, call in enumerate(self.step.calls):
            strategy = self.variables.strategy(self.choice.choice, number)
            for tensor, wanted in zip(call.inputs, strategy.inputs):
                if path := made.get(tensor):
                    sums = tuple(p if _can_be_made((p,)) else Replicate() for p in wanted)
                    found.setdefault(path, sums)
        return found

    def apply(self, model: nn.Module) -> nn.Module:
        """Makes the parameters and buffers of `model` DTensors with these placements, in place; returns the model.

        Modules redistribute what they are given to the placements in which they read it, by forward pre-hooks, and a
        lookup in a sharded vocabulary is summed where it is made: in eager too, operators then begin as planned. Every
        rank must hold the same full tensors. Nothing is sent. Tied parameters stay tied.

        Raises:
            PlacementError: the model has no parameter or buffer of a name that the plan has, or one of other sizes.
        """
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        made: dict[int, torch.Tensor] = {}
        for name, placements in {**self.parameters, **self.buffers}.items():
            tensor = state.get(name)
            if tensor is None:
                raise PlacementError(f"the plan has placements for {name}, which the model has not")
            planned = self.step.tensors[{**self.step.parameters, **self.step.buffers}[name]].shape
            if tensor.shape != planned:
                raise PlacementError(f"{name} has sizes {tuple(tensor.shape)}, and was planned with {tuple(planned)}")
            if not isinstance(tensor, DTensor):
                placed = distribute_tensor(tensor.detach(), self.mesh, placements, src_data_rank=None)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(placed, tensor.requires_grad) if is_parameter else placed
        replace_tensors(model, made)
        for path, placements in self.lookups.items():
            model.get_submodule(path).register_forward_hook(_sums_masked(placements))
        for path, wanted in self.arguments.items():
            model.get_submodule(path).register_forward_pre_hook(_redistributes(wanted), with_kwargs=True)
        return model

    def distribute_inputs(self, args: Any) -> Any:
        """The arguments with their tensors as DTensors in these placements; every rank must hold the same ones."""
        leaves, structure = pytree.tree_flatten(args)
        placements = iter(self.inputs)
        placed = [
            distribute_tensor(leaf, self.mesh, next(placements), src_data_rank=None)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(placed, structure)


def _sums_masked(wanted: Placements) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that sums what a lookup in a sharded vocabulary made, to these placements."""

    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, DTensor) and any(isinstance(p, MaskPartial) for p in result.placements):
            return _moved(result, wanted)
        return result

    return hook


def _moved(tensor: DTensor, wanted: Placements) -> DTensor:
    """The tensor in these placements.

    One that was partial is redistributed twice, where the second sends nothing forward and brings the gradient to these
    placements first: torch cannot give a partial gradient to the sum under a mask that a lookup makes.
    """
    moved = tensor.redistribute(placements=wanted)
    partial = any(isinstance(placement, Partial) for placement in tensor.placements)
    return moved.redistribute(placements=wanted) if partial else moved


def _can_be_made(placements: Placements) -> bool:
    return all(isinstance(p, Replicate) or type(p) is Shard for p in placements)


def _redistributes(placements: tuple[Placements | None, ...]) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward pre-hook that gives a module its tensors in these placements."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        ways = iter(placements)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            wanted = next(ways, None)
            if wanted is None or not isinstance(tensor, DTensor) or tensor.placements == wanted:
                return tensor
            return _moved(tensor, wanted)

        return pytree.tree_map_only(torch.Tensor, moved, (args, kwargs))

    return hook


def place(
    model: nn.Module,
    mesh: DeviceMesh,
    inputs: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    memory: float | None = None,
    topology: str | os.PathLike[str] | Cluster | None = None,
    states: float = 3.0,
    fixed: Mapping[str, Sequence[Placement]] | None = None,
) -> PlacementPlan:
    """Chooses placements of parameters and inputs for a training step, with the least estimated time.

    The step is traced on fake tensors of global shape. For every operator, all strategies of DTensor's rules on every
    mesh dim are weighed: their compute on shards, the redistributions between them as the planner plans them over the
    links, and the memory that parameters, gradients, optimizer states and saved activations take. Calls of equal blocks
    have equal placements. All ranks choose the same.

    Args:
        model: on any device (``meta`` takes no memory). Parameters that are DTensors stay as they are.
        mesh: with named dims. Its process group may be a simulated one (`dtensor_compile.offline.job`).
        inputs: a tensor, a tuple of arguments, or a dict of them. DTensors stay as they are.
        loss: of the model's result, from which the backward pass starts; the sum of its floating-point tensors if None.
        memory: bytes that a rank may hold.
        topology: name or file of a cluster, as the option of the backend; if None, the one that the backend assumes.
        states: bytes of gradient and optimizer states for each byte of a trained parameter: 3 for Adam.
        fixed: placements by name of a parameter or buffer, or by number of an input (``"0"``), that stay.

    Returns:
        The plan. ``plan.choice.fits`` is False if no plan within `memory` was found; it is the one with the least
        memory then.

    Raises:
        MeshError: the mesh has no names.
        PlacementError: a fixed placement names nothing, or contradicts a DTensor.
    """
    if mesh.mesh_dim_names is None:
        raise MeshError("place() needs a mesh with names: init_device_mesh(..., mesh_dim_names=(...))")
    args, kwargs = _call(inputs)
    kept = _fixed(model, mesh, (args, kwargs), fixed or {})
    on = torch.device(mesh.device_type) if mesh.device_type != "cuda" else None
    step = record_step(model, args, kwargs, loss or sum_of_results, on)
    plan = plan_step(step, mesh, _cluster(topology, mesh), states=states, fixed=kept, memory=memory)
    return replace(plan, modules={path: _kind(module) for path, module in model.named_modules()})


def _kind(module: nn.Module) -> str:
    known = next((base for base in (nn.Linear, nn.Embedding) if isinstance(module, base)), type(module))
    return known.__name__


def plan_step(
    step: RecordedStep,
    mesh: DeviceMesh,
    cluster: Cluster,
    *,
    states: float = 3.0,
    overlaps: bool = True,
    fixed: Mapping[str, Placements],
    memory: float | None = None,
) -> PlacementPlan:
    """The plan of a recorded step; arguments are as those of `place`.

    Args:
        overlaps: whether redistributions of parameters and gradients run beside compute, as with this backend.
    """
    variables, without_rule = build_variables(step, mesh, cluster, states=states, fixed=fixed)
    choice = choose_placements(variables.model, memory, overlaps)
    if overlaps and choice.gap > _CLOSE:  # the search is over weighted sums, and may miss a plan between two of them
        known = known_plans(variables, mesh.mesh_dim_names or (), memory)
        better = best_of([choice, *(this.choice for this in known if this.choice is not None)])
        choice = replace(better, bound=min(choice.bound, better.seconds))

    return PlacementPlan(mesh, {}, {}, [], choice, memory, step, variables, without_rule).with_choice(choice)


def build_variables(
    step: RecordedStep,
    mesh: DeviceMesh,
    cluster: Cluster,
    *,
    states: float = 3.0,
    fixed: Mapping[str, Placements] | None = None,
) -> tuple[StepVariables, frozenset[str]]:
    """The variables of a recorded step with all costs, and the operators for which DTensor has no rule."""
    without_rule: set[str] = set()
    with rules_anywhere(), plans_for(cluster), fallback_reports(without_rule.add):
        variables = connected_variables(step, mesh, CostSettings(cluster.device, states, fixed or {}))
    return variables, frozenset(without_rule | variables.candidates.without_rule)


def sum_of_results(result: Any) -> torch.Tensor:
    """The sum of the floating-point tensors of a result."""
    found = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not found:
        raise PlacementError("no result of the model requires a gradient: give place() a loss")
    return torch.stack([x.float().sum() for x in found]).sum() if len(found) > 1 else found[0].sum()


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _cluster(topology: str | os.PathLike[str] | Cluster | None, mesh: DeviceMesh) -> Cluster:
    if isinstance(topology, Cluster):
        return topology
    return default_cluster(mesh.device_type) if topology is None else read_topology(topology)


def _fixed(
    model: nn.Module, mesh: DeviceMesh, arguments: Any, asked: Mapping[str, Sequence[Placement]]
) -> dict[str, Placements]:
    """Placements that stay: those asked for, and those of DTensors."""
    inputs = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors.update({str(i): x for i, x in enumerate(inputs)})
    unknown = sorted(asked.keys() - tensors.keys())
    if unknown:
        raise PlacementError(f"fixed placements for {unknown[0]!r}, which is no parameter, buffer or input")
    kept: dict[str, Placements] = {}
    for name, tensor in tensors.items():
        placements = tuple(asked[name]) if name in asked else None
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != mesh:
                raise PlacementError(f"{name} is a DTensor over another mesh than the one to plan for")
            if placements is not None and placements != tensor.placements:
                raise PlacementError(
                    f"{name} is fixed to {spec_text(placements)}, and is a DTensor with {spec_text(tensor.placements)}"
                )
            placements = tuple(tensor.placements)
        if placements is not None:
            kept[name] = _checked(name, tensor, placements, mesh)
    return kept


def _checked(name: str, tensor: torch.Tensor, placements: Placements, mesh: DeviceMesh) -> Placements:
    if len(placements) != mesh.ndim:
        raise PlacementError(f"{name} is fixed to {spec_text(placements)}, and the mesh has {mesh.ndim} dims")
    pieces = pieces_of_dims(tensor.ndim, placements, tuple(mesh.shape))
    for dim, (size, n) in enumerate(zip(tensor.shape, pieces)):
        if size % n:
            raise PlacementError(
                f"{name} is fixed to {spec_text(placements)}, which cuts dim {dim} of {size} into {n}: plans are for "
                "even shards"
            )
    return placements


__all__ = ["PlacementPlan", "place", "sum_of_results"]
