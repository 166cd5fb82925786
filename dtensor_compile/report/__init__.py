"""What was captured, decided and sent: `record` collects it while programs compile."""

from dtensor_compile.graph.costs import Collective
from dtensor_compile.record.recorder import GraphRecord, Recording, collectives_in, record

__all__ = ["Collective", "GraphRecord", "Recording", "collectives_in", "record"]
