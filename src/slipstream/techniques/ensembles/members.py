"""Ensembles whose members start from one trained network in place of nothing.

Source: as `redundancy`; snapshots: Huang et al., "Snapshot Ensembles: Train 1, Get M for Free",
ICLR 2017; independent members: Lakshminarayanan et al., NeurIPS 2017.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from slipstream.errors import InvalidArgumentError
from slipstream.surgery import chain_units
from slipstream.techniques.ensembles.redundancy import compact

Train = Callable[[nn.Module, float, int], object]
"""Trains a model in place: of a share of the main schedule's epochs, with a seed."""
Method = Literal["independent", "peers", "snapshot"]


class Ensemble(nn.Module):
    """Members whose probabilities are averaged."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not members:
            raise InvalidArgumentError("members", "are none")
        self.members = nn.ModuleList(members)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean probabilities, [N, classes]."""
        return self.probabilities(x).mean(0)

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """Every member's, [members, N, classes].

        Raises:
            InvalidArgumentError: members give different numbers of classes.
        """
        logits = [one(x) for one in self.members]
        if len({one.shape for one in logits}) > 1:
            raise InvalidArgumentError("members", "give outputs of different shapes")
        return torch.stack([one.softmax(-1) for one in logits])


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


def build(
    model: nn.Sequential,
    train: Train,
    *,
    members: int = 4,
    method: Method = "peers",
    sample: Sequence[torch.Tensor] = (),
    correlation: float = 0.95,
    fresh: float = 0.4,
    share: float = 0.4,
    seed: int = 0,
) -> Ensemble:
    """An ensemble of `members`.

    Args:
        model: untrained; a copy is trained for each member, or once for all.
        train: see `Train`; called with a share of 1.0 for a whole training.
        method: ``independent`` trains every member from the start. ``peers`` trains one, compacts
            it (`compact`), and lets others start from that with some units drawn anew. ``snapshot``
            takes a member after each `members`-th of one training.
        sample: inputs that peers are compacted with; without any they keep their width.
        correlation: see `compact`.
        fresh: share of a hidden layer's units that a peer draws anew.
        share: of a whole training that a peer gets.

    Raises:
        InvalidArgumentError: fewer than one member, or a share that is none.
    """
    if members < 1:
        raise InvalidArgumentError("members", f"{members} is less than one")
    for name, value in (("fresh", fresh), ("share", share)):
        if not 0.0 < value <= 1.0:
            raise InvalidArgumentError(name, f"{value} is not in (0, 1]")
    if method == "independent":
        found = []
        for number in range(members):
            one = copy.deepcopy(model)
            _draw_anew(one, 1.0, seed + number)
            train(one, 1.0, seed + number)
            found.append(one)
        return Ensemble(found)
    main = copy.deepcopy(model)
    if method == "snapshot":
        found = []
        for number in range(members):
            train(main, 1.0 / members, seed + number)
            found.append(copy.deepcopy(main))
        return Ensemble(found)
    train(main, 1.0, seed)
    start = compact(main, sample, correlation).model if len(sample) else main
    found = [main]
    for number in range(1, members):
        peer = copy.deepcopy(start)
        _draw_anew(peer, fresh, seed + number)
        train(peer, share, seed + number)
        found.append(peer)
    return Ensemble(found)


def _draw_anew(model: nn.Sequential, share: float, seed: int) -> None:
    """Some units of every hidden layer as at the start: what they read, and what reads them."""
    generator = torch.Generator().manual_seed(seed)
    for units in chain_units(model):
        chosen = torch.randperm(units.count, generator=generator)[: round(share * units.count)]
        layer, following = copy.deepcopy(units.layer), copy.deepcopy(units.following)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            layer.reset_parameters()
            following.reset_parameters()
            units.layer.weight[chosen] = layer.weight[chosen]
            if units.layer.bias is not None:
                units.layer.bias[chosen] = layer.bias[chosen]
            blocks = units.following.weight.view(len(following.weight), units.count, -1)
            blocks[:, chosen] = following.weight.view_as(blocks)[:, chosen]


def evaluate(ensemble: Ensemble, x: torch.Tensor, labels: torch.Tensor) -> Quality:
    """How good an ensemble is on inputs that it was not made with.

    Raises:
        InvalidArgumentError: not one label for every input.
    """
    if len(x) != len(labels) or not len(labels):
        raise InvalidArgumentError("labels", f"are {len(labels)}, of {len(x)} inputs")
    with torch.no_grad():
        each = ensemble.probabilities(x)
    mean = each.mean(0)
    confidence, chosen = mean.max(-1)
    right = (chosen == labels).float()
    bins = (confidence * 15).long().clamp_max(14)
    gap = torch.zeros(15).index_add(0, bins, right - confidence)
    own = each.argmax(-1)
    pairs = [float((own[i] != own[j]).float().mean()) for i in range(len(own)) for j in range(i)]
    return Quality(
        float(right.mean()), float(functional.nll_loss(mean.clamp_min(1e-12).log(), labels)),
        float(gap.abs().sum() / len(labels)), sum(pairs) / len(pairs) if pairs else 0.0,
    )  # fmt: skip
