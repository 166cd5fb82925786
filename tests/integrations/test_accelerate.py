"""accelerate and the Trainer train with this backend as in eager, by the calls that they document."""

import pathlib

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from dtensor_compile.testing import run_on_ranks
from tests.integrations.models import Block, Model, graphs

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
)

from dtensor_compile.integrations.accelerate import NAMES, TESTED, disable, enable, enabled  # noqa: E402


@pytest.fixture
def enabled_here():
    enable()
    yield
    disable()


def accelerator_of(plugin, sharded=False):
    """An accelerator over the process group that is there, with nothing left of the one before."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    shards = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[Block.__name__]
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=plugin)
    if sharded:  # accelerate itself does so only where there is an accelerator
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, shards
    return accelerator


def train(plugin, sharded, in_place=None):
    torch.manual_seed(0)
    accelerator = accelerator_of(plugin, sharded)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if in_place:
        model.compile(backend=in_place)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(6):
        with accelerator.accumulate(model):
            loss = model(torch.randn(4, 16, generator=generator)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_both(sharded, backend, regions):
    graphs()
    eager = train(TorchDynamoPlugin(backend="no"), sharded)
    assert graphs() == (0, [])
    enable()
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regions, options={"strict": True})
    compiled = train(plugin, sharded)
    return eager, compiled, *graphs()


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("regions", [False, True], ids=["whole", "regions"])
def test_accelerator_trains_like_eager(sharded, regions):
    for eager, compiled, compiles, breaks in run_on_ranks(2, train_both, sharded, "dtensor_aten", regions):
        torch.testing.assert_close(compiled, eager)
        assert compiles > 0 and not breaks


def test_accelerator_trains_like_eager_through_inductor():
    for eager, compiled, compiles, breaks in run_on_ranks(2, train_both, True, "dtensor", True):
        torch.testing.assert_close(compiled, eager)
        assert compiles > 0 and not breaks


def train_in_place():
    graphs()
    eager = train(TorchDynamoPlugin(backend="no"), True)
    return eager, train(TorchDynamoPlugin(backend="no"), True, "dtensor_aten"), *graphs()


def test_prepared_model_compiled_in_place_needs_no_enable():
    for eager, compiled, compiles, breaks in run_on_ranks(2, train_in_place):
        torch.testing.assert_close(compiled, eager)
        assert compiles > 0 and not breaks


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def run_trainer(folder, backend, options=None):
    from accelerate.state import AcceleratorState, GradientState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, **heads)
    )
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        ddp_find_unused_parameters=False,
        torch_compile=backend is not None, torch_compile_backend=backend,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.accelerator.state.dynamo_plugin.options = options
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trainer_both(folder):
    graphs()
    eager = run_trainer(folder, None)
    enable()
    return eager, run_trainer(folder, "dtensor_aten", {"strict": True}), *graphs()


def test_trainer_trains_like_eager(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    for eager, compiled, compiles, breaks in run_on_ranks(2, trainer_both, str(tmp_path)):
        torch.testing.assert_close(compiled, eager)
        assert compiles > 0 and not breaks


def unknown_option():
    enable()
    accelerator = accelerator_of(TorchDynamoPlugin(backend="dtensor", options={"strickt": True}))
    with pytest.raises(BackendCompilerFailed) as error:
        accelerator.prepare(Model())(torch.ones(4, 16))
    with pytest.raises(BackendCompilerFailed) as same:
        torch.compile(Model(), backend="dtensor", options={"strickt": True})(torch.ones(4, 16))
    return str(error.value), str(same.value)


def test_unknown_option_is_the_error_of_torch_compile():
    for error, same in run_on_ranks(2, unknown_option):
        assert error == same and "did you mean 'strict'" in error


def test_names_are_known_while_enabled(enabled_here):
    enable()
    assert enabled()
    for name in NAMES:
        assert TorchDynamoPlugin(backend=name.lower()).to_kwargs() == {"backend": name.lower()}
        assert DynamoBackend(name) is getattr(DynamoBackend, name) and name in DynamoBackend
    with pytest.raises(ValueError, match="'NONE_SUCH' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="none_such")


def test_environment_variable_names_the_backend(enabled_here, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "dtensor")
    assert TorchDynamoPlugin().to_kwargs()["backend"] == "dtensor"


def test_disable_restores_the_enum():
    before, members = dict(vars(DynamoBackend)), list(DynamoBackend)
    enable()
    disable()
    disable()
    assert dict(vars(DynamoBackend)) == before and list(DynamoBackend) == members and not enabled()
    with pytest.raises(ValueError, match="'DTENSOR' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="dtensor")


def test_another_hook_is_not_replaced(monkeypatch):
    monkeypatch.setattr(DynamoBackend, "_missing_", classmethod(lambda cls, value: None))
    with pytest.raises(RuntimeError, match="has a `_missing_` of its own"):
        enable()


def test_docs_name_the_tested_version():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    assert f"| accelerate | {TESTED[-1]} |" in page
