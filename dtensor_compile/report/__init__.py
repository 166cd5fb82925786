"""What was captured, decided and sent: `record` collects it while programs compile."""

from dtensor_compile.graph.node_costs import SentCollective
from dtensor_compile.recording.recorder import GraphRecord, Recording, collectives_in, record
from dtensor_compile.report import build as _build  # noqa: F401 - tells recordings how a report of them is made

__all__ = ["SentCollective", "GraphRecord", "Recording", "collectives_in", "record"]
