"""Emulates a GPU for torch: fake tensors on ``cuda``, and Inductor's code for them. Undone at the end.

While `emulated` is active:

- `CudaTensorsAreFake` is the fake tensor mode: tensors on ``cuda`` are fake, all others are real.
- ``torch.cuda`` and Dynamo's device interface report the properties of the GPU.
- A module that is moved or cast keeps its parameter objects, as with tensors on a device.
- A torch without a GPU, whether built for CUDA or not, gets a nominal device (`offline/native_code`): its autograd
  would otherwise abort the process, or query the driver.
- Inductor loads kernels and generated code through `Hooks`; its caches are off, and its cached device queries are
  cleared.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.resources
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in torch's stubs
from torch._dynamo.eval_frame import TorchPatcher
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _pytree as pytree

from dtensor_compile.compat.apply_patches import patched, patched_value, patched_values
from dtensor_compile.compat.emulation.cuda_answers import (
    CUDA_ROWS,
    cuda_answers,
    device_interfaces,
    do_nothing,
)
from dtensor_compile.compat.emulation.emulated_inductor import (
    INDUCTOR_ROWS,
    Hooks,
    forget_devices,
    generated_code,
    inductor_settings,
    make_tables,
    triton_environment,
)
from dtensor_compile.compat.patches import feature, hook, patch
from dtensor_compile.errors import OfflineError
from dtensor_compile.native.loader import built_library

if TYPE_CHECKING:
    from dtensor_compile.topology.gpus import Gpu

#: Held while a device is emulated.
_ONE = threading.Lock()
_GUARD_SET = patch("torch._C:_ensureCUDADeviceGuardSet")
_TRACKER = patch("torch.distributed.tensor._random:_rng_tracker")
_DDP = patch("torch.nn.parallel:DistributedDataParallel.__init__", "self module ...")
#: ``_init_group`` of each optimizer class, its own or not: from a process's first compilation on it is its own.
_GROUPS = tuple(
    patch(f"torch.optim:{name}._init_group")
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and hasattr(cls, "_init_group")
)
_FOREACH = (
    patch("torch.optim.optimizer:_foreach_supported_types"),
    patch("torch.utils._foreach_utils:_foreach_supported_types"),
)
_RESIZE = patch("torch:UntypedStorage.resize_")
_RUNTIME_STATS = patch("torch._C._distributed_c10d:Logger.set_runtime_stats_and_log")
_VERIFY = patch("torch.distributed:_verify_params_across_processes")
_APPLY = patch("torch.nn:Module._apply", "self fn recurse")
_META = patch(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached", "self op_schema"
)
_GPU = feature(
    "an emulated GPU",
    *CUDA_ROWS,
    *INDUCTOR_ROWS,
    _GUARD_SET,
    _TRACKER,
    _DDP,
    *_GROUPS,
    *_FOREACH,
    _RESIZE,
    _RUNTIME_STATS,
    _VERIFY,
    _APPLY,
    _META,
    hook("torch._dynamo.device_interface:CudaInterface.Worker"),
    hook("torch._dynamo.eval_frame:TorchPatcher.patch"),
    hook("torch._higher_order_ops.utils:registered_hop_fake_fns"),
    hook("torch._inductor.select_algorithm:ExternKernelCaller"),
    hook("torch._C:_swap_tensor_impl"),
    hook("torch._C._distributed_c10d:_create_work_from_future"),
    without="programs are analyzed on a CPU",
    essential=True,
    upstream="#171425, #148977, #184976",
    remove_when="torch can trace and compile for an emulated GPU",
)


class CudaTensorsAreFake(FakeTensorMode):
    """Makes tensors on ``cuda`` fake; computes operators that involve none of them.

    Args:
        hooks: told of operators that involve one, of operators over DTensors, and of those whose values are read.
    """

    supports_higher_order_operators = True  # their rules are registered for FakeTensorMode, not for this class

    def __init__(self, hooks: Hooks) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.hooks = hooks
        self.propagates = False  # operators have global sizes then, and are not the program's

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator) and func not in registered_hop_fake_fns:
            return func.python_key_table[FakeTensorMode](self, *args, **kwargs)
        if not isinstance(func, HigherOrderOperator) and any(issubclass(this, DTensor) for this in types):
            self.hooks.dispatch(func, args)
        if isinstance(func, HigherOrderOperator) or _is_for_cuda(args, kwargs):
            if func is torch.ops.aten._local_scalar_dense.default and (value := self.hooks.read(args[0])) is not None:
                return value
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if result is NotImplemented:  # for DTensors beside plain tensors: their operators on local ones come here
                return result
            if not self.propagates:
                self.hooks.operator(func, args, result)
            return result if isinstance(func, HigherOrderOperator) or func.namespace != "c10d" else _with_future(result)
        if func in (torch.ops.aten._pin_memory.default, torch.ops.aten.pin_memory.default):
            return args[0].clone()
        with fake_tensor.unset_fake_temporarily():
            return func(*args, **kwargs)


def reads_values(error: BaseException | None) -> bool:
    """Whether an error says that the program reads values of a tensor of the emulated GPU, which has none."""
    return isinstance(error, fake_tensor.DataDependentOutputException)


def _is_for_cuda(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    return any(isinstance(x, FakeTensor) or isinstance(x, torch.device) and x.type == "cuda" for x in leaves)


def _with_future(result: Any) -> Any:
    """The results of a collective, also set in the future of its work, as gradient hooks expect; a fake group's is
    empty."""
    if not (isinstance(result, tuple) and isinstance(result[-1], torch.ScriptObject)):
        return result  # a barrier
    future = torch.futures.Future[list[torch.Tensor]]()
    future.set_result([x for x in pytree.tree_leaves(result[:-1]) if isinstance(x, torch.Tensor)])
    return *result[:-1], _create_work_from_future(future).boxed()


@contextlib.contextmanager
def emulated(gpu: Gpu, hooks: Hooks) -> Iterator[None]:
    """While active, this process seems to have `PER_HOST` GPUs of that kind, whose tensors have no values.

    Compiled functions of this process are discarded on entry and on exit.

    Raises:
        OfflineError: there is no C++ compiler to register the device with autograd, or another emulation is active.
        UnsupportedTorchError: the installed torch lacks a hook that this needs.
    """
    _GPU.works()
    make_tables()
    TorchPatcher.patch()  # torch replaces `_init_group` at a process's first compilation, which may be one inside
    with contextlib.ExitStack() as stack:
        stack.callback(forget_devices)
        stack.callback(torch._dynamo.reset)
        stack.enter_context(_cuda_in_name())
        for scope in (
            cuda_answers(gpu),
            device_interfaces(gpu),
            generated_code(hooks),
            inductor_settings(),
            triton_environment(),
        ):
            stack.enter_context(scope)
        torch._dynamo.reset()
        forget_devices()
        # DTensor keeps the RNG tracker of the first device that draws, which may be another one outside.
        stack.enter_context(patched_value(_TRACKER, None))
        # Optimizers take their foreach form for tensors of these classes where all are on a GPU.
        for known in _FOREACH:
            stack.enter_context(patched_value(known, [*_foreach_supported_types, FakeTensor]))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        mode = CudaTensorsAreFake(hooks)
        stack.enter_context(_entered_while_traced(mode))
        stack.enter_context(_propagation_is_not_the_program(mode))
        stack.enter_context(_no_measured_times())
        stack.enter_context(_report_resizes(hooks.resized))
        stack.enter_context(_modules_keep_parameters())
        stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _entered_while_traced(mode: FakeTensorMode) -> Iterator[None]:
    """Enters `mode` where optimizers make their states and ``replicate`` its wrapper: Dynamo traces without a mode."""

    def under(stock: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return stock(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for row in (*_GROUPS, _DDP):
            stack.enter_context(patched(row, under, every_thread=True))
        yield


@contextlib.contextmanager
def _propagation_is_not_the_program(mode: CudaTensorsAreFake) -> Iterator[None]:
    """Sets `CudaTensorsAreFake.propagates` where torch propagates sizes of DTensors, which it does by `mode` for
    DTensors beside plain tensors.
    """

    def propagate(stock: Any, propagator: Any, op_schema: Any) -> Any:
        mode.propagates, before = True, mode.propagates
        try:
            return stock(propagator, op_schema)
        finally:
            mode.propagates = before

    with patched(_META, propagate):
        yield


@contextlib.contextmanager
def _report_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    def resize(stock: Any, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result: torch.UntypedStorage = stock(storage, size)
        on_resize(storage)
        return result

    with patched(_RESIZE, resize):
        yield


@contextlib.contextmanager
def _no_measured_times() -> Iterator[None]:
    """Disables reads of ``DistributedDataParallel`` from the device: measured times, and the comparison of parameters
    with those of other ranks."""
    with patched_values({_RUNTIME_STATS: do_nothing, _VERIFY: do_nothing}):
        yield


@contextlib.contextmanager
def _modules_keep_parameters() -> Iterator[None]:
    """Makes ``module.to(...)`` and the like change parameters in place, as on a device; optimizers and tied modules
    hold them.

    torch replaces a parameter that becomes fake by another, and cannot convert a fake one.
    """

    stock = torch.nn.Module._apply

    def apply(
        self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        parameters = dict(self._parameters)
        for name, parameter in parameters.items():
            if parameter is not None and _convert(parameter, fn):
                self._parameters[name] = None
        try:
            return stock(self, fn, recurse=False)
        finally:
            self._parameters.update(
                {name: value for name, value in parameters.items() if self._parameters[name] is None}
            )

    with patched_value(_APPLY, apply):
        yield


def _convert(parameter: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Applies `fn` to a parameter and its gradient in place; returns False, with nothing done, if neither parameter nor
    result is fake."""
    with torch.no_grad():
        converted = fn(parameter)
        if not (isinstance(parameter, FakeTensor) or isinstance(converted, FakeTensor)):
            return False
        gradient = parameter.grad
        parameter.grad = None
        if converted is not parameter:
            _become(parameter, converted)
        if gradient is not None:
            parameter.grad = fn(gradient).requires_grad_(gradient.requires_grad)
    return True


def _become(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """Moves the contents of `other`, a tensor without other references, into a parameter."""
    if isinstance(parameter, FakeTensor) and isinstance(other, FakeTensor):
        parameter.data = other
        parameter.fake_device = other.fake_device
        return
    other.requires_grad_(parameter.requires_grad)
    own = {} if isinstance(parameter, FakeTensor) else vars(parameter)
    other.__dict__.update(own, _is_param=True)
    attributes = dict(vars(other))
    parameter.__class__ = type(other) if isinstance(other, FakeTensor) else torch.nn.Parameter
    parameter.__dict__.clear()
    parameter.__dict__.update(attributes)
    torch._C._swap_tensor_impl(parameter, other)


@functools.cache
def _library() -> ctypes.CDLL:
    source = importlib.resources.files("dtensor_compile.offline") / "native_code" / "cuda_device.cpp"
    try:
        with importlib.resources.as_file(source) as main:
            return ctypes.CDLL(
                str(built_library("dtensor_compile_cuda_device", main, ("torch_python", "torch_cpu", "c10")))
            )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise OfflineError(
            f"an emulated device on a machine without one needs a C++ compiler once, and that failed ({reason}). "
            "Install g++, or name a compiler in the environment variable CXX."
        ) from error


@contextlib.contextmanager
def _cuda_in_name() -> Iterator[None]:
    if not _ONE.acquire(blocking=False):
        raise OfflineError("a device is emulated in this process already: leave that context first")
    try:
        if torch.cuda._is_compiled() and torch._C._cuda_getDeviceCount():
            yield  # the real GPU serves as the device
        else:
            with _without_a_gpu():
                yield
    finally:
        _ONE.release()


@contextlib.contextmanager
def _without_a_gpu() -> Iterator[None]:
    library = _library()
    library.dtensor_compile_cuda_device(1)
    try:
        # It would replace our guard for good.
        with patched_value(_GUARD_SET, do_nothing):
            yield
    finally:
        library.dtensor_compile_cuda_device(0)
