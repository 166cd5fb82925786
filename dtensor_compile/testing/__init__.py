"""Tests of programs on real ranks: the helpers that the tests of this package use, for other models too.

- ``ranks``: runs a test body on every rank of a job of several processes on this machine.
- ``compare_values``: compares two results, value by value.
- ``parity``: compares one eager and one compiled step from equal states.
- ``bisect``: finds the part of the compilation that causes a difference.
- ``check``: ``@parity(mesh=(2, 2))`` on a function that returns a model and its inputs.
- ``local``: the same with all ranks in this process.
- ``minify``: the smallest part of a program that still differs, as a script.
- ``graphs``: graphs as short text for golden tests.
- ``count_collectives``: the number of collectives that a program runs; ``step_memory``: the memory of a step.

The decorator `parity` has the name of the module that it stands on; ``from dtensor_compile.testing.parity import ...``
is the module.
"""

from dtensor_compile.testing.bisect import Culprit, bisect
from dtensor_compile.testing.check import parity
from dtensor_compile.testing.compare_values import Difference, compare_values
from dtensor_compile.testing.graphs import captured_graph, graph_text
from dtensor_compile.testing.parity import assert_parity, compare_steps
from dtensor_compile.testing.ranks import RankError, make_mesh, on_ranks, run_on_ranks

__all__ = [
    "Culprit", "Difference", "RankError", "assert_parity", "bisect", "captured_graph", "compare_steps",
    "compare_values",
    "graph_text", "make_mesh", "on_ranks", "parity", "run_on_ranks",
]  # fmt: skip
