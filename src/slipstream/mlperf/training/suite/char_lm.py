"""Predict the next character of Shakespeare with an LSTM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from slipstream.mlperf.training.tasks import task

_LENGTH, _TRAINED, _TESTED = 32, 8_000, 800


class _CharacterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 48)
        self.lstm = nn.LSTM(48, 128, batch_first=True)
        self.hidden, self.out = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(ids))
        logits: Tensor = self.out(torch.relu(self.hidden(y)))
        return logits.flatten(0, 1)


@task(
    target=3.0, higher=False, metric="bits per character", train_samples=_TRAINED, batch=32,
    evaluate_every=800, most_epochs=6, eval_samples=_TESTED,
    about="an LSTM of 128; tiny Shakespeare, 8,000 sequences of 32 characters",
)  # fmt: skip
def char_lm(run: Any) -> Iterator[Any]:
    """Train with Adam."""
    model = _CharacterModel()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets.flatten())

    yield model, loss, torch.optim.Adam(model.parameters(), 2e-3)
    text = run.data("tiny_shakespeare")
    x, y = _sequences(text.as_bytes("train"), _TRAINED)
    test = _sequences(text.as_bytes("validation"), _TESTED)

    def bits(model: Any) -> float:
        return float(loss(model(test[0]), test[1])) / math.log(2)

    yield run.shuffled(x, y), bits


def _sequences(codes: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next characters, [count, length] each, spread evenly over the text."""
    whole = torch.from_numpy(codes).long().clamp_(max=127)
    starts = torch.linspace(0, len(whole) - _LENGTH - 2, count).long()
    at = starts[:, None] + torch.arange(_LENGTH + 1)
    sequences = whole[at]
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
