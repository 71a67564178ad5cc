"""Which units of a trained network say what others say already, and a smaller network without them.

Units are looked at behind their activation, over a sample of inputs: their means and covariances
in one pass, of C x C numbers a layer. A unit is dead if it does not vary, dependent if its variance
is explained by units that are kept (pivoted Cholesky): least squares on those gives it back.

Source: the purpose is that of CODE, "Compiler-based Neuron-aware Ensemble Training", MLSys 2021,
whose text was not available; the reading of it is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.surgery import Units, chain_units, remove_units

# Of the largest variance in a layer: what is below is rounding, and the unit does not vary.
_NO_VARIANCE = 1e-10


@dataclass(frozen=True)
class LayerRedundancy:
    """What one layer has too much.

    Attributes:
        name: of the layer.
        units, dead, dependent: counts; what stays is the rest.
    """

    name: str
    units: int
    dead: int
    dependent: int


@dataclass(frozen=True)
class Compacted:
    """A network without redundant units.

    Attributes:
        model: a copy; the original is as it was.
        layers: what was found, front to back, each after those before it were compacted.
        parameters: of the copy, over those of the original.
    """

    model: nn.Sequential
    layers: tuple[LayerRedundancy, ...]
    parameters: float


@dataclass(frozen=True)
class _Moments:
    mean: torch.Tensor
    covariance: torch.Tensor


def redundancy(
    model: nn.Sequential, batches: Sequence[torch.Tensor], correlation: float = 1.0
) -> tuple[LayerRedundancy, ...]:
    """What `compact` would take away; arguments and errors as there."""
    return compact(model, batches, correlation).layers


def compact(
    model: nn.Sequential, batches: Sequence[torch.Tensor], correlation: float = 1.0
) -> Compacted:
    """`model` without units whose share of variance that others explain is `correlation` squared.

    At 1 only what is dead or a sum of others goes (up to rounding), and outputs stay; below, more
    goes and less is exact. Nothing is trained again.

    Args:
        batches: inputs, a sample of what the model is for; in eval mode.
        correlation: multiple correlation from which a unit is taken for dependent.

    Raises:
        InvalidArgumentError: no batch, or `correlation` is not in (0, 1].
        WorkloadError: a model that is no chain of known modules.
    """
    if not 0.0 < correlation <= 1.0:
        raise InvalidArgumentError("correlation", f"{correlation} is not in (0, 1]")
    if not len(batches):
        raise InvalidArgumentError("batches", "are none: there is nothing to look at units with")
    made = copy.deepcopy(model)
    training = made.training
    made.eval()
    found = []
    for number in range(len(chain_units(made))):
        units = chain_units(made)[number]
        moments = _moments(made, units, batches)
        found.append(_compact_layer(units, moments, correlation))
    count = [sum(p.numel() for p in one.parameters()) for one in (made, model)]
    return Compacted(made.train(training), tuple(found), count[0] / count[1])


def _moments(model: nn.Module, units: Units, batches: Sequence[torch.Tensor]) -> _Moments:
    """Of the units' values over all inputs (and places): float64, one batch at a time."""
    total = products = torch.zeros((), dtype=torch.float64)
    number = 0
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, given: object, output: torch.Tensor) -> None:
        seen.append(output.detach())

    with units.probe.register_forward_hook(note), torch.no_grad():
        for batch in batches:
            model(batch)
            values = seen.pop().movedim(1, -1).flatten(0, -2).double()
            total = total + values.sum(0)
            products = products + values.T @ values
            number += len(values)
    mean = total / number
    return _Moments(mean, products / number - torch.outer(mean, mean))


def _compact_layer(units: Units, moments: _Moments, correlation: float) -> LayerRedundancy:
    variance = moments.covariance.diagonal().clamp_min(0)
    floor = _NO_VARIANCE * float(variance.max())
    dead = variance <= floor
    kept = _pivots(moments.covariance, dead, 1.0 - correlation**2, floor)
    if not kept:  # a layer needs one unit
        kept = [int(variance.argmax())]
        dead[kept[0]] = False
    gone = [unit for unit in range(units.count) if unit not in set(kept)]
    if gone:
        among = moments.covariance[kept][:, kept]
        across = moments.covariance[kept][:, gone]
        matrix = torch.linalg.lstsq(among, across, driver="gelsd").solution.T
        matrix[dead[gone]] = 0.0
        constant = moments.mean[gone] - matrix @ moments.mean[kept]
        remove_units(units, kept, matrix, constant)
    silent = int(dead.sum())
    return LayerRedundancy(units.name, len(variance), silent, len(gone) - silent)


def _pivots(
    covariance: torch.Tensor, dead: torch.Tensor, unexplained: float, floor: float
) -> list[int]:
    """Units to keep, rising: the one with the most unexplained variance, until none has enough.

    Source: pivoted Cholesky decomposition, as in Harbrecht et al., 2012.
    """
    variance = covariance.diagonal().clone()
    left = torch.where(dead, torch.zeros_like(variance), variance)
    share = max(unexplained, _NO_VARIANCE)
    columns: list[torch.Tensor] = []
    kept: list[int] = []
    while True:
        open_ = (left > share * variance) & (left > floor)
        if not bool(open_.any()):
            return sorted(kept)
        pivot = int(torch.where(open_, left, -torch.ones_like(left)).argmax())
        column = covariance[:, pivot].clone()
        for one in columns:
            column -= one * one[pivot]
        column /= left[pivot].sqrt()
        left = (left - column * column).clamp_min(0)
        left[pivot] = 0.0
        columns.append(column)
        kept.append(pivot)
