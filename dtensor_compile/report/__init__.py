"""Reports of captured redistributions, decisions and sent bytes, from data that `record` collects while programs
compile."""

from dtensor_compile.graph.node_costs import SentCollective as Collective
from dtensor_compile.recording.recorder import GraphRecord, Recording, collectives_in, record
from dtensor_compile.report import build as _build  # noqa: F401 - registers `Recording.make_report`

__all__ = ["Collective", "GraphRecord", "Recording", "collectives_in", "record"]
