"""Ensembles, and what they are worth: of whole networks, of a shared trunk, of shared weights.

Source: independent members: Lakshminarayanan et al., NeurIPS 2017; calibration error: Guo et al.,
"On Calibration of Modern Neural Networks", ICML 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.techniques._onnx import write
from slipstream.techniques.ensembles.stacking import Stacked

_BINS = 15


class Ensemble(nn.Module):
    """Members whose probabilities are averaged.

    Args:
        members: give logits [N, classes] each; a `Stacked` counts as many as it holds.
        trunk: what all are given in place of the input; computed once.

    Raises:
        InvalidArgumentError: no member.
    """

    def __init__(self, members: Sequence[nn.Module], trunk: nn.Module | None = None) -> None:
        super().__init__()
        if not members:
            raise InvalidArgumentError("members", "are none")
        self.members = nn.ModuleList(members)
        self.trunk = trunk

    def __len__(self) -> int:
        """How many members."""
        return sum(one.count if isinstance(one, Stacked) else 1 for one in self.members)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean probabilities, [N, classes]."""
        return self.probabilities(x).mean(0)

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """Every member's, [members, N, classes].

        Raises:
            InvalidArgumentError: members give different numbers of classes.
        """
        x = x if self.trunk is None else self.trunk(x)
        logits = [
            one.logits(x) if isinstance(one, Stacked) else one(x).unsqueeze(0)
            for one in self.members
        ]
        if len({tuple(map(int, one.shape[1:])) for one in logits}) > 1:
            raise InvalidArgumentError("members", "give outputs of different shapes")
        return torch.cat(logits).softmax(-1)

    def stacked(self) -> Ensemble:
        """The same with members of one shape side by side, in the order of shapes; a copy.

        Members that do not stack stay by themselves.
        """
        groups: dict[Any, list[nn.Module]] = {}
        for number, one in enumerate(self.members):
            shapes = tuple((n, tuple(p.shape)) for n, p in one.named_parameters())
            key: Any = (number,) if isinstance(one, Stacked) else shapes
            groups.setdefault(key, []).append(one)
        members: list[nn.Module] = []
        for group in groups.values():
            try:
                members += [Stacked(group)] if len(group) > 1 else group
            except WorkloadError:  # of a layer that does not stack
                members += group
        return Ensemble(members, self.trunk).train(self.training)

    def export_onnx(self, path: str | Path, example: torch.Tensor) -> Path:
        """Write all members and their mean as one graph; `example` [N, ...], any N later.

        Raises:
            MissingExtraError: the package onnx is not installed.
            SlipstreamError: the file cannot be written.
        """
        training = self.training
        try:
            return write(self.eval(), (example,), path, ["x"], ["probabilities"])
        finally:
            self.train(training)


@dataclass(frozen=True)
class Quality:
    """How good an ensemble's probabilities are.

    Attributes:
        accuracy: share of labels that are the most probable.
        nll: mean negative log-likelihood, nats.
        ece: expected calibration error, in 15 equal bins of confidence.
        disagreement: share of inputs on which two members differ, mean over pairs; 0 of one.
    """

    accuracy: float
    nll: float
    ece: float
    disagreement: float


@dataclass(frozen=True)
class Bin:
    """Of the inputs with a confidence above `low` and up to `high`: how often it was right.

    Attributes:
        count: inputs.
        confidence, accuracy: means over them; 0 of none.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def evaluate(ensemble: Ensemble, x: torch.Tensor, labels: torch.Tensor) -> Quality:
    """How good an ensemble is on inputs that it was not made with.

    Raises:
        InvalidArgumentError: not one label for every input.
    """
    each = _judged(ensemble, x, labels)
    mean = each.mean(0)
    tops = each.argmax(-1)
    pairs = [float((tops[i] != tops[j]).float().mean()) for i in range(len(tops)) for j in range(i)]
    gaps = [one.count * abs(one.accuracy - one.confidence) for one in _bins(mean, labels, _BINS)]
    return Quality(
        float((mean.argmax(-1) == labels).float().mean()),
        float(functional.nll_loss(mean.clamp_min(1e-12).log(), labels)),
        sum(gaps) / len(labels), sum(pairs) / len(pairs) if pairs else 0.0,
    )  # fmt: skip


def calibration(
    ensemble: Ensemble, x: torch.Tensor, labels: torch.Tensor, bins: int = _BINS
) -> list[Bin]:
    """How often predictions of each confidence are right; arguments and errors as `evaluate`."""
    return _bins(_judged(ensemble, x, labels).mean(0), labels, bins)


def _judged(ensemble: Ensemble, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if len(x) != len(labels) or not len(labels):
        raise InvalidArgumentError("labels", f"are {len(labels)}, of {len(x)} inputs")
    return probabilities(ensemble, x)


def probabilities(ensemble: Ensemble, x: torch.Tensor) -> torch.Tensor:
    """Every member's in evaluation mode, [members, N, classes]; modules keep their modes."""
    modes = {module: module.training for module in ensemble.modules()}
    try:
        with torch.no_grad():
            return ensemble.eval().probabilities(x)
    finally:
        for module, training in modes.items():
            module.training = training


def _bins(mean: torch.Tensor, labels: torch.Tensor, bins: int) -> list[Bin]:
    confidence, chosen = mean.max(-1)
    place = (confidence * bins).long().clamp_max(bins - 1)
    counts = torch.bincount(place, minlength=bins)
    sums = [
        torch.zeros(bins).index_add(0, place, one.float()) for one in (confidence, chosen == labels)
    ]
    means = [(one / counts.clamp_min(1)).tolist() for one in sums]
    return [
        Bin(number / bins, (number + 1) / bins, count, means[0][number], means[1][number])
        for number, count in enumerate(counts.tolist())
    ]


def detection(ensemble: Ensemble, inside: torch.Tensor, outside: torch.Tensor) -> float:
    """How well confidence tells inputs of the kind trained on from others: area under the ROC.

    Args:
        inside, outside: inputs of either kind, in eval mode.
    """
    with torch.no_grad():
        low, high = (ensemble.eval()(x).amax(-1) for x in (outside, inside))
    order = torch.sort(low).values
    below = torch.searchsorted(order, high)
    upto = torch.searchsorted(order, high, right=True)
    return float((below + upto).double().mean() / (2 * len(low)))
