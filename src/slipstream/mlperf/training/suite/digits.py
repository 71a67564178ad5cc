"""Classify handwritten digits with a perceptron; needs no data folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.mlperf.training.suite.metrics import accuracy
from slipstream.mlperf.training.tasks import task


@task(
    target=0.85, train_samples=1_437, batch=24, evaluate_every=240, most_epochs=12,
    eval_samples=360, about="a perceptron, 51 k parameters; 1,797 digits of scikit-learn",
)  # fmt: skip
def digits(run: Any) -> Iterator[Any]:
    """Train with Adam."""
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128),
        nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    yield model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-3)
    images = run.data("digits")
    x = torch.from_numpy(images.images).flatten(1).float() / 255
    y = torch.from_numpy(images.labels)
    yield run.shuffled(x[:1437], y[:1437]), lambda model: accuracy(model, x[1437:], y[1437:])
