"""Three models with twelve subgraphs that a library function replaces, each written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Tensor, ...]]
"""A model with its inputs."""


class Encoder(nn.Module):
    """A layer of an encoder: layer norm, linear layers, attention and GELU by hand."""

    def __init__(self, width: int = 128, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up = nn.Parameter(torch.randn(width, 2 * width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(2 * width))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + 1e-5) * self.scale + self.shift
        batch, length, width = y.shape
        q, k, v = (
            layer(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        mixed = (e / e.sum(-1, keepdim=True)) @ v
        x = x + mixed.transpose(1, 2).reshape(batch, length, width)
        h = (x.reshape(batch * length, width) @ self.up) + self.bias
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        out: Tensor = self.down(h).view(batch, length, width)
        return out


class Retrieval(nn.Module):
    """Matching of embeddings: RMS norm, softmax, normalization and cross-entropy by hand."""

    def __init__(self, width: int = 64, classes: int = 1024) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.mixing, self.classes = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        gates = self.mixing(y)
        e = torch.exp(gates - gates.max(-1, keepdim=True).values)
        y = y * (e / e.sum(-1, keepdim=True))
        y = y / y.pow(2).sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
        scores = self.classes(y)
        shifted = scores - scores.amax(-1, keepdim=True)
        logs = shifted - shifted.exp().sum(-1, keepdim=True).log()
        loss: Tensor = -logs.gather(1, labels[:, None]).mean()
        return loss


class Series(nn.Module):
    """Statistics of series [batch, channels, time]: sums, variance, copies, log-sum-exp by hand."""

    def __init__(self, channels: int = 64, width: int = 64) -> None:
        super().__init__()
        self.mixing = nn.Linear(channels, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x[..., 0]
        totals = [total]
        for step in range(1, x.shape[-1]):
            total = total + x[..., step]
            totals.append(total)
        y = torch.stack(totals, -1)
        y = y.transpose(1, 2).contiguous().transpose(1, 2).contiguous()
        y = self.mixing(y.transpose(1, 2))
        mean = y.mean(-1, keepdim=True)
        variance = ((y - mean) ** 2).mean(-1)
        largest = y.amax(-1, keepdim=True)
        logs = torch.log(torch.exp(y - largest).sum(-1, keepdim=True)) + largest
        return logs, variance


def encoder() -> Case:
    return Encoder(), (torch.randn(8, 128, 128),)


def wide_encoder() -> Case:
    """Return an encoder in which matrix products take most of the step."""
    return Encoder(512), (torch.randn(8, 128, 512),)


def retrieval() -> Case:
    return Retrieval(), (torch.randn(2048, 64), torch.randint(1024, (2048,)))


def series() -> Case:
    return Series(), (torch.randn(256, 64, 32),)


PLANTED: dict[Callable[[], Case], tuple[str, ...]] = {
    encoder: ("layer_norm", "attention", "gelu", "addmm"),
    retrieval: ("rms_norm", "softmax", "normalize", "cross_entropy"),
    series: ("cumsum", "variance", "clone", "logsumexp"),
}
"""Functions that replace the planted subgraphs, by model."""
