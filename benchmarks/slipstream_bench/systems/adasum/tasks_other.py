"""Tasks on data other than clicks and images: spoken digits, newsgroups."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from slipstream_bench.systems.adasum.study import Samples, Study

_STEPS = 117
_WORKERS = 16
# Windows of a recording, samples per window, and bands of their spectra.
_WINDOWS, _WINDOW, _BANDS = 16, 256, 32
# Number of buckets of words.
_PLACES = 1000


def of_other_data() -> dict[str, Study] | None:
    """Return four tasks of 16 workers, each about 117 steps long; None if data is missing."""
    from slipstream import data
    from slipstream.data import MissingDataError
    from slipstream_bench.datasets import newsgroups

    try:
        spoken, groups = data.get("fsdd", all_takes=True), newsgroups()
    except MissingDataError:
        return None
    topics = np.concatenate([groups.train_labels, groups.test_labels])
    of_words = _shared(_words([*groups.train, *groups.test]), topics, 8000)
    of_sound = _shared(
        np.stack([_spectrum(samples) for samples in spoken.samples]), spoken.labels, 2200
    )
    return {
        "spoken digits, 4 samples a worker": _study(of_sound, 10, 4),
        "spoken digits, 16": _study(of_sound, 10, 16),
        "newsgroups, 4": _study(of_words, 20, 4),
        "newsgroups, 16": _study(of_words, 20, 16),
    }


def _study(samples: tuple[Samples, Samples, Samples], classes: int, batch: int) -> Study:
    inputs = samples[0].x.shape[1]

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))

    an_epoch = len(samples[0].x) // (_WORKERS * batch)
    return Study(made, *samples, _WORKERS, batch, epochs=max(1, round(_STEPS / an_epoch)))


def _shared(x: Any, y: Any, trained: int) -> tuple[Samples, Samples, Samples]:
    """Split samples in a random order: training, a tenth of that to choose settings, the rest."""
    order = np.random.default_rng(0).permutation(len(x))
    x = (x[order] - x[order[:trained]].mean(0)) / (x[order[:trained]].std(0) + 1e-3)
    inputs, labels = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y[order])
    cuts = (0, trained, trained + trained // 10, len(x))
    first, second, third = (Samples(inputs[a:b], labels[a:b]) for a, b in itertools.pairwise(cuts))
    return first, second, third


def _spectrum(sound: Any) -> Any:
    """Return logarithms of a recording's spectrum in bands, float64 [windows * bands]."""
    sound = np.pad(sound / 32768.0, (0, max(0, 2 * _WINDOW - len(sound))))
    begins = np.linspace(0, len(sound) - _WINDOW, _WINDOWS).astype(int)
    windows = np.stack([sound[a : a + _WINDOW] * np.hanning(_WINDOW) for a in begins])
    spectra = np.abs(np.fft.rfft(windows))[:, 1:]
    return np.log(spectra.reshape(_WINDOWS, _BANDS, -1).mean(2) + 1e-3).ravel()


def _words(texts: Sequence[str]) -> Any:
    """Return logarithms of word counts, float32 [texts, places]."""
    counts = np.zeros((len(texts), _PLACES), np.float32)
    for row, text in zip(counts, texts, strict=True):
        for word in re.findall(r"[a-z]{3,}", text.lower()):
            row[zlib.crc32(word.encode()) % _PLACES] += 1
    return np.log1p(counts)
