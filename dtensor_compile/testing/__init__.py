"""Testing programs on real ranks: the helpers that the tests of this package use, for use on other models too.

- ``ranks``: a test body runs on every rank of a job of several processes on this machine.
- ``parity``: one step eager and one compiled, from equal states, compared.
- ``graphs``: graphs as short text for golden tests.
"""

from dtensor_compile.testing.parity import Difference, assert_parity, compare_steps
from dtensor_compile.testing.graphs import captured_graph, graph_text
from dtensor_compile.testing.ranks import RankError, make_mesh, on_ranks, run_on_ranks

__all__ = [
    "Difference", "RankError", "assert_parity", "captured_graph", "compare_steps", "graph_text", "make_mesh", "on_ranks",
    "run_on_ranks",
]  # fmt: skip
