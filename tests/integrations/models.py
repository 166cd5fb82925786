"""A small model of repeated blocks, and how the losses of one run compare with eager's."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.output = nn.Linear(16, 32), nn.Linear(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def graphs():
    """How many graphs were compiled since the last call, and where the program broke."""
    counters = torch._dynamo.utils.counters
    found = counters["stats"]["unique_graphs"], list(counters["graph_break"])
    counters.clear()
    return found
