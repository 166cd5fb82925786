"""Expert parallelism of transformers in one graph: `all_to_all_without_branches`.

    from dtensor_compile.integrations import transformers as front_door

    front_door.all_to_all_without_branches()
    model = Qwen3MoeForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(fsdp_size=8, ep_size=8))
    step = torch.compile(step, backend="dtensor")

transformers sends each token to the rank of its expert and checks, in Python, whether any token was received. That
number is data-dependent, so that the check breaks the graph in every layer, under any backend. The check is for experts
that leave the autograd graph if they get no row; those computed by grouped or batched matmuls accept any number of
rows, including none."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.integrations import third_party

TESTED = ("5.24.0",)
third_party("transformers", TESTED)

from transformers.distributed.expert_parallel import AllToAllEP, AutoEP, EPImplementationInterface  # noqa: E402 - known to be there


class AllToAll(AllToAllEP):
    """transformers' all-to-all of tokens; while compiling, without the check whether a token was received.

    The exchange, its backward and the computation of the experts are transformers' own, with the same collectives.
    """

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the experts' outputs for each token.

        Args:
            hidden_states: the tokens of this rank, (tokens, hidden).
            top_k_index: the experts of each token, counted over all ranks, (tokens, k).
            top_k_weights: their weights, (tokens, k).

        Returns:
            A tensor like `hidden_states`.
        """
        if not torch.compiler.is_compiling():
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        tokens, experts, weights, sent = self._dispatch_tokens(hidden_states, top_k_index, top_k_weights)
        return self._combine_tokens(self.experts_forward(tokens, experts, weights), sent)


class Auto(AutoEP):
    """transformers' choice between its implementations, with `AllToAll` for the all-to-all one."""

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.all_to_all = AllToAll(experts, ep_mesh, tp_mesh)


def all_to_all_without_branches() -> None:
    """Makes ``DistributedConfig(ep_implementation="all_to_all")``, and "auto", one graph from now on; eager code is
    unchanged.

    Call it before a model is distributed. Only experts with grouped or batched matmuls are one graph
    (``experts_implementation="grouped_mm"``, which is the default, or "batched_mm"); transformers' loop over experts
    breaks it."""
    EPImplementationInterface.register("all_to_all", AllToAll)
    EPImplementationInterface.register("auto", Auto)
