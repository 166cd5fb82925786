"""Twenty operators over fifty pairs of placements on three meshes: a program for every operator and mesh, with a line a
pair.

The sizes divide by some meshes and not by others; each result is used as it comes and redistributed.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtensor_compile.testing.local import compare_locally, run_eager
from tests.fuzz.programs import Program, case_of_program, settings_of

MESHES = [(2,), (3,), (2, 2)]
SHAPE = [4, 6, 8]
#: The loss is a sum of squares, which is constant for what is normalized: gradients that are all rounding say nothing.
OPERATORS = {
    "add": "{x} + {y}",
    "mul": "{x} * {y}",
    "where": "torch.where({x} > 0, {x}, {y})",
    "maximum": "torch.maximum({x}, {y})",
    "bmm": "{x} @ {y}.transpose(-1, -2)",
    "linear": "F.linear({x}, {y}.select(0, 0))",
    "softmax": "F.softmax({x} + {y}, -1)",
    "layer_norm": "F.layer_norm({x} * {y}, (8,)) + {y}",
    "gelu": "F.gelu({x}) + {y}",
    "sum": "({x} + {y}).sum(1)",
    "mean": "({x} * {y}).mean((0, 2))",
    "amax": "{x}.amax(1) + {y}.amax(1)",
    "transpose": "({x} + {y}).transpose(0, 2).contiguous()",
    "cat": "torch.cat([{x}, {y}], 1)",
    "stack": "torch.stack([{x}, {y}], 0)",
    "flatten": "({x} + {y}).flatten(0, 1)",
    "view": "({x} * {y}).view(4, 6, 2, 4)",
    "narrow": "{x}.narrow(1, 1, 3) + {y}.narrow(1, 2, 3)",
    "mm": "{x}.flatten(0, 1).t() @ {y}.flatten(0, 1)",
    "embedding": "F.embedding(i, {x}.select(1, 0)) + {y}.mean()",
}

_PLAIN = ["Shard(0)", "Shard(1)", "Shard(2)", "Replicate()", "Partial()"]
_PARTIAL = ['Partial("avg")', 'Partial("max")', 'Partial("min")']
PAIRS = 50


def pairs(mesh_dims: int) -> list[tuple[str, str]]:
    """Fifty pairs of placements of two tensors, over one or two mesh dims; the same ones each time.

    On one mesh dim all pairs of shards, replicas and sums, and half of those with other reductions; on two each of the
    25 placements of a tensor with two others.
    """
    if mesh_dims == 1:
        rest = [(a, b) for a, b in itertools.product([*_PLAIN, *_PARTIAL], repeat=2) if a in _PARTIAL or b in _PARTIAL]
        chosen = [*itertools.product(_PLAIN, repeat=2), *(rest[i * len(rest) // 25] for i in range(25))]
        return [(f"[{a}]", f"[{b}]") for a, b in chosen]
    each = [f"[{', '.join(of_dims)}]" for of_dims in itertools.product(_PLAIN, repeat=mesh_dims)]
    return [(each[i % len(each)], each[(7 * i + 3 * (i // len(each))) % len(each)]) for i in range(PAIRS)]


def make_program(operator: str, mesh: tuple[int, ...], which: Sequence[int] = range(PAIRS)) -> Program:
    """The program of an operator on a mesh, with the pairs of these numbers: ``u3`` is the result for pair 3, ``v3``
    that redistributed."""
    inputs, lines, outputs = [], [], []
    for k, number in enumerate(which):
        x, y = pairs(len(mesh))[number]
        into = f"Shard({number % 2})"
        target = ", ".join("Replicate()" if (number + dim) % 3 == 0 else into for dim in range(len(mesh)))
        inputs += [f"tensor(mesh, {2 * number + j}, {SHAPE}, torch.float32, {p}, True)" for j, p in enumerate((x, y))]
        lines.append(f"u{number} = {OPERATORS[operator].format(x=f'a{2 * k}', y=f'a{2 * k + 1}')}")
        target = target if operator != "mean" else target.replace("Shard(1)", "Shard(0)")
        lines.append(f"v{number} = u{number}.redistribute(placements=[{target}])")
        outputs += [f"u{number}", f"v{number}"]
    if operator == "embedding":
        inputs.append(f"indices(mesh, {2 * PAIRS}, [3, 4], 4, {[*['Replicate()'] * len(mesh)]})".replace("'", ""))
        lines.insert(0, f"i = a{len(inputs) - 1}")
    return Program(mesh, tuple(inputs), tuple(lines), tuple(outputs))


@dataclass
class Outcome:
    """What came of some pairs for one operator on one mesh.

    Attributes:
        equal, refused: pairs for which compiled is eager, and those that eager, on ``LocalTensor``, does not run.
        wrong: what differs, or why it does not compile, for each of the others.
    """

    equal: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    wrong: dict[int, list[str]] = field(default_factory=dict)


def check(operator: str, mesh: tuple[int, ...], which: Sequence[int] = range(PAIRS)) -> Outcome:
    """Compares the pairs of these numbers, forward and backward, in one program; where that is wrong, in two halves."""
    program = make_program(operator, mesh, which)
    case, settings = case_of_program(program, calls=1), settings_of(program)["all"]
    eager = run_eager(case, program.world)
    if not eager.refused:
        try:
            found = [str(d) for d in compare_locally(case, program.world, settings, eager).differences]
        except Exception:  # noqa: BLE001 - reported with the pair that does it
            found = [traceback.format_exc()[-1500:]]
        if not found:
            return Outcome(equal=list(which))
        if len(which) == 1:
            return Outcome(wrong={which[0]: found})
    elif len(which) == 1:
        return Outcome(refused=list(which))
    if eager.refused:  # one after the other: eager is fast
        alone = {n: case_of_program(make_program(operator, mesh, [n]), calls=1) for n in which}
        none = [n for n, one in alone.items() if run_eager(one, program.world).refused]
        rest = [n for n in which if n not in none]
        halves = [Outcome(refused=none), *([check(operator, mesh, rest)] if none and rest else [])]
        if not none:
            message = f"eager runs each of {list(which)}, and not all in one program: {eager.refused}"
            return Outcome(wrong={which[0]: [message]})
    else:
        halves = [check(operator, mesh, half) for half in (which[: len(which) // 2], which[len(which) // 2 :])]
    total = Outcome()
    for part in halves:
        total.equal += part.equal
        total.refused += part.refused
        total.wrong |= part.wrong
    return total
