"""Classify the sentiment of phrases of film reviews with a bag of words.

Every node of a tree is a labelled phrase. The test set consists of whole sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from slipstream.mlperf.training.suite.metrics import accuracy
from slipstream.mlperf.training.tasks import task

_MAX_WORDS, _WORDS, _TRAINED, _TESTED = 40, 8_000, 40_000, 872


class _Bag(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(_WORDS + 1, width, mode="mean", padding_idx=_WORDS)
        self.top = nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.top(self.words(ids))
        return logits


@task(
    target=0.70, train_samples=_TRAINED, batch=64, evaluate_every=4_000, most_epochs=6,
    eval_samples=_TESTED,
    about="a bag of words, 0.5 M parameters; Stanford Sentiment Treebank, 40,000 phrases",
)  # fmt: skip
def sst_bag(run: Any) -> Iterator[Any]:
    """Train with Adam, without neutral phrases."""
    model = _Bag()
    yield model, cross_entropy, torch.optim.Adam(model.parameters(), 1e-3)
    trees = run.data("sst")
    phrases = [phrase for tree in trees.train for phrase in _phrases(tree)]
    counts: dict[str, int] = {}
    for words, _ in phrases:
        for word in words:
            counts[word] = counts.get(word, 0) + 1
    common = sorted(counts, key=lambda word: (-counts[word], word))[:_WORDS]
    number = {word: place for place, word in enumerate(common)}
    chosen = torch.randperm(len(phrases), generator=torch.Generator().manual_seed(0))[:_TRAINED]
    x, y = _tensors([phrases[i] for i in chosen.tolist()], number)
    whole = [_phrases(tree)[-1] for tree in trees.validation if int(tree.labels[-1]) != 2]
    test = _tensors(whole, number)
    yield run.shuffled(x, y), lambda model: accuracy(model, *test)


def _phrases(tree: Any) -> list[tuple[list[str], int]]:
    """Return words and label of every phrase that is not neutral; the whole sentence is last."""
    words: list[list[str]] = []
    phrases = []
    for node, label in enumerate(tree.labels.tolist()):
        left, right = int(tree.left[node]), int(tree.right[node])
        spanned = [tree.words[node]] if left < 0 else words[left] + words[right]
        words.append(spanned)
        if label != 2:
            phrases.append((spanned, int(label > 2)))
    return phrases


def _tensors(phrases: Any, number: dict[str, int]) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(phrases), _MAX_WORDS), _WORDS)
    for row, (words, _) in enumerate(phrases):
        numbers = [number[word] for word in words if word in number][:_MAX_WORDS]
        ids[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
    return ids, torch.tensor([label for _, label in phrases])
