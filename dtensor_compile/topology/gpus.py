"""Devices for estimates of time, and GPUs for which code is compiled, in one table.

A `Device` is the few numbers of a roofline (`topology/links.py`). A `Gpu` adds the properties that a compiler needs:
the architecture, the number of multiprocessors, and the resources of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dtensor_compile.topology import measured_rates
from dtensor_compile.topology.rates import Achieved


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    Attributes:
        peak: floating-point operations per second of a matmul, by bytes of an element (4: float32 as TF32 where the
            device has it, 2: bfloat16).
        memory: bytes per second to and from its memory.
        launch: minimum seconds of an operator.
        exact: operations per second of a float32 matmul without TF32; None: those of `peak`.
        achieved: rates by kind and size of the work, where they are known; they take the place of the others.
        contention: seconds of compute that are lost for each second of communication beside it: both share
            multiprocessors, memory and power.
    """

    peak: tuple[tuple[int, float], ...]
    memory: float
    launch: float
    exact: float | None = None
    achieved: Achieved | None = field(default=None, hash=False)
    contention: float = 0.0

    @property
    def basis(self) -> str:
        """The source of estimates for it."""
        return "a roofline at its peaks, a lower bound" if self.achieved is None else self.achieved.basis

    @property
    def quality(self) -> str:
        """Quality of that source: ``"measured"``, ``"guess"``, ``"vendor's figures"``."""
        return "vendor's figures" if self.achieved is None else self.achieved.quality

    def operations_per_second(self, itemsize: int, tf32: bool = True) -> float:
        """Peak for elements of that many bytes, or for the nearest larger ones."""
        if itemsize == 4 and self.exact is not None and not tf32:
            return self.exact
        sizes = dict(self.peak)
        return sizes.get(itemsize) or next(
            (rate for size, rate in sorted(self.peak) if size >= itemsize), self.peak[-1][1]
        )


@dataclass(frozen=True)
class Gpu:
    """A GPU as a compiler sees it; the words are those of the CUDA C++ Programming Guide (Compute Capabilities).

    Attributes:
        name: its name in ``torch.cuda.get_device_name`` and reports.
        capability: compute capability, (major, minor); (9, 0) is compiled for as sm_90.
        multiprocessors: number of streaming multiprocessors (SMs).
        bytes: size of its memory.
        shared_memory: maximum bytes of one thread block (opt-in). l2: bytes of the level 2 cache.
        device: `Device` for estimates.
        registers: 32-bit registers of a multiprocessor.
        threads: resident threads of a multiprocessor.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    bytes: int
    shared_memory: int
    l2: int
    device: Device
    registers: int = 65536
    threads: int = 2048

    @property
    def architecture(self) -> str:
        """``"sm_90"`` for compute capability 9.0."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


#: Compute lost beside communication: 18.9% on average over GPT and Llama models on A100, H100, MI250 and MI210
#: (Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning, arXiv:2507.03114, 2025).
_CONTENTION = 0.189

CPU = Device(((4, 5e10), (8, 2.5e10)), 1e10, 2e-6)
V100 = Device(((2, 125e12), (4, 15.7e12), (8, 7.8e12)), 0.9e12, 5e-6)
_H100 = Device(((2, 989e12), (4, 494e12), (8, 67e12)), 3.35e12, 4e-6, 67e12, measured_rates.H100, _CONTENTION)


def _like_h100(peak: tuple[tuple[int, float], ...], memory: float, launch: float, exact: float) -> Device:
    """A device of which the vendor's figures are known, with the fractions of them that an H100 achieves."""
    rates, own = dict(_H100.peak), dict(peak)
    factors = {"bfloat16": own[2] / rates[2], "tf32": own[4] / rates[4], "float32": exact / (_H100.exact or exact)}
    achieved = measured_rates.H100.scaled(
        factors.__getitem__, memory / _H100.memory, "vendors' figures, at the fractions that an H100 achieves"
    )
    return Device(peak, memory, launch, exact, achieved, _CONTENTION)


#: Vendors' figures, of the SXM form; rates are those of dense matmuls.
GPUS: dict[str, Gpu] = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 << 30, 166_912, 40 << 20,
        _like_h100(((2, 312e12), (4, 156e12), (8, 19.5e12)), 2.0e12, 5e-6, 19.5e12),
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 << 30, 232_448, 50 << 20, _H100),
    "h200": Gpu(
        "NVIDIA H200", (9, 0), 132, 143_771 << 20, 232_448, 60 << 20,
        Device(_H100.peak, 4.8e12, 4e-6, 67e12, measured_rates.H200, _CONTENTION),
    ),
    "b200": Gpu(
        "NVIDIA B200", (10, 0), 148, 180 * 10**9, 232_448, 126 << 20,
        _like_h100(((2, 2250e12), (4, 1100e12), (8, 40e12)), 8.0e12, 4e-6, 75e12),
    ),
}  # fmt: skip
