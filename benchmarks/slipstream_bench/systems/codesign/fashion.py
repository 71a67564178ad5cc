"""A network for clothes (Fashion-MNIST at 14 x 14), its supernet, and searches in it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from slipstream import data
from slipstream.nas import Supernet, calibrate, derive_space, fit
from slipstream.search.estimators import load_target

_TRAIN, _VALID = 6000, 2000
_EXAMPLE = Path(__file__).parents[4] / "examples" / "codesign.py"


def network() -> nn.Module:
    """Return a network like MobileNetV2, of the example's inverted bottlenecks."""
    block: Any = load_target(f"{_EXAMPLE}:Block")
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        block(16, 16, 1, 5), block(16, 32, 2), block(32, 32, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


@functools.cache
def images(split: str) -> tuple[Tensor, Tensor]:
    """Return images float32 [n, 1, 14, 14] and labels int64 [n]."""
    found = data.get("fashion_mnist", split=split, limit=_TRAIN + _VALID)
    x = torch.from_numpy(found.images).float()[:, None] / 255
    return avg_pool2d(x, 2) - 0.286, torch.from_numpy(found.labels)


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training batches of one epoch."""
    x, y = images("train")
    order = torch.randperm(_TRAIN, generator=torch.Generator().manual_seed(seed))
    yield from ((x[chosen], y[chosen]) for chosen in order.split(64))


def supernet(epochs: int) -> Supernet:
    """Return a supernet of `network`, trained for a number of epochs."""
    torch.manual_seed(0)
    net = Supernet(derive_space(network(), images("train")[0][:2]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - epoch / epochs)
        fit(net, lambda e=epoch: batches(e), cross_entropy, optimizer, subnets=1, seed=epoch)  # type: ignore[misc]
    return net


def calibration() -> Tensor:
    """Return images on which batch norms are recomputed."""
    return images("train")[0][:512]


def accuracy(module: nn.Module, split: str = "valid") -> float:
    """Return the accuracy on 2,000 images for validation, or on 8,000 for ``"test"``."""
    x, y = images("test" if split == "test" else "train")
    first = 0 if split == "test" else _TRAIN
    with torch.no_grad():
        hits = [
            (module(part).argmax(1) == labels).sum()
            for part, labels in zip(x[first:].split(500), y[first:].split(500), strict=True)
        ]
    return float(sum(hits)) / len(x[first:])


def trained(module: nn.Module, epochs: int) -> nn.Module:
    """Train a network with its present weights as a start, in place."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        module.train()
        for x, y in batches(epoch):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
        schedule.step()
    calibrate(module.eval(), calibration())
    return module
