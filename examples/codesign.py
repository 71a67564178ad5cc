"""A classifier of handwritten digits, searched together with the chip that runs it.

slipstream nas codesign examples/codesign.py:task --hw edge --limit 'time<=1x' --limit 'area<=1x'
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import slipstream as ss


class Block(nn.Module):
    """An inverted bottleneck (Sandler et al., CVPR 2018): wide, depthwise, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, kernel: int = 3) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU(),
            nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden), nn.ReLU(),
            nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


def network() -> nn.Module:
    """Return a small network of inverted bottlenecks."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def task(epochs: int = 4) -> tuple[ss.nas.Supernet, Callable[[nn.Module], float], Tensor]:
    """Return a trained supernet, the validation accuracy, and batches for its batch norms."""
    torch.manual_seed(0)
    digits = ss.data.get("digits")
    x = torch.from_numpy(digits.images).float()[:, None] / 255
    y = torch.from_numpy(digits.labels)
    train, valid = slice(0, 1400), slice(1400, None)
    net = ss.nas.Supernet(ss.nas.derive_space(network(), x[:2]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def batches() -> list[tuple[Tensor, Tensor]]:
        return [(x[chosen], y[chosen]) for chosen in torch.randperm(1400).split(64)]

    ss.nas.fit(net, batches, cross_entropy, optimizer, epochs=epochs, subnets=1)

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(x[valid]).argmax(1) == y[valid]).float().mean())

    return net, accuracy, x[train][:256]


if __name__ == "__main__":
    net, accuracy, calibration = task()
    found = ss.codesign.search(
        net, accuracy, ss.codesign.ChipSpace.load("edge"), calibration=calibration,
        constraints={"time": "<= 1x", "area": "<= 1x"},
    ).run(60)  # fmt: skip
    pairs = found.pareto()
    found.table(pairs).print()
    for table in found.explain(pairs[0]):
        table.print()
