"""Warm start: what the first step of a job costs where an earlier job has left its graphs and kernels in Inductor's
caches.

    python tools/bench/warm_start.py [--layers 4] [--repeats 2] [--layout tp] [--json FILE]

Each job has new processes. Measured are wall time of the slowest rank and CPU time of the ranks, C++ compiler included,
of the first forward and backward less those of the second: cold with empty caches, warm in the job after it.
"""

from __future__ import annotations

import tempfile

from compile_time import Measured, arguments, first_step_of_job, medians_of, report

from dtensor_compile.testing.ranks import end_jobs


def main() -> None:
    args = arguments(__doc__, repeats=2)
    measured: Measured = {}
    for repeat in range(args.repeats):
        for backend in ("inductor", "dtensor"):
            with tempfile.TemporaryDirectory() as folder:
                for start in ("cold", "warm"):
                    wall, cpu = first_step_of_job(args, backend, folder)
                    end_jobs()
                    measured.setdefault(f"{backend} {start}", []).append((wall, cpu))
                    print(f"repeat {repeat}: {backend}, {start}: wall {wall:.1f} s, CPU {cpu:.1f} s", flush=True)
    medians = medians_of(measured)
    rows = {
        f"{name}, {what}": (medians[f"{backend} cold"][i], medians[f"{backend} warm"][i])
        for backend, name in (("inductor", "stock"), ("dtensor", "ours"))
        for i, what in enumerate(("wall time", "CPU time"))
    }
    report(args, "first step", rows, ("cold", "warm"), measured)


if __name__ == "__main__":
    main()
