"""The memory of a plan: its peak, what holds it, and what the caching allocator makes of it.

Input: a step that was made. Output: `StepMemory`.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from dtensor_compile.forecast import step_plan as model
from dtensor_compile.forecast.allocator import reserved_by
from dtensor_compile.forecast.memory_use import KINDS, use_of_step
from dtensor_compile.forecast.observed_step import Observed
from dtensor_compile.forecast.step_log import Allocation
from dtensor_compile.topology.gpus import Gpu

#: Bytes of the workspace that cuBLAS gets from torch, by the major compute capability (``CUDABlas.cpp``:
#: ``parseChosenWorkspaceSize``), once for each thread that multiplies: the program's, and autograd's.
_WORKSPACE = {9: 4096 * 8 * 1024, 10: 4096 * 8 * 1024}
_WORKSPACE_ELSE = 4096 * 1024 * 2 + 16 * 1024 * 8
#: Number of holders of the peak that a plan names.
HOLDERS = 12


def memory_of_step(seen: Observed, starts: Sequence[float], gpu: Gpu) -> model.StepMemory:
    """Memory over the step.

    Args:
        starts: for each request of the step, and after the last, the seconds at which compute reaches it.
    """
    marks = seen.marks
    use = use_of_step(seen.log.changes, seen.kind, marks.forward.changes, marks.end.changes)
    first, peak = marks.forward.requests, use.peak
    where, module = seen.place(min(max(first, peak.requests), first + len(seen.operations) - 1))
    threads = 2 if marks.rest.requests > marks.backward.requests else 1
    fixed = threads * _WORKSPACE.get(gpu.capability[0], _WORKSPACE_ELSE)
    reserved = reserved_by(use.blocks, gpu.bytes - fixed)
    return model.StepMemory(
        kinds=KINDS,
        over_time=tuple(
            model.MemoryAt(starts[max(0, at.requests - first)], tuple(at.bytes[kind] for kind in KINDS))
            for at in use.uses
        ),
        peak=peak.total,
        peak_of_kinds=tuple(peak.bytes[kind] for kind in KINDS),
        peak_where=where,
        peak_module=module,
        holders=_holders(use.held, seen),
        reserved=reserved.segments,
        fixed=fixed,
        capacity=gpu.bytes,
        fits=reserved.segments + fixed <= gpu.bytes,
        releases=reserved.releases,
    )


def _holders(held: Sequence[Allocation], seen: Observed) -> tuple[model.Holder, ...]:
    sums: dict[tuple[str, str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    for this in held:
        kind, where, module = seen.kind(this), "", ""
        place = this.born - seen.marks.forward.requests
        if this not in seen.owned and 0 <= place < len(seen.operations):
            where, module = seen.place(this.born)
            where = this.where or where
        entry = sums[kind, where, module]
        entry[0] += this.bytes
        entry[1] += 1
    rows = [model.Holder(*key, *value) for key, value in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:HOLDERS])
