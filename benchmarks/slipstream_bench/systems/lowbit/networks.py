"""Seven well-known image networks with random weights, for timing inference at 224 x 224 pixels.

Sources: Krizhevsky et al. 2012 (single-column, 2014), Simonyan and Zisserman 2015, He et
al. 2016, Iandola et al. 2016 (version 1.1), Szegedy et al. 2015 (with batch norm), Sandler et al.
2018.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

SIZE = 224


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True
) -> nn.Sequential:
    """Return convolution, batch norm and ReLU, padded to keep the size except for the stride."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([nn.ReLU()] if act else []))


def alexnet() -> nn.Sequential:
    """Return AlexNet: 0.7 G multiply-adds, 61 M weights."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(), nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(),
        nn.Linear(4096, 1000),
    )  # fmt: skip


def vgg16() -> nn.Sequential:
    """Return VGG-16: 15.5 G multiply-adds, 138 M weights."""
    layers: list[nn.Module] = []
    channels = 3
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096),
        nn.ReLU(), nn.Linear(4096, 1000),
    )  # fmt: skip


class _Residual(nn.Module):
    """A residual block: the sum of a body and a shortcut."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, act: bool = True) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut
        self.act = nn.ReLU() if act else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.act(self.body(x) + self.shortcut(x))
        return made


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]


def _resnet(block: Callable[[int, int, int], nn.Module], counts: tuple[int, ...], wide: int
            ) -> nn.Sequential:  # fmt: skip
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate(counts):
        for number in range(count):
            inner = 64 << stage
            layers.append(block(channels, inner, 2 if stage and not number else 1))
            channels = inner * wide
    return nn.Sequential(*layers, *_head(channels))


def resnet18() -> nn.Sequential:
    """Return ResNet-18: 1.8 G multiply-adds, 12 M weights."""

    def block(inputs: int, inner: int, stride: int) -> nn.Module:
        body = nn.Sequential(_conv(inputs, inner, 3, stride), _conv(inner, inner, 3, act=False))
        same = inputs == inner and stride == 1
        return _Residual(
            body, nn.Identity() if same else _conv(inputs, inner, 1, stride, act=False)
        )

    return _resnet(block, (2, 2, 2, 2), 1)


def resnet50() -> nn.Sequential:
    """Return ResNet-50: 4.1 G multiply-adds, 25 M weights."""

    def block(inputs: int, inner: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            _conv(inputs, inner, 1), _conv(inner, inner, 3, stride),
            _conv(inner, 4 * inner, 1, act=False),
        )  # fmt: skip
        same = inputs == 4 * inner and stride == 1
        return _Residual(
            body, nn.Identity() if same else _conv(inputs, 4 * inner, 1, stride, act=False)
        )

    return _resnet(block, (3, 4, 6, 3), 4)


class _Branches(nn.Module):
    """Parallel branches over one input, with concatenated channels."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([path(x) for path in self.paths], 1)


def squeezenet() -> nn.Sequential:
    """Return SqueezeNet: 0.35 G multiply-adds, 1.2 M weights."""

    def fire(inputs: int, squeezed: int, expanded: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, squeezed, 1), nn.ReLU(),
            _Branches(
                nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU()),
                nn.Sequential(nn.Conv2d(squeezed, expanded, 3, padding=1), nn.ReLU()),
            ),
        )  # fmt: skip

    pool = (3, 2, 0, 1, False, True)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(*pool),
        fire(64, 16, 64), fire(128, 16, 64), nn.MaxPool2d(*pool),
        fire(128, 32, 128), fire(256, 32, 128), nn.MaxPool2d(*pool),
        fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256), fire(512, 64, 256),
        nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def googlenet() -> nn.Sequential:
    """Return GoogLeNet: 1.5 G multiply-adds, 6.6 M weights."""

    def mixed(inputs: int, *sizes: int) -> nn.Module:
        single, three_in, three, five_in, five, pooled = sizes
        return _Branches(
            _conv(inputs, single, 1),
            nn.Sequential(_conv(inputs, three_in, 1), _conv(three_in, three, 3)),
            nn.Sequential(_conv(inputs, five_in, 1), _conv(five_in, five, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, pooled, 1)),
        )

    return nn.Sequential(
        _conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), _conv(64, 64, 1), _conv(64, 192, 3),
        nn.MaxPool2d(3, 2, 1),
        mixed(192, 64, 96, 128, 16, 32, 32), mixed(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, 2, 1),
        mixed(480, 192, 96, 208, 16, 48, 64), mixed(512, 160, 112, 224, 24, 64, 64),
        mixed(512, 128, 128, 256, 24, 64, 64), mixed(512, 112, 144, 288, 32, 64, 64),
        mixed(528, 256, 160, 320, 32, 128, 128), nn.MaxPool2d(3, 2, 1),
        mixed(832, 256, 160, 320, 32, 128, 128), mixed(832, 384, 192, 384, 48, 128, 128),
        *_head(1024),
    )  # fmt: skip


def mobilenet_v2() -> nn.Sequential:
    """Return MobileNetV2: 0.3 G multiply-adds, 3.5 M weights; ReLU instead of ReLU6."""
    layers: list[nn.Module] = [_conv(3, 32, 3, 2)]
    channels = 32
    settings = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    )  # fmt: skip
    for times, outputs, count, stride in settings:
        for number in range(count):
            step = 1 if number else stride
            inner = channels * times
            body = nn.Sequential(
                *([_conv(channels, inner, 1)] if times > 1 else []),
                _conv(inner, inner, 3, step, groups=inner),
                _conv(inner, outputs, 1, act=False),
            )
            same = step == 1 and channels == outputs
            layers.append(_Residual(body, nn.Identity(), act=False) if same else body)
            channels = outputs
    return nn.Sequential(*layers, _conv(channels, 1280, 1), *_head(1280))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "AlexNet": alexnet,
    "VGG-16": vgg16,
    "ResNet-18": resnet18,
    "ResNet-50": resnet50,
    "SqueezeNet": squeezenet,
    "GoogLeNet": googlenet,
    "MobileNetV2": mobilenet_v2,
}
