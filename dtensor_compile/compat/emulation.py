"""torch taken for one with a GPU that is not there: fake tensors on ``cuda``, and Inductor's code for them. Undone at
the end.

What is taken over, each for as long as `emulated` is entered:

- `CudaTensorsAreFake` is the fake tensor mode: what is on ``cuda`` is fake, everything else is real.
- ``torch.cuda`` and Dynamo's device interface answer with the properties of the GPU.
- A module that is moved or cast keeps its parameters, as with tensors that a device holds.
- A torch without a GPU, whether built for CUDA or not, gets a device in name (`offline/native_code`): its autograd ends
  the process otherwise, or asks the driver.
- Inductor loads kernels and generated code through `Hooks`; its caches are off, and what it remembers of devices is
  forgotten.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.resources
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor._random
from torch._C._distributed_c10d import _create_work_from_future
from torch._dynamo import device_interface
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_compile.compat.apply_patches import patched, patched_entries, patched_value, patched_values
from dtensor_compile.compat.patches import feature, hook, patch
from dtensor_compile.errors import OfflineError
from dtensor_compile.native.loader import built_library

if TYPE_CHECKING:
    from dtensor_compile.topology.gpus import Gpu

#: What ``torch.cuda`` answers for the device.
_ANSWERS = (
    "is_available", "is_initialized", "is_bf16_supported", "is_current_stream_capturing", "device_count",
    "current_device", "get_device_properties", "get_device_capability", "get_device_name", "get_arch_list",
    "mem_get_info", "memory_stats_as_nested_dict", "get_rng_state", "_exchange_device", "_maybe_exchange_device",
    "_DeviceGuard", "device", "Stream", "Event", "stream", "current_stream", "default_stream",
)  # fmt: skip
#: What acts on the device, and does nothing here.
_ACTIONS = (
    "_lazy_init", "init", "set_device", "synchronize", "empty_cache", "set_rng_state", "manual_seed", "manual_seed_all",
)  # fmt: skip
_CUDA = {name: patch(f"torch.cuda:{name}") for name in (*_ANSWERS, *_ACTIONS)}
_STREAM = patch("torch._C:_cuda_getCurrentRawStream", optional=True)
_GUARD_SET = patch("torch._C:_ensureCUDADeviceGuardSet")
_AVOID_INIT = patch("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init")
_INIT_CONTEXT = patch("torch._subclasses.fake_tensor:init_gpu_context", "device")
_FALLBACK = patch("torch._subclasses.fake_tensor:run_fallback_kernel", "fake_mode func ...")
_UNSET_FAKE = patch("torch.fx.experimental.proxy_tensor:unset_fake_temporarily", "")
_TRACKER = patch("torch.distributed.tensor._random:_rng_tracker")
_DDP = patch("torch.nn.parallel:DistributedDataParallel.__init__", "self module ...")
#: Methods of optimizers, of each class that has one of its own.
_GROUPS = tuple(
    patch(f"torch.optim:{name}._init_group")
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and "_init_group" in vars(cls)
)
_RUNTIME_STATS = patch("torch._C._distributed_c10d:Logger.set_runtime_stats_and_log")
_VERIFY = patch("torch.distributed:_verify_params_across_processes")
_APPLY = patch("torch.nn:Module._apply", "self fn recurse")
_INTERFACES = patch("torch._dynamo.device_interface:device_interfaces")
_KERNEL = patch("torch._inductor.async_compile:AsyncCompile.triton", "self kernel_name source_code device_str")
_LOAD = patch("torch._inductor.codecache:PyCodeCache.load_by_key_path", "cls key path ...")
_ALLOCATOR = patch("torch._inductor.cudagraph_utils:check_caching_allocator_for_cudagraphs", "")
_FOLDER = patch("torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder")
_LAZY_INIT = patch("torch._inductor.fx_passes.joint_graph:lazy_init", "input_device")
_DRIVER = patch("torch._inductor.runtime.triton_helpers:set_driver_to_gpu", "")
_SELECT = patch("torch._inductor.select_algorithm:AlgorithmSelectorCache.__call__", "self name choices ...")
_GUARDS = "torch._C._dynamo.guards:"
_EMPTY = patch(_GUARDS + "_empty_strided_cuda", optional=True)
_VIEW = patch(_GUARDS + "_reinterpret_tensor")
_ALIGNMENT = patch(_GUARDS + "assert_alignment")
_MISALIGNED = patch(_GUARDS + "copy_if_misaligned")
_GPU = feature(
    "a GPU that is not there",
    *_CUDA.values(),
    _STREAM,
    _GUARD_SET,
    _AVOID_INIT,
    _INIT_CONTEXT,
    _FALLBACK,
    _UNSET_FAKE,
    _TRACKER,
    _DDP,
    *_GROUPS,
    _RUNTIME_STATS,
    _VERIFY,
    _APPLY,
    _INTERFACES,
    _KERNEL,
    _LOAD,
    _ALLOCATOR,
    _FOLDER,
    _LAZY_INIT,
    _DRIVER,
    _SELECT,
    _EMPTY,
    _VIEW,
    _ALIGNMENT,
    _MISALIGNED,
    hook("torch._dynamo.device_interface:CudaInterface.Worker"),
    hook("torch._higher_order_ops.utils:registered_hop_fake_fns"),
    hook("torch._inductor.select_algorithm:ExternKernelCaller"),
    hook("torch._C:_swap_tensor_impl"),
    hook("torch._C._distributed_c10d:_create_work_from_future"),
    without="programs are looked at on a CPU",
    essential=True,
    upstream="#171425, #148977, #184976",
    remove_when="torch can trace and compile for a GPU that is not there",
)

#: GPUs that a host seems to have.
PER_HOST = 8


@dataclass(frozen=True)
class Hooks:
    """Who is told of what Inductor makes.

    Attributes:
        kernel: is given the name and the source of a Triton kernel, and returns what the generated code calls ``run``
            of.
        graph: is given the text of generated code and whether it is of a backward graph, and returns a context to run
            it in.
    """

    kernel: Callable[[str, str], Any]
    graph: Callable[[str, bool], Callable[[], contextlib.AbstractContextManager[Any]]]


class CudaTensorsAreFake(FakeTensorMode):
    """Fake tensors for what is on ``cuda``; what has nothing to do with it is computed."""

    supports_higher_order_operators = True  # their rules are by the type of the mode, which is not this one

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator) and func not in registered_hop_fake_fns:
            return func.python_key_table[FakeTensorMode](self, *args, **kwargs)
        if isinstance(func, HigherOrderOperator) or _is_for_cuda(args, kwargs):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            return result if isinstance(func, HigherOrderOperator) or func.namespace != "c10d" else _with_future(result)
        if func in (torch.ops.aten._pin_memory.default, torch.ops.aten.pin_memory.default):
            return args[0].clone()
        with fake_tensor.unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_for_cuda(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    return any(isinstance(x, FakeTensor) or isinstance(x, torch.device) and x.type == "cuda" for x in leaves)


def _with_future(result: Any) -> Any:
    """Results of a collective, whose work has them in its future, as hooks of gradients expect; that of a fake group
    has nothing.
    """
    if not (isinstance(result, tuple) and isinstance(result[-1], torch.ScriptObject)):
        return result  # a barrier
    future = torch.futures.Future[list[torch.Tensor]]()
    future.set_result([x for x in pytree.tree_leaves(result[:-1]) if isinstance(x, torch.Tensor)])
    return *result[:-1], _create_work_from_future(future).boxed()


@contextlib.contextmanager
def emulated(gpu: Gpu, hooks: Hooks) -> Iterator[None]:
    """While it is entered, this process seems to have `PER_HOST` GPUs of that kind, whose tensors have no values.

    Compiled functions of this process are forgotten at both ends.

    Raises:
        OfflineError: autograd cannot be told of the device: no C++ compiler, or another emulation is under way.
        UnsupportedTorchError: the installed torch has not what this takes over.
    """
    _GPU.works()
    _make_tables()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_devices)
        stack.callback(torch._dynamo.reset)
        stack.enter_context(_cuda_in_name())
        for scope in (_torch_cuda(gpu), _interfaces(gpu), _generated_code(hooks), _inductor_settings(), _environment()):
            stack.enter_context(scope)
        torch._dynamo.reset()
        _forget_devices()
        # DTensor keeps the tracker of the first device that draws: outside, it is that of another one.
        stack.enter_context(patched_value(_TRACKER, None))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        mode = CudaTensorsAreFake(allow_non_fake_inputs=True)
        stack.enter_context(_entered_while_traced(mode))
        stack.enter_context(_no_measured_times())
        stack.enter_context(_modules_keep_parameters())
        stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _entered_while_traced(mode: FakeTensorMode) -> Iterator[None]:
    """While Dynamo traces, without a mode, optimizers make their states and ``replicate`` its wrapper; here they do
    with `mode`.
    """

    def under(stock: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return stock(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for row in (*_GROUPS, _DDP):
            stack.enter_context(patched(row, under, every_thread=True))
        yield


@contextlib.contextmanager
def _no_measured_times() -> Iterator[None]:
    """``DistributedDataParallel`` does without the times that it measures on the device, and without comparing its
    parameters with those of other ranks, which it reads there."""
    with patched_values({_RUNTIME_STATS: _nothing, _VERIFY: _nothing}):
        yield


@contextlib.contextmanager
def _modules_keep_parameters() -> Iterator[None]:
    """``module.to(...)`` and its like change parameters in place, as they do on a device; optimizers and ties hold
    them.

    torch replaces a parameter that becomes fake by another, and cannot convert one that is fake.
    """

    def apply(
        stock: Any, self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
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

    with patched(_APPLY, apply, every_thread=True):
        yield


def _convert(parameter: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Makes of a parameter and its gradient what `fn` does; False, with nothing done, where none of both is fake."""
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
    """Gives a parameter the contents of a tensor that nobody else has."""
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
    if torch.cuda._is_compiled() and torch._C._cuda_getDeviceCount():
        yield  # what there is answers for the device
        return
    library = _library()
    if not library.dtensor_compile_cuda_device(1):
        raise OfflineError("a device is emulated in this process already: leave that context first")
    try:
        # It would put another guard into the place of ours, for good.
        with patched_value(_GUARD_SET, _nothing):
            yield
    finally:
        library.dtensor_compile_cuda_device(0)


def _properties(gpu: Gpu) -> types.SimpleNamespace:
    """What ``torch.cuda.get_device_properties`` returns."""
    return types.SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.bytes,
        regs_per_multiprocessor=gpu.registers,
        max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024,
        warp_size=32,
        L2_cache_size=gpu.l2,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu.shared_memory,
        shared_memory_per_multiprocessor=gpu.shared_memory + 1024,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="",
    )


class _Nothing:
    """Takes the place of guards and of functions that act on a device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Done(_Nothing):
    """A stream or an event on which all work is done."""

    cuda_stream = device_index = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def query(self) -> bool:
        return True


class _Event(_Done):
    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Stream(_Done):
    def record_event(self, event: _Event | None = None) -> _Event:
        return event if event is not None else _Event()


def _first(*args: Any, **kwargs: Any) -> int:
    return 0


@contextlib.contextmanager
def _torch_cuda(gpu: Gpu) -> Iterator[None]:
    properties = _properties(gpu)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: gpu.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: PER_HOST,
        "current_device": _first,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_name": lambda device=None: gpu.name,
        "get_arch_list": lambda: [gpu.architecture],
        "mem_get_info": lambda device=None: (gpu.bytes, gpu.bytes),
        "memory_stats_as_nested_dict": lambda device=None: {},
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "_exchange_device": _first,
        "_maybe_exchange_device": _first,
        "_DeviceGuard": _Nothing,
        "device": _Nothing,
        "Stream": _Stream,
        "Event": _Event,
        "stream": _Nothing,
        "current_stream": _Stream,
        "default_stream": _Stream,
    }
    answers |= dict.fromkeys(_ACTIONS, _nothing)
    values = {_CUDA[name]: answer for name, answer in answers.items()}
    values |= {_STREAM: _first, _AVOID_INIT: True, _INIT_CONTEXT: _nothing, _UNSET_FAKE: _real_on_cpu}
    with patched_values(values), patched(_FALLBACK, _without_kernel, every_thread=True):
        yield


def _without_kernel(stock: Callable[..., Any], fake_mode: FakeTensorMode, func: Any, *args: Any) -> Any:
    """torch runs an operator that has no rule for fake tensors on the device. One that returns nothing, as fused SGD,
    needs no run.
    """
    return stock(fake_mode, func, *args) if func._schema.returns else None


@contextlib.contextmanager
def _real_on_cpu() -> Iterator[None]:
    """While a graph is traced torch computes constants, on the device for which they are made; here on the CPU."""
    with fake_tensor.unset_fake_temporarily(), _OnCpu():
        yield


@contextlib.contextmanager
def _interfaces(gpu: Gpu) -> Iterator[None]:
    """Dynamo's and Inductor's way to ask about devices."""
    properties = _properties(gpu)

    class Worker(device_interface.CudaInterface.Worker):
        set_device = staticmethod(_nothing)
        current_device = staticmethod(_first)
        get_device_properties = staticmethod(lambda device=None: properties)

    class Interface(device_interface.CudaInterface):
        device = _Nothing  # type: ignore[assignment]
        current_device = staticmethod(_first)
        set_device = staticmethod(_nothing)
        device_count = staticmethod(lambda: PER_HOST)
        synchronize = staticmethod(_nothing)
        get_device_properties = staticmethod(lambda device=None: properties)
        get_raw_stream = staticmethod(_first)
        exchange_device = staticmethod(_first)
        maybe_exchange_device = staticmethod(_first)
        memory_allocated = staticmethod(_first)
        is_bf16_supported = staticmethod(lambda including_emulation=False: gpu.capability >= (8, 0))
        is_available = staticmethod(lambda: True)
        get_compute_capability = staticmethod(lambda device=None: gpu.capability[0] * 10 + gpu.capability[1])
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(_nothing)

    Interface.Worker = Worker  # type: ignore[misc]
    device_interface.get_interface_for_device("cpu")  # registers torch's own
    named = {"cuda": Interface, **{f"cuda:{i}": Interface for i in range(PER_HOST)}}
    with patched_entries(_INTERFACES, named):
        yield


@contextlib.contextmanager
def _generated_code(hooks: Hooks) -> Iterator[None]:
    """Kernels and generated code are loaded through `hooks`; what was loaded meanwhile is unloaded."""
    from torch._inductor.virtualized import V

    stock_view = torch._C._dynamo.guards._reinterpret_tensor

    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        return hooks.kernel(kernel_name, source_code)

    def load(stock: Any, cls: Any, key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        module = stock(cls, key, path, *args, **kwargs)
        if hasattr(module, "call"):  # not the module of a kernel
            with open(path) as file:
                scope = hooks.graph(file.read(), bool(V.graph.is_backward))
            module.call = _called_in(scope, module.call)
        return module

    def view(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        as_strided = torch.as_strided if isinstance(tensor, FakeTensor) else stock_view
        return as_strided(tensor, size, stride, offset)

    values = {
        _KERNEL: triton,
        _EMPTY: _empty_on_cuda,
        _VIEW: view,
        _ALIGNMENT: _nothing,
        _MISALIGNED: lambda tensor: tensor,
        _LAZY_INIT: _nothing,
        _FOLDER: _folder(),
        _DRIVER: _nothing,
        _ALLOCATOR: lambda: "the device is emulated",
    }
    with (
        _unloaded_at_the_end(),
        patched_values(values),
        patched(_LOAD, load, every_thread=True),
        patched(_SELECT, _select_a_library, every_thread=True),
    ):
        yield


def _empty_on_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _select_a_library(stock: Any, self: Any, name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Of the ways to multiply the first that is a library's; others would have to be measured."""
    from torch._inductor.select_algorithm import ExternKernelCaller

    of_libraries = [choice for choice in choices if isinstance(choice, ExternKernelCaller)]
    return stock(self, name, (of_libraries or choices)[:1], *args, **kwargs)


def _folder() -> type:
    """The class that computes constants that are one number each, on the CPU."""
    from torch._inductor.fx_passes import joint_graph

    class Folder(joint_graph.UniformValueConstantFolder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _OnCpu():
                super().__init__(*args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            with _OnCpu():
                return super().run(*args, **kwargs)

    return Folder


@contextlib.contextmanager
def _unloaded_at_the_end() -> Iterator[None]:
    """Modules of generated code that are loaded meanwhile are forgotten."""
    from torch._inductor.codecache import PyCodeCache

    loaded = set(sys.modules)
    kept = [(table, table.copy()) for table in (PyCodeCache.modules, PyCodeCache.modules_no_attr, PyCodeCache.linemaps)]
    try:
        yield
    finally:
        for table, before in kept:
            table.clear()
            table.extend(before) if isinstance(table, list) else table.update(before)
        for name in set(sys.modules) - loaded:
            if name.startswith("torch._inductor.runtime.compile_tasks."):
                del sys.modules[name]


def _called_in(
    scope: Callable[[], contextlib.AbstractContextManager[Any]], call: Callable[..., Any]
) -> Callable[..., Any]:
    def run(args: Any) -> Any:
        with scope():
            return call(args)

    return run


def _make_tables() -> None:
    """Tables that torch makes at first use, and keeps for good, are those of a process without the device.

    Dynamo's hold functions of ``torch.cuda``, Inductor's patterns that were traced on a device, autograd's a thread for
    each device.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad

    torch.compile(torch.relu, backend="eager")(torch.ones(1))
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    joint_graph.lazy_init(torch.device("cpu"))
    for module in (post_grad, pre_grad):
        module.lazy_init()


@contextlib.contextmanager
def _inductor_settings() -> Iterator[None]:
    """No caches, and nothing that is measured on a device."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    settings = {
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "autotune_local_cache": False,
        "autotune_remote_cache": False,
        "bundle_triton_into_fx_graph_cache": False,
        "shape_padding": False,
        "worker_suppress_logging": True,
    }
    with inductor.patch(settings), functorch.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        yield


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Triton's folder for what it compiled, which Inductor puts into the environment."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None) if before is None else os.environ.update(TRITON_CACHE_DIR=before)


def _forget_devices() -> None:
    """Answers about devices that torch keeps for good are asked for again."""
    from torch._inductor import codecache, utils
    from torch._inductor.codegen.cuda import cuda_env
    from torch._inductor.kernel import mm
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    functions = [value for module in (_triton, utils, cuda_env, mm) for value in vars(module).values()]
    functions += [DeviceProperties.create.__func__, codecache.CacheBase.get_system]  # type: ignore[attr-defined]
    for function in functions:
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()


class _OnCpu(TorchDispatchMode):
    """Operators run on the CPU, whatever device they name."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def on_cpu(x: Any) -> Any:
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, named = pytree.tree_map(on_cpu, (args, dict(kwargs or {})))
        return func(*args, **named)


class Watch(TorchDispatchMode):
    """Tells of the operators that generated code calls, views and new tensors aside.

    Args:
        told: is given the operator, its arguments and its result.
    """

    supports_higher_order_operators = True

    def __init__(self, told: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self.told = told

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator) or not func.is_view and func.namespace != "prim" and func not in _NEW:
            self.told(func, args, result)
        return result


_NEW = {torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default, torch.ops.aten.detach.default}
