"""Metrics that several tasks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 1000


def accuracy(model: Any, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of `labels` [n] that are the argmax of the model's outputs [n, classes]."""
    correct = [
        model(x).argmax(1).eq(y).sum()
        for x, y in zip(inputs.split(_ROWS), labels.split(_ROWS), strict=True)
    ]
    return float(sum(map(float, correct))) / len(labels)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve of `scores` [n] for binary `labels` [n]."""
    order = scores.double().argsort()
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = labels > 0
    count = int(positive.sum())
    above = float(ranks[positive].sum()) - count * (count + 1) / 2
    return above / (count * (len(labels) - count))
