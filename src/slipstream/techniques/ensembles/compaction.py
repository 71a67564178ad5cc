"""Find redundant units of a trained network, and remove them.

The means and covariances of units after their activation are collected over a sample of inputs in
one pass, C x C values per layer. A unit is dead if it does not vary, and dependent if retained
units explain its variance (pivoted Cholesky); the next layer then reads its least-squares estimate.

Source: our own design for the goal of CODE, "Compiler-based Neuron-aware Ensemble Training", MLSys
2021, whose text was not available.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.surgery import Units, removable_units, remove_units, tensors_in

# Units below this share of the layer's largest mean square do not vary, up to rounding.
_MIN_VARIANCE_SHARE = 1e-10


@dataclass(frozen=True)
class LayerRedundancy:
    """Redundant units of a layer.

    Attributes:
        name: qualified name of the layer.
        units: number of all units.
        dead, dependent: numbers of redundant units; the others are retained.
    """

    name: str
    units: int
    dead: int
    dependent: int


@dataclass(frozen=True)
class CompactionResult:
    """A network without redundant units.

    Attributes:
        model: a copy; the original is not changed.
        layers: redundancy of each layer, in order, after compaction of the preceding ones.
        parameters: number of the copy's parameters over the original's.
        error: norm of the change of outputs over the norm of the outputs, on the batches; a
            rounding error at a `correlation` of 1, possibly large below.
    """

    model: nn.Module
    layers: tuple[LayerRedundancy, ...]
    parameters: float
    error: float


@dataclass(frozen=True)
class _Moments:
    """Moments of a layer's units, float64.

    Attributes:
        variance: [units].
        products: mean products of the units minus `mean`, [units, units].
        mean: [units]; zeros if the next layer cannot absorb a constant.
    """

    variance: torch.Tensor
    products: torch.Tensor
    mean: torch.Tensor


def redundancy(
    model: nn.Module, batches: Sequence[torch.Tensor], correlation: float = 1.0
) -> tuple[LayerRedundancy, ...]:
    """Return what `compact` would remove; arguments and errors are those of `compact`."""
    return compact(model, batches, correlation).layers


def compact(
    model: nn.Module, batches: Sequence[torch.Tensor], correlation: float = 1.0
) -> CompactionResult:
    """Return `model` without units of which others explain `correlation` squared of the variance.

    At 1 only dead units and linear combinations of others are removed, and outputs change by
    rounding; smaller values remove more units and change outputs. Nothing is retrained.

    Args:
        batches: a representative sample of inputs; the model runs on them in eval mode.
        correlation: multiple correlation from which a unit counts as dependent.

    Raises:
        InvalidArgumentError: there is no batch, or `correlation` is not in (0, 1].
        WorkloadError: no layer has units that can be removed separately, see
            `slipstream.surgery.removable_units`.
    """
    if not 0.0 < correlation <= 1.0:
        raise InvalidArgumentError("correlation", f"{correlation} is not in (0, 1]")
    if not len(batches):
        raise InvalidArgumentError("batches", "is empty: units are compared on at least one batch")
    compacted = copy.deepcopy(model)
    training = compacted.training
    compacted.eval()
    layers = [
        _compact_layer(units, _moments(compacted, units, batches), correlation)
        for units in removable_units(compacted)
    ]
    count = [sum(p.numel() for p in network.parameters()) for network in (compacted, model)]
    error = _error(model, compacted, batches)
    return CompactionResult(compacted.train(training), tuple(layers), count[0] / count[1], error)


def _error(model: nn.Module, compacted: nn.Module, batches: Sequence[torch.Tensor]) -> float:
    """Return the relative change of all outputs; `compacted` is in eval mode."""
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
    """Accumulate the moments of the units over all inputs and positions, batch by batch."""
    total = torch.zeros(units.count, dtype=torch.float64)
    products = torch.zeros(units.count, units.count, dtype=torch.float64)
    rows = 0

    def add_moments(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        nonlocal rows
        values = units.values(arguments[0].detach()).double()
        total.add_(values.sum(0))
        products.addmm_(values.T, values)
        rows += len(values)

    with units.following.register_forward_pre_hook(add_moments), torch.no_grad():
        for batch in batches:
            model(batch)
    mean, products = total / rows, products.div_(rows)
    variance = (products.diagonal() - mean * mean).clamp_min(0)
    # At a padded edge the next layer reads zeros, to which a constant in its bias would be added.
    if units.padded:
        return _Moments(variance, products, torch.zeros_like(mean))
    return _Moments(variance, products.addr_(mean, mean, alpha=-1), mean)


def _compact_layer(units: Units, moments: _Moments, correlation: float) -> LayerRedundancy:
    count, variance = units.count, moments.variance
    min_variance = _MIN_VARIANCE_SHARE * float(moments.products.diagonal().max())
    dead = variance <= min_variance
    order, factor = _pivots(moments.products, variance, 1.0 - correlation**2, min_variance)
    if not order:  # a layer needs at least one unit
        order, factor = [0], torch.zeros(1, count, dtype=torch.float64)
        factor[0, 0] = 1.0
    retained = sorted(order)
    removed = [unit for unit in range(count) if unit not in set(retained)]
    if removed:
        # Least squares on the retained units, by the factor of their products.
        matrix = torch.linalg.solve_triangular(factor[:, order], factor[:, removed], upper=True).T
        matrix = matrix[:, torch.tensor(order).argsort()]
        constant = moments.mean[removed] - matrix @ moments.mean[retained]
        remove_units(units, retained, matrix, constant)
    dead_count = int(dead[removed].sum())
    return LayerRedundancy(units.name, count, dead_count, len(removed) - dead_count)


def _pivots(
    products: torch.Tensor, variance: torch.Tensor, unexplained: float, min_variance: float
) -> tuple[list[int], torch.Tensor]:
    """Return the units to retain, and the triangular factor of their products, [retained, units].

    The next pivot is the unit with the largest unexplained variance, until no unit exceeds its
    share `unexplained`.

    Source: pivoted Cholesky decomposition, as in Harbrecht et al., 2012.
    """
    unexplained_variance = products.diagonal().clone()
    required = max(unexplained, _MIN_VARIANCE_SHARE) * variance + min_variance
    factor = torch.empty_like(products)
    retained: list[int] = []
    while True:
        eligible = unexplained_variance > required
        pivot = int((unexplained_variance * eligible).argmax())
        if not eligible[pivot]:
            return retained, factor[: len(retained)]
        above = factor[: len(retained)]
        row = (products[pivot] - above[:, pivot] @ above) / unexplained_variance[pivot].sqrt()
        row[retained] = 0.0
        # The remainder of an explained unit may exceed the variance of later pivots. Its
        # coefficients would be in the hundreds, and training from there would diverge.
        row *= eligible | (row.abs() <= unexplained_variance[pivot].sqrt())
        factor[len(retained)] = row
        unexplained_variance = (unexplained_variance - row * row).clamp_min(0)
        unexplained_variance[pivot] = 0.0
        retained.append(pivot)
