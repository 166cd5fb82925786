"""Random programs over DTensors: what the fuzzer makes, as text, and how one is compared with eager.

A program is text, so that one that differs can be printed, made smaller line by line, and kept as a test. Lines are
tried in eager as they are made, on a simulated job, and those that eager refuses are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import linecache
import math
import random
import re
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.store.ledger import current_ledger
from dtensor_compile.testing import Difference, compare_values, make_mesh
from dtensor_compile.testing.bisect import pass_names
from dtensor_compile.testing.parity import Allowed, Case, Settings, of_all_ranks, sum_of_squares

MESHES = [(2,), (2,), (2, 1), (1, 2), (4,), (2, 2), (1, 2, 2), (2, 1, 2)]
SIZES = [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
FLOATS = ["torch.float32"] * 6 + ["torch.float64", "torch.bfloat16"]


@dataclass(frozen=True)
class Program:
    """
    Attributes:
        mesh: shape; its dims are called d0, d1, ...
        inputs: expressions that make an argument each, called a0, a1, ...
        lines: statements ``v0 = ...``.
        outputs: names of what is returned.
        dynamic: for ``torch.compile``.
    """

    mesh: tuple[int, ...]
    inputs: tuple[str, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    dynamic: bool | None = None

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    @property
    def source(self) -> str:
        """The function."""
        arguments = ", ".join(f"a{i}" for i in range(len(self.inputs)))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({arguments}):\n{body}    return {', '.join(self.outputs)}\n"

    def __str__(self) -> str:
        dynamic = f", dynamic={self.dynamic}" if self.dynamic is not None else ""
        return "\n".join(
            [f"mesh {self.mesh}{dynamic}", *(f"a{i} = {text}" for i, text in enumerate(self.inputs)), self.source]
        )

    def computed_in(self, kernels: str) -> torch.dtype | None:
        """The dtype whose rounding may show in results of any: of bfloat16, and of sums in float32, which Inductor adds
        in an order of its own."""
        if "bfloat16" in str(self):
            return torch.bfloat16
        return torch.float32 if kernels == "inductor" and "float32" in str(self) else None


# ---- what inputs are made of; the names that the text uses ---------------------------------------------------------


def tensor(
    mesh: Any, seed: int, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Any], grad: bool
) -> DTensor:
    """A DTensor of random values, the same global tensor on every rank; partial mesh dims hold a different term on
    each.
    """
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(full, mesh, whole, src_data_rank=None).to_local()
    terms = [c for c, p in zip(mesh.get_coordinate(), placements) if p.is_partial()]
    if terms:
        local = local * (1 + sum(terms) % 3)  # replicas of a term are equal
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    return made.detach().requires_grad_(grad)


def indices(mesh: Any, seed: int, shape: Sequence[int], limit: int, placements: Sequence[Any]) -> DTensor:
    """A DTensor of integers below `limit`."""
    full = torch.randint(limit, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def namespace(shape: tuple[int, ...]) -> dict[str, Any]:
    """The globals of a program."""
    mesh = make_mesh(shape, tuple(f"d{i}" for i in range(len(shape))))
    return {
        "torch": torch, "F": F, "DTensor": DTensor, "Partial": Partial, "Replicate": Replicate, "Shard": Shard,
        "mesh": mesh, "tensor": tensor, "indices": indices,
    }  # fmt: skip


# ---- making programs -----------------------------------------------------------------------------------------------


class Maker:
    """Makes one program, line by line.

    Args:
        draw: the source of choices.
        names: globals of the program.
    """

    def __init__(self, draw: random.Random, mesh: tuple[int, ...], names: dict[str, Any]) -> None:
        self.draw, self.mesh, self.names = draw, mesh, dict(names)
        self.inputs: list[str] = []
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}

    def placements(self, dims: int, mesh_dims: int, partial: float = 0.1) -> str:
        kinds = []
        for _ in range(mesh_dims):
            at = self.draw.random()
            if at < partial:
                kinds.append("Partial()")
            elif at < 0.7 and dims:
                kinds.append(f"Shard({self.draw.randrange(dims)})")
            else:
                kinds.append("Replicate()")
        return f"[{', '.join(kinds)}]"

    def shape(self) -> list[int]:
        shape = [self.draw.choice(SIZES) for _ in range(self.draw.choice([1, 2, 2, 2, 3, 3, 4]))]
        if self.draw.random() < 0.03:
            shape[0] = 0
        return shape

    def make_inputs(self) -> None:
        base = self.shape()
        for i in range(self.draw.choice([1, 2, 2, 3])):
            shape = base if i == 0 or self.draw.random() < 0.5 else self.shape()
            mesh, dims = "mesh", len(self.mesh)
            if dims > 1 and self.draw.random() < 0.12:
                mesh, dims = f'mesh["d{self.draw.randrange(dims)}"]', 1
            dtype = self.draw.choice(FLOATS) if i == 0 or self.draw.random() < 0.2 else "torch.float32"
            grad = self.draw.random() < 0.75
            self.add_input(f"tensor({mesh}, {i}, {shape}, {dtype}, {self.placements(len(shape), dims)}, {grad})")

    def add_input(self, text: str) -> str:
        name = f"a{len(self.inputs)}"
        self.values[name] = eval(text, self.names)
        self.inputs.append(text)
        return name

    def add(self, expression: str) -> bool:
        """Adds a line, where eager runs it."""
        name = f"v{len(self.lines)}"
        try:
            with _within_cpu_seconds(5):  # torch looks for ever for the groups of dims of some views of empty tensors
                value = eval(expression, {**self.names, **self.values})
        except Exception:  # noqa: BLE001 - whatever eager refuses
            return False
        if not isinstance(value, torch.Tensor) or value.numel() > 20_000:
            return False
        self.values[name] = value
        self.lines.append(f"{name} = {expression}")
        return True

    def some(self, **wanted: Callable[[Any], bool]) -> str | None:
        """The name of a value for which all conditions hold, recent ones more often than others."""
        names = [n for n, v in self.values.items() if all(test(v) for test in wanted.values())]
        if not names:
            return None
        return names[-1] if self.draw.random() < 0.5 else self.draw.choice(names)

    def make_line(self) -> bool:
        kind = self.draw.choice(_KINDS)
        name = self.some(floating=_floating)
        return name is not None and self.add(kind(self, name, self.values[name]))


@contextlib.contextmanager
def _within_cpu_seconds(limit: float) -> Iterator[None]:
    """Raises `TimeoutError` where this process works longer than that."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _floating(value: Any) -> bool:
    return bool(value.is_floating_point())


def _pointwise(make: Maker, x: str, value: Any) -> str:
    forms = [
        "torch.relu({})",
        "F.gelu({})",
        "torch.tanh({})",
        "-{}",
        "{} * 2",
        "{} + 1",
        "torch.sigmoid({})",
        "{}.abs()",
    ]
    forms += [
        "F.dropout({}, 0.5)",
        "{}.clone()",
        "1 - {}",
        "({} * 1).add_(1)",
        "{}.detach()",
        "torch.where({0} > 0, {0}, -{0})",
    ]
    return make.draw.choice(forms).format(x)


def _binary(make: Maker, x: str, value: Any) -> str:
    def fits(other: Any) -> bool:
        if not (other.is_floating_point() and other.dtype == value.dtype or make.draw.random() < 0.1):
            return False
        pairs = zip(reversed(other.shape), reversed(value.shape))
        return all(a == b or 1 in (a, b) for a, b in pairs)

    y = make.some(fits=fits) or x
    return make.draw.choice(
        ["{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "torch.add({}, {}, alpha=3)"]
    ).format(x, y)


def _dim(make: Maker, value: Any) -> int:
    return make.draw.randrange(max(1, value.dim()))


def _reduction(make: Maker, x: str, value: Any) -> str:
    dim, keep = _dim(make, value), make.draw.random() < 0.5
    forms = [
        "{x}.sum({d}, keepdim={k})",
        "{x}.mean({d}, keepdim={k})",
        "{x}.amax({d}, keepdim={k})",
        "{x}.sum()",
        "{x}.mean()",
    ]
    forms += ["F.softmax({x}, {d})", "F.log_softmax({x}, {d})", "{x}.cumsum({d})", "{x}.var({d})", "{x}.norm()"]
    forms += ["{x}.max({d})[0]", "F.layer_norm({x}, {x}.shape[{d}:])", "F.rms_norm({x}, {x}.shape[-1:])"]
    forms += ["torch.linalg.vector_norm({x}, dim={d})"]
    return make.draw.choice(forms).format(x=x, d=dim, k=keep)


def _view(make: Maker, x: str, value: Any) -> str:
    dim, other = _dim(make, value), _dim(make, value)
    size = value.shape[dim] if value.dim() else 1
    start = make.draw.randrange(max(1, size))
    shape = list(value.shape)
    merged = shape[:dim] + [math.prod(shape[dim : dim + 2])] + shape[dim + 2 :]
    factor = make.draw.choice([2, 3, 4])
    split = shape[:dim] + [size // factor, factor] + shape[dim + 1 :]
    if not value.numel():
        return f"{x}.transpose({dim}, {other})"  # most other views of empty tensors do not come to an end in torch
    return make.draw.choice(
        [
            f"{x}.transpose({dim}, {other})", f"{x}.reshape({merged})", f"{x}.view({split})", f"{x}.unsqueeze({dim})",
            f"{x}.squeeze()", f"{x}.narrow({dim}, {start}, {max(1, (size - start) // 2)})",
            f"{x}.select({dim}, {start})", f"{x}.flatten()", f"{x}.expand({[2, *shape]})", f"{x}.contiguous()",
            f"{x}.chunk(2, {dim})[0]", f"{x}.flip({dim})",
            f"torch.cat([{x}, {x}], {dim})", f"torch.stack([{x}, {x} * 2], {dim})", f"F.pad({x}, (1, 0))", f"{x}.t()",
            f"{x}[..., :1]", f"{x}.movedim({dim}, {other})", f"{x}.tril()", f"{x}.unbind({dim})[0]",
            f"torch.split({x}, 2, {dim})[0]",
        ]
    )  # fmt: skip


def _matmul(make: Maker, x: str, value: Any) -> str:
    if value.dim() == 0:
        return f"{x} * {x}"
    inner = value.shape[-1]

    def fits(other: Any) -> bool:
        return other.dim() in (2, value.dim()) and other.dtype == value.dtype and inner in other.shape[-2:]

    y = make.some(fits=fits)
    if y is None or make.draw.random() < 0.3:
        grad, seed, out = make.draw.random() < 0.7, len(make.inputs), make.draw.choice(SIZES)
        placements = make.placements(2, len(make.mesh))
        y = make.add_input(f"tensor(mesh, {seed}, {[out, inner]}, {value.dtype}, {placements}, {grad})")
    other = make.values[y]
    if other.dim() == 2 and other.shape[-1] == inner:
        return make.draw.choice([f"F.linear({x}, {y})", f"{x} @ {y}.t()", f"torch.matmul({x}, {y}.transpose(-1, -2))"])
    return f"{x} @ {y}"


def _lookup(make: Maker, x: str, value: Any) -> str:
    if value.dim() != 2 or not value.shape[0]:
        return f"{x} + {x}"
    shape = [make.draw.choice(SIZES) for _ in range(make.draw.choice([1, 2]))]
    placements = make.placements(len(shape), len(make.mesh), partial=0)
    i = make.add_input(f"indices(mesh, {len(make.inputs)}, {shape}, {value.shape[0]}, {placements})")
    return make.draw.choice([f"F.embedding({i}, {x})", f"F.embedding({i}, {x})", f"{x}.index_select(0, {i}.flatten())"])


def _convolution(make: Maker, x: str, value: Any) -> str:
    if value.dim() not in (3, 4) or value.dtype != torch.float32:
        return f"{x} * 3"
    kernel = [3, value.shape[1], *[3] * (value.dim() - 2)]
    placements = make.placements(0, len(make.mesh), 0)
    w = make.add_input(f"tensor(mesh, {len(make.inputs)}, {kernel}, torch.float32, {placements}, True)")
    return f"F.conv{value.dim() - 2}d({x}, {w}, padding=1)"


def _cast(make: Maker, x: str, value: Any) -> str:
    return f"{x}.to({make.draw.choice(['torch.bfloat16', 'torch.float32', 'torch.float32', 'torch.float64'])})"


def _redistribute(make: Maker, x: str, value: Any) -> str:
    return f"{x}.redistribute(placements={make.placements(value.dim(), value.device_mesh.ndim)})"


def _local(make: Maker, x: str, value: Any) -> str:
    function = make.draw.choice(["{} * 2", "torch.tanh({})", "{}.clone()", "{}"]).format(f"{x}.to_local()")
    how = f"{x}.device_mesh, {x}.placements, run_check=False, shape={x}.shape, stride={x}.stride()"
    return f"DTensor.from_local({function}, {how})"


_KINDS = [
    *[_pointwise] * 4, *[_binary] * 5, *[_reduction] * 3, *[_view] * 5, *[_matmul] * 4, _lookup, _convolution, _cast,
    *[_redistribute] * 7, _local,
]  # fmt: skip


def make_program(draw: random.Random, meshes: Sequence[tuple[int, ...]] = MESHES, lines: int = 8) -> Program | None:
    """A program of up to `lines` lines for one of `meshes`; needs a simulated job with as many ranks as the largest
    has.

    Returns:
        None where no line came about.
    """
    mesh = draw.choice(list(meshes))
    make = Maker(draw, mesh, namespace(mesh))
    make.make_inputs()
    wanted = draw.randrange(2, lines + 1)
    for _ in range(3 * wanted):
        make.make_line()
        if len(make.lines) >= wanted:
            break
    if not make.lines:
        return None
    names = [line.partition(" ")[0] for line in make.lines]
    outputs = sorted({names[-1], *(name for name in names if draw.random() < 0.2)})
    dynamic = draw.choice([None, None, None, None, True])
    return Program(mesh, tuple(make.inputs), tuple(make.lines), tuple(outputs), dynamic)


# ---- comparing -----------------------------------------------------------------------------------------------------


def case_of_program(program: Program, calls: int = 2, kernels: str = "aten") -> Case:
    file = f"<program {zlib.crc32(program.source.encode()):x}>"
    linecache.cache[file] = (len(program.source), None, program.source.splitlines(True), file)
    code = compile(program.source, file, "exec")

    def make() -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        names = namespace(program.mesh)
        exec(code, names)
        return names["program"], [eval(text, names) for text in program.inputs], {}

    return Case(make, loss=sum_of_squares, calls=calls, backwards=2, allowed=Allowed(program.computed_in(kernels)))


def settings_of(program: Program, kernels: str = "aten") -> dict[str, Settings]:
    """All passes together, and each alone."""
    every = Settings("dtensor", dynamic=program.dynamic, options={"kernels": kernels, "strict": True})
    names = pass_names(every)
    return {
        "all": every,
        **{f"{n} alone": every.with_options(disable_passes=tuple(m for m in names if m != n)) for n in names},
    }


def check_program(program: Program, variants: Sequence[str] = ("all",), kernels: str = "aten") -> list[str]:
    """Runs a program on the ranks of this job, eager and compiled; returns what differs, on all ranks the same list.

    Raises:
        Refused: eager raises on every rank.
        RefusedBySome: on some ranks only.
    """
    case, every = case_of_program(program, kernels=kernels), settings_of(program, kernels)
    eager = _attempt(lambda: case.run(Settings(eager=True)))
    _raise_if_refused(eager)
    found: list[str] = []
    for variant in variants:
        compiled = _attempt(lambda: case.run(every[variant]))
        if isinstance(compiled, str):
            differences = [Difference("raises", "", compiled, rank=dist.get_rank())]
        else:
            differences = [
                d for key in eager for d in compare_values(key, eager[key], compiled[key], allowed=case.allowed)
            ]
        found += [f"{variant}: {d}" for d in of_all_ranks(differences)]
    return found


class Refused(Exception):
    """Eager does not run the program."""


class RefusedBySome(Exception):
    """Eager does not run the program on some ranks, and does on others."""


def _attempt(run: Callable[[], dict[str, Any]]) -> Any:
    try:
        return run()
    except Exception:  # noqa: BLE001 - reported to the other ranks
        return traceback.format_exc()[-2500:]


def _raise_if_refused(result: Any) -> None:
    """Raises `Refused` where eager raised on every rank of the job.

    Ranks ask each other through the store: where eager raised on some of them only, the others may be in the middle of
    a collective, and the next one would meet it.

    Raises:
        RefusedBySome: eager raised on some ranks only; the job is of no use any more.
    """
    ledger, outcome = current_ledger(), "refused" if isinstance(result, str) else "ran"
    if ledger is not None:
        everyone = tuple(range(dist.get_world_size()))
        number = _asked[ledger.epoch] = _asked.get(ledger.epoch, 0) + 1
        keys = [ledger.key(everyone, "refused", number, rank) for rank in everyone]
        ledger.store.set(keys[dist.get_rank()], outcome)
        try:
            ledger.store.wait(keys, PATIENCE)
        except RuntimeError:  # which one depends on the store
            raise RefusedBySome(result if isinstance(result, str) else "another rank did not finish in eager") from None
        if {ledger.store.get(key) for key in keys} == {b"ran", b"refused"}:
            raise RefusedBySome(result if isinstance(result, str) else "another rank raised in eager")
    if isinstance(result, str):
        raise Refused(result)


#: How often ranks have asked each other, by the epoch of the job's ledger.
_asked: dict[int, int] = {}

#: How long a rank waits for what eager does on the others.
PATIENCE = datetime.timedelta(seconds=10)


def verdict(program: Program, variants: Sequence[str] = ("all",), kernels: str = "aten") -> tuple[str, list[str]]:
    """``"equal"``, ``"differs"`` or ``"refused"``, and what differs; for the ranks of a job."""
    try:
        found = check_program(program, variants, kernels)
    except Refused as refusal:
        return "refused", [str(refusal)]
    return ("differs" if found else "equal"), found


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one line, output or input less; not all of them run."""
    for i in reversed(range(len(program.lines))):
        name, _, expression = program.lines[i].partition(" = ")
        rest = program.lines[:i] + program.lines[i + 1 :]
        used = any(_uses(line.partition(" = ")[2], name) for line in rest)
        outputs = tuple(o for o in program.outputs if o != name) or ((rest[-1].partition(" ")[0],) if rest else ())
        if not used and outputs:
            yield dataclasses.replace(program, lines=rest, outputs=outputs)
    for output in program.outputs:
        if len(program.outputs) > 1:
            yield dataclasses.replace(program, outputs=tuple(o for o in program.outputs if o != output))
    if program.dynamic is not None:
        yield dataclasses.replace(program, dynamic=None)


def _uses(expression: str, name: str) -> bool:
    return name in re.findall(r"\w+", expression)
