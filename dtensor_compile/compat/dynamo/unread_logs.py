"""What torch makes for logs is made where a log takes it.

After each joint trace and each partition, AOTAutograd writes the graphs down as code, whether ``TORCH_LOGS`` or
``TORCH_TRACE`` asks for them or not. After each frame, Dynamo fills the caches of the processor with other data in
order to measure what cold guards take, some 20 ms each time.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from torch._logging._internal import trace_log

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

_JOINT = patch("torch._functorch._aot_autograd.graph_compile:_log_joint_graph", "fx_g aot_config", optional=True)
_PARTS = patch(
    "torch._functorch._aot_autograd.graph_compile:_log_fw_bw_graphs",
    "fw_module bw_module maybe_subclass_meta fw_metadata aot_config",
    optional=True,
)
_LATENCY = patch("torch._dynamo.guards:profile_guard_manager", optional=True)

_joint_log = logging.getLogger("torch._functorch._aot_autograd.graph_compile.__aot_joint_graph")
_parts_log = logging.getLogger("torch._functorch._aot_autograd.graph_compile.__aot_graphs")
_guards_log = logging.getLogger("torch._dynamo.guards.__guards")


@needs(
    "nothing is made for logs that nothing takes",
    _JOINT,
    _PARTS,
    _LATENCY,
    without="small programs take some percent longer to compile",
    upstream="not reported: graphs are printed for each compilation, and guards timed with a flush of the caches",
    remove_when="_log_joint_graph and _log_fw_bw_graphs print graphs lazily, and guards are timed without a flush",
)
@contextlib.contextmanager
def without_unread_logs() -> Iterator[None]:
    """While active, graphs are printed if logs or traces of this process take them.

    An entry of AOTAutograd's cache has the code of its graphs for the logs of those that load it; it has none then. The
    latency of guards in torch's metrics is that of one evaluation right after they were made.
    """

    def joint(stock: Any, *args: Any, **kwargs: Any) -> str | None:
        return stock(*args, **kwargs) if _taken(_joint_log, logging.INFO) else None

    def parts(stock: Any, *args: Any, **kwargs: Any) -> tuple[str | None, str | None]:
        return stock(*args, **kwargs) if _taken(_parts_log, logging.INFO) else (None, None)

    def latency(stock: Any, root: Any, scope: Any, repeats: int) -> float:
        if _taken(_guards_log, logging.DEBUG):
            return float(stock(root, scope, repeats))
        start = time.perf_counter_ns()
        root.check(scope)
        return (time.perf_counter_ns() - start) / 1e3

    with patched(_JOINT, joint), patched(_PARTS, parts), patched(_LATENCY, latency):
        yield


def _taken(log: logging.Logger, level: int) -> bool:
    return bool(trace_log.handlers) or log.isEnabledFor(level)
