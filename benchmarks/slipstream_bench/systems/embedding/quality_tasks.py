"""Tasks that train and score compressed tables: real data, and data with known truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from slipstream.data.kinds import ClickRows, Clicks
from slipstream_bench.datasets import Interactions
from slipstream_bench.systems.embedding.dlrm import DLRM

_TOP = 20
_HELD_OUT = 0.1


class Task(Protocol):
    """A training task with embedding tables.

    Attributes:
        name, metric: as shown in tables; a higher metric is better.
        epochs: epochs of the dense model.
        rate: usual learning rate of such a model.
    """

    name: str
    metric: str
    epochs: int
    rate: float

    def model(self) -> nn.Module:
        """Return the dense model, initialised from torch's seed."""

    def counts(self) -> dict[str, torch.Tensor]:
        """Return the number of look-ups of each row in an epoch, by table."""

    def training(self, model: nn.Module, rate: float) -> Iterator[None]:
        """Train `model` in place, one epoch per item, for as long as it is iterated."""

    def score(self, model: nn.Module) -> float:
        """Return the score on test data."""

    def yardstick(self) -> str:
        """Return a reference score that needs no training, as text."""

    def validation(self) -> Self:
        """Return the task on training data alone, a tenth held out, to choose settings."""


def by_adam(
    model: nn.Module,
    rate: float,
    parts: Callable[[], Sequence[torch.Tensor]],
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Train `model` in place, an epoch per item: a step for the `loss` of each of its `parts`."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    while True:
        model.train()
        for part in parts():
            optimizer.zero_grad()
            torch.autograd.backward(loss(part))
            optimizer.step()
        yield


class Factors(nn.Module):
    """Vectors of users and items whose dot products predict who takes what."""

    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)


@dataclass
class Feedback:
    """Prediction of who takes what, by matrix factorisation: softmax over the batch's items.

    The score is the share of a user's held-out items among the 20 best that were not trained on.
    """

    data: Interactions
    name: str
    dim: int = 64
    epochs: int = 4
    rate: float = 3e-3
    batch: int = 512
    scored_users: int = 2000

    metric = f"recall@{_TOP}"

    def model(self) -> nn.Module:
        """Return a model of two tables."""
        return Factors(self.data.user_count, self.data.item_count, self.dim)

    def counts(self) -> dict[str, torch.Tensor]:
        """Return the number of pairs of each user and item."""
        data = self.data
        return {
            "user": torch.from_numpy(np.bincount(data.users, minlength=data.user_count)),
            "item": torch.from_numpy(np.bincount(data.items, minlength=data.item_count)),
        }

    def training(self, model: nn.Module, rate: float) -> Iterator[None]:
        """Train by Adam; subtract the log popularity of items from their log-odds in the batch."""
        users, items = torch.from_numpy(self.data.users), torch.from_numpy(self.data.items)
        popular = self.counts()["item"].float() + 1
        log_popular = (popular / popular.sum()).log()

        def loss(part: torch.Tensor) -> torch.Tensor:
            user, item = users[part], items[part]
            scores = model.user(user) @ model.item(item).T - log_popular[item]  # type: ignore[operator]
            same = item[None] == item[:, None]
            same.fill_diagonal_(False)
            return cross_entropy(scores.masked_fill(same, -1e9), torch.arange(len(part)))

        def parts() -> Sequence[torch.Tensor]:
            return torch.split(torch.randperm(len(users)), self.batch)[:-1]

        return by_adam(model, rate, parts, loss)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Return the recall among the 20 best."""
        model.eval()
        every = model.item(torch.arange(self.data.item_count))  # type: ignore[operator]
        return self._recall(lambda users: model.user(users) @ every.T)  # type: ignore[operator]

    def yardstick(self) -> str:
        """Return the recall of the same 20 for all users: the most taken items."""
        popular = self.counts()["item"].float()
        found = self._recall(lambda users: popular.repeat(len(users), 1))
        return f"the most taken items, no model, {found:.4f}"

    def _recall(self, scores_of: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the recall of scores [users, items]."""
        data = self.data
        test = np.unique(data.test_users)[: self.scored_users]
        held = _by_user(data.test_users, data.test_items)
        trained = _by_user(data.users, data.items)
        found = []
        for part in np.array_split(test, -(-len(test) // 500)):
            scores = scores_of(torch.from_numpy(part))
            for row, user in enumerate(part.tolist()):
                if user in trained:
                    scores[row, trained[user]] = -torch.inf
            best = scores.topk(_TOP, 1).indices.numpy()
            found += [
                np.isin(held[user], best[row]).mean() for row, user in enumerate(part.tolist())
            ]
        return float(np.mean(found))

    def validation(self) -> Feedback:
        """Hold out random pairs."""
        data = self.data
        held = split(data.users, data.items, data.user_count, data.item_count, data.name, _HELD_OUT)
        return dataclasses.replace(self, data=held)


@dataclass
class ClickTask:
    """Click prediction with a `DLRM`; scored by the area under the curve (AUC).

    Attributes:
        best: maximum of any model, if known.
    """

    data: Clicks
    name: str
    dim: int = 16
    epochs: int = 1
    rate: float = 0.02
    batch: int = 1024
    best: float | None = None

    metric = "AUC"

    def model(self) -> nn.Module:
        """Return a model with a table per field and sparse gradients: an epoch reads few rows."""
        dense = self.data.train.dense.shape[1]
        return DLRM(self.data.cardinalities, dense, self.dim, sparse=True)

    def counts(self) -> dict[str, torch.Tensor]:
        """Return the number of training rows with each id."""
        return {
            f"tables.{field}": torch.from_numpy(
                np.bincount(self.data.train.ids[:, field], minlength=rows)
            )
            for field, rows in enumerate(self.data.cardinalities)
        }

    def training(self, model: nn.Module, rate: float) -> Iterator[None]:
        """Train by Adagrad, whose steps are the same for sparse and dense gradients."""
        ids, dense, labels = _tensors(self.data.train)
        optimizer = torch.optim.Adagrad(model.parameters(), rate, initial_accumulator_value=1e-6)
        while True:
            model.train()
            order = torch.randperm(len(ids))
            for part in torch.split(order, self.batch):
                loss = binary_cross_entropy_with_logits(model(ids[part], dense[part]), labels[part])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
            yield

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Return the AUC of the test rows."""
        model.eval()
        ids, dense, labels = _tensors(self.data.test)
        made = [
            model(i, d)
            for i, d in zip(torch.split(ids, 8192), torch.split(dense, 8192), strict=True)
        ]
        return auc(torch.cat(made).numpy(), labels.numpy())

    def yardstick(self) -> str:
        """Return the AUC of the true probabilities."""
        return "" if self.best is None else f"the truth {self.best:.4f}"

    def validation(self) -> ClickTask:
        """Hold out the last rows."""
        rows = self.data.train
        last = len(rows) - int(_HELD_OUT * len(rows))
        train, held = (
            ClickRows(rows.ids[part], rows.dense[part], rows.labels[part])
            for part in (slice(last), slice(last, None))
        )
        return dataclasses.replace(
            self, data=dataclasses.replace(self.data, train=train, test=held)
        )


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the chance that a click is scored above a non-click; ties count half."""
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    clicks = labels > 0
    count = int(clicks.sum())
    above = ranks[clicks].sum() - count * (count + 1) / 2
    return float(above / (count * (len(labels) - count)))


def split(
    users: np.ndarray,
    items: np.ndarray,
    user_count: int,
    item_count: int,
    name: str,
    share: float = 0.2,
) -> Interactions:
    """Hold out this share of all pairs randomly."""
    held = np.random.default_rng(0).random(len(users)) < share
    return Interactions(
        name, users[~held], items[~held], users[held], items[held], user_count, item_count
    )


def first_users(data: Interactions, users: int, least: int = 3) -> Interactions:
    """Keep the first `users` users, and the items that at least `least` of them took."""
    own, own_test = data.users < users, data.test_users < users
    count = np.bincount(data.items[own], minlength=data.item_count)
    retained = count >= least
    number = np.cumsum(retained) - 1
    train = own & retained[data.items]
    test = own_test & retained[data.test_items]
    return Interactions(
        data.name, data.users[train], number[data.items[train]], data.test_users[test],
        number[data.test_items[test]], users, int(retained.sum()),
    )  # fmt: skip


def _tensors(rows: ClickRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(rows.ids),
        torch.from_numpy(np.nan_to_num(rows.dense)),
        torch.from_numpy(rows.labels).float(),
    )


def _by_user(users: np.ndarray, items: np.ndarray) -> dict[int, np.ndarray]:
    order = np.argsort(users, kind="stable")
    distinct, begin = np.unique(users[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(items[order], begin[1:]), strict=True))
