"""torchtitan's mixtures of experts, with experts on both ranks: its own `apply_compile` and whole models train as in
eager.

torchtitan runs them on GPUs alone. What keeps eager from a CPU has a form here that runs there, for both eager and
compiled code: the counts of tokens (`torch.histc` of integers), the order of tokens by expert (a Triton kernel), and
sums over ranks on gloo.
"""

import unittest.mock

import pytest
import torch
import torch.distributed as dist

from dtensor_compile.testing import run_on_ranks
from tests.integrations.models import graphs

pytest.importorskip("torchtitan", reason="torchtitan is not installed")


def histc(tokens, bins, min, max):
    """How many tokens each expert gets, as `torch.histc` counts them on a GPU."""
    return (tokens.reshape(-1, 1) == torch.arange(bins)).sum(0)


def fill_indices(lengths, starts, write_offsets, experts, ranks, max_len, **_):
    """The rows in the order of experts, -1 where there is padding: what torchtitan's Triton kernel writes."""
    lengths, starts = (of.view(ranks, experts).T.reshape(-1) for of in (lengths, starts))
    by_expert = lengths.view(experts, ranks)
    begins = (write_offsets.view(-1, 1) + by_expert.cumsum(1) - by_expert).reshape(-1)
    rows = torch.arange(max_len).view(-1, 1)
    inside = (rows >= begins) & (rows < begins + lengths)
    found = torch.where(inside, starts + rows - begins, 0).sum(1)
    return torch.where(inside.any(1), found, -1).to(torch.int32)


def build(kind, job):
    import torchtitan.distributed.parallel_dims as parallel
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.moe import MoEArgs

    torch.manual_seed(0)
    layers = 1 if kind.startswith("qwen3") else 2  # the first of DeepSeek is dense
    sizes = {"dim": 64, "n_layers": layers, "n_heads": 4, "vocab_size": 128, "max_seq_len": 32, "moe_inter_dim": 32}
    if kind.startswith("qwen3"):
        from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3 as parallelize
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model

        moe = MoEArgs(
            num_experts=4, num_shared_experts=0, top_k=2, score_func="softmax", route_norm=True,
            score_before_experts=False, load_balance_coeff=None, use_grouped_mm=kind.endswith("grouped"),
        )  # fmt: skip
        model = Qwen3Model(
            Qwen3ModelArgs(**sizes, n_kv_heads=2, head_dim=16, hidden_dim=96, moe_enabled=True, moe_args=moe)
        )
    else:
        from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3 as parallelize
        from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
        from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model

        moe = MoEArgs(num_experts=4, top_k=2, use_grouped_mm=kind.endswith("grouped"))
        latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        arguments = DeepSeekV3ModelArgs(**sizes, **latent, inter_dim=96, moe_args=moe)
        arguments.moe_impl = "standard"
        model = DeepSeekV3Model(arguments)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    with unittest.mock.patch.object(parallel, "device_type", "cpu"):
        dims = parallel.ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, etp=1, world_size=2)
        dims.build_mesh()
        parallelize(model, dims, job)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def train(kind, unit, backend):
    import torchtitan.models.moe.kernels as kernels
    import torchtitan.models.moe.moe as moe
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.activation_checkpoint.mode, job.training.seq_len = "none", 32
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = "float32"
    job.compile.enable, job.compile.backend = backend is not None and unit == "blocks", backend or "inductor"
    # `apply_compile` replaces this function of the module, once a process.
    experts = unittest.mock.patch.object(moe, "_run_experts_grouped_mm", moe._run_experts_grouped_mm)
    counts, order = (
        unittest.mock.patch.object(torch, "histc", histc),
        unittest.mock.patch.object(kernels, "fill_indices_wrapper", fill_indices),
    )
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=False)  # which `apply_compile` sets, for the process
    with experts, counts, order, scalars:
        model = build(kind, job)
        if backend and unit == "whole":
            model.compile(backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for _ in range(3):
            tokens = torch.randint(128, (2, 32), generator=generator)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def train_both(kind, unit, backend):
    graphs()
    eager = train(kind, unit, None)
    assert graphs() == (0, [])
    return eager, train(kind, unit, backend), *graphs()


@pytest.mark.parametrize(
    "kind, unit, backend",
    [
        ("qwen3 grouped", "whole", "dtensor_aten"),
        ("qwen3 grouped", "blocks", "dtensor_aten"),
        pytest.param("qwen3 grouped", "blocks", "dtensor", marks=pytest.mark.slow),
        pytest.param("qwen3 grouped", "whole", "dtensor", marks=pytest.mark.slow),
        pytest.param("qwen3 loop", "whole", "dtensor_aten", marks=pytest.mark.slow),
        pytest.param("deepseek grouped", "blocks", "dtensor_aten", marks=pytest.mark.slow),
        pytest.param("deepseek loop", "whole", "dtensor_aten", marks=pytest.mark.slow),
    ],
)
def test_experts_train_like_eager(kind, unit, backend):
    for eager, compiled, compiles, breaks in run_on_ranks(2, train_both, kind, unit, backend, timeout=280):
        torch.testing.assert_close(compiled, eager)
        assert not breaks and (compiles == 1 if unit == "whole" else compiles > 1)
