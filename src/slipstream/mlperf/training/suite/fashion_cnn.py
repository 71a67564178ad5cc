"""Classify Fashion-MNIST with two convolutions and a hidden layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.mlperf.training.suite.metrics import accuracy
from slipstream.mlperf.training.tasks import task

_TRAINED, _TESTED = 20_000, 4_000


@task(
    target=0.82, train_samples=_TRAINED, batch=128, evaluate_every=2_000, most_epochs=6,
    eval_samples=_TESTED, about="2 convolutions, 53 k parameters; Fashion-MNIST, 20,000 images",
)  # fmt: skip
def fashion_cnn(run: Any) -> Iterator[Any]:
    """Train with Adam; the learning rate scales with the square root of the batch size."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 49, 30), nn.ReLU(), nn.Linear(30, 10),
    )  # fmt: skip
    # Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    rate = 1e-3 * math.sqrt(run.batch / 128)
    yield model, cross_entropy, torch.optim.Adam(model.parameters(), rate)
    images = run.data("fashion_mnist")
    x = torch.from_numpy(images.images[: _TRAINED + _TESTED]).unsqueeze(1).float() / 255
    y = torch.from_numpy(images.labels[: _TRAINED + _TESTED])
    test = x[_TRAINED:], y[_TRAINED:]
    yield run.shuffled(x[:_TRAINED], y[:_TRAINED]), lambda model: accuracy(model, *test)
