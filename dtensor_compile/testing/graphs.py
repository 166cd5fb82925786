"""Graphs as short text, for golden tests: one line per node, redistributions with their specs, collectives without
group names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor_compile.graph.nodes import is_redistribution, redistribution_of, starts_collective


def graph_text(graph: torch.fx.Graph) -> str:
    """One line per node. Metadata, group names and overload names of aten are left out, so that the text is readable
    and stable.
    """
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_shape(node)}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0])}")
        elif is_redistribution(node):
            this = redistribution_of(node)
            lines.append(f"{node.name}: {_shape(node)} = redistribute({this.local.name}, {this})")
        else:
            name = getattr(node.target, "_schema", None)
            target = name.name.split("::")[-1] if name else getattr(node.target, "__name__", str(node.target))
            args = node.args
            if starts_collective(node):
                args = args[:-1]
            text = ", ".join([*map(_argument, args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())])
            lines.append(f"{node.name}: {_shape(node)} = {target}({text})")
    return "\n".join(lines) + "\n"


def _shape(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    return f"[{', '.join(map(str, value.shape))}]" if isinstance(value, torch.Tensor) else type(value).__name__


def _argument(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return str(value)


def captured_graph(
    function: Callable[..., Any], *args: Any, stage: str = "captured", options: dict[str, Any] | None = None
) -> str:
    """Text of the joint graph of ``function(*args)`` before the passes (``"captured"``), after (``"planned"``), or of
    the last graph that was lowered (``"lowered"``).

    Raises:
        ValueError: there is no such stage.
    """
    from dtensor_compile.recording.recorder import watch_graphs

    texts: dict[str, str] = {}

    def keep(name: str, graph: torch.fx.Graph) -> None:
        texts[name] = graph_text(graph)

    torch.compiler.reset()
    with watch_graphs(keep):
        torch.compile(function, backend="dtensor", fullgraph=True, options=options)(*args)
    if stage not in texts:
        raise ValueError(f"no stage {stage!r}; stages: {', '.join(texts)}")
    return texts[stage]
