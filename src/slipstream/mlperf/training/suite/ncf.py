"""Predict a user's next film with matrix factorization and a perceptron.

Source: He et al., "Neural Collaborative Filtering", WWW 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from slipstream.mlperf.training.tasks import task

_USERS, _ITEMS, _RATINGS = 610, 9_724, 100_226
_NEGATIVES, _TEST_NEGATIVES, _TOP = 4, 99, 10


class _Factors(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.user1, self.user2 = nn.Embedding(_USERS, width), nn.Embedding(_USERS, width)
        self.item1, self.item2 = nn.Embedding(_ITEMS, width), nn.Embedding(_ITEMS, width)
        for table in (self.user1, self.user2, self.item1, self.item2):
            nn.init.normal_(table.weight, std=0.05)
        self.mlp = nn.Sequential(
            nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16),
            nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Linear(width + 16, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(-1)
        product = self.user1(user) * self.item1(item)
        deep = self.mlp(torch.cat((self.user2(user), self.item2(item)), -1))
        score: Tensor = self.out(torch.cat((product, deep), -1)).squeeze(-1)
        return score


@task(
    target=0.55, metric="hit ratio at 10", train_samples=_RATINGS * (1 + _NEGATIVES), batch=1024,
    evaluate_every=8_000, most_epochs=4, eval_samples=_USERS,
    about="factors of 16 and a perceptron, 0.33 M parameters; MovieLens, 100,836 ratings",
)  # fmt: skip
def ncf(run: Any) -> Iterator[Any]:
    """Train with Adam; the test ranks each user's last film among 99 others."""
    model = _Factors()
    yield model, binary_cross_entropy_with_logits, torch.optim.Adam(model.parameters(), 2e-3)
    ratings = run.data("movielens_latest_small")
    order = np.lexsort((ratings.timestamps, ratings.users))
    users, items = ratings.users[order], ratings.items[order]
    last = np.append(np.flatnonzero(np.diff(users)), len(users) - 1)
    train = np.ones(len(users), bool)
    train[last] = False
    generator = np.random.default_rng(0)
    rated = set((users * _ITEMS + items).tolist())
    negatives = generator.integers(0, _ITEMS, (len(last), 3 * _TEST_NEGATIVES))
    rows = []
    for user, item, others in zip(users[last], items[last], negatives, strict=True):
        unrated = [film for film in others if user * _ITEMS + film not in rated][:_TEST_NEGATIVES]
        rows.append([[user, film] for film in (item, *unrated)])
    test = torch.tensor(rows)
    x = torch.from_numpy(np.stack((users[train], items[train]), 1))

    def hits(model: Any) -> float:
        scores = model(test)
        return float((scores[:, 1:] >= scores[:, :1]).sum(1).lt(_TOP).float().mean())

    yield _WithNegatives(run, x), hits


class _WithNegatives:
    """Batches of every pair, with four random films per pair drawn again in each epoch."""

    def __init__(self, run: Any, pairs: Tensor) -> None:
        self._run, self._pairs = run, pairs

    def __iter__(self) -> Iterator[Any]:
        others = self._pairs.repeat(_NEGATIVES, 1)
        others[:, 1] = torch.randint(0, _ITEMS, (len(others),))
        x = torch.cat((self._pairs, others))
        y = torch.zeros(len(x))
        y[: len(self._pairs)] = 1
        return iter(self._run.shuffled(x, y))
