"""Networks and their masks: small ones trained on digits, ResNet-50, and MobileNetV2 as shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from slipstream.graph.statistics import OperandMask
from slipstream.hardware import Accelerator, LayerShape, MaskRecorder, Operand, Pass, PassCost
from slipstream.hardware.simulate import Masks, module_layer, simulate_layer

Layers = dict[str, tuple[LayerShape, Masks]]
"""Shape and masks of each layer."""


def plain(
    widths: tuple[int, ...],
    activation: Callable[[], nn.Module] = nn.ReLU,
    *,
    norm: bool = False,
    pool: Callable[[int], nn.Module] = nn.MaxPool2d,
    hidden: int = 0,
) -> nn.Module:
    """Return convolutions of 3 x 3 for images of 8 x 8, halved after the second.

    Args:
        hidden: units of two linear layers behind dropout, as in AlexNet and VGG; 0 for none.
    """
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip((1, *widths), widths, strict=False)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        layers += [nn.BatchNorm2d(outputs)] if norm else []
        layers.append(activation())
        layers += [pool(2)] if number == 1 else []
    layers.append(nn.Flatten())
    inputs = 16 * widths[-1]
    for _ in range(2 if hidden else 0):
        layers += [nn.Dropout(), nn.Linear(inputs, hidden), activation()]
        inputs = hidden
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


class Fire(nn.Module):
    """SqueezeNet's module: a narrow layer, then 1 x 1 and 3 x 3 next to each other."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.narrow = nn.Conv2d(squeeze, expand, 1)
        self.wide = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.narrow(x).relu(), self.wide(x).relu()], 1)


def squeezed() -> nn.Module:
    """Return a small SqueezeNet."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), Fire(64, 16, 64), Fire(128, 16, 64),
        nn.MaxPool2d(2), Fire(128, 32, 128), Fire(256, 32, 128), nn.Dropout(),
        nn.Conv2d(256, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "4 layers": lambda: plain((32, 64, 64, 128)),
    "6 layers of 32": lambda: plain((32,) * 6),
    "like AlexNet": lambda: plain((64, 96, 128, 96, 96), hidden=512),
    "like VGG": lambda: plain((64, 64, 128, 128), hidden=512),
    "like SqueezeNet": squeezed,
}
"""Convolutional networks with ReLU and without batch norm."""


def perceptron(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """Return three hidden layers of 256."""
    hidden: list[nn.Module] = []
    for inputs in (64, 256, 256):
        hidden += [nn.Linear(inputs, 256), activation()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.skip = (
            nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
            if stride > 1 or inputs != 4 * width
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) + self.skip(x)
        return y.relu()


def resnet50() -> nn.Module:
    """Return ResNet-50, as published."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def trained_masks(model: nn.Module, epochs: int) -> Layers:
    """Train on digits; return the masks of one more step."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(epochs):
        for chosen in torch.randperm(1500).split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return step_masks(model, x[:64], y[:64])


def step_masks(model: nn.Module, x: Tensor, y: Tensor) -> Layers:
    """Return the shapes and masks of the layers in one step."""
    with MaskRecorder(model) as masks:
        cross_entropy(model(x), y).backward()
    found: dict[str, dict[Operand, OperandMask]] = {}
    for mask in masks.take():
        found.setdefault(mask.module, {})[Operand(mask.operand)] = mask
    layers: Layers = {}
    for name, by in found.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Conv2d | nn.Linear)
        layers[name] = module_layer(module, by)
    return layers


def simulated(layers: Layers, chip: Accelerator) -> dict[str, tuple[PassCost, ...]]:
    """Return the passes of each layer; the first layer needs no gradient of its input."""
    costs = {name: simulate_layer(shape, masks, chip) for name, (shape, masks) in layers.items()}
    first = next(iter(costs))
    costs[first] = tuple(cost for cost in costs[first] if cost.which is not Pass.INPUT)
    return costs


def speedup(costs: dict[str, tuple[PassCost, ...]]) -> float:
    """Return the speed-up of the array over the step."""
    passes = [cost for layer in costs.values() for cost in layer]
    return sum(c.structural_cycles for c in passes) / sum(c.cycles for c in passes)


def mobilenet_v2(batch: int = 1) -> Counter[tuple[LayerShape, Pass, int]]:
    """Return the forward passes of MobileNetV2 at 224 x 224."""
    layers = [LayerShape(batch, 3, 32, 224, 224, 3, 3, (2, 2), (1, 1))]
    size, inputs = 112, 32
    for expansion, width, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
        (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            s, hidden = stride if number == 0 else 1, inputs * expansion
            if expansion > 1:
                layers.append(LayerShape(batch, inputs, hidden, size, size))
            depthwise = LayerShape(
                batch, hidden, hidden, size, size, 3, 3, (s, s), (1, 1), groups=hidden
            )
            size, inputs = depthwise.oh, width
            layers += [depthwise, LayerShape(batch, hidden, width, size, size)]
    layers += [LayerShape(batch, 320, 1280, size, size), LayerShape(1, 1280, 1000, 1, batch)]
    return Counter((layer, Pass.FORWARD, 4) for layer in layers)
