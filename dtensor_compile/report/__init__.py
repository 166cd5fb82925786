"""What was captured, decided and sent: `record` collects it while programs compile."""

from dtensor_compile.report.graphs import Collective
from dtensor_compile.report.recorder import GraphRecord, Recording, collectives_in, record

__all__ = ["Collective", "GraphRecord", "Recording", "collectives_in", "record"]
