"""The decision about a graph with a kernel that does not compile.

Symptom: A graph with a kernel that does not compile runs operator by operator, with a warning, instead of ending the
    program.
Upstream: https://github.com/pytorch/pytorch/pull/111153 ([inductor] Allow backend compiler to skip; closed, lets a
    compiler's error leave the frame to eager).
Releases: 2.11 to 2.14.
Remove when: Inductor can run a graph whose kernels do not compile as the operators of its post-grad graph, without
    retracing the frame.
"""

from __future__ import annotations

import warnings

from dtensor_compile.decisions import Decision


def runs_uncompiled(graph: str, output: str) -> Decision:
    """Warns that a graph runs operator by operator because a kernel does not compile; returns the decision.

    Args:
        graph: ``"forward"`` or ``"backward"``.
        output: the last lines of the compiler's output.
    """
    reason = f"a kernel of the {graph} graph does not compile, so that its operators run one by one: {output}"
    warnings.warn(f'dtensor_compile: {reason}; options={{"strict": True}} raises instead', stacklevel=2)
    return Decision("uncompiled_kernels", "", reason, before="inductor", after="aten", left_alone=True)
