"""The long run of the fuzzer: ``make fuzz``, or ``python -m tests.fuzz.run --programs 2000 --seed 0``.

Programs that differ are made smaller and printed; the exit status is 1 where there was one.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from collections import Counter

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.testing import RankError, run_on_ranks
from dtensor_compile.testing.bisect import pass_names
from dtensor_compile.testing.parity import Settings
from tests.fuzz.programs import MESHES, Program, RefusedBySome, make_program, smaller, verdict


def programs(seeds: range, meshes: list[tuple[int, ...]]) -> list[tuple[int, Program]]:
    """A program for each seed for which one comes about."""
    made = []
    with simulated_job(4, 0):
        for seed in seeds:
            program = make_program(random.Random(seed), meshes)
            if program is not None:
                made.append((seed, program))
    return made


def judge(program: Program, variants: list[str], kernels: str) -> tuple[str, list[str]]:
    """`verdict` on ranks; where their job ended with it, "refused", "no answer" or "differs", and what they said."""
    try:
        return run_on_ranks(program.world, verdict, program, variants, kernels, timeout=280)[0]
    except RankError as error:
        message = str(error)
        result = (
            "refused" if RefusedBySome.__name__ in message else "no answer" if "no answer" in message else "differs"
        )
        return result, [message]


def reduced(program: Program, variants: list[str], kernels: str, tries: int = 25) -> Program:
    """The smallest program found that still differs."""
    again = True
    while again:
        again = False
        for candidate in smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if judge(candidate, variants, kernels)[0] == "differs":
                program, again = candidate, True
                break
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--kernels", choices=["aten", "inductor"], default="aten")
    parser.add_argument("--world", type=int, help="only meshes of so many ranks")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--no-reduce", action="store_true", help="print programs as they were made")
    parser.add_argument("--save", type=pathlib.Path, metavar="FILE", help="append programs that differ to it as well")
    args = parser.parse_args()
    meshes = [m for m in MESHES if args.world is None or Program(m, (), (), ()).world == args.world]
    counts: Counter[str] = Counter()
    begin, names = time.monotonic(), pass_names(Settings())
    for first in range(args.seed, args.seed + args.programs, 10):
        for seed, program in programs(range(first, min(first + 10, args.seed + args.programs)), meshes):
            if time.monotonic() - begin > 60 * args.minutes:
                break
            # with all passes each program, with a single one in turn
            variants = ["all", f"{names[seed % len(names)]} alone"] if seed % 4 == 0 else ["all"]
            result, found = judge(program, variants, args.kernels)
            counts[result] += 1
            if result in ("differs", "no answer"):
                small = program if args.no_reduce or result == "no answer" else reduced(program, variants, args.kernels)
                message = f"\n==== seed {seed}\n{small}\n" + "\n".join(found[:6])[-3500:]
                print(message, flush=True)
                if args.save:
                    with args.save.open("a") as file:
                        file.write(message + "\n")
        print(f"{sum(counts.values())} programs in {time.monotonic() - begin:.0f} s: {dict(counts)}", flush=True)
    return 1 if counts["differs"] or counts["no answer"] else 0


if __name__ == "__main__":
    sys.exit(main())
