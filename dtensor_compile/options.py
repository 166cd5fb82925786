"""Options of the backend: ``torch.compile(model, backend="dtensor", options={...})`` or ``mode=...``.

Our own options are the fields of `Options`; keys that Inductor knows are passed on to it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dtensor_compile.compat.inductor.compile import inductor_config_error, inductor_keys, mode_options
from dtensor_compile.errors import OptionError, TopologyError
from dtensor_compile.lowering.drop_copies import drop_copies
from dtensor_compile.lowering.order_rows import order_rows
from dtensor_compile.lowering.send_transposed import send_transposed
from dtensor_compile.passes import OPTIONAL, PASSES
from dtensor_compile.schedule.overlap import LOWERED_OPTIONAL, LOWERED_PASSES
from dtensor_compile.topology.files import to_values, topology
from dtensor_compile.topology.links import Cluster

_CHOICES = {
    "blocks": ("each", "traced", "once"),
    "plan": ("greedy", "global"),
    "kernels": ("inductor", "aten"),
    "fallback": ("replicate", "error"),
    "kernel_costs": ("estimated", "measured"),
}
#: The graph passes that each of the two options may name.
PASS_NAMES = {
    "disable_passes": (
        *dict.fromkeys(run.__name__ for run in (*PASSES, drop_copies, order_rows, send_transposed)),
        *LOWERED_PASSES,
    ),
    "enable_passes": (*OPTIONAL, *LOWERED_OPTIONAL),
}


@dataclass(frozen=True)
class Options:
    """The keys of ``options={...}`` of ``torch.compile``; docs/options.md is generated from this.

    Attributes:
        capture: Keeps redistributions as nodes until after autograd, so that they are planned together. ``False``
            compiles as stock Inductor does, to find out whether a difference comes from this backend.
        kernels: ``"inductor"`` generates kernels. ``"aten"`` runs the lowered graph operator by operator, which
            compiles fast: for tests and debugging. ``backend="dtensor_aten"`` is short for it.
        disable_passes: Names of graph passes that do not run.
        enable_passes: Names of graph passes that run although they are off by default, because they round differently,
            rely on assumptions about the program, or do not always pay.
        strict: If a pass raises, or a kernel does not compile, the compilation fails. Otherwise the change of the pass
            is dropped, and the graph of the kernel runs operator by operator, with a warning and a decision that has
            the last lines of the compiler's output.
        fallback: ``"replicate"`` runs an operator for which torch has no sharding rule on replicated tensors, and
            reports that as a decision; ``"error"`` raises as eager does.
        topology: The links for which redistributions are planned: a preset (``"h100"``, ``"a100"``, ``"cpu-10gbit"``,
            ...), or the path of a TOML or JSON file (`topology/files.py`; ``torchrun ... tools/measure_links.py --save
            FILE.json`` measures one). ``None``: all links count as equal, and plans with the fewest bytes win.
        schedule: Starts collectives early and waits for them late, so that they overlap with compute. ``False`` keeps
            the order of the program.
        kernel_costs: Kernel times for the schedule: ``"estimated"`` by the rates of the device in `topology`, or
            ``"measured"``: matmuls, convolutions and attention are timed on the current device (a few hundredths of a
            second for each different one, once in a process); fused loops stay estimated.
        overlap_memory: Increase of the peak of live tensors that `schedule` may cause, as a fraction of it;
            ``float("inf")`` for no limit. The memory of the order of ``fully_shard`` itself (two modules gathered, one
            reduction in flight; `schedule/wrapper_order.py`) is always allowed.
        redistribution_memory: Bytes that one redistribution may hold at once besides its input (result, buffers, and
            tensors between its steps; `planner/memory.py`). Plans that hold more are excluded, even if the remaining
            ones send more bytes; if none remains, the compilation fails with an error that reports the memory needed
            and an alternative that fits. ``None`` for no limit.
        regather: Gathered tensors that backward needs: ``"always"`` gathers them again there (less memory, more bytes
            sent), ``"never"`` keeps them, including those that FSDP or a checkpointed region would gather again, and a
            number keeps up to so many bytes on each rank (`lowering/regather.py` decides which). ``None``: as
            checkpointed regions and ``reshard_after_forward`` specify.
        artifacts: A folder that ``dtensor-compile build`` filled: graphs and kernels of programs that were compiled for
            this job in advance are taken from it, on ranks that compiled nothing themselves. What does not fit this job
            is compiled, and a warning says why (`runtime/artifacts.py`). ``None``: only torch's caches.
        blocks: Modules of one class that one module holds, such as the layers of a transformer: ``"traced"`` traces the
            first, and copies its graph for others that differ in nothing that its trace depended on; ``"once"`` also
            plans, lowers and compiles it once, for all of them: collectives at the ends of blocks are planned inside of
            them, and only nodes between blocks are ordered across them, which ``"traced"`` does for those that the
            program marks with ``torch.compiler.nested_compile_region``; ``"each"`` does everything for every one.
        plan: Placements of tensors inside of the program, where it leaves them open: ``"greedy"`` are DTensor's, chosen
            for one operator at a time; ``"global"`` are chosen for forward and backward together, by estimated time
            (`global_plan/`). Inputs, results and gradients, and everything that the program redistributes itself, stay
            as they are placed.
        inductor: Settings for Inductor: all other keys of ``options``, and ``mode``.
    """

    capture: bool = True
    kernels: str = "inductor"
    disable_passes: tuple[str, ...] = ()
    enable_passes: tuple[str, ...] = ()
    strict: bool = False
    fallback: str = "replicate"
    topology: Cluster | None = None
    schedule: bool = True
    kernel_costs: str = "estimated"
    overlap_memory: float = 0.05
    redistribution_memory: int | None = None
    regather: str | int | None = None
    artifacts: str | None = None
    blocks: str = "traced"
    plan: str = "greedy"
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def cache_key(self) -> tuple[Any, ...]:
        """All options that affect the steps on a graph, as plain values: part of the key of torch's caches of compiled
        graphs.

        Every option counts but those of Inductor, which are in torch's own key, and the folder of artifacts.
        """
        own = [option.name for option in fields(self) if option.name not in ("inductor", "artifacts")]
        values = {name: getattr(self, name) for name in own}
        values["topology"] = str(self.topology and to_values(self.topology))
        return tuple(values.items())

    @classmethod
    def parse(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
        """Parses the arguments of ``torch.compile``.

        Raises:
            OptionError: an unknown key (the message names the nearest known one) or an invalid value (it names the
                allowed ones).
        """
        own: dict[str, Any] = {}
        inductor: dict[str, Any] = dict(mode_options(mode)) if mode and mode != "default" else {}
        known = [f.name for f in fields(cls) if f.name != "inductor"]
        for key, value in (options or {}).items():
            name = key.replace("-", "_")
            if name in known:
                own[name] = _checked(name, value)
            elif name in inductor_keys():
                problem = inductor_config_error(name, value)
                if problem:
                    raise OptionError(f"option {key!r}: {problem}")
                inductor[name] = value
            else:
                near = difflib.get_close_matches(name, [*known, *inductor_keys()], n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"options of this backend: {', '.join(known)}"
                raise OptionError(f"unknown option {key!r}: {hint} (keys of torch._inductor.config are accepted too)")
        return cls(**own, inductor=inductor)


def _checked(name: str, value: Any) -> Any:
    """The value of an option, converted from `value`.

    Raises:
        OptionError: `value` is invalid for the option.
    """
    if name in _CHECKS:
        return _CHECKS[name](name, value)
    return _choice(name, value) if name in _CHOICES else _pass_names(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"option {name!r} takes True or False, not {value!r}")
    return value


def _part_of_the_peak(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise OptionError(
            f"option {name!r} takes a fraction of the peak, a number not below 0 (0.05 for 5%), not {value!r}"
        )
    return float(value)


def _bytes_or_no_bound(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise OptionError(f"option {name!r} takes a number of bytes from 1, or None for no limit, not {value!r}")
    return value


def _when_to_gather_again(name: str, value: Any) -> Any:
    bytes_ = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not bytes_ and value not in (None, "always", "never"):
        raise OptionError(f"option {name!r} takes 'always', 'never', a number of bytes from 0, or None, not {value!r}")
    return value


def _folder(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, (str, os.PathLike)) and str(value)):
        raise OptionError(f"option {name!r} takes the path of a folder, or None, not {value!r}")
    return None if value is None else os.fspath(value)


def _cluster(name: str, value: Any) -> Cluster | None:
    try:
        return value if value is None or isinstance(value, Cluster) else topology(value)
    except (TopologyError, TypeError) as error:
        raise OptionError(f"option {name!r}: {error}") from error


def _choice(name: str, value: Any) -> Any:
    if value not in _CHOICES[name]:
        raise OptionError(f"option {name!r} takes one of {', '.join(map(repr, _CHOICES[name]))}, not {value!r}")
    return value


def _pass_names(name: str, value: Any) -> Any:
    names = (
        (value,)
        if isinstance(value, str)
        else tuple(value)
        if isinstance(value, (list, tuple, set, frozenset))
        else None
    )
    unknown = [n for n in names if n not in PASS_NAMES[name]] if names is not None else [value]
    if unknown:
        raise OptionError(
            f"option {name!r} takes a list of pass names, not {unknown[0]!r}; the passes are: "
            f"{', '.join(PASS_NAMES[name])}"
        )
    return names


#: Check of the value of an option; other options take one of `_CHOICES`, or names of passes.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "capture": _flag,
    "strict": _flag,
    "schedule": _flag,
    "overlap_memory": _part_of_the_peak,
    "redistribution_memory": _bytes_or_no_bound,
    "artifacts": _folder,
    "regather": _when_to_gather_again,
    "topology": _cluster,
}
