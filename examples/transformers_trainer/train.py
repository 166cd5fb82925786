"""A Llama of transformers, trained by transformers' Trainer, with gradients accumulated over two microbatches.

    torchrun --nproc-per-node 2 examples/transformers_trainer/train.py
"""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dtensor_compile.integrations.accelerate import enable

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "use_cache": False}


class Tokens(torch.utils.data.Dataset):
    """Rows of random tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(CONFIG["vocab_size"], (1024, 128), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


class Losses(Trainer):
    """The Trainer, which keeps the losses of the microbatches of a step."""

    losses: list[torch.Tensor] = []

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses = [*self.losses, loss.detach()]
        return loss


class AfterStep(TrainerCallback):
    """Gives the loss of each step to a function, and ends the training where that returns True."""

    def __init__(self, trainer: Losses, after_step: Callable[[torch.Tensor], bool]) -> None:
        self.trainer, self.after_step = trainer, after_step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        loss, self.trainer.losses = torch.stack(self.trainer.losses).sum(), []  # each is divided by the tokens of the whole step
        control.should_training_stop = self.after_step(loss)


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[Callable[[torch.Tensor], bool]], None]]:
    """The model, and the training: it calls a function after each step, and ends where that returns True."""
    enable()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, num_attention_heads=8, num_key_value_heads=4))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, max_steps=60, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", ddp_find_unused_parameters=False,
        torch_compile=backend is not None, torch_compile_backend=backend,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Losses(model, arguments, train_dataset=Tokens())

    def loop(after_step: Callable[[torch.Tensor], bool]) -> None:
        trainer.add_callback(AfterStep(trainer, after_step))
        trainer.train()

    return model, loop


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, loop = build("dtensor")
    losses: list[float] = []

    def show(loss: torch.Tensor) -> bool:
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}")
        return len(losses) == 10

    loop(show)
    dist.destroy_process_group()
