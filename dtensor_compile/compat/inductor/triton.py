"""Triton without a device: a driver that reports a target, and kernels compiled to PTX and cubin for it."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtensor_compile.errors import OfflineError

if TYPE_CHECKING:
    from dtensor_compile.topology.gpus import Gpu


def triton_version() -> str | None:
    """The installed version of Triton; None if it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for a target.

    Attributes:
        config: Inductor's choice: block sizes by name, warps and stages.
        ptx, cubin: the assembly and the machine code.
        registers: per thread.
        shared: bytes of shared memory per block.
        spills: bytes of local memory per thread.
    """

    config: str
    ptx: str
    cubin: bytes
    registers: int
    shared: int
    spills: int


def _target(gpu: Gpu) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], 32)


@contextlib.contextmanager
def driver_for(gpu: Gpu) -> Iterator[None]:
    """While active, Triton's driver reports a device of that kind; it compiles, but runs nothing.

    Raises:
        OfflineError: Triton is not installed.
    """
    if triton_version() is None:
        raise OfflineError(
            'kernels are Triton\'s, which is not installed: pip install "dtensor-compile[triton]". Without it, '
            "programs compile and run on CPUs, and dtensor-compile report and explain show breaks, collectives and "
            "times for h100, h200 and other machines"
        )
    from triton.runtime.driver import driver

    class Driver:
        def get_current_target(self) -> Any:
            return _target(gpu)

        def get_current_device(self) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return gpu.capability

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cuda", 0)

        @staticmethod
        def is_active() -> bool:
            return True

    active, default = driver._active, driver._default  # Triton's, and not torch's
    driver.set_active(Driver())
    driver._default = driver._active
    try:
        yield
    finally:
        driver._active, driver._default = active, default


def load_kernel(name: str, source: str) -> Any:
    """Inductor's object for a kernel that it generated, with the configurations that it chose."""
    from torch._inductor.codecache import _load_triton_kernel_from_source
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    return _load_triton_kernel_from_source(name, source)


def compile_kernel(kernel: Any, gpu: Gpu) -> Binary:
    """Compiles the first configuration that fits the GPU, which is the one that runs without autotuning.

    Raises:
        Exception: from Triton or the assembler; Inductor's error if no configuration fits into shared memory.
    """
    from torch._inductor import config as settings
    from torch._inductor.runtime.triton_heuristics import NoTritonConfigsError
    from triton.runtime.errors import OutOfResources, PTXASError

    reason: Exception | None = None
    for config in kernel.configs:
        try:
            with settings.patch(use_static_triton_launcher=False):  # its kernels have no code
                compiled = kernel._precompile_config(config).kernel
        except (OutOfResources, PTXASError) as error:
            reason = error
            continue
        if compiled.metadata.shared > gpu.shared_memory:
            reason = OutOfResources(compiled.metadata.shared, gpu.shared_memory, "shared memory")
            continue
        registers, spills = _resources(compiled.asm["cubin"])
        values = {**config.kwargs, "warps": config.num_warps, "stages": config.num_stages}
        text = ", ".join(f"{key} {value}" for key, value in values.items())
        return Binary(text, compiled.asm["ptx"], compiled.asm["cubin"], registers, compiled.metadata.shared, spills)
    raise NoTritonConfigsError(f"no configuration of {kernel.fn.__name__} fits: {reason}")


@functools.lru_cache(maxsize=1024)
def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, per thread; read by NVIDIA's ``cuobjdump``, which comes with
    Triton."""
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr)}
    return found["REG"], found["STACK"] + found["LOCAL"]
