"""Reading redistribute nodes: the one place that knows the order of their arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dtensor_compile.capture.redistribute import redistribute_op

#: Key of a node's ``meta``: under which number a recording knows the redistribution, also when it has become collectives.
RECORDED_AS = "dtensor_compile_recorded_as"


class Redistribution(NamedTuple):
    """Arguments of a redistribute node."""

    local: torch.fx.Node
    source: str
    target: str
    mesh: str
    shape: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


def redistributions(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The redistribute nodes of a graph in order."""
    return iter([node for node in graph.nodes if is_redistribution(node)])


def is_redistribution(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target is redistribute_op


def read(node: torch.fx.Node) -> Redistribution:
    """Arguments of a redistribute node."""
    local, source, target, mesh, shape = node.args
    return Redistribution(local, source, target, mesh, tuple(shape))  # type: ignore[arg-type]


_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def source_line(node: torch.fx.Node) -> str:
    """The user's line that caused a node, ``file:line: code``; for a node of the backward that of its forward operator."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    file, line, code = (own or frames)[-1]
    return f"{file}:{line}: {code.strip()}"
