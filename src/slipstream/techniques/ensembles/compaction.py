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
from slipstream.surgery import Units, removable_units, remove_units, tensors_in

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
        error: norm of the change of outputs over the norm of the outputs, on the batches; what is
            as small as rounding at a `correlation` of 1 may be large below.
    """

    model: nn.Module
    layers: tuple[LayerRedundancy, ...]
    parameters: float
    error: float


@dataclass(frozen=True)
class _Moments:
    """Of a layer's units, float64.

    Attributes:
        variance: [units].
        products: [units, units], of what is left of them when `mean` is taken away.
        mean: [units]; zeros where a constant cannot be given to the next layer.
    """

    variance: torch.Tensor
    products: torch.Tensor
    mean: torch.Tensor


def redundancy(
    model: nn.Module, batches: Sequence[torch.Tensor], correlation: float = 1.0
) -> tuple[LayerRedundancy, ...]:
    """What `compact` would take away; arguments and errors as there."""
    return compact(model, batches, correlation).layers


def compact(
    model: nn.Module, batches: Sequence[torch.Tensor], correlation: float = 1.0
) -> Compacted:
    """`model` without units whose share of variance that others explain is `correlation` squared.

    At 1 only what is dead or a sum of others goes (up to rounding), and outputs stay; below, more
    goes and less is exact. Nothing is trained again.

    Args:
        batches: inputs, a sample of what the model is for; in eval mode.
        correlation: multiple correlation from which a unit is taken for dependent.

    Raises:
        InvalidArgumentError: no batch, or `correlation` is not in (0, 1].
        WorkloadError: no layer has units that can be told apart from the rest, see
            `slipstream.surgery.removable_units`.
    """
    if not 0.0 < correlation <= 1.0:
        raise InvalidArgumentError("correlation", f"{correlation} is not in (0, 1]")
    if not len(batches):
        raise InvalidArgumentError("batches", "are none: there is nothing to look at units with")
    compacted = copy.deepcopy(model)
    training = compacted.training
    compacted.eval()
    layers = [
        _compact_layer(units, _moments(compacted, units, batches), correlation)
        for units in removable_units(compacted)
    ]
    count = [sum(p.numel() for p in one.parameters()) for one in (compacted, model)]
    error = _error(model, compacted, batches)
    return Compacted(compacted.train(training), tuple(layers), count[0] / count[1], error)


def _error(model: nn.Module, compacted: nn.Module, batches: Sequence[torch.Tensor]) -> float:
    """Return the relative change of all outputs; `compacted` is in evaluation mode."""
    change = size = 0.0
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                pairs = zip(tensors_in(model(batch)), tensors_in(compacted(batch)), strict=True)
                for before, after in pairs:
                    change += float((before.double() - after.double()).square().sum())
                    size += float(before.double().square().sum())
    finally:
        for module, training in modes.items():
            module.training = training
    return (change / size) ** 0.5 if size else 0.0


def _moments(model: nn.Module, units: Units, batches: Sequence[torch.Tensor]) -> _Moments:
    """Of the units' values over all inputs (and places), one batch at a time."""
    total = torch.zeros(units.count, dtype=torch.float64)
    products = torch.zeros(units.count, units.count, dtype=torch.float64)
    number = 0

    def note(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal number
        values = units.values(given[0].detach()).double()
        total.add_(values.sum(0))
        products.addmm_(values.T, values)
        number += len(values)

    with units.following.register_forward_pre_hook(note), torch.no_grad():
        for batch in batches:
            model(batch)
    mean, products = total / number, products.div_(number)
    variance = (products.diagonal() - mean * mean).clamp_min(0)
    # At a padded edge the next layer sees zeros, and would add the constant all the same.
    if units.padded:
        return _Moments(variance, products, torch.zeros_like(mean))
    return _Moments(variance, products.addr_(mean, mean, alpha=-1), mean)


def _compact_layer(units: Units, moments: _Moments, correlation: float) -> LayerRedundancy:
    count, variance = units.count, moments.variance
    floor = _NO_VARIANCE * float(moments.products.diagonal().max())
    dead = variance <= floor
    order, factor = _pivots(moments.products, variance, 1.0 - correlation**2, floor)
    if not order:  # a layer needs one unit
        order, factor = [0], torch.zeros(1, count, dtype=torch.float64)
        factor[0, 0] = 1.0
    kept = sorted(order)
    gone = [unit for unit in range(count) if unit not in set(kept)]
    if gone:
        # Least squares on the kept units, by the factor of their products.
        matrix = torch.linalg.solve_triangular(factor[:, order], factor[:, gone], upper=True).T
        matrix = matrix[:, torch.tensor(order).argsort()]
        constant = moments.mean[gone] - matrix @ moments.mean[kept]
        remove_units(units, kept, matrix, constant)
    silent = int(dead[gone].sum())
    return LayerRedundancy(units.name, count, silent, len(gone) - silent)


def _pivots(
    products: torch.Tensor, variance: torch.Tensor, unexplained: float, floor: float
) -> tuple[list[int], torch.Tensor]:
    """Units to keep, and the factor of their products with all: [kept, units], triangular.

    The one with most that is unexplained, until none has enough of its variance. Of what is left of
    a pivot no unit takes more than once.

    Source: pivoted Cholesky decomposition, as in Harbrecht et al., 2012.
    """
    left = products.diagonal().clone()
    enough = max(unexplained, _NO_VARIANCE) * variance + floor
    factor = torch.empty_like(products)
    kept: list[int] = []
    while True:
        open_ = left > enough
        pivot = int((left * open_).argmax())
        if not open_[pivot]:
            return kept, factor[: len(kept)]
        above = factor[: len(kept)]
        row = (products[pivot] - above[:, pivot] @ above) / left[pivot].sqrt()
        row[kept] = 0.0
        # What is left of a unit that is explained may be more than later pivots vary by: it would
        # take them times hundreds, and training from there would break down.
        row *= open_ | (row.abs() <= left[pivot].sqrt())
        factor[len(kept)] = row
        left = (left - row * row).clamp_min(0)
        left[pivot] = 0.0
        kept.append(pivot)
