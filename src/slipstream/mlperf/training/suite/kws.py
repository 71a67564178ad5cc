"""Classify spoken digits of an unseen speaker with a depthwise separable network.

Source: Zhang et al., "Hello Edge: Keyword Spotting on Microcontrollers", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from slipstream.mlperf.training.suite.metrics import accuracy
from slipstream.mlperf.training.tasks import task

_SAMPLES, _BANDS, _TRAINED, _TESTED = 6_000, 32, 2_500, 500
_TEST_SPEAKER = 1


def _separable(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False),
        nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
    ]  # fmt: skip


@task(
    target=0.55, train_samples=_TRAINED, batch=32, evaluate_every=500, most_epochs=16,
    eval_samples=_TESTED,
    about="3 depthwise separable convolutions, 8 k parameters; 3,000 spoken digits, one "
    "speaker held out",
)  # fmt: skip
def kws(run: Any) -> Iterator[Any]:
    """Train with Adam."""
    model = nn.Sequential(
        nn.Conv2d(1, 40, 5, 2, 2, bias=False), nn.BatchNorm2d(40), nn.ReLU(),
        *(layer for _ in range(3) for layer in _separable(40)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10),
    )  # fmt: skip
    yield model, cross_entropy, torch.optim.Adam(model.parameters(), 2e-3)
    audio = run.data("fsdd", all_takes=True)
    held_out = sorted(set(audio.speakers))[_TEST_SPEAKER]
    tested = torch.tensor([speaker == held_out for speaker in audio.speakers])
    x = torch.stack([_spectrogram(torch.from_numpy(s)) for s in audio.samples]).unsqueeze(1)
    y = torch.from_numpy(audio.labels)
    mean, spread = x[~tested].mean(), x[~tested].std()
    x = (x - mean) / spread
    test = x[tested], y[tested]
    yield run.shuffled(x[~tested], y[~tested]), lambda model: accuracy(model, *test)


def _spectrogram(samples: Tensor) -> Tensor:
    """Return log power per band, [bands, frames], of the first 0.75 s."""
    x = samples.float()[:_SAMPLES] / 32768
    x = pad(x, (0, _SAMPLES - len(x)))
    window = torch.hann_window(256)
    power = torch.stft(x, 256, 192, window=window, return_complex=True).abs().square()
    bands = power[: 4 * _BANDS].reshape(_BANDS, 4, -1).mean(1)
    return torch.log(bands + 1e-6)
