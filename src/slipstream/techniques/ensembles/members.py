"""Ensembles of networks, or of heads on a shared trunk, and the quality of their predictions.

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
from slipstream.techniques.ensembles.stacking import StackedEnsemble

_BINS = 15


class Ensemble(nn.Module):
    """Members whose probabilities are averaged.

    Args:
        members: modules that return logits [N, classes]; a `StackedEnsemble` counts as all that
            it holds.
        trunk: computed once; members read its output instead of the input.

    Raises:
        InvalidArgumentError: there is no member.
    """

    def __init__(self, members: Sequence[nn.Module], trunk: nn.Module | None = None) -> None:
        super().__init__()
        if not members:
            raise InvalidArgumentError("members", "is empty")
        self.members = nn.ModuleList(members)
        self.trunk = trunk

    def __len__(self) -> int:
        """Return the number of members."""
        return sum(
            member.count if isinstance(member, StackedEnsemble) else 1 for member in self.members
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return mean probabilities, [N, classes]."""
        return self.probabilities(x).mean(0)

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """Return every member's probabilities, [members, N, classes].

        Raises:
            InvalidArgumentError: members return different numbers of classes.
        """
        x = x if self.trunk is None else self.trunk(x)
        logits = [
            member.logits(x) if isinstance(member, StackedEnsemble) else member(x).unsqueeze(0)
            for member in self.members
        ]
        if len({tuple(map(int, output.shape[1:])) for output in logits}) > 1:
            raise InvalidArgumentError("members", "return outputs of different shapes")
        return torch.cat(logits).softmax(-1)

    def stacked(self) -> Ensemble:
        """Return a copy in which members of equal shapes are stacked.

        Members are grouped by shape, in the order in which shapes first occur. Members that cannot
        be stacked stay separate.
        """
        groups: dict[Any, list[nn.Module]] = {}
        for number, member in enumerate(self.members):
            shapes = tuple((n, tuple(p.shape)) for n, p in member.named_parameters())
            key: Any = (number,) if isinstance(member, StackedEnsemble) else shapes
            groups.setdefault(key, []).append(member)
        members: list[nn.Module] = []
        for group in groups.values():
            try:
                members += [StackedEnsemble(group)] if len(group) > 1 else group
            except WorkloadError:  # a layer cannot be stacked
                members += group
        return Ensemble(members, self.trunk).train(self.training)

    def export_onnx(self, path: str | Path, example: torch.Tensor) -> Path:
        """Write all members and their mean as one graph with a dynamic batch size.

        Args:
            example: an input, [N, ...].

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
    """Quality of an ensemble's probabilities.

    Attributes:
        accuracy: share of inputs whose label is the most probable class.
        nll: mean negative log-likelihood, nats.
        ece: expected calibration error, over 15 equal bins of confidence.
        disagreement: share of inputs on which two members differ, mean over pairs; 0 for a single
            member.
    """

    accuracy: float
    nll: float
    ece: float
    disagreement: float


@dataclass(frozen=True)
class Bin:
    """Accuracy of predictions with a confidence above `low` and up to `high`.

    Attributes:
        count: number of inputs.
        confidence, accuracy: means over these inputs; 0 without any.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def evaluate(ensemble: Ensemble, x: torch.Tensor, labels: torch.Tensor) -> Quality:
    """Evaluate an ensemble on held-out inputs.

    Raises:
        InvalidArgumentError: there is not one label per input, or no input.
    """
    by_member = _checked_probabilities(ensemble, x, labels)
    mean = by_member.mean(0)
    predicted = by_member.argmax(-1)
    pairs = [
        float((predicted[i] != predicted[j]).float().mean())
        for i in range(len(predicted))
        for j in range(i)
    ]
    gaps = [
        interval.count * abs(interval.accuracy - interval.confidence)
        for interval in _bins(mean, labels, _BINS)
    ]
    return Quality(
        float((mean.argmax(-1) == labels).float().mean()),
        float(functional.nll_loss(mean.clamp_min(1e-12).log(), labels)),
        sum(gaps) / len(labels), sum(pairs) / len(pairs) if pairs else 0.0,
    )  # fmt: skip


def calibration(
    ensemble: Ensemble, x: torch.Tensor, labels: torch.Tensor, bins: int = _BINS
) -> list[Bin]:
    """Return the accuracy by bin of confidence; arguments and errors are those of `evaluate`."""
    return _bins(_checked_probabilities(ensemble, x, labels).mean(0), labels, bins)


def _checked_probabilities(
    ensemble: Ensemble, x: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    if len(x) != len(labels) or not len(labels):
        raise InvalidArgumentError("labels", f"has {len(labels)} labels for {len(x)} inputs")
    return probabilities(ensemble, x)


def probabilities(ensemble: Ensemble, x: torch.Tensor) -> torch.Tensor:
    """Return every member's probabilities in eval mode, [members, N, classes].

    Modules are restored to their training modes.
    """
    modes = {module: module.training for module in ensemble.modules()}
    try:
        with torch.no_grad():
            return ensemble.eval().probabilities(x)
    finally:
        for module, training in modes.items():
            module.training = training


def _bins(mean: torch.Tensor, labels: torch.Tensor, bins: int) -> list[Bin]:
    confidence, predicted = mean.max(-1)
    index = (confidence * bins).long().clamp_max(bins - 1)
    counts = torch.bincount(index, minlength=bins)
    sums = [
        torch.zeros(bins).index_add(0, index, values.float())
        for values in (confidence, predicted == labels)
    ]
    means = [(values / counts.clamp_min(1)).tolist() for values in sums]
    return [
        Bin(at / bins, (at + 1) / bins, count, means[0][at], means[1][at])
        for at, count in enumerate(counts.tolist())
    ]


def detection(ensemble: Ensemble, inside: torch.Tensor, outside: torch.Tensor) -> float:
    """Return the area under the ROC curve of out-of-distribution detection by confidence.

    The ensemble is switched to eval mode.

    Args:
        inside, outside: inputs from the training distribution, and others.
    """
    with torch.no_grad():
        outside_confidence, inside_confidence = (
            ensemble.eval()(x).amax(-1) for x in (outside, inside)
        )
    ordered = torch.sort(outside_confidence).values
    below = torch.searchsorted(ordered, inside_confidence)
    up_to = torch.searchsorted(ordered, inside_confidence, right=True)
    return float((below + up_to).double().mean() / (2 * len(outside_confidence)))
