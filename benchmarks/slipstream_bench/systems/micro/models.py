"""The architectures of MLPerf Tiny in PyTorch, with TensorFlow's SAME padding, seeded.

Sizes are those of its reference implementation: a keyword spotter (DS-CNN), person detection
(MobileNetV1 at a quarter of its width), images (ResNet-8) and machine sounds (an autoencoder).
Batch norms have statistics of propagated values, as after training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def _same(kernel: tuple[int, int], stride: int, size: tuple[int, int]) -> nn.Module:
    """Pad an image with zeros for an output per `stride` pixels; an odd pixel is at the end."""
    sides = []
    for extent, reach in ((size[1], kernel[1]), (size[0], kernel[0])):
        total = max((-(-extent // stride) - 1) * stride + reach - extent, 0)
        sides += [total // 2, total - total // 2]
    return nn.ZeroPad2d((sides[0], sides[1], sides[2], sides[3]))


class _Block(nn.Sequential):
    """A convolution, batch norm and ReLU."""

    def __init__(
        self, inputs: int, channels: int, kernel: tuple[int, int], stride: int,
        size: tuple[int, int], *, groups: int = 1, relu: bool = True,
    ) -> None:  # fmt: skip
        layers: list[nn.Module] = [
            _same(kernel, stride, size),
            nn.Conv2d(inputs, channels, kernel, stride, groups=groups, bias=False),
            nn.BatchNorm2d(channels),
        ]
        super().__init__(*layers, *([nn.ReLU()] if relu else []))


def _separable(inputs: int, channels: int, stride: int, size: tuple[int, int]) -> nn.Sequential:
    out = (-(-size[0] // stride), -(-size[1] // stride))
    return nn.Sequential(
        _Block(inputs, inputs, (3, 3), stride, size, groups=inputs),
        _Block(inputs, channels, (1, 1), 1, out),
    )


class DSCNN(nn.Module):
    """A model from [n, 1, 49, 10] to 12 words."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _Block(1, 64, (10, 4), 2, (49, 10)),
            *(_separable(64, 64, 1, (25, 5)) for _ in range(4)),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(64, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Probabilities."""
        return self.head(self.pool(self.features(x)).flatten(1)).softmax(1)  # type: ignore[no-any-return]


class MobileNetV1(nn.Module):
    """A model from [n, 3, 96, 96] to 2 classes, with a quarter of the width."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_Block(3, 8, (3, 3), 2, (96, 96))]
        inputs, size = 8, 48
        plan = [(16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2)]
        for channels, stride in [*plan, *[(128, 1)] * 5, (256, 2), (256, 1)]:
            layers.append(_separable(inputs, channels, stride, (size, size)))
            inputs, size = channels, -(-size // stride)
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(256, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Probabilities."""
        return self.head(self.pool(self.features(x)).flatten(1)).softmax(1)  # type: ignore[no-any-return]


class _Residual(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int, size: int) -> None:
        super().__init__()
        out = -(-size // stride)
        self.first = _Block(inputs, channels, (3, 3), stride, (size, size))
        self.second = _Block(channels, channels, (3, 3), 1, (out, out), relu=False)
        # As in the original: the input itself if the shape stays.
        self.skip = (
            nn.Identity()
            if inputs == channels
            else _Block(inputs, channels, (1, 1), stride, (size, size), relu=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + self.skip(x))


class ResNet8(nn.Module):
    """A model from [n, 3, 32, 32] to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _Block(3, 16, (3, 3), 1, (32, 32)),
            _Residual(16, 16, 1, 32), _Residual(16, 32, 2, 32), _Residual(32, 64, 2, 16),
        )  # fmt: skip
        self.pool = nn.AvgPool2d(8)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Probabilities."""
        return self.head(self.pool(self.features(x)).flatten(1)).softmax(1)  # type: ignore[no-any-return]


class Autoencoder(nn.Sequential):
    """A model from [n, 640] to itself, through 8 units."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        inputs = 640
        for width in (128, 128, 128, 128, 8, 128, 128, 128, 128):
            layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
            inputs = width
        super().__init__(*layers, nn.Linear(inputs, 640))


SHAPES = {
    "DS-CNN": (1, 49, 10), "MobileNetV1-0.25": (3, 96, 96), "ResNet-8": (3, 32, 32),
    "autoencoder": (640,),
}  # fmt: skip
"""Shape of an input, without the batch."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "DS-CNN": DSCNN, "MobileNetV1-0.25": MobileNetV1, "ResNet-8": ResNet8,
    "autoencoder": Autoencoder,
}  # fmt: skip


def seeded(name: str, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a model in eval mode with random weights and statistics, and 16 inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[name]()
        inputs = torch.randn(16, *SHAPES[name])
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
        # Statistics close to those of the inputs keep values in range through all layers.
        model.train()
        with torch.no_grad():
            for _ in range(4):
                model(torch.randn(16, *SHAPES[name]))
    return model.eval(), inputs
