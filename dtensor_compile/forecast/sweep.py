"""Plans of all combinations of some settings, each in a process of its own.

Input: a command line of ``dtensor-compile plan`` and the settings that vary: sizes of mesh dims, and arguments of the
target's function. Output: the plans, the fastest first among those that fit, and for each other one the reason.

The number of ranks stays: if one mesh dim varies, the first of the others gets the remaining ranks.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtensor_compile.forecast.forecast import KERNELS
from dtensor_compile.forecast.step_plan import StepPlan, from_json
from dtensor_compile.report.target import TargetError

#: Sizes and names of the dims of a mesh.
Mesh = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Swept:
    """One combination.

    Attributes:
        settings: the chosen values by name.
        mesh: the mesh with it.
        plan: None where there is none, for the reason in `failed`.
    """

    settings: Mapping[str, str]
    mesh: Mesh
    plan: StepPlan | None = None
    failed: str = ""

    @property
    def seconds(self) -> float:
        """Of a token where the program's inputs are tokens, else of a step."""
        assert self.plan is not None
        return 1 / self.plan.tokens_per_second if self.plan.tokens else self.plan.time.step


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """``tp=2,4,8`` as a name and its values.

    Raises:
        TargetError: `text` is something else.
    """
    name, _, values = text.partition("=")
    found = tuple(filter(None, (value.strip() for value in values.split(","))))
    if not name.strip().isidentifier() or not found:
        raise TargetError(f"--sweep {text} is no sweep: write NAME=VALUE,VALUE, such as tp=2,4,8 or checkpoint=on,off")
    return name.strip(), found


def value_of(text: str) -> object:
    """An argument of a function from its text: a number, ``on`` and ``off``, ``true`` and ``false``, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"on": True, "true": True, "off": False, "false": False}.get(text.lower(), text)


def combinations(sweeps: Sequence[tuple[str, tuple[str, ...]]], mesh: Mesh) -> list[Swept]:
    """All combinations, with their meshes.

    Raises:
        TargetError: a mesh does not have the number of ranks of the given one.
    """
    found = []
    for values in itertools.product(*(values for _, values in sweeps)):
        settings = dict(zip((name for name, _ in sweeps), values))
        found.append(Swept(settings, _with_sizes(mesh, settings)))
    return found


def _with_sizes(mesh: Mesh, settings: Mapping[str, str]) -> Mesh:
    sizes = dict(mesh)
    ranks = 1
    for size in sizes.values():
        ranks *= size
    swept = [name for name in sizes if name in settings]
    if not swept:
        return mesh
    for name in swept:
        if not settings[name].isdigit() or not int(settings[name]):
            raise TargetError(f"{name} is a mesh dim, and {settings[name]!r} no size of one")
        sizes[name] = int(settings[name])
    rest = next((name for name in sizes if name not in settings), None)
    others = 1
    for name, size in sizes.items():
        others *= size if name != rest else 1
    if ranks % others or rest is None and ranks != others:
        sized = ", ".join(f"{name}={sizes[name]}" for name in swept)
        raise TargetError(f"{sized} does not divide the {ranks} ranks of --mesh")
    if rest is not None:
        sizes[rest] = ranks // others
    return tuple(sizes.items())


def run_sweep(
    combined: Sequence[Swept], command: Sequence[str], jobs: int, on_done: Callable[[Swept], None]
) -> list[Swept]:
    """Makes the plans. They share compiled Triton kernels.

    Args:
        combined: from `combinations`.
        command: arguments of ``dtensor-compile plan`` without ``--mesh``, ``--set`` and ``--json``.
        jobs: processes at once.
        on_done: called with each that is done.
    """

    def run(this: Swept, kernels: str) -> Swept:
        dims = {name for name, _ in this.mesh}
        own = ["--mesh", ",".join(f"{name}={size}" for name, size in this.mesh)] if this.mesh else []
        own += [f"--set={name}={value}" for name, value in this.settings.items() if name not in dims]
        arguments = [sys.executable, "-W", "ignore", "-m", "dtensor_compile.cli", "plan", *command, *own, "--json", "-"]
        settings = {**os.environ, "OMP_NUM_THREADS": "1", KERNELS: kernels}
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=settings)
        begin = done.stdout.find("{")
        if done.returncode not in (0, 1) or begin < 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            made = Swept(this.settings, this.mesh, failed=lines[-1].removeprefix("dtensor-compile plan: "))
        else:
            made = Swept(this.settings, this.mesh, from_json(done.stdout[begin:]))
        on_done(made)
        return made

    with tempfile.TemporaryDirectory() as kernels, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return order(list(pool.map(run, combined, itertools.repeat(kernels))))


def order(swept: Sequence[Swept]) -> list[Swept]:
    """Those that fit, the fastest first; those that do not, the smallest first; those that failed."""

    def key(this: Swept) -> tuple[int, float]:
        if this.plan is None:
            return 2, 0.0
        return (0, this.seconds) if this.plan.memory.fits else (1, float(this.plan.memory.reserved))

    return sorted(swept, key=key)
