"""State of ``DistributedDataParallel`` and of ``replicate``, which is built on it; nothing here depends on Dynamo."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import _ReplicateState
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

ReplicateState = _ReplicateState
PRE_FORWARD, RUN_FORWARD, POST_FORWARD = DDP._pre_forward, DDP._run_ddp_forward, DDP._post_forward
REPLICATE_PRE_FORWARD, REPLICATE_POST_FORWARD = _ReplicateState.forward_pre_hook, _ReplicateState.forward_post_hook

#: Files of the wrappers; only the forward of a module is worth a graph.
_FILES = frozenset(thing.__init__.__code__.co_filename for thing in (DDP, _ReplicateState, Join))


def belongs_to_python(code: types.CodeType) -> bool:
    """Whether `code` belongs to the code of a wrapper around the forward of a module, and is therefore left to
    Python."""
    return code.co_filename in _FILES and code is not DDP.forward.__code__


#: Reasons to keep a module out of a graph: a test, and its text.
_OBSTACLES: tuple[tuple[Callable[[DDP], bool], str], ...] = (
    (lambda m: m.mixed_precision is not None, "mixed_precision"),
    (lambda m: m._join_config.enable, "the join context"),
    (lambda m: hasattr(m, "buffer_hook"), "a communication hook for buffers"),
    (lambda m: bool(m._delay_all_reduce_params), "delay_all_reduce_named_params"),
    (
        lambda m: any(hasattr(p, "_in_backward_optimizers") for p in m._module_parameters),
        "optimizers in the backward pass",
    ),
    (lambda m: m.find_unused_parameters and not m.static_graph, "find_unused_parameters"),
)


def facts(module: DDP) -> tuple[Any, ...]:
    """Everything that determines how the module behaves, besides its parameters and the attributes that the program
    sees."""
    return (
        tuple(test(module) for test, _ in _OBSTACLES),
        group_name(module),
        bucket_limits(module),
        len(module._module_parameters),
        module.broadcast_buffers,
    )


def replicate_facts(state: _ReplicateState) -> tuple[Any, ...]:
    """`facts` for `replicate`, and whether gradients are synchronized."""
    return (state._no_sync, facts(state._ddp)) if state.has_initialized else ()


def obstacle(module: DDP) -> str | None:
    """The reason why the forward has to run in eager; None if it can be traced."""
    return next((text for test, text in _OBSTACLES if test(module)), None)


def passes_through(module: DDP) -> bool:
    """Whether torch reduces gradients by parameter hooks that Dynamo sees (``optimize_ddp="python_reducer"``)."""
    return module._use_python_reducer


def prepare(module: DDP) -> None:
    """Runs the lazy initialization that eager runs before the first forward."""
    if not module._lazy_init_ran:
        module._lazy_init()


def prepare_replicate(state: _ReplicateState) -> DDP:
    """Runs the lazy initialization of `replicate`: makes the DDP module, for which all ranks verify their
    parameters."""
    if state._init_args or state._init_kwargs:
        state.lazy_init()
    prepare(state._ddp)
    return state._ddp


def wants_gradients_averaged(state: _ReplicateState) -> bool:
    """Whether gradients are averaged, as set by ``set_requires_gradient_sync``."""
    return not state._no_sync


def parameters(module: DDP) -> list[torch.nn.Parameter]:
    """The parameters whose gradients are averaged."""
    return [p for p in module._module_parameters if p.requires_grad]


def buffers(module: DDP) -> list[str]:
    """Names, within the wrapped module, of the buffers that the first rank broadcasts."""
    module._assign_modules_buffers()
    return list(module.named_module_buffers) if module.broadcast_buffers else []


def bucket_limits(module: DDP) -> tuple[int, ...]:
    """Capacities of gradient buckets in bytes: of the first, and of those after it.

    As in torch's reducer from the second step on; the first is small by default, so that communication starts early.
    """
    own = getattr(module, "bucket_bytes_cap_list", None)  # since 2.13
    if own:
        return tuple(own)
    whole = int(module.bucket_bytes_cap)
    return (dist._DEFAULT_FIRST_BUCKET_BYTES, whole) if module.bucket_bytes_cap_default else (whole,)


def group(module: DDP) -> torch.distributed.ProcessGroup:
    """The process group of the ranks that share the parameters."""
    return module.process_group


def group_name(module: DDP) -> str:
    """The name of that group."""
    return module.process_group.group_name


def device_of_inputs(module: DDP) -> torch.device | None:
    """The device to which inputs are moved; None if they stay."""
    return torch.device(module.device_type, module.device_ids[0]) if module.device_ids else None


# ---- gradients that torch's reducer averages -----------------------------------------------------------------------

#: Modules whose gradients compiled code leaves unreduced, so that they may wait to be averaged.
_left: weakref.WeakSet[DDP] = weakref.WeakSet()


def leave_gradients(module: DDP) -> None:
    """Records that compiled code exists which leaves the gradients of the module unreduced (``no_sync``)."""
    _left.add(module)


def gradients_wait(module: DDP) -> bool:
    """Whether gradients of earlier backward passes may wait to be averaged together with the next."""
    if module in _left or not module.require_forward_param_sync:
        return any(p.grad is not None for p in module._module_parameters)
    return False


def _has_hooks(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def needs_reducer(module: DDP) -> bool:
    """Whether averaging is more than the mean of one gradient: earlier gradients wait, or hooks see unreduced ones."""
    return bool(module._comm_hooks) or any(map(_has_hooks, module._module_parameters)) or gradients_wait(module)


def arm_reducer(module: Callable[[], DDP | None]) -> None:
    """Prepares the reducer, as eager does around a forward, to average gradients when autograd accumulates them.

    Args:
        module: a weak reference.
    """
    ddp = module()
    if ddp is None:
        return
    assert ddp.logger is not None  # set by its constructor
    ddp.logger.set_runtime_stats_and_log()
    ddp.reducer.prepare_for_forward()
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    ddp.reducer.prepare_for_backward([])


def paths_of(module: torch.nn.Module, wanted: set[torch.nn.Parameter]) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yields submodule path, name and parameter for every place in `module` of one of the `wanted` parameters."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter in wanted:
                yield path, name, parameter
