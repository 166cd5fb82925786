"""Operators for which DTensor has no rule, or none that can be traced: the rules of `compat.dtensor.rules.sharding`,
and decisions about them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from dtensor_compile.compat.dtensor.rules.sharding import sharding_rules
from dtensor_compile.compat.dtensor.rules.sharding_decisions import fallback_reports
from dtensor_compile.compat.dynamo.tracing import options_on_stack
from dtensor_compile.decisions import Decision


def rules_while_tracing() -> contextlib.AbstractContextManager[None]:
    """Context with the rules for tracing; with ``options={"fallback": "error"}`` operators without one raise torch's
    error.
    """
    return sharding_rules(lambda: options_on_stack().get("fallback", "replicate") == "replicate")


@contextlib.contextmanager
def report_fallbacks(decided: Callable[[list[Decision]], None]) -> Iterator[None]:
    """While active, `decided` is called once for each operator that runs on replicated tensors because it has no
    sharding rule.
    """
    reported: set[str] = set()

    def on_fallback(op: str) -> None:
        if op not in reported:
            reported.add(op)
            decided(
                [
                    Decision(
                        "replicate_fallback", "", f"torch has no sharding rule for {op}: it runs on replicated tensors"
                    )
                ]
            )

    with fallback_reports(on_fallback):
        yield


def rules_anywhere() -> contextlib.AbstractContextManager[None]:
    """Context with the rules outside of tracing, for queries of which dims of an operator's tensors belong together."""
    return sharding_rules(lambda: True)
