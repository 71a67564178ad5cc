"""Tests that every pair of techniques can be predicted on a step that the other edits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import Durations
from slipstream.graph import Graph
from slipstream.verbs.advising import single_techniques
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted
from slipstream.workload import build_from
from tiny_models import record


class _Sequences(nn.Module):
    """Embedding, attention, recurrent layers of two kinds, dropout, norms and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.attention = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.wide, self.out = nn.Linear(64, 96), nn.Linear(96, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.gru(self.lstm(self.attention(self.words(x)))[0])[0]
        scores: torch.Tensor = self.out(self.wide(states[:, -1]))
        return scores


def _sequences() -> Any:
    model, batch = _Sequences(), (torch.randint(0, 50, (4, 6)), torch.randint(0, 4, (4,)))
    return model, batch, cross_entropy, torch.optim.AdamW(model.parameters(), 0.1)


def _images() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1, groups=2),
        nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip
    batch = (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize("make", [_sequences, _images], ids=lambda make: make.__name__[1:])
def test_every_pair_is_predicted_or_refused(make: Any, tmp_path: Path) -> None:
    graph: Graph = record(build_from(make(), (), 0, make.__name__))
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    singles = single_techniques()
    predictions = predict(graph, [[part] for part in singles], durations=durations, measuring_s=0)
    apply = [part for part, p in zip(singles, predictions, strict=True) if isinstance(p, Predicted)]
    pairs = [list(pair) for pair in itertools.combinations(apply, 2)]
    # A machine with one core has no threads to try.
    assert len(pairs) > 30
    assert len(predict(graph, pairs, durations=durations, measuring_s=0)) == len(pairs)
