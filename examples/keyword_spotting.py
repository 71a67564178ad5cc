"""A network for spoken digits, searched for a microcontroller.

slipstream nas search examples/keyword_spotting.py:task --board stm32f446re --latency 60ms -o kws/
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import slipstream as ss
from slipstream.runtimes import preprocessing

TEST_SPEAKERS = ("lucas", "theo")


def network(channels: int = 64, blocks: int = 4) -> nn.Module:
    """Return a DS-CNN (Zhang et al., arXiv 1711.07128) for inputs [n, 1, 49, 10]."""
    layers = [nn.Conv2d(1, channels, (10, 4), (2, 2), (4, 1)), nn.BatchNorm2d(channels), nn.ReLU()]
    for _ in range(blocks):
        layers += [
            nn.Conv2d(channels, channels, 3, 1, 1, groups=channels), nn.BatchNorm2d(channels),
            nn.ReLU(), nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels), nn.ReLU(),
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def task() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the network, and the recordings of four speakers and of two others."""
    audio = ss.data.get("fsdd")
    spectrum = preprocessing.sound_pipeline(
        audio.rate_hz, frame=240, hop=160, low=20.0, high=4_000.0, coefficients=10
    )
    images = torch.tensor(np.stack([spectrum(take) for take in audio.samples]))[:, None].float()
    classes = torch.tensor(audio.labels)
    test = torch.tensor(np.isin(audio.speakers, TEST_SPEAKERS))
    images = (images - images[~test].mean()) / images[~test].std()
    return network(), (images[~test], classes[~test]), (images[test], classes[test])
