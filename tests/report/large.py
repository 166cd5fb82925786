"""A report of many layers, made by hand, with as many rows as a step of a large model has."""

import dataclasses

from dtensor_compile.report.model import (
    VERSION,
    Collective,
    DecisionRow,
    Graph,
    Redistribution,
    Report,
    Side,
    Source,
    Span,
    Total,
    Totals,
)

FILE = "/user/model.py"
#: Per layer and phase: what a layer of the example has on a 2-D mesh.
OPERATORS = {"forward": 60, "backward": 110}
CHANGES = 16


def source(line: int) -> Source:
    return Source(
        FILE, line, f"y{line} = self.linear{line}(x{line})", (f"# before {line}", ""), ("", f"# after {line}")
    )


def large_side(layers: int, name: str = "dtensor") -> Side:
    """One side: per layer `CHANGES` redistributions, each with its collective, among operators."""
    redistributions, collectives, missed, graphs = [], [], [], []
    for number, (phase, operators) in enumerate(OPERATORS.items()):
        spans, now = [], 0.0
        for layer in range(layers):
            for i in range(operators):
                module, seconds = f"layers.{layer}.block{i % 5}.linear", 1e-6 * (1 + i % 7) + layer * 1e-9
                spans.append(Span(f"aten.operator{i % 12}", "compute", now, seconds, f"{FILE}:{10 + i % 40}", module))
                now += seconds
            for i in range(CHANGES // 2):
                module, line, size = f"layers.{layer}.block{i % 5}.linear", source(10 + 3 * i), 1_000_000 + 1000 * i
                kind, seconds = ("all_gather" if i % 2 else "reduce_scatter"), 2e-6 + i * 1e-7
                redistributions.append(
                    Redistribution(
                        line,
                        module,
                        bool(i % 3),
                        "" if i % 3 else "aten.mm.default",
                        "S(0)",
                        "R",
                        (4096, 4096),
                        "bfloat16",
                        "cpu[dp=4:2,tp=2:1]@8",
                        ("tp",),
                        (f"{kind}[tp] S(0)->R",),
                        phase,
                        "sent",
                        size,
                        size,
                        seconds,
                        seconds / 2,
                    )  # fmt: skip
                )
                collectives.append(
                    Collective(
                        kind,
                        "tp",
                        2,
                        line,
                        module,
                        (2048, 4096),
                        "bfloat16",
                        phase,
                        size,
                        seconds,
                        seconds / 2,
                        number,
                        len(redistributions) - 1,
                    )  # fmt: skip
                )
                place = f"{FILE}:{line.line}"
                spans.append(Span(kind, "communication", now, seconds, place, module, len(collectives) - 1))
                now += seconds
                reason = (
                    "its result is waited for at once: nothing stands between its start and its wait "
                    f"({seconds / 2:.9f} s)"
                )
                missed.append(DecisionRow("overlap", line, reason, f"{kind}[tp]", f"{kind}[tp]"))
        graphs.append(Graph("forward", phase, len(spans), now, now / 10, now / 20, now, tuple(spans)))
    sent = sum(c.bytes for c in collectives)
    total = Total(
        "all", len(collectives), sent, sum(c.seconds for c in collectives), sum(c.exposed_seconds for c in collectives)
    )
    return Side(
        name, (), (), tuple(redistributions), tuple(collectives), (), tuple(missed), tuple(graphs), Totals(total), 10.0,
    )  # fmt: skip


def large_report(layers: int) -> Report:
    """Both sides; stock knows of no redistributions."""
    stock = large_side(layers, "stock")
    collectives = tuple(dataclasses.replace(c, redistribution=None) for c in stock.collectives)
    stock = dataclasses.replace(stock, redistributions=(), collectives=collectives)
    return Report(VERSION, "model.py:build", "2.13.0", 8, 0, True, "h100", large_side(layers), stock)
