"""A small report, made by hand, for tests of what reads reports."""

import dataclasses

from dtensor_compile.report.model import (
    VERSION,
    Collective,
    DecisionRow,
    Graph,
    GraphBreak,
    LayerTime,
    Recompile,
    Redistribution,
    Report,
    Side,
    Source,
    Span,
    StageTime,
    Total,
    Totals,
)

LINE = Source(
    "/user/model.py", 12, "y = x.redistribute(placements=[Replicate()])", ("def forward(self, x):", ""), ("return y",)
)


def sample_side(name: str = "dtensor", scale: int = 1, breaks: int = 1) -> Side:
    """One side with an all-gather that is sent, `scale` times 1000 bytes, and one redistribution that a pass
    removed.
    """
    sent = Redistribution(
        LINE, "blocks.0", False, "aten.mm.default", "S(0)", "R", (8, 4), "float32", "cpu[tp=2:1]@2", ("tp",),
        ("all_gather[tp] S(0)->R",), "forward", "sent", 1000 * scale, 1000 * scale, 2e-3 * scale, 1e-3 * scale,
    )  # fmt: skip
    nothing = {"bytes": 0, "seconds": 0.0, "exposed_seconds": 0.0}
    removed = dataclasses.replace(sent, fate="removed", decided_by="cancel_inverse_pairs", **nothing)
    gather = Collective(
        "all_gather",
        "tp",
        2,
        LINE,
        "blocks.0",
        (4, 4),
        "float32",
        "forward",
        1000 * scale,
        2e-3 * scale,
        1e-3 * scale,
        0,
        0,
    )
    total = Total("all", 1, 1000 * scale, 2e-3 * scale, 1e-3 * scale)
    named = {"by_phase": "forward", "by_kind": "all_gather", "by_mesh_dim": "tp", "by_module": "blocks.0"}
    spans = (
        Span("aten.mm", "compute", 0.0, 1e-3, "/user/model.py:11", "blocks.0"),
        Span("all_gather", "communication", 0.0, 2e-3, "/user/model.py:12", "blocks.0", 0),
    )
    row = DecisionRow("overlap", LINE, "its result is waited for at once", "all_gather[tp]", "all_gather[tp]")
    cause = GraphBreak(
        LINE, "x.item()", "value-of-data", "Python needs a data-dependent value", "It is known late.",
        "Keep it a tensor.",
        "every backend", "Unsupported Tensor.item() call", graphs=2, collectives_before=1, collectives_after=3,
    )  # fmt: skip
    return Side(
        name,
        (cause,) * breaks,
        (Recompile(LINE, "forward", "size", "size mismatch at index 0. expected 4, actual 6", 1.5),),
        (sent, removed),
        (gather,),
        (DecisionRow("cancel_inverse_pairs", LINE, "the tensor was there before", "S(0)->R", "nothing"),),
        (row,),
        (Graph("forward", "forward", 10, 1e-3, 2e-3 * scale, 1e-3 * scale, 2e-3 * scale, spans),),
        Totals(total, **{key: (dataclasses.replace(total, name=name),) for key, name in named.items()}),
        2.5,
        stages=(StageTime("Dynamo", "bytecode_tracing", 1, 1.5), StageTime("dtensor_compile", "order_rows", 2, 0.5)),
        layers=(LayerTime("blocks.0", "Dynamo", 1.25),),
    )


def sample_report(scale: int = 1, breaks: int = 1, stock: bool = True) -> Report:
    """A report of this backend, and of stock with twice the bytes."""
    ours = sample_side(scale=scale, breaks=breaks)
    theirs = sample_side("stock", 2 * scale) if stock else None
    return Report(VERSION, "model.py:build", "2.13.0", 2, 0, True, "h100", ours, theirs)
