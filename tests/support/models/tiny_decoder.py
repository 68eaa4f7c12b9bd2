"""A small decoder of Llama's kind, that is told where its tokens stand, and sequences from which it can learn."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

VOCABULARY = 64
WIDTH = 48
HEAD = 4
LAYERS = 2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Grouped heads with rotary embedding."""

    def __init__(self, q_heads: int, kv_heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * HEAD, bias=False) for n in (q_heads, kv_heads, kv_heads))
        self.o = nn.Linear(q_heads * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        out = attend(rotated(q, positions), rotated(k, positions), v)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, q_heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(q_heads, kv_heads), MLP()

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.norms[0](x), positions, attend)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """The same weights wherever it is made."""

    def __init__(self, q_heads: int, kv_heads: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(Layer(q_heads, kv_heads) for _ in range(LAYERS))
            self.norm = nn.RMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.head(self.norm(x))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding: each pair of columns is turned by its token's position in the whole sequence."""
    angles = positions[:, None] * 100.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over this rank's tokens: a mean would weigh ranks with few tokens as those with many."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def sequences(step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows each: phrases of 3 to 7 tokens, said again and again. They come back after 5 steps."""
    generator = torch.Generator().manual_seed(step % 5)
    rows = []
    for _ in range(batch):
        size = int(torch.randint(3, 8, (), generator=generator))
        phrase = torch.randint(VOCABULARY, (size,), generator=generator)
        rows.append(phrase.repeat(-(-(length + 1) // size))[: length + 1])
    whole = torch.stack(rows)
    return whole[:, :-1], whole[:, 1:]
