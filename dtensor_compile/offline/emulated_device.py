"""`device`: an emulated GPU. Programs compile for it as they would on a real one; nothing is computed.

Input: the name of a preset (`topology/gpus.py`) or a file. While the context is active, tensors on ``cuda`` are fake
and everything else is real. Inductor lowers to Triton, Triton to PTX and cubin for the architecture. A compiled
function runs its generated code once, in the order in which a GPU would be given the work, and each step of that is
recorded:

    with device("h200") as gpu:
        x = torch.randn(64, 256, device="cuda")
        torch.compile(lambda x: x.softmax(-1))(x)
    gpu.graphs[0].source          # the code that calls the kernels
    gpu.kernels[0].cubin          # machine code for sm_90
    print(gpu.graphs[0].order())  # kernel triton_per_fused__softmax_0

Nothing that needs measurements on a GPU is done: matmuls are the library's (no ``max_autotune``), none is padded, and
each kernel has the first configuration that Inductor tries. CUDA graphs are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor_compile.compat.aot.random_state import without_state
from dtensor_compile.compat.emulation.emulated_gpu import emulated
from dtensor_compile.compat.emulation.emulated_inductor import Hooks, Watch
from dtensor_compile.compat.inductor.triton import Binary, compile_kernel, driver_for, load_kernel
from dtensor_compile.fixups.failing_backward import raise_error_op, raise_text
from dtensor_compile.topology.files import find_gpu
from dtensor_compile.topology.gpus import Gpu


@dataclass(frozen=True)
class IssuedStep:
    """One request of generated code to the device or the network.

    Attributes:
        kind: ``"kernel"`` (Triton's), ``"operator"`` (of a library, by the name of the operator), ``"start"`` and
            ``"wait"`` of a collective.
        name: of the kernel, the operator or the collective.
        number: of the collective, counted from 0 in the order of their starts; -1 for others.
        sends: dtype and shape of the inputs of a collective, at its start.
    """

    kind: str
    name: str
    number: int = -1
    sends: str = ""

    def __str__(self) -> str:
        of_collective = (f"#{self.number}" if self.number >= 0 else "", self.sends)
        return " ".join([f"{self.kind:8}", self.name, *filter(None, of_collective)])


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel.

    Attributes:
        name: as in the generated code; it lists the operators that were fused.
        source: its Python source.
        binary: the result of its compilation.
    """

    name: str
    source: str
    binary: Binary = field(repr=False)


@dataclass
class EmulatedGraph:
    """Generated code of one graph.

    Attributes:
        direction: ``"forward"`` (also of a graph without backward) or ``"backward"``.
        source: the code that calls kernels, operators and collectives, with the sources of the kernels.
        kernels: its kernels, in the order of the source.
        steps: of its last run.
    """

    direction: str
    source: str
    kernels: tuple[Kernel, ...]
    steps: list[IssuedStep] = field(default_factory=list)

    def order(self) -> str:
        """The steps of the last run, one a line."""
        return "".join(f"{step}\n" for step in self.steps)


class Observer:
    """Receives the work that the device is given, in order, while it is an `EmulatedDevice.observer`. This one does
    nothing."""

    def operator(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Called after an operator on tensors of the device: in eager, and in generated code, where allocations and
        views are operators too."""

    def dispatch(self, func: Any, args: Sequence[Any]) -> None:
        """Called before an operator over DTensors makes its operators on local tensors."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Called after the size of a storage changed; to zero if its memory was freed."""

    def step(self, step: IssuedStep, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> None:
        """Called at a request of generated code; for a kernel with the tensors that it reads and writes."""

    def read(self, tensor: torch.Tensor) -> bool | int | float | None:
        """Called when the program reads the value of a tensor with one element; returns that value, or None for an
        error."""

    def begins(self, graph: EmulatedGraph) -> None:
        """Called before generated code runs."""

    def ends(self, graph: EmulatedGraph) -> None:
        """Called after generated code ran."""


class EmulatedDevice:
    """Everything that was compiled while `device` was active.

    Attributes:
        gpu: the GPU.
        graphs: generated code, in the order in which it was compiled.
        observer: receives the work that the device is given.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.graphs = gpu, list[EmulatedGraph]()
        self.observer = Observer()
        self._pending, self._running = dict[str, Kernel](), list[EmulatedGraph]()

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels of all graphs; two graphs with the same kernel source have one each."""
        return [kernel for graph in self.graphs for kernel in graph.kernels]

    def table(self) -> str:
        """Table with a line per kernel: registers per thread, bytes of shared memory per block, bytes of spills per
        thread.
        """
        rows = [("kernel", "registers", "shared", "spills", "configuration")]
        for kernel in self.kernels:
            b = kernel.binary
            rows.append((kernel.name, str(b.registers), str(b.shared), str(b.spills), b.config))
        widths = [max(map(len, column)) for column in zip(*rows)]
        numbers = [[text.rjust(width) for text, width in zip(row[1:4], widths[1:])] for row in rows]
        lines = ["  ".join([row[0].ljust(widths[0]), *middle, row[4]]) for row, middle in zip(rows, numbers)]
        return f"{self.gpu.name}, {self.gpu.architecture}\n" + "".join(f"{line.rstrip()}\n" for line in lines)

    def _kernel(self, name: str, source: str) -> Any:
        if (
            source not in self._pending
        ):  # Inductor asks once when it writes a kernel, and once for the code that calls it
            # Not in threads: in Python 3.11 they share one depth counter when they build syntax trees.
            try:
                self._pending[source] = Kernel(name, source, compile_kernel(load_kernel(name, source), self.gpu))
            except Exception:
                self._pending = {}  # no code will be generated that calls them
                raise
        return _Launch(self, name, source)

    def _graph(self, source: str, is_backward: bool) -> Any:
        graph = EmulatedGraph("backward" if is_backward else "forward", source, tuple(self._pending.values()))
        self._pending = {}
        self.graphs.append(graph)

        @contextlib.contextmanager
        def run() -> Iterator[None]:
            graph.steps = []
            self._running.append(graph)
            self.observer.begins(graph)
            try:
                with Watch(_Requests(graph, self._issued)):
                    yield
            finally:
                self._running.pop()
                self.observer.ends(graph)

        return run

    def _issued(self, step: IssuedStep, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> None:
        self._running[-1].steps.append(step)
        self.observer.step(step, reads, writes)

    def _operator(self, func: Any, args: Sequence[Any], result: Any) -> None:
        self.observer.operator(func, args, result)

    def _dispatch(self, func: Any, args: Sequence[Any]) -> None:
        self.observer.dispatch(func, args)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self.observer.resized(storage)

    def _read(self, tensor: torch.Tensor) -> bool | int | float | None:
        return self.observer.read(tensor)


class _Launch:
    """Stand-in for a kernel in generated code."""

    def __init__(self, device: EmulatedDevice, name: str, source: str) -> None:
        self._device, self._name = device, name
        found = _POINTERS.search(source)
        self._pointers = [text.strip() for text in found[1].split(",")] if found is not None else []

    def run(self, *args: Any, **kwargs: Any) -> None:
        named = list(zip(self._pointers, args))
        reads = [value for name, value in named if name.startswith("in_")]
        writes = [value for name, value in named if name.startswith(("out_", "in_out_"))]
        self._device._issued(IssuedStep("kernel", self._name), reads, writes)


#: The parameters of a kernel: Inductor names those that it reads in_ptr, those that it writes out_ptr or in_out_ptr.
_POINTERS = re.compile(r"^def \w+\(((?:in|out)_[^)]*)\)", re.MULTILINE)


class _Requests:
    """Records the operators that generated code calls as steps; a wait has the number of its start. What stands for an
    error of the backward pass raises it."""

    def __init__(self, graph: EmulatedGraph, issued: Callable[[IssuedStep], None]) -> None:
        self.graph, self.issued, self.started = graph, issued, dict[int, tuple[str, int]]()

    def __call__(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        func, args, result, _ = without_state(func, args, result)
        if func is raise_error_op:
            raise_text(args[-1])
        name = func._name.split("::")[-1].split(".")[0]
        if func.namespace not in ("_c10d_functional", "_c10d_functional_autograd"):
            self.issued(IssuedStep("operator", name))
        elif name == "wait_tensor":
            self.issued(IssuedStep("wait", *self.started.get(_storage(args[0]), ("?", -1))))
        else:
            number = sum(step.kind == "start" for step in self.graph.steps)
            given = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
            sends = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in given)
            self.issued(IssuedStep("start", name, number, sends))
            for tensor in result if isinstance(result, (list, tuple)) else (result,):
                self.started[_storage(tensor)] = name, number


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def device(name: str | os.PathLike[str]) -> Iterator[EmulatedDevice]:
    """While active, this process seems to have 8 GPUs of that kind, whose tensors have no values.

    Functions compiled meanwhile or before are forgotten at the end; torch is then as it was. Applies to one thread.

    Args:
        name: of a preset (``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``), or a TOML or JSON file
            (`topology/files.py`).

    Raises:
        TopologyError: there is neither, or the file does not describe a GPU.
        OfflineError: Triton or a C++ compiler is missing, or a device is emulated already.
    """
    gpu = find_gpu(name)
    with driver_for(gpu):
        made = EmulatedDevice(gpu)
        with emulated(gpu, Hooks(made._kernel, made._graph, made._operator, made._dispatch, made._resized, made._read)):
            yield made
