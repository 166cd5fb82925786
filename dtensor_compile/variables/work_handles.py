"""``torch.distributed.Work`` and its future: results of asynchronous calls.

In the graph the call is complete, so that all of their methods return at once. Objects that the program returns, or
that live across a graph break, are of the classes below and behave the same.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.stand_in import CFuture, stand_in
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, VariableTracker, function_variable
from dtensor_compile.variables.member_rules import causes_of, table


class Future(CFuture):
    """A future that has its value."""

    FIELDS = ("_value",)

    def __init__(self, value: Any) -> None:
        super().__init__([])
        self._value = value
        self.set_result(value)

    def wait(self) -> Any:
        return self._value

    def value(self) -> Any:
        return self._value

    def done(self) -> bool:
        return True

    def then(self, callback: Callable[[Future], Any]) -> Future:
        return Future(callback(self))

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        callback(self)


class Work(dist.Work):
    """The work of a complete call.

    Args:
        results: the tensors that the call filled.
        source: the group rank of the sender; None unless the call received a message.
    """

    FIELDS = ("_results", "_source")

    def __init__(self, results: list[torch.Tensor], source: int | None = None) -> None:
        super().__init__()
        self._results = results
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        if all(tensor.device.type == "cpu" for tensor in self._results):
            raise RuntimeError("Failed to create StreamBlock")

    def result(self) -> list[torch.Tensor]:
        return self._results

    def source_rank(self) -> int:
        if self._source is None:
            text = "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call."
            raise RuntimeError(text)
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Future:
        return Future(self._results)

    def get_future_result(self) -> Future:
        raise RuntimeError("Work::getFutureResult not implemented.")


#: Rules of the members of a work.
WORK = table(
    inline="""
        wait is_completed is_success exception synchronize block_current_stream result source_rank get_future
        get_future_result
    """,
    breaks={"raw-object": "boxed unbox timeout"},
)
FUTURE = table(
    inline="wait value done then add_done_callback",
    breaks={"raw-object": "set_result set_exception __getstate__ __setstate__"},
)


def wait_all(futures: list[Future]) -> list[Any]:
    return [future.wait() for future in futures]


def collect_all(futures: list[Future]) -> Future:
    return Future(list(futures))


def _trace(polyfill: Any) -> Retrack:
    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return function_variable(polyfill).call_function(tx, args, kwargs)

    return handle_calls(call)


#: Entries for `compat.dynamo.tracing.Entries.objects`.
OBJECTS = (
    stand_in(Future, causes_of(FUTURE)),
    stand_in(Work, causes_of(WORK)),
    (torch.futures.wait_all, _trace(wait_all)),
    (torch.futures.collect_all, _trace(collect_all)),
)
