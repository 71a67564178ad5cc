"""Translate captions from German to English with a transformer of 1 + 1 layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from slipstream.mlperf.training.tasks import task

_TRAINED, _TESTED, _WORDS, _LENGTH, _WIDTH = 6_000, 400, 1_500, 16, 96
_PAD, _BEGIN, _UNKNOWN = 0, 1, 2


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(_WORDS, _WIDTH)
        self.places = nn.Parameter(torch.randn(_LENGTH, _WIDTH) * 0.05)
        layer = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, **layer)  # type: ignore[arg-type]
        self.decoder = nn.TransformerDecoderLayer(_WIDTH, 4, 2 * _WIDTH, **layer)  # type: ignore[arg-type]
        self.out = nn.Linear(_WIDTH, _WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source(source) + self.places)
        later = torch.triu(torch.ones(_LENGTH, _LENGTH, dtype=torch.bool), 1)
        y = self.decoder(self.target(target) + self.places, memory, tgt_mask=later)
        logits: Tensor = self.out(y)
        return logits.flatten(0, 1)


@task(
    target=3.7, higher=False, metric="log perplexity", train_samples=_TRAINED, batch=32,
    evaluate_every=320, most_epochs=6, eval_samples=_TESTED,
    about="a transformer of 1 + 1 layers of 96, 0.7 M parameters; Multi30k, 6,000 pairs",
)  # fmt: skip
def nmt_tiny(run: Any) -> Iterator[Any]:
    """Train with Adam and teacher forcing."""
    model = _Translator()

    def loss(logits: Tensor, words: Tensor) -> Tensor:
        return cross_entropy(logits, words.flatten(), ignore_index=_PAD)

    yield model, loss, torch.optim.Adam(model.parameters(), 1e-3)
    pairs = run.data("multi30k")
    sides = {"source": pairs.train.source, "target": pairs.train.target}
    vocabulary = {side: _vocabulary(lines[:_TRAINED]) for side, lines in sides.items()}
    train, test = (
        _tensors(part, vocabulary, count)
        for part, count in ((pairs.train, _TRAINED), (pairs.validation, _TESTED))
    )

    def perplexity(model: Any) -> float:
        return float(loss(model(test[0], test[1][:, :-1]), test[1][:, 1:]))

    yield _Pairs(run, *train), perplexity


class _Pairs:
    """Batches of ((source, shifted target), target)."""

    def __init__(self, run: Any, source: Tensor, target: Tensor) -> None:
        self._run, self._source, self._target = run, source, target

    def __iter__(self) -> Iterator[Any]:
        for source, target in self._run.shuffled(self._source, self._target):
            yield (source, target[:, :-1].contiguous()), target[:, 1:].contiguous()


def _vocabulary(lines: Any) -> dict[str, int]:
    counts = Counter(word for line in lines for word in line.split())
    common = sorted(counts, key=lambda word: (-counts[word], word))[: _WORDS - 3]
    return {word: place + 3 for place, word in enumerate(common)}


def _tensors(part: Any, vocabulary: dict[str, dict[str, int]], count: int) -> tuple[Tensor, Tensor]:
    """Return ids of the source, [count, length], and of the target, [count, length + 1]."""
    source = torch.full((count, _LENGTH), _PAD)
    target = torch.full((count, _LENGTH + 1), _PAD)
    target[:, 0] = _BEGIN
    for tensor, lines, side, first in (
        (source, part.source, "source", 0), (target, part.target, "target", 1)
    ):  # fmt: skip
        for row, line in enumerate(lines[:count]):
            ids = [vocabulary[side].get(word, _UNKNOWN) for word in line.split()]
            ids = ids[: tensor.shape[1] - first]
            tensor[row, first : first + len(ids)] = torch.tensor(ids)
    return source, target
