"""``ProcessGroup``, and ``torch.distributed.group`` / ``GroupMember``, whose ``WORLD`` is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dtensor_compile.compat.dynamo.trackers.tracker_tools import Source, Translator, VariableTracker, fact_guard
from dtensor_compile.variables.collective_calls import call_method_polyfill
from dtensor_compile.variables.group_methods import METHODS
from dtensor_compile.variables.member_rules import SourcedVariable, table


def group_facts(group: dist.ProcessGroup) -> tuple[Any, ...]:
    """All facts of a group that a graph may contain: its name, the rank of this process in it, its ranks in order."""
    return group.group_name, group.rank(), dist.get_process_group_ranks(group)


#: torch guards only the type of a group, whereas its rank, size and name are constants of the graph.
_same_group = fact_guard("PROCESS_GROUP_MATCH", group_facts)


class ProcessGroupVariable(SourcedVariable):
    kind = "group"
    members = table(
        bake="rank size name group_name group_desc _get_backend_name __repr__ __str__ __hash__ __eq__ __ne__ "
        "__format__",
        operator=" ".join(METHODS),
        read="""
            BackendType CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL bound_device_id use_pg_for_symm_mem_rendezvous
            _device_types supports_reconfigure supports_window supports_abort_hooks supports_completion_hooks
        """,
        breaks={
            "receive-from-any": "recv_anysource",
            "error-of-other-ranks": "monitored_barrier",
            "group-lifetime": "abort shutdown merge_remote_group split_group reconfigure get_reconfigure_handle",
            "process-setting": """
                set_timeout register_abort_hook register_post_hook register_pre_hook unregister_abort_hook
                unregister_post_hook unregister_pre_hook
            """,
            "raw-object": "boxed unbox get_group_store get_backend _get_backend new_window gather_single "
            "gather_into_tensor",
            "object-state": "__setattr__ __delattr__ __dict__",
        },
    )

    def operate(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        return call_method_polyfill(tx, self, name, args, kwargs)

    @classmethod
    def guard(cls, source: Source) -> None:
        _same_group(source)
