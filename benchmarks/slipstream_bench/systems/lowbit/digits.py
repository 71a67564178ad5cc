"""A small network trained on scikit-learn's digits in float, then in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.errors import MissingExtraError
from slipstream.quant import calibrate
from slipstream.techniques.lowbit.qat import added_parameters, convert, prepare_training

_BATCH = 64
_HELD_OUT = 597


@dataclass(frozen=True)
class Digits:
    """Images, float32 [n, 1, 8, 8] in 0 to 1, and labels; the last 597 are held out."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def load(cls) -> Digits:
        """Load and shuffle the digits, always in the same order.

        Raises:
            MissingExtraError: scikit-learn is not installed.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise MissingExtraError("the digits data set", "scikit-learn", "data") from error
        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
        labels = torch.tensor(found.target)[order]
        cut = len(labels) - _HELD_OUT
        return cls((images[:cut], labels[:cut]), (images[cut:], labels[cut:]))

    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy of `model` on held-out images, in percent."""
        model.eval()
        with torch.no_grad():
            right = model(self.test[0]).argmax(1) == self.test[1]
        return 100 * float(right.float().mean())


def network() -> nn.Sequential:
    """Return three convolutions and a linear layer with 15 thousand weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(model: nn.Module, data: Digits, epochs: int, rate: float, seed: int) -> None:
    """Train with Adam and a learning rate that decays to zero."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = epochs * (len(data.train[1]) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(data.train[1]), generator=generator)
        for first in range(0, len(order) - _BATCH + 1, _BATCH):
            chosen = order[first : first + _BATCH]
            optimizer.zero_grad()
            loss: Any = cross_entropy(model(data.train[0][chosen]), data.train[1][chosen])
            loss.backward()
            optimizer.step()
            schedule.step()


@dataclass(frozen=True)
class Trained:
    """Accuracies in percent, and the model in two forms.

    Attributes:
        float_: accuracy of the network in float32.
        rounded: accuracy after training with fake quantisation.
        lowbit: accuracy of the low-bit layers converted from it.
        model: the network with low-bit layers.
        fake: the network with fake quantisation, in eval mode.
    """

    float_: float
    rounded: float
    lowbit: float
    model: nn.Module
    fake: nn.Module


def run(wbits: int, abits: int, seed: int, *, epochs: tuple[int, int] = (8, 8)) -> Trained:
    """Train in float, then with rounding, then convert.

    Args:
        epochs: epochs of each training.
    """
    import copy

    data = Digits.load()
    torch.manual_seed(seed)
    model: Any = network()
    train(model, data, epochs[0], 4e-3, seed)
    before = data.accuracy(model)
    ranges = calibrate(model, [data.train[0][:256]])
    prepare_training(model, wbits, abits, ranges)
    assert added_parameters(model)
    train(model, data, epochs[1], 2e-3, seed + 1)
    rounded = data.accuracy(model)
    fake = copy.deepcopy(model)

    def forward() -> None:
        with torch.no_grad():
            model(data.test[0][:2])

    convert(model, run=forward)
    return Trained(before, rounded, data.accuracy(model), model, fake)
