"""Steps whose layers have given times and parameters, without using a core.

Layers sleep instead of computing, so that overlap can be measured on a busy machine. Shares of
parameters and of arithmetic are those of published networks. Two small networks that do compute are
for a machine with a core for every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream_bench.rank_models import Pause, busy

# A backward pass has about twice the arithmetic of the forward pass.
_FORWARD = 1 / 3


@dataclass(frozen=True)
class Layer:
    """Number of parameters, and seconds of both passes."""

    numel: int
    forward_s: float
    backward_s: float


def layers(
    parameters: Sequence[float], arithmetic: Sequence[float], numel: int, compute_s: float
) -> list[Layer]:
    """Return layers with these shares of `numel` parameters and of `compute_s` seconds."""
    weights, work = sum(parameters), sum(arithmetic)
    return [
        Layer(
            max(1, round(numel * p / weights)),
            _FORWARD * compute_s * a / work,
            (1 - _FORWARD) * compute_s * a / work,
        )
        for p, a in zip(parameters, arithmetic, strict=True)
    ]


# Millions of parameters, and billions of multiplications for a 224 x 224 image (VGG-19, D of
# Simonyan and Zisserman 2015, counted from its table).
_VGG_PARAMETERS = (
    0.002, 0.037, 0.074, 0.148, 0.295, 0.590, 0.590, 0.590, 1.180, 2.360, 2.360, 2.360,
    2.360, 2.360, 2.360, 2.360, 102.765, 16.781, 4.097,
)  # fmt: skip
_VGG_ARITHMETIC = (
    0.087, 1.850, 0.925, 1.850, 0.925, 1.850, 1.850, 1.850, 0.925, 1.850, 1.850, 1.850,
    0.462, 0.462, 0.462, 0.462, 0.103, 0.017, 0.004,
)  # fmt: skip


def named(name: str, compute_s: float) -> list[Layer]:
    """Return one of `NAMES`, scaled to `compute_s` seconds per step."""
    if name == "tail-heavy":
        return layers(_VGG_PARAMETERS, _VGG_ARITHMETIC, 1_200_000, compute_s)
    if name == "uniform":
        # Blocks of a residual network: parameters and arithmetic are even over 16 of them.
        return layers([1.0] * 16, [1.0] * 16, 960_000, compute_s)
    if name == "head-heavy":
        # A translation model: first a large embedding, last a softmax of half its size.
        return layers([8.0, *[1.0] * 8, 4.0], [0.1, *[1.0] * 8, 1.0], 1_000_000, compute_s)
    if name == "tied":
        # A language model whose embedding is its softmax: needed first, ready last.
        return layers([6.0, *[1.0] * 10], [0.5, *[1.0] * 10], 1_000_000, compute_s)
    raise KeyError(name)


NAMES = ("tail-heavy", "uniform", "head-heavy", "tied")


class Emulated(nn.Module):
    """A model from [1] to [1] whose layers take a given time."""

    def __init__(self, made: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sleeper(layer) for layer in made])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1] to [1]."""
        for layer in self.layers:
            x = layer(x)
        return x


class Sleeper(nn.Module):
    """A layer whose gradient is ready when its share of the backward pass is over."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layer.numel))
        self.pause = Pause()
        self.times = layer.forward_s, layer.backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1] to [1]."""
        return busy(x + self.weight.mean(), self.pause, *self.times)


REAL = ("language model", "conv net")
TINY = "tiny"


def real(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return one of `REAL` with about as many parameters as `named`, or `TINY`; and a batch."""
    torch.manual_seed(0)
    if name == TINY:
        # 30 weights and 30 biases.
        return nn.Sequential(*[nn.Linear(18, 18) for _ in range(30)]), torch.randn(8, 18)
    if name == "language model":
        return TiedTransformer(), torch.randint(0, 2000, (8, 64))
    layers: list[nn.Module] = []
    for inside, out in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(inside, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    dense = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers, nn.Flatten(), *dense), torch.randn(64, 3, 32, 32)


class TiedTransformer(nn.Module):
    """A transformer of four layers, 1.05 M parameters, whose embedding is its softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 128)
        layers = [
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(128, 2000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map int64 [batch, length] to [batch, length, 2000]."""
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores
