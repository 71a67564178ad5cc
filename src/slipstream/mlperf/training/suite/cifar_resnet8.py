"""Classify CIFAR-10 with the residual network of MLPerf Tiny."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from slipstream.mlperf.training.suite.metrics import accuracy
from slipstream.mlperf.training.tasks import task

_PER_CLASS, _TESTED = 600, 100


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1:
            self.skip = nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.skip(x))


@task(
    target=0.38, train_samples=10 * _PER_CLASS, batch=64, evaluate_every=600, most_epochs=6,
    eval_samples=10 * _TESTED, about="ResNet-8, 78 k parameters; CIFAR-10 as JPEG, 6,000 images",
)  # fmt: skip
def cifar_resnet8(run: Any) -> Iterator[Any]:
    """Train with Adam, without augmentation."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        _Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    yield model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-3)
    # Read the archive once: the last images of each class are the test set.
    per_class = _PER_CLASS + _TESTED
    images = run.data("cifar10_jpeg", split="train", limit_per_class=per_class)
    x = torch.from_numpy(images.images).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = torch.from_numpy(images.labels)
    # Images are sorted by class.
    tested = torch.arange(len(y)) % per_class >= _PER_CLASS
    test = x[tested].contiguous(), y[tested]
    yield run.shuffled(x[~tested].contiguous(), y[~tested]), lambda model: accuracy(model, *test)
