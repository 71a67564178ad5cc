"""Texts as bags of words, on which compressed tables are trained and scored."""

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
from slipstream_bench import datasets
from slipstream_bench.systems.embedding.quality_tasks import by_adam

_HELD_OUT = 0.1
# Maximum number of words read of a text, and minimum count of a word to have a row.
_MAX_WORDS = 200
_MIN_COUNT = 2


class WordMeans(nn.Module):
    """Classification of a text by the mean of its words' vectors."""

    def __init__(self, words: int, classes: int, dim: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, dim, mode="mean")
        self.head = nn.Linear(dim, classes)
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Map ids [N] and the start of each text in them [texts] to scores [texts, classes]."""
        scores: torch.Tensor = self.head(self.words(ids, offsets))
        return scores


@dataclass(frozen=True)
class Texts:
    """Texts as ids of their words.

    Attributes:
        ids: int64 [words of the text] per text.
        labels: int64 [texts].
    """

    ids: tuple[np.ndarray, ...]
    labels: np.ndarray

    def bags(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids, starts of texts, and labels of the `chosen` ones."""
        texts = [self.ids[index] for index in chosen.tolist()]
        begin = np.cumsum([0, *map(len, texts[:-1])])
        ids = torch.from_numpy(np.concatenate(texts))
        return ids, torch.from_numpy(begin), torch.from_numpy(self.labels[chosen.numpy()])

    def part(self, places: slice) -> Texts:
        """Return a slice of the texts."""
        return Texts(self.ids[places], self.labels[places])


@dataclass
class TextTask:
    """Classification of topics or opinions with `WordMeans`; scored by accuracy."""

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
        """Return a model of one table."""
        return WordMeans(self.word_count, self.class_count, self.dim)

    def counts(self) -> dict[str, torch.Tensor]:
        """Return the number of uses of each word in training texts."""
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
        """Return the accuracy on the test texts."""
        model.eval()
        correct = 0
        for part in torch.split(torch.arange(len(self.test.ids)), 512):
            ids, offsets, labels = self.test.bags(part)
            correct += int((model(ids, offsets).argmax(1) == labels).sum())
        return correct / len(self.test.ids)

    def yardstick(self) -> str:
        """Return the accuracy of the same class for every text."""
        most = np.bincount(self.test.labels).max() / len(self.test.labels)
        return f"the largest class, no model, {most:.4f}"

    def validation(self) -> TextTask:
        """Hold out the last of the shuffled training texts."""
        last = len(self.train.ids) - int(_HELD_OUT * len(self.train.ids))
        return dataclasses.replace(
            self, train=self.train.part(slice(last)), test=self.train.part(slice(last, None))
        )


def sentiments() -> TextTask:
    """Load sentences of film reviews, positive or negative, without neutral ones."""
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
    """Load posts of twenty groups, by their first words."""
    data = datasets.newsgroups()
    train = list(zip(data.train, data.train_labels.tolist(), strict=True))
    test = list(zip(data.test, data.test_labels.tolist(), strict=True))
    return _task("20 Newsgroups", train, test, classes=len(data.classes))


def _task(
    name: str, train: Sequence[tuple[str, int]], test: Sequence[tuple[str, int]], classes: int
) -> TextTask:
    split = [[(_words(text), label) for text, label in part] for part in (train, test)]
    often = Counter(word for words, _ in split[0] for word in words)
    rows = [word for word, count in often.most_common() if count >= _MIN_COUNT]
    number = {word: row for row, word in enumerate(rows)}
    order = np.random.default_rng(0).permutation(len(train))
    shuffled = [split[0][index] for index in order]
    return TextTask(
        _numbered(shuffled, number), _numbered(split[1], number), len(rows), classes, name
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())[:_MAX_WORDS]


def _numbered(texts: Sequence[tuple[list[str], int]], number: dict[str, int]) -> Texts:
    """Replace words by ids; texts without a known word are left out."""
    ids = [
        (np.array([number[word] for word in words if word in number], np.int64), label)
        for words, label in texts
    ]
    nonempty = [(words_of, label) for words_of, label in ids if len(words_of)]
    return Texts(
        tuple(words_of for words_of, _ in nonempty),
        np.array([label for _, label in nonempty], np.int64),
    )
