"""Records of collectives outside of graphs: those sent in eager between graphs, in hooks and in reducers.

Input: observations of `dtensor_compile.compat.distributed.eager_collectives`. Output:
`dtensor_compile.graph.node_costs.SentCollective`, with bytes counted as for those of graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from dtensor_compile.compat.distributed.eager_collectives import EagerCollective, watch_eager_collectives
from dtensor_compile.graph.node_costs import SentCollective
from dtensor_compile.ir.mesh import group_dim_name
from dtensor_compile.planner.search import StepKind, elements_sent
from dtensor_compile.recording.recorder import OutsideCollectives, Recording
from dtensor_compile.report.sources import is_users

#: Substring of the name of an operator -> its kind. c10d writes names without the first underscore.
_KINDS: tuple[tuple[str, StepKind], ...] = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
)


@contextlib.contextmanager
def outside_recorded(recording: Recording) -> Iterator[None]:
    """While active, collectives outside of graphs are added to `recording`, for a program that is called once.

    Only for other backends than ours: our guards (`native/native_code/guard.h`) compare the dispatch keys of the
    thread, which a dispatch mode adds to, so that each call would recompile.
    """

    def watched() -> None:
        recording.outside = OutsideCollectives()

    def on_collective(this: EagerCollective) -> None:
        assert recording.outside is not None
        (recording.outside.backward if this.backward else recording.outside.forward).append(collective_outside(this))

    with watch_eager_collectives(on_collective, watched):
        yield


def collective_outside(this: EagerCollective) -> SentCollective:
    """The record of a collective that ran in eager."""
    plain = this.name.replace("_", "")
    kind = next((kind for part, kind in _KINDS if part in plain), None)
    ranks = tuple(dist.get_process_group_ranks(this.group)) if this.group is not None else ()
    elements, itemsize = sum(x.numel() for x in this.inputs), this.inputs[0].element_size() if this.inputs else 0
    sent, rows = 0, sum(this.splits)
    if kind == "all_to_all" and rows and ranks:
        sent = elements * (rows - this.splits[ranks.index(dist.get_rank())]) // rows
    elif kind is not None:
        sent = elements_sent(kind, len(ranks), elements)
    # The only known line of a backward pass is the one that started it.
    frames = [] if this.backward else this.stack
    own = [frame for frame in frames if is_users(frame[0]) and "site-packages" not in frame[0]]
    return SentCollective(
        kind=kind or this.name.strip("_"),
        bytes=sent * itemsize,
        where="{}:{}: {}".format(*own[-1]) if own else "",
        mesh_dim=group_dim_name(this.group) if this.group is not None else "",
        ranks=ranks,
        shape=tuple(this.inputs[0].shape) if this.inputs else (),
        dtype=str(this.inputs[0].dtype).removeprefix("torch.") if this.inputs else "",
    )
