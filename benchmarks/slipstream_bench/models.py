"""Models of common families for our benchmarks, seeded and sized for two cores.

Each function is a workload as a user would write it: ``(model, batch, loss, optimizer)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

_TRAINED = tuple[nn.Module, Any, Any, torch.optim.Optimizer]


class Residual(nn.Module):
    """Two convolutions of 3 x 3 with a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.skip(x))


class _ConvNet(nn.Module):
    def __init__(self, width: int, blocks: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        channels = width
        for factor, stride in blocks:
            layers.append(Residual(channels, factor * width, stride))
            channels = factor * width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """A transformer block on x [batch, length, width]: pre-norm, GELU."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(a.transpose(1, 2).reshape(n, t, d))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class _LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))
        return logits.flatten(0, 1)


class _VisionTransformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, patch: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


class _Recurrent(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.tokens(x))[0])
        return logits.flatten(0, 1)


class _Recommender(nn.Module):
    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(width * (tables + 1), 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(),
            nn.Linear(64, 2),
        )  # fmt: skip

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        parts = [self.dense(dense)]
        parts += [table(ids[:, i]) for i, table in enumerate(self.tables)]
        logits: Tensor = self.top(torch.cat(parts, 1))
        return logits


def conv_net(batch_size: int = 32) -> _TRAINED:
    """Build a residual network on 32 x 32 images."""
    model = _ConvNet(32, ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1)))
    return _classified(model, torch.randn(batch_size, 3, 32, 32))


def conv_net_inference(batch_size: int = 32) -> tuple[nn.Module, Tensor]:
    """Build the residual network of `conv_net` in eval mode, without an update."""
    model, (images, _), *_ = conv_net(batch_size)
    return model.eval(), images


def vision_transformer(batch_size: int = 32) -> _TRAINED:
    """Build a small vision transformer on 32 x 32 images, 64 patches each."""
    return _classified(_VisionTransformer(192, 4, 3, 4, 32), torch.randn(batch_size, 3, 32, 32))


def language_model(batch_size: int = 8) -> _TRAINED:
    """Build a causal transformer over 4096 words, with sequences of 128."""
    return _next_token(_LanguageModel(4096, 256, 4, 4, 128), 4096, batch_size, 128)


def tiny_language_model(batch_size: int = 4) -> _TRAINED:
    """Build a causal transformer so small that dispatching its operators dominates."""
    return _next_token(_LanguageModel(256, 64, 6, 2, 32), 256, batch_size, 32)


def recurrent_network(batch_size: int = 16) -> _TRAINED:
    """Build a two-layer LSTM language model."""
    return _next_token(_Recurrent(1024, 256, 2), 1024, batch_size, 32)


def recommender(batch_size: int = 256) -> _TRAINED:
    """Build embedding bags and a small dense network, as in click prediction."""
    model = _Recommender(8, 20_000, 32)
    ids = torch.randint(0, 20_000, (batch_size, 8, 4))
    labels = torch.randint(0, 2, (batch_size,))
    batch = ((torch.randn(batch_size, 13), ids), labels)
    return model, batch, cross_entropy, torch.optim.Adagrad(model.parameters(), lr=0.01)


def perceptron(batch_size: int = 128) -> _TRAINED:
    """Build three wide linear layers."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    return _classified(model, torch.randn(batch_size, 784))


def _classified(model: nn.Module, images: Tensor) -> _TRAINED:
    labels = torch.randint(0, 10, (len(images),))
    return model, (images, labels), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-4)


def _next_token(model: nn.Module, vocabulary: int, batch: int, context: int) -> _TRAINED:
    tokens = torch.randint(0, vocabulary, (batch, context + 1))
    targets = tokens[:, 1:].reshape(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, (tokens[:, :-1], targets), cross_entropy, optimizer


FAMILIES = (
    conv_net, vision_transformer, language_model, tiny_language_model, recurrent_network,
    recommender, perceptron,
)  # fmt: skip
