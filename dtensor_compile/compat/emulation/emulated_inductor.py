"""Inductor for an emulated GPU: its kernels, the code that it generates, its cached device queries."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_compile.compat.apply_patches import patched, patched_values
from dtensor_compile.compat.emulation.cuda_answers import (
    OnCpu,
    do_nothing,
)
from dtensor_compile.compat.patches import patch

if TYPE_CHECKING:
    pass

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
INDUCTOR_ROWS = (
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
)


@dataclass(frozen=True)
class Hooks:
    """Receives the code that Inductor generates.

    Attributes:
        kernel: called with the name and the source of a Triton kernel; returns the object whose ``run`` the generated
            code calls.
        graph: called with the generated code and whether it is of a backward graph; returns a function that makes the
            context to run it in.
        operator: called with each operator that the device is given, its arguments and its result.
        dispatch: called with each operator over DTensors and its arguments, before its operators on local tensors.
        resized: called with a storage whose size was changed, as FSDP does to free memory of tensors that it keeps.
        read: called with a tensor whose value the program reads; returns one, or None where that is an error.
    """

    kernel: Callable[[str, str], Any]
    graph: Callable[[str, bool], Callable[[], contextlib.AbstractContextManager[Any]]]
    operator: Callable[[Any, Sequence[Any], Any], None]
    dispatch: Callable[[Any, Sequence[Any]], None]
    resized: Callable[[torch.UntypedStorage], None]
    read: Callable[[torch.Tensor], bool | int | float | None]


@contextlib.contextmanager
def generated_code(hooks: Hooks) -> Iterator[None]:
    """While active, kernels and generated code are loaded through `hooks`; they are unloaded at the end."""
    from torch._inductor.virtualized import V

    stock_view = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]  # not in torch's stubs

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
        _ALIGNMENT: do_nothing,
        _MISALIGNED: lambda tensor: tensor,
        _LAZY_INIT: do_nothing,
        _FOLDER: _folder(),
        _DRIVER: do_nothing,
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
    """Selects the first library kernel of several choices for an operator; the others would have to be benchmarked."""
    from torch._inductor.select_algorithm import ExternKernelCaller

    of_libraries = [choice for choice in choices if isinstance(choice, ExternKernelCaller)]
    return stock(self, name, (of_libraries or choices)[:1], *args, **kwargs)


def _folder() -> type:
    """A class that computes uniform constants on the CPU."""
    from torch._inductor.fx_passes import joint_graph

    class Folder(joint_graph.UniformValueConstantFolder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with OnCpu():
                super().__init__(*args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            with OnCpu():
                return super().run(*args, **kwargs)

    return Folder


@contextlib.contextmanager
def _unloaded_at_the_end() -> Iterator[None]:
    """Unloads the modules of generated code that are loaded meanwhile."""
    from torch._inductor.codecache import PyCodeCache

    loaded = set(sys.modules)
    tables: tuple[Any, ...] = (PyCodeCache.modules, PyCodeCache.modules_no_attr, PyCodeCache.linemaps)
    kept = [(table, table.copy()) for table in tables]
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


def make_tables() -> None:
    """Fills tables that torch makes at first use and keeps for good, as in a process without the device.

    Dynamo's tables contain functions of ``torch.cuda``, Inductor's patterns traced on a device, autograd's a thread per
    device.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad

    torch.compile(torch.relu, backend="eager")(torch.ones(1))
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    joint_graph.lazy_init(torch.device("cpu"))
    for module in (post_grad, pre_grad):
        module.lazy_init()


@contextlib.contextmanager
def inductor_settings() -> Iterator[None]:
    """While active, caches are off, and nothing is measured on a device."""
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
def triton_environment() -> Iterator[None]:
    """Restores Triton's cache folder, which Inductor sets in the environment."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None) if before is None else os.environ.update(TRITON_CACHE_DIR=before)


def forget_devices() -> None:
    """Clears torch's cached device queries."""
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


class Watch(TorchDispatchMode):
    """Reports the operators that generated code calls, except views and allocations.

    Args:
        on_operator: called with the operator, its arguments and its result.
    """

    supports_higher_order_operators = True

    def __init__(self, on_operator: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self.on_operator = on_operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator) or not func.is_view and func.namespace != "prim" and func not in _NEW:
            self.on_operator(func, args, result)
        return result


_NEW = {torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default, torch.ops.aten.detach.default}
