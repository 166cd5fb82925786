"""Collectives that others measured with nccl-tests and published, for the presets: their times by size, kind, ranks and
hosts.

Sizes are nccl-tests': the whole output of an all-gather, the whole input of the others; times those out of place. What
one process measured for all of its GPUs begins where sending takes longer than starting so many kernels. Of all tables
that were found, those without reported faults of the network; `docs/planning.md` compares forecasts with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dtensor_compile.topology.rates import Curve, curve


class Measured(NamedTuple):
    """Measured collectives of one kind: bytes per second by the bytes that one rank sends.

    Attributes:
        ranks: of the group.
        hosts: on which it was; 0: as many ranks on each as the group has for which the rates are taken.
    """

    kind: str
    ranks: int
    rates: Curve
    hosts: int = 0


def _measured(kind: str, ranks: int, hosts: int, microseconds: Mapping[int, float]) -> Measured:
    """Of microseconds by the logarithm of the size, to the base of two."""
    sent = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    points = ((sent * 2**size, sent * 2**size / (time * 1e-6)) for size, time in microseconds.items())
    return Measured(kind, ranks, curve(points), hosts)


def _table(*known: Measured) -> tuple[Measured, ...]:
    """By kind, as files have them."""
    return tuple(sorted(known, key=lambda this: (this.kind, this.ranks)))


# fmt: off
#: NVLink 3 (A100).
NVLINK3 = _table(
    # A100 40 GB, one process: github.com/microsoft/superbenchmark, tests/data
    _measured("all_reduce", 8, 1, {25: 374.3, 27: 1162, 29: 4200, 31: 16215, 33: 63896}),
    _measured("all_gather", 8, 1, {25: 265.8, 27: 698.6, 29: 2304, 31: 8659, 33: 33646}),
    _measured("reduce_scatter", 8, 1, {25: 240.5, 27: 618.1, 29: 2169, 31: 8357, 33: 32464}),
    _measured("all_to_all", 8, 1, {25: 237.5, 27: 633.6, 29: 2237, 31: 8510, 33: 33508}),
)
#: NVLink 4 (H100, H200).
NVLINK4 = _table(
    # DGX H100, a process for each GPU: github.com/NVIDIA/dgxc-benchmarking, nccl/README.md
    _measured("all_reduce", 8, 1, {10: 16.94, 11: 17.14, 13: 17.4, 15: 19.33, 17: 19.89, 19: 20.66, 21: 42.21, 23:
        83.04, 25: 199.3, 27: 586.4, 29: 2151, 31: 7939, 33: 31307}),
    # H100, one process: github.com/MooreThreads/SimuMax, simu_tools/efficency_test/nccl_fit.py
    _measured("all_gather", 8, 1, {25: 128.2, 27: 386.4, 29: 1394, 31: 5379, 33: 21025}),
    _measured("reduce_scatter", 8, 1, {25: 117.8, 27: 385.5, 29: 1410, 31: 5420, 33: 20940}),
    _measured("all_to_all", 8, 1, {25: 129.9, 27: 398.7, 29: 1461, 31: 5520, 33: 21730}),
    # four GPUs of an H100 host, one process: github.com/waynehacking8/nccl-collectives-bench, results/quiet
    _measured("all_reduce", 4, 1, {25: 175.8, 27: 617.7, 29: 2315, 31: 8927, 33: 35188}),
    _measured("all_gather", 4, 1, {25: 109.2, 27: 349.9, 29: 1270, 31: 4832, 33: 18754}),
    _measured("reduce_scatter", 4, 1, {25: 105.9, 27: 346.8, 29: 1275, 31: 4782, 33: 18360}),
)
#: NVLink 5 (B200).
NVLINK5 = _table(
    # HGX B200, a process for each GPU: "B200 / Vultr POC - cluster test summary", 2026-05-18
    _measured("all_reduce", 8, 1, {10: 25.47, 11: 25.98, 13: 26.44, 15: 27.41, 17: 28.9, 19: 29.63, 21: 34.29, 23:
        76.96, 25: 169.7, 27: 394.6, 29: 1335, 31: 4605, 33: 17920}),
    _measured("all_gather", 8, 1, {10: 16.42, 11: 16.74, 13: 17.13, 15: 17.93, 17: 18.87, 19: 19.89, 21: 22.35, 23:
        44.92, 25: 76.98, 27: 207.5, 29: 762.4, 31: 2911, 33: 11323}),
    _measured("reduce_scatter", 8, 1, {10: 16.4, 11: 16.66, 13: 16.82, 15: 17.67, 17: 18.5, 19: 20.06, 21: 23.9, 23:
        58.36, 25: 80.28, 27: 206.1, 29: 753.3, 31: 2809, 33: 10912}),
    _measured("all_to_all", 8, 1, {10: 11.11, 11: 11.12, 13: 11.37, 15: 11.81, 17: 12.92, 19: 14.53, 21: 23.52, 23:
        34.62, 25: 83.13, 27: 236.7, 29: 840.3, 31: 3041, 33: 11246}),
)
#: Microseconds of an all-gather of 16 ranks, H200 hosts, RoCE: github.com/skypilot-org/skypilot,
#: examples/gcp_gpu_direct_tcpx/README.md; and B200 hosts: github.com/GoogleCloudPlatform/cluster-toolkit,
#: examples/gke-a4/README.md. Taken for reduce-scatters too: in the tables with both they differ by a few percent.
_GATHERED = {10: 28.39, 11: 28.29, 13: 34.12, 15: 34.8, 17: 36.17, 19: 43.98, 21: 68.4, 23: 86.92, 25: 174.4, 27:
    499.6, 29: 1576, 31: 6230, 33: 24724}
_GATHERED_B200 = {10: 39.23, 11: 36.35, 13: 36.87, 15: 39.6, 17: 45.5, 19: 46.44, 21: 86.29, 23: 103.9, 25: 185.7,
    27: 477.4, 29: 1456, 31: 5548, 33: 21986}
#: 64 B200 hosts; all-reduces: of rings and NVLS trees the faster, the others rings:
#: github.com/togethercomputer/together-dgxc-benchmarking, worklog/2026-04-16_nccl_64node_benchmark.md
_ON_64_HOSTS = (
    _measured("all_reduce", 512, 64, {20: 265.8, 21: 309.3, 23: 571.2, 25: 1219, 27: 1822, 29: 4976, 31: 17219, 33:
        61281}),
    _measured("all_gather", 512, 64, {20: 1108, 21: 1262, 23: 2380, 25: 3258, 27: 4696, 29: 6326, 31: 10301, 33:
        31145}),
    _measured("reduce_scatter", 512, 64, {20: 1123, 21: 1252, 23: 2354, 25: 3272, 27: 4692, 29: 6293, 31: 10226, 33:
        29897}),
)
#: Hosts of eight H100 or H200 with eight 400 Gbit/s network cards (InfiniBand NDR, RoCE).
NDR = _table(
    # github.com/NVIDIA/nccl-tests, issue 309
    _measured("all_reduce", 16, 2, {10: 29.75, 11: 28.19, 13: 32.12, 15: 34.1, 17: 38.77, 19: 77.69, 21: 76.24, 23:
        132.6, 25: 267.9, 27: 748.3, 29: 2358, 31: 8730, 33: 34381}),
    _measured("all_reduce", 32, 4, {10: 39.79, 11: 39.59, 13: 46.84, 15: 49.13, 17: 55.87, 19: 72.88, 21: 191.3, 23:
        217.3, 25: 376, 27: 990.7, 29: 3109, 31: 11508, 33: 45606}),
    _measured("all_reduce", 64, 8, {20: 117, 21: 143.4, 23: 1272, 25: 509.6, 27: 1159, 29: 3517, 31: 13252, 33:
        52733}),
    _measured("all_gather", 16, 2, _GATHERED),
    _measured("reduce_scatter", 16, 2, _GATHERED),
    *_ON_64_HOSTS,
)
#: The same of eight B200.
NDR_B200 = _table(
    # "B200 / Vultr POC - cluster test summary", 2026-05-18
    _measured("all_reduce", 16, 2, {10: 37.54, 11: 38.87, 13: 41.72, 15: 43.57, 17: 64.46, 19: 77.88, 21: 104.9, 23:
        136.2, 25: 249.2, 27: 597.3, 29: 1620, 31: 5806, 33: 22541}),
    _measured("all_gather", 16, 2, _GATHERED_B200),
    _measured("reduce_scatter", 16, 2, _GATHERED_B200),
    *_ON_64_HOSTS,
)
# fmt: on
