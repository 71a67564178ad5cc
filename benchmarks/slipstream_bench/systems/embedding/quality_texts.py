"""Texts as bags of words on which compressed tables are trained from scratch and scored."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.data import get
from slipstream_bench.systems.embedding.quality_tasks import by_adam

_HELD_OUT = 0.1
# Words of a text that are read, and how often a word must occur to have a row.
_LONGEST = 200
_LEAST_OFTEN = 2


class WordMeans(nn.Module):
    """The class of a text from the mean of its words' vectors."""

    def __init__(self, words: int, classes: int, dim: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, dim, mode="mean")
        self.head = nn.Linear(dim, classes)
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Ids [N] and where each text begins among them [texts] to scores [texts, classes]."""
        scores: torch.Tensor = self.head(self.words(ids, offsets))
        return scores


@dataclass(frozen=True)
class Texts:
    """Texts as ids of their words.

    Attributes:
        ids: int64 [words of the text] each.
        labels: int64 [texts].
    """

    ids: tuple[np.ndarray, ...]
    labels: np.ndarray

    def bags(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, where texts begin, and labels of those that are `chosen`."""
        texts = [self.ids[one] for one in chosen.tolist()]
        begin = np.cumsum([0, *map(len, texts[:-1])])
        ids = torch.from_numpy(np.concatenate(texts))
        return ids, torch.from_numpy(begin), torch.from_numpy(self.labels[chosen.numpy()])

    def part(self, places: slice) -> Texts:
        """Some of them."""
        return Texts(self.ids[places], self.labels[places])


@dataclass
class TextTask:
    """Topics or opinions of texts with `WordMeans`; scored by the share that is named right."""

    train: Texts
    test: Texts
    word_count: int
    class_count: int
    name: str
    dim: int = 64
    epochs: int = 6
    rate: float = 3e-3
    batch: int = 64

    metric = "accuracy"

    def model(self) -> nn.Module:
        """One table."""
        return WordMeans(self.word_count, self.class_count, self.dim)

    def counts(self) -> dict[str, torch.Tensor]:
        """As often as training texts use them."""
        every = np.concatenate(self.train.ids)
        return {"words": torch.from_numpy(np.bincount(every, minlength=self.word_count))}

    def training(self, model: nn.Module, rate: float) -> Iterator[None]:
        """Adam."""

        def loss(part: torch.Tensor) -> torch.Tensor:
            ids, offsets, labels = self.train.bags(part)
            return cross_entropy(model(ids, offsets), labels)

        def parts() -> Sequence[torch.Tensor]:
            return torch.split(torch.randperm(len(self.train.ids)), self.batch)

        return by_adam(model, rate, parts, loss)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Of the test texts."""
        model.eval()
        right = 0
        for part in torch.split(torch.arange(len(self.test.ids)), 512):
            ids, offsets, labels = self.test.bags(part)
            right += int((model(ids, offsets).argmax(1) == labels).sum())
        return right / len(self.test.ids)

    def yardstick(self) -> str:
        """The same class for every text."""
        most = np.bincount(self.test.labels).max() / len(self.test.labels)
        return f"the largest class, no model, {most:.4f}"

    def validation(self) -> TextTask:
        """The last training texts held out, as they were shuffled."""
        last = len(self.train.ids) - int(_HELD_OUT * len(self.train.ids))
        return dataclasses.replace(
            self, train=self.train.part(slice(last)), test=self.train.part(slice(last, None))
        )


def sentiments() -> TextTask:
    """Sentences of film reviews, for or against; neutral ones left out."""
    data = get("sst", drop_shared=True)
    middle = len(data.classes) // 2
    train, test = (
        [
            (tree.sentence, int(tree.labels[-1] > middle))
            for tree in trees
            if tree.labels[-1] != middle
        ]
        for trees in (data.train, data.test)
    )
    return _task("Stanford sentiments", train, test, classes=2)


def newsgroups() -> TextTask:
    """Posts of twenty groups, by their first words."""
    data = get("newsgroups")
    train = list(zip(data.train, data.train_labels.tolist(), strict=True))
    test = list(zip(data.test, data.test_labels.tolist(), strict=True))
    return _task("20 Newsgroups", train, test, classes=len(data.classes))


def _task(
    name: str, train: Sequence[tuple[str, int]], test: Sequence[tuple[str, int]], classes: int
) -> TextTask:
    split = [[(_words(text), label) for text, label in part] for part in (train, test)]
    often = Counter(word for words, _ in split[0] for word in words)
    rows = [word for word, count in often.most_common() if count >= _LEAST_OFTEN]
    number = {word: row for row, word in enumerate(rows)}
    order = np.random.default_rng(0).permutation(len(train))
    shuffled = [split[0][one] for one in order]
    return TextTask(
        _numbered(shuffled, number), _numbered(split[1], number), len(rows), classes, name
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())[:_LONGEST]


def _numbered(texts: Sequence[tuple[list[str], int]], number: dict[str, int]) -> Texts:
    """Texts without a word that is known are left out."""
    ids = [
        (np.array([number[word] for word in words if word in number], np.int64), label)
        for words, label in texts
    ]
    kept = [(words_of, label) for words_of, label in ids if len(words_of)]
    return Texts(
        tuple(words_of for words_of, _ in kept), np.array([label for _, label in kept], np.int64)
    )
