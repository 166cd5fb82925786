"""Small models of many kinds: each returns its loss for its inputs."""

import torch
import torch.nn.functional as F
from torch import nn

from dtensor_compile.demo.llama import Llama, LlamaConfig

DIM, HEADS, VOCAB, ROWS, LENGTH, CLASSES = 16, 4, 32, 8, 16, 8


class Attention(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k, v = (
            f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A transformer block, with attention to `memory` if it has one."""

    def __init__(self, causal=False, crosses=False, mlp=None):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(3 if crosses else 2))
        self.attention = Attention(causal)
        self.cross = Attention() if crosses else None
        self.mlp = mlp or nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, memory=None):
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory)
        return x + self.mlp(self.norms[1](x))


class Dense(nn.Module):
    """The demo's Llama."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(layers=2, dim=DIM, ffn_dim=32, heads=HEADS, kv_heads=2, vocab=VOCAB, sequence=LENGTH)
        self.model = Llama(config)

    def forward(self, tokens):
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


class TiedGpt(nn.Module):
    """Learned positions, and an embedding that is the head too."""

    def __init__(self, mlp=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block(True, mlp=mlp and mlp()) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Experts(nn.Module):
    """Experts whose results are weighed by a softmax over the best two."""

    def __init__(self, experts=4):
        super().__init__()
        self.gate = nn.Linear(DIM, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, DIM, 2 * DIM) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * DIM, DIM) / 4)

    def forward(self, x):
        scores = self.gate(x)
        best = scores.topk(2, -1).values[..., -1:]
        weights = torch.where(scores >= best, scores, torch.full_like(scores, -1e9)).softmax(-1)
        hidden = F.silu(torch.einsum("btd,edh->ebth", x, self.up))
        return torch.einsum("ebth,ehd,bte->btd", hidden, self.down, weights)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block(True, True) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, source, target):
        memory = self.embedding(source)
        for block in self.encoder:
            memory = block(memory)
        y = self.embedding(target)
        for block in self.decoder:
            y = block(y, memory)
        return F.cross_entropy(self.head(y).flatten(0, 1), target.roll(-1, 1).flatten())


class ConvolutionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)

    def forward(self, images, labels):
        x = F.relu(self.first(images))
        x = F.relu(self.norm(self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 pixels."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(4 * 16, DIM)
        self.positions = nn.Parameter(torch.randn(4, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images, labels):
        x = images.unflatten(3, (2, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.patches(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Skips(nn.Module):
    """Halves an image, doubles it again, and joins both."""

    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(4, 8, 2, stride=2), nn.Conv2d(8, 8, 1)
        self.up, self.out = nn.Linear(8, 4 * 4), nn.Conv2d(8, 4, 1)

    def forward(self, images, _):
        x = F.silu(self.middle(F.silu(self.down(images))))
        x = self.up(x.permute(0, 2, 3, 1)).unflatten(-1, (4, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        return F.mse_loss(self.out(torch.cat([images, x], 1)), images)


class Recurrent(nn.Module):
    """A gated recurrence, written out."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.gate, self.state = nn.Linear(2 * DIM, DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, tokens):
        x = self.embedding(tokens)
        h, made = torch.zeros_like(x[:, 0]), []
        for t in range(4):
            both = torch.cat([x[:, t], h], -1)
            gate = self.gate(both).sigmoid()
            h = gate * h + (1 - gate) * self.state(both).tanh()
            made.append(h)
        return F.cross_entropy(self.head(torch.stack(made, 1)).flatten(0, 1), tokens[:, 1:5].flatten())


class Recommender(nn.Module):
    """Tables of features, their products, and an MLP."""

    def __init__(self, tables=4):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCAB, DIM) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(LENGTH, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        self.top = nn.Sequential(nn.Linear((tables + 1) ** 2 + DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, 1))

    def forward(self, tokens):
        dense = self.dense(tokens.to(self.dense[0].weight.dtype) / VOCAB)
        features = torch.stack([dense, *(table(tokens[:, i]) for i, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        out = self.top(torch.cat([products.flatten(1), dense], 1))
        return F.binary_cross_entropy_with_logits(out[:, 0], (tokens[:, -1] % 2).to(out.dtype))


class Mixer(nn.Module):
    """Mixes rows, then columns, of patches."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Sequential(nn.Linear(LENGTH, 32), nn.GELU(), nn.Linear(32, LENGTH))
        self.columns = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.embedding, self.norm, self.head = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.rows(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.columns(self.norm(x))
        return F.cross_entropy(self.head(x.mean(1)), tokens[:, 0] % CLASSES)


def tokens(seed):
    return (torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)),)


def pairs(seed):
    return tokens(seed) + tokens(seed + 100)


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(ROWS, 4, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, CLASSES, (ROWS,), generator=generator)


#: Models by name, and their inputs by a seed.
MODELS = {
    "dense": (Dense, tokens),
    "tied": (TiedGpt, tokens),
    "experts": (lambda: TiedGpt(Experts), tokens),
    "encoder and decoder": (EncoderDecoder, pairs),
    "convolution": (ConvolutionNet, images),
    "vision transformer": (VisionTransformer, images),
    "skips": (Skips, images),
    "recurrent": (Recurrent, tokens),
    "recommender": (Recommender, tokens),
    "mixer": (Mixer, tokens),
}
