"""Predict which app is used in a context with a small DLRM.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from slipstream.mlperf.training.suite.metrics import auc
from slipstream.mlperf.training.tasks import task

_TRAINED, _TESTED, _FIELDS, _IDS = 57_722, 8_000, 10, 5_382


class _Interactions(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(_IDS, width)
        nn.init.normal_(self.embed.weight, std=0.05)
        pairs = _FIELDS * (_FIELDS - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(_FIELDS * width + pairs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 1),
        )  # fmt: skip
        self.register_buffer("pairs", torch.triu_indices(_FIELDS, _FIELDS, 1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        fields = self.embed(ids)
        dots = torch.bmm(fields, fields.transpose(1, 2))
        crossed = dots[:, self.pairs[0], self.pairs[1]]  # type: ignore[index]
        score: Tensor = self.top(torch.cat((fields.flatten(1), crossed), 1)).squeeze(1)
        return score


@task(
    target=0.92, metric="area under the curve", train_samples=_TRAINED, batch=256,
    evaluate_every=3_000, most_epochs=6, eval_samples=_TESTED,
    about="embeddings of 16 and dot products, 0.1 M parameters; Frappe, 57,722 uses of apps",
)  # fmt: skip
def ctr(run: Any) -> Iterator[Any]:
    """Train with Adam."""
    model = _Interactions()
    yield model, binary_cross_entropy_with_logits, torch.optim.Adam(model.parameters(), 2e-3)
    clicks = run.data("frappe")
    offsets = torch.tensor([0, *clicks.cardinalities[:-1]]).cumsum(0)
    x = torch.from_numpy(clicks.train.ids) + offsets
    y = torch.from_numpy(clicks.train.labels).float()
    chosen = torch.randperm(len(clicks.test.ids), generator=torch.Generator().manual_seed(0))
    chosen = chosen[:_TESTED]
    test = (torch.from_numpy(clicks.test.ids) + offsets)[chosen]
    labels = torch.from_numpy(clicks.test.labels)[chosen]
    yield run.shuffled(x, y), lambda model: auc(model(test), labels)
