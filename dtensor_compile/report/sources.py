"""Lines of the user's program, with their surroundings."""

from __future__ import annotations

import functools
import linecache
import os
import re
from collections.abc import Sequence

import torch

from dtensor_compile.report.model import Source

_WHERE = re.compile(r"(?P<file>.*?):(?P<line>\d+): (?P<code>.*)", re.S)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEMO = os.path.join(_OURS, "demo") + os.sep

#: Lines of the program that a report shows on either side.
AROUND = 2


@functools.lru_cache(maxsize=4096)
def source_at(file: str, line: int, code: str = "") -> Source:
    """The line `line` of `file`, with the lines around it if the file can be read."""
    lines = linecache.getlines(file)
    here = code or (lines[line - 1].strip() if 0 < line <= len(lines) else "")
    around, above = [text.rstrip("\n") for text in lines], max(0, line - 1)
    return Source(file, line, here, tuple(around[max(0, above - AROUND) : above]), tuple(around[line : line + AROUND]))


def source_of(where: str) -> Source:
    """The line named by ``file:line: code``; an unknown one for other text."""
    match = _WHERE.fullmatch(where)
    return source_at(match["file"], int(match["line"]), match["code"].strip()) if match else Source()


def is_users(file: str) -> bool:
    """Whether a file belongs to the user's program: not to torch, nor to this package."""
    return not file.startswith(("<frozen", _TORCH)) and (not file.startswith(_OURS) or file.startswith(_DEMO))


def users_line(stack: Sequence[tuple[str, int, str]]) -> Source:
    """The innermost frame of the user's program; the innermost of all if there is none. Frames are
    ``(file, line, code)``.
    """
    own = [frame for frame in stack if is_users(frame[0])] or list(stack)
    return source_at(*own[-1]) if own else Source()
