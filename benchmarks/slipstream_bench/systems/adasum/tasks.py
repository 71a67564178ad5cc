"""Small models and their samples for simulated workers: Fashion-MNIST and digits.

Samples that choose settings are neither trained on nor reported.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import nn

from slipstream_bench.systems.adasum.study import Samples, Study

MISSING = "Fashion-MNIST is not on this machine"
# Of the 60,000 training samples.
_TRAINED, _CHOICE = 20_000, 10_000
# So few that a step of 16 workers is one of 117, as with 32 samples per worker and three epochs.
_TRAINED_BY_8 = 15_000


def fashion(name: str, workers: int = 16, epochs: int = 3) -> Study | None:
    """Return ``MLP`` or ``CNN`` on 20,000 samples of Fashion-MNIST; None if it is missing here."""
    train, held = _images("train", _TRAINED + _CHOICE), _images("test", 10_000)
    if train is None or held is None:
        return None
    shape = (-1, 784) if name == "MLP" else (-1, 1, 28, 28)
    mean, scale = train.x[:_TRAINED].mean(), train.x[:_TRAINED].std()
    (x, y), (held_x, held_y) = (
        ((split.x.view(shape) - mean) / scale, split.y) for split in (train, held)
    )
    return Study(
        _mlp if name == "MLP" else _cnn, Samples(x[:_TRAINED], y[:_TRAINED]),
        Samples(x[_TRAINED:], y[_TRAINED:]), Samples(held_x, held_y), workers, epochs=epochs,
    )  # fmt: skip


def of_equal_steps() -> dict[str, Study] | None:
    """Return six tasks of 16 workers with different noise, each about 117 steps long."""
    found = {}
    for name in ("MLP", "CNN"):
        study = fashion(name)
        if study is None:
            return None
        fewer = Samples(study.train.x[:_TRAINED_BY_8], study.train.y[:_TRAINED_BY_8])
        found[f"{name}, 8 samples a worker"] = replace(study, train=fewer, batch=8, epochs=1)
        found[f"{name}, 32"] = study
    return {**found, "digits, 4": _digits(4, epochs=7), "digits, 16": _digits(16, epochs=29)}


def _digits(batch: int, epochs: int) -> Study:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.data).float() / 16.0
    y = torch.from_numpy(digits.target)
    train, choice, held = (
        Samples(x[begin:end], y[begin:end])
        for begin, end in ((0, 1100), (1100, 1400), (1400, None))
    )
    return Study(_small, train, choice, held, batch=batch, epochs=epochs)


@functools.cache
def _images(split: str, limit: int) -> Samples | None:
    from slipstream import data
    from slipstream.data import MissingDataError

    try:
        found = data.get("fashion_mnist", split=split, limit=limit)
    except MissingDataError:
        return None
    return Samples(
        torch.from_numpy(found.images.copy()).float() / 255, torch.from_numpy(found.labels.copy())
    )


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
