"""Excerpts of the program for a report page: lines with costs or breaks, with their surroundings.

Input: the lines of a report. Output: per file the excerpts that contain them. An excerpt ends with the function of its
line, so that a short function is shown in full. If a file cannot be read, or has changed since, only the lines stored
in the report are shown.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtensor_compile.report.model import Source

#: Lines on either side of a line with costs.
AROUND = 8


@dataclass(frozen=True)
class Excerpt:
    """Consecutive lines of a file; the first has the number `first`, counted from 1."""

    first: int
    lines: tuple[str, ...]


def excerpts(sources: Iterable[Source]) -> dict[str, tuple[Excerpt, ...]]:
    """Per file the excerpts that contain `sources`, in line order; unknown lines are left out."""
    by_file: dict[str, dict[int, Source]] = {}
    for source in sources:
        if source.file and source.line > 0:
            by_file.setdefault(source.file, {})[source.line] = source
    return {file: _excerpts_of(file, lines) for file, lines in by_file.items()}


def _excerpts_of(file: str, sources: dict[int, Source]) -> tuple[Excerpt, ...]:
    text = [line.rstrip("\n") for line in linecache.getlines(file)]
    shown: dict[int, str] = {}
    functions = _functions("\n".join(text)) if text else []
    for line, source in sources.items():
        if line <= len(text) and _is_part(source.code, text, line):
            first, last = _function_around(line, functions) or (1, len(text))
            shown.update((n, text[n - 1]) for n in range(max(first, line - AROUND), min(last, line + AROUND) + 1))
        else:
            above = line - len(source.before)
            shown.update(enumerate((*source.before, source.code, *source.after), above))
    return tuple(_joined(shown))


def _is_part(code: str, text: Sequence[str], line: int) -> bool:
    """Whether the file still has `code` at `line`. For a statement over several lines `code` may be all of them."""
    here = text[line - 1].strip()
    return not code.strip() or (bool(here) and (code.split("\n", maxsplit=1)[0].strip() in here or here in code))


def _functions(text: str) -> list[tuple[int, int]]:
    """First and last line of each function, decorators included."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # no Python, or that of another release
        return []
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.end_lineno or n.lineno) for n in nodes]


def _function_around(line: int, functions: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The smallest function that contains `line`."""
    return min((f for f in functions if f[0] <= line <= f[1]), key=lambda f: f[1] - f[0], default=None)


def _joined(shown: dict[int, str]) -> Iterable[Excerpt]:
    """Numbered lines as excerpts, one for each run of consecutive numbers."""
    run: list[int] = []
    for number in [*sorted(shown), None]:
        if run and number != run[-1] + 1:
            yield Excerpt(run[0], tuple(shown[n] for n in run))
            run = []
        if number is not None:
            run.append(number)
