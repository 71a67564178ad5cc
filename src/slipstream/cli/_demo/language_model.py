"""A small transformer language model trained on English text: Python's own reference topics.

Ordinary PyTorch code; `make_workload` returns what slipstream needs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import slipstream as ss


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the same shape, [batch, time, width]."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class LanguageModel(nn.Module):
    """Next-byte predictor."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, [batch, time, 256], for int64 `tokens`, [batch, time]."""
        x = self.bytes(tokens) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_workload(
    batch_size: int = 16, width: int = 256, layers: int = 4, context: int = 128
) -> tuple[nn.Module, tuple[Tensor, Tensor], object, torch.optim.Optimizer]:
    """Build the model, one batch of text, the loss and the optimizer."""
    corpus = torch.from_numpy(ss.data.get("python_topics").as_bytes()).long()
    starts = torch.randint(0, len(corpus) - context - 1, (batch_size,))
    windows = torch.stack([corpus[s : s + context + 1] for s in starts.tolist()])
    model = LanguageModel(width, layers, heads=4, context=context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, (windows[:, :-1], windows[:, 1:]), next_byte_loss, optimizer
