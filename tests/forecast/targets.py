"""Programs for forecasts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, ROWS, HEADS = 64, 256, 32, 2


class Net(nn.Module):
    """An MLP without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def tensor_parallel(mesh):
    model = parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, (torch.ones(ROWS, WIDTH),)


def sharded(mesh):
    model = nn.Sequential(Net(), Net())
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model, (torch.ones(ROWS, WIDTH),)


def step(mesh):
    """A step that does everything itself, compiled optimizer and all."""
    model, (x,) = tensor_parallel(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = torch.compile(model, backend="dtensor")

    def train():
        run(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def tokens(mesh):
    return nn.Sequential(nn.Embedding(8, WIDTH), Net()), (torch.zeros(2, 16, dtype=torch.long),)


def weighted_loss(out, x):
    return (out * 2).sum() + x.sum()


class Attention(nn.Module):
    """Causal attention of a (1, HEADS, ROWS, WIDTH) tensor."""

    def __init__(self, again):
        super().__init__()
        self.scale, self.again = nn.Parameter(torch.ones(WIDTH)), again

    def attend(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def forward(self, x):
        x = x * self.scale
        return checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)


def attends(mesh, again=False):
    return Attention(again).bfloat16(), (torch.ones(1, HEADS, ROWS, WIDTH, dtype=torch.bfloat16),)


def attends_again(mesh):
    return attends(mesh, again=True)


def frozen(mesh):
    return Net().requires_grad_(False), (torch.ones(ROWS, WIDTH),)


def large(mesh):
    return nn.Linear(1 << 17, 1 << 17, bias=False), (torch.ones(1, 1 << 17),)


def reads_a_value(mesh):
    if torch.ones(ROWS, WIDTH, device="cuda").sum() > 0:
        return tensor_parallel(mesh)


def reads_a_value_on_the_host(mesh):
    """As models do that compute a rate for each layer."""
    rates = [float(rate) for rate in torch.linspace(0, 1, 2)]
    model, inputs = tensor_parallel(mesh)
    return nn.Sequential(model, nn.Dropout(rates[1])), inputs


def sized(mesh, rows=ROWS, width=WIDTH, checkpoint=False):
    model = nn.Linear(width, width, bias=False)
    return parallelize_module(model, mesh["tp"], ColwiseParallel()), (torch.ones(rows, width),)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def layers(mesh):
    """Equal blocks, tensor parallel inside of ``fully_shard``."""
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), torch.zeros(ROWS, WIDTH)


class Unfinished(nn.Module):
    """A loss over classes in shards, whose gradient eager refuses outside of ``loss_parallel``."""

    def __init__(self, mesh):
        super().__init__()
        self.linear = parallelize_module(
            nn.Linear(WIDTH, WIDTH), mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        )

    def forward(self, x):
        logits = self.linear(x)
        with loss_parallel():
            return F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.long, device=x.device))


def raises_in_backward(mesh):
    return Unfinished(mesh), (torch.randn(ROWS, WIDTH),)


def classes(mesh):
    return nn.Linear(WIDTH, 4096), (torch.ones(1, 2, WIDTH),)
