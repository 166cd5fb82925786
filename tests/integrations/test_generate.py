"""``generate`` of transformers compiles decoding of a tensor-parallel model: eager's tokens, one graph."""

import pytest
import torch

from dtensor_compile.testing import run_on_ranks
from tests.integrations.models import graphs

pytest.importorskip("transformers", reason="transformers is not installed")


def generate(backend, mode):
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=64, **heads)
    distributed, _, meshes = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=2))
    model = LlamaForCausalLM.maybe_distribute_model(LlamaForCausalLM(config), distributed, meshes).eval()
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    eager = model.generate(tokens, disable_compile=True, **settings)
    graphs()
    compiling = CompileConfig(backend=backend, mode=mode, fullgraph=True)
    compiling._compile_all_devices = True  # else generate compiles on accelerators alone
    compiled = [model.generate(tokens, compile_config=compiling, **settings).tolist() for _ in range(2)]
    return eager.tolist(), compiled, *graphs()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_generate_gives_the_tokens_of_eager(mode):
    for eager, compiled, compiles, breaks in run_on_ranks(2, generate, "dtensor_aten", mode):
        assert compiled == [eager, eager]
        assert compiles == 1 and not breaks
