"""A Llama-like decoder that generates one byte at a time, with a cache of keys and values.

Pre-norms, gated layers, added position embeddings; trained on the texts of Python's help.
"""

from __future__ import annotations

import math
from pydoc_data import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BYTES = 256
_CONTEXT = 512

Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Layer(nn.Module):
    """Attention to earlier positions, then a gated layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        wide = width * 8 // 3 // 64 * 64
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, Any]:
        """Map [batch, n, width] to the same; return keys and values extended by those of `x`."""
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        x = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x, (k, v)


class Decoder(nn.Module):
    """A model from bytes to logits of the next byte."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(_CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, ids: torch.Tensor, cache: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """Map [batch, n] to logits [batch, n, BYTES]; return the cache extended by these ids."""
        before = 0 if cache is None else cache[0][0].shape[2]
        places = torch.arange(before, before + ids.shape[1])
        x, extended = self.embedding(ids) + self.positions(places), []
        for number, layer in enumerate(self.layers):
            x, keys_values = layer(x, None if cache is None else cache[number])
            extended.append(keys_values)
        return self.head(self.norm(x)), extended

    @torch.no_grad()
    def decode(self, logits: torch.Tensor, cache: Cache, count: int) -> torch.Tensor:
        """Generate the `count` most likely next bytes, one at a time.

        Args:
            logits, cache: results of the ids before.
        """
        made = []
        for _ in range(count):
            made.append(logits[:, -1:].argmax(-1))
            logits, cache = self(made[-1], cache)
        return torch.cat(made, 1)


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes to train on, and held-out ones."""
    joined = "\n".join(topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def batch(data: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Return `count` random sequences of `length` bytes and one more."""
    starts = torch.randint(0, len(data) - length - 1, (count,))
    return data[starts[:, None] + torch.arange(length + 1)]


def trained(steps: int, width: int = 128) -> Decoder:
    """Train a small decoder for `steps` steps of Adam."""
    torch.manual_seed(0)
    model = Decoder(width, 2, 4)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    data, _ = text()
    for _ in range(steps):
        ids = batch(data, 12, 64)
        loss = functional.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def perplexity(model: nn.Module) -> float:
    """Return the perplexity of held-out bytes."""
    torch.manual_seed(1)
    ids = batch(text()[1], 64, 64)
    logits = model(ids[:, :-1])[0]
    return math.exp(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
