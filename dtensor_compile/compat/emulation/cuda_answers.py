"""Answers of torch.cuda and of Dynamo's device interface for an emulated GPU."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import device_interface
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_compile.compat.apply_patches import patched, patched_entries, patched_values
from dtensor_compile.compat.patches import patch

if TYPE_CHECKING:
    from dtensor_compile.topology.gpus import Gpu

#: Functions and classes of ``torch.cuda`` that report on the device.
_ANSWERS = (
    "is_available", "is_initialized", "is_bf16_supported", "is_current_stream_capturing", "device_count",
    "current_device", "get_device_properties", "get_device_capability", "get_device_name", "get_arch_list",
    "mem_get_info", "memory_stats_as_nested_dict", "get_rng_state", "_exchange_device", "_maybe_exchange_device",
    "_DeviceGuard", "device", "Stream", "Event", "stream", "current_stream", "default_stream",
)  # fmt: skip


#: Functions that act on the device, and do nothing here.
_ACTIONS = (
    "_lazy_init", "init", "set_device", "synchronize", "empty_cache", "set_rng_state", "manual_seed", "manual_seed_all",
)  # fmt: skip


_CUDA = {name: patch(f"torch.cuda:{name}") for name in (*_ANSWERS, *_ACTIONS)}


_STREAM = patch("torch._C:_cuda_getCurrentRawStream", optional=True)


_AVOID_INIT = patch("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init")


_INIT_CONTEXT = patch("torch._subclasses.fake_tensor:init_gpu_context", "device")


_FALLBACK = patch("torch._subclasses.fake_tensor:run_fallback_kernel", "fake_mode func ...")


_UNSET_FAKE = patch("torch.fx.experimental.proxy_tensor:unset_fake_temporarily", "")


_INTERFACES = patch("torch._dynamo.device_interface:device_interfaces")
CUDA_ROWS = (*_CUDA.values(), _STREAM, _AVOID_INIT, _INIT_CONTEXT, _FALLBACK, _UNSET_FAKE, _INTERFACES)


#: Number of emulated GPUs per host.
PER_HOST = 8


def _properties(gpu: Gpu) -> types.SimpleNamespace:
    """The result of ``torch.cuda.get_device_properties``."""
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
    """Replaces guards and functions that act on a device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


def do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Done(_Nothing):
    """A stream or an event whose work is complete."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1  # of CUDA in C++; `fully_shard` hands these numbers to an operator, as of 2.15

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return do_nothing

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
def cuda_answers(gpu: Gpu) -> Iterator[None]:
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
    answers |= dict.fromkeys(_ACTIONS, do_nothing)
    values = {_CUDA[name]: answer for name, answer in answers.items()}
    values |= {_STREAM: _first, _AVOID_INIT: True, _INIT_CONTEXT: do_nothing, _UNSET_FAKE: _real_on_cpu}
    with patched_values(values), patched(_FALLBACK, _without_kernel, every_thread=True):
        yield


def _without_kernel(stock: Callable[..., Any], fake_mode: FakeTensorMode, func: Any, *args: Any) -> Any:
    """Skips an operator without a rule for fake tensors that returns nothing, such as fused SGD; torch would run it on
    the device."""
    return stock(fake_mode, func, *args) if func._schema.returns else None


@contextlib.contextmanager
def _real_on_cpu() -> Iterator[None]:
    """Computes constants on the CPU while a graph is traced; torch computes them on their own device."""
    with fake_tensor.unset_fake_temporarily(), OnCpu():
        yield


@contextlib.contextmanager
def device_interfaces(gpu: Gpu) -> Iterator[None]:
    """While active, Dynamo and Inductor query the emulated device."""
    properties: Any = _properties(gpu)

    class Worker(device_interface.CudaInterface.Worker):
        set_device = staticmethod(do_nothing)
        current_device = staticmethod(_first)
        get_device_properties = staticmethod(lambda device=None: properties)

    class Interface(device_interface.CudaInterface):
        device = _Nothing  # type: ignore[assignment]
        current_device = staticmethod(_first)
        set_device = staticmethod(do_nothing)
        device_count = staticmethod(lambda: PER_HOST)
        synchronize = staticmethod(do_nothing)
        get_device_properties = staticmethod(lambda device=None: properties)
        get_raw_stream = staticmethod(_first)
        exchange_device = staticmethod(_first)
        maybe_exchange_device = staticmethod(_first)
        memory_allocated = staticmethod(_first)
        is_bf16_supported = staticmethod(lambda including_emulation=False: gpu.capability >= (8, 0))
        is_available = staticmethod(lambda: True)
        get_compute_capability = staticmethod(lambda device=None: gpu.capability[0] * 10 + gpu.capability[1])
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(do_nothing)

    Interface.Worker = Worker  # type: ignore[misc]
    device_interface.get_interface_for_device("cpu")  # registers torch's own
    named = {"cuda": Interface, **{f"cuda:{i}": Interface for i in range(PER_HOST)}}
    with patched_entries(_INTERFACES, named):
        yield


class OnCpu(TorchDispatchMode):
    """Runs operators on the CPU, whatever device they name."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def on_cpu(x: Any) -> Any:
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, named = pytree.tree_map(on_cpu, (args, dict(kwargs or {})))
        return func(*args, **named)
