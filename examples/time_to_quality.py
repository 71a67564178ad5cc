"""A training task of your own: how soon does it reach its quality, with and without a technique?

slipstream mlperf train examples/time_to_quality.py:digits -t lowrank:0.25 --runs 5
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from slipstream.mlperf import training


@training.task(target=0.85, train_samples=1437, batch=24, evaluate_every=240, most_epochs=12)
def digits(run: Any) -> Iterator[Any]:
    """Before the first yield: building. Behind it the clock runs, and data may be touched."""
    sizes = (64, 128, 128, 128)
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(128, 10))
    yield model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters(), 1e-3)
    images = run.data("digits")
    x = torch.from_numpy(images.images).flatten(1).float() / 255
    y = torch.from_numpy(images.labels)
    test = x[1437:], y[1437:]
    yield run.shuffled(x[:1437], y[:1437]), lambda model: training.accuracy(model, *test)


if __name__ == "__main__":
    for table in training.time_to_quality(f"{__file__}:digits", ["lowrank:0.25"], runs=3).tables():
        table.print()
