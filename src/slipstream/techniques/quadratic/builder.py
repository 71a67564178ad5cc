"""Automatic builder: shorten a trained network of quadratic layers to a budget.

Half of the weights of one layer at a time are set to zero, and the model is scored again. Layers
with the smallest loss of score for their cost are removed first. If removing a whole layer exceeds
the budget or does not fit its shapes, units of it are removed. The rest is trained from scratch.

Source: Xu et al., "QuadraLib: A Performant Quadratic Neural Network Library for Architecture
Optimization and Design Exploration", MLSys 2022.
"""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.surgery import Units, place, removable_units, remove_units
from slipstream.tables import Field, Table
from slipstream.techniques.quadratic.neurons import NEURONS
from slipstream.techniques.quadratic.nn import QuadraticConv2d, QuadraticLinear, convert_layer

Measure = Literal["parameters", "operations"]
Score = Callable[[nn.Module], float]
# A layer is removed as a whole if the result falls below the budget by at most this share.
_TOLERANCE = 0.05
_KINDS = (QuadraticLinear, QuadraticConv2d)


@dataclass(frozen=True)
class Sensitivity:
    """Cost of a layer, and the loss of score while a part of its weights is masked.

    Attributes:
        parameters, operations: shares of the model's totals.
        drop: score of the model minus its score with the layer masked.
    """

    name: str
    parameters: float
    operations: float
    drop: float

    @property
    def redundancy(self) -> float:
        """The paper's indicator, by which layers are removed; infinite if no score is lost."""
        return self.parameters * self.operations / self.drop if self.drop > 0 else math.inf


@dataclass(frozen=True)
class ShorteningResult:
    """A shorter network, trained from scratch.

    Attributes:
        layers: every quadratic layer of the original, the most redundant first.
        removed: names of removed layers.
        narrowed: units before and after, by name of layers with fewer units.
        share: remaining share of the original's parameters or operations, as the budget counts.
        before, after: scores of the original and of `model`.
    """

    model: nn.Module
    layers: tuple[Sensitivity, ...]
    removed: tuple[str, ...]
    narrowed: Mapping[str, tuple[int, int]]
    share: float
    before: float
    after: float

    def table(self) -> Table:
        """Return layers with their cost, loss of score and outcome."""
        number = Field[Sensitivity].number
        return Table.of(self.layers, [
            Field[Sensitivity].of("layer", lambda layer: layer.name),
            number("parameters", lambda layer: f"{layer.parameters:.1%}"),
            number("operations", lambda layer: f"{layer.operations:.1%}"),
            number("score lost", lambda layer: f"{layer.drop:.4g}"),
            number("redundancy", lambda layer: f"{layer.redundancy:.3g}"),
            Field[Sensitivity].of("outcome", lambda layer: self._outcome(layer.name)),
        ], notes=[
            f"{self.share:.3f} of the original remains; score {self.after:.4g}, originally "
            f"{self.before:.4g}"
        ])  # fmt: skip

    def _outcome(self, name: str) -> str:
        if name in self.removed:
            return "removed"
        units = self.narrowed.get(name)
        return "unchanged" if units is None else f"{units[1]} of {units[0]} units"


def sensitivities(
    model: nn.Module, score: Score, x: torch.Tensor, *, mask: float = 0.5, seed: int = 0
) -> tuple[Sensitivity, ...]:
    """Return every quadratic layer of a trained model, the most redundant first.

    `model` is not changed.

    Args:
        score: returns the score of a model, higher is better; called with a copy in eval mode, once
            unmasked and once per masked layer.
        x: inputs, to count operations with.
        mask: share of a layer's weights that is set to zero; the others are not scaled.
        seed: selects the weights to mask.

    Raises:
        InvalidArgumentError: there is no quadratic layer, `mask` is not in (0, 1], or a score is
            not finite.
    """
    return _probed(model, score, x, mask, seed)[0]


def _probed(
    model: nn.Module, score: Score, x: torch.Tensor, mask: float, seed: int
) -> tuple[tuple[Sensitivity, ...], float]:
    if not 0.0 < mask <= 1.0:
        raise InvalidArgumentError("mask", f"{mask} is not in (0, 1]")
    layers = _layers(model)
    parameters, operations = _parameters(model, layers), _operations(model, x, layers)
    probe = copy.deepcopy(model).eval()
    before = _score(score, probe, "the whole model")
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for name in layers:
        weights = [
            weight
            for key, weight in probe.get_submodule(name).named_parameters()
            if "weight" in key
        ]
        originals = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.mul_((torch.rand(weight.shape, generator=generator) >= mask).to(weight))
        after = _score(score, probe, name)
        with torch.no_grad():
            for weight, value in zip(weights, originals, strict=True):
                weight.copy_(value)
        rows.append(Sensitivity(name, parameters[name], operations[name], before - after))
    order = sorted(
        rows, key=lambda weight: (weight.redundancy, weight.parameters * weight.operations)
    )
    return tuple(reversed(order)), before


def shorten(
    model: nn.Module, train: Callable[[nn.Module], object], score: Score, x: torch.Tensor, *,
    budget: float, of: Measure = "parameters", mask: float = 0.5, seed: int = 0,
) -> ShorteningResult:  # fmt: skip
    """Return `model` without its most redundant layers, within `budget`, trained from scratch.

    Training starts from a randomly initialised first-order network if the neuron has a linear term
    and no branch norm, otherwise from random branches.

    A whole layer can be removed if it has as many inputs as outputs, or fewer if a single layer
    reads it; its stride remains. Units can be removed from layers that
    `slipstream.surgery.removable_units` finds, at most half of a layer's before the next layer is
    reduced.

    Args:
        model: trained, with quadratic layers; not changed.
        train: trains a model in place; called once.
        budget: maximum share of the measure `of` that remains, in (0, 1); reached to within a unit.
        score, x, mask, seed: see `sensitivities`.

    Raises:
        InvalidArgumentError: see `sensitivities`; or the budget cannot be reached.
    """
    if not 0.0 < budget < 1.0:
        raise InvalidArgumentError("budget", f"{budget} is not in (0, 1)")
    if of not in ("parameters", "operations"):
        raise InvalidArgumentError("of", f"'{of}' is neither parameters nor operations")
    table, before = _probed(model, score, x, mask, seed)
    plan = _Plan(model, x, of)
    while plan.share > budget:
        share = plan.share
        for layer in table:
            plan.reduce(layer.name, budget)
        if plan.share == share:
            raise InvalidArgumentError(
                "budget", f"{budget} of the {of} cannot be reached: at least {share:.3f} remains",
                remedy=f"pass {share:.3f} or more, or a model whose layers each feed one other",
            )  # fmt: skip
    shorter = plan.quadratic()
    train(shorter.train())
    after = _score(score, copy.deepcopy(shorter).eval(), "the shorter model")
    return ShorteningResult(
        shorter, table, tuple(plan.removed), plan.narrowed(), plan.share, before, after
    )


class _Plan:
    """A shrinking copy of a model, with first-order layers of the same shapes.

    Attributes:
        share: remaining share of the original.
        removed: names of removed layers.
    """

    def __init__(self, model: nn.Module, x: torch.Tensor, of: Measure) -> None:
        self._model, self._x, self._of = model, x, of
        self._layers = _layers(model)
        self._plain = copy.deepcopy(model)
        for name, layer in self._layers.items():
            place(self._plain, name, _first_order(layer))
        self._shape = _shape(self._plain, x)
        self._whole = self._size(model)
        self.share = 1.0
        self.removed: list[str] = []

    def reduce(self, name: str, budget: float) -> None:
        """Remove a layer, or up to half of its units if the whole is too much or does not fit."""
        if self.share <= budget or name in self.removed:
            return
        self._remove(name, budget * (1 - _TOLERANCE))
        if name not in self.removed and name in _units(self._plain):
            self._narrow(name, budget)

    def _remove(self, name: str, min_share: float) -> None:
        shorter = copy.deepcopy(self._plain)
        layer = _plain_layer(shorter, name)
        if isinstance(layer, nn.Conv2d):
            inputs, outputs, stride = layer.in_channels, layer.out_channels, layer.stride
        else:
            inputs, outputs, stride = layer.in_features, layer.out_features, (1,)
        units = _units(shorter).get(name)
        if inputs > outputs or (inputs < outputs and units is None):
            return
        if inputs < outputs and units is not None:
            _keep(units, inputs)
        replacement = (
            nn.Identity() if set(stride) == {1} else nn.AvgPool2d(1, (stride[0], stride[-1]))
        )
        place(shorter, name, replacement)
        if _shape(shorter, self._x) == self._shape and self._share(shorter) >= min_share:
            self._accept(shorter)
            self.removed.append(name)

    def _narrow(self, name: str, budget: float) -> None:
        count = _count(_plain_layer(self._plain, name))
        sizes = range(count - 1, (count - 1) // 2, -1)
        if sizes:
            at = bisect.bisect_left(
                sizes, True, key=lambda size: self._share(self._narrowed_to(name, size)) <= budget
            )
            self._accept(self._narrowed_to(name, sizes[min(at, len(sizes) - 1)]))

    def narrowed(self) -> dict[str, tuple[int, int]]:
        """Return the original and present units of remaining layers that have fewer."""
        counts = {
            name: (layer.out, _count(_plain_layer(self._plain, name)))
            for name, layer in self._layers.items()
            if name not in self.removed
        }
        return {name: both for name, both in counts.items() if both[0] != both[1]}

    def quadratic(self) -> nn.Module:
        """Return the remaining model with quadratic layers, all newly initialised."""
        plain = copy.deepcopy(self._plain)
        for module in plain.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        return self._quadratic_copy(plain)

    def _quadratic_copy(self, plain: nn.Module) -> nn.Module:
        model = copy.deepcopy(plain)
        for name, old in self._layers.items():
            layer = model.get_submodule(name)
            if isinstance(layer, nn.Linear | nn.Conv2d):
                norm = old.gamma is not None
                # Products of random branches over many layers train slowly.
                init = "first_order" if NEURONS[old.neuron].linear and not norm else "random"
                quadratic = convert_layer(
                    layer, old.neuron, init, branch_norm=norm, memory=old.memory
                )
                place(model, name, quadratic)
        return model

    def _narrowed_to(self, name: str, size: int) -> nn.Module:
        narrower = copy.deepcopy(self._plain)
        _keep(_units(narrower)[name], size)
        return narrower

    def _accept(self, plain: nn.Module) -> None:
        self._plain, self.share = plain, self._share(plain)

    def _share(self, plain: nn.Module) -> float:
        return self._size(self._quadratic_copy(plain)) / self._whole

    def _size(self, model: nn.Module) -> float:
        if self._of == "parameters":
            return float(sum(parameter.numel() for parameter in model.parameters()))
        return float(_counted(model, self._x).get_total_flops())


def _plain_layer(plain: nn.Module, name: str) -> nn.Linear | nn.Conv2d:
    layer = plain.get_submodule(name)
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return layer


def _count(layer: nn.Linear | nn.Conv2d) -> int:
    return int(layer.weight.shape[0])


def _layers(model: nn.Module) -> dict[str, QuadraticLinear | QuadraticConv2d]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _KINDS)}
    if not layers or "" in layers:
        raise InvalidArgumentError(
            "model", "is a single layer" if layers else "has no quadratic layer",
            remedy="convert it with slipstream.quadratic.convert(model), and train it first",
        )  # fmt: skip
    return layers


def _parameters(model: nn.Module, names: Mapping[str, object]) -> dict[str, float]:
    """Return each layer's share of the model's parameters."""
    count = {n: sum(p.numel() for p in model.get_submodule(n).parameters()) for n in ("", *names)}
    return {name: count[name] / count[""] for name in names}


def _operations(model: nn.Module, x: torch.Tensor, names: Mapping[str, object]) -> dict[str, float]:
    """Return each layer's share of the model's floating-point operations."""
    counted = _counted(model, x)
    of_modules, kind = counted.get_flop_counts(), type(model).__name__
    return {
        name: sum(of_modules.get(f"{kind}.{name}", {}).values()) / counted.get_total_flops()
        for name in names
    }


def _counted(model: nn.Module, x: torch.Tensor) -> FlopCounterMode:
    counter, evaluated = FlopCounterMode(display=False), copy.deepcopy(model).eval()
    with counter, torch.no_grad():
        evaluated(x)
    return counter


def _shape(model: nn.Module, x: torch.Tensor) -> torch.Size | None:
    """Return the output's shape; None if the layers' shapes do not match."""
    try:
        with torch.no_grad():
            output = copy.deepcopy(model).eval()(x)
    except RuntimeError:
        return None
    return output.shape if isinstance(output, torch.Tensor) else None


def _score(score: Score, model: nn.Module, of: str) -> float:
    value = float(score(model))
    if not math.isfinite(value):
        raise InvalidArgumentError("score", f"is {value} for {of}")
    return value


def _units(model: nn.Module) -> dict[str, Units]:
    try:
        return {units.name: units for units in removable_units(model)}
    except WorkloadError:  # whole layers can still be removed
        return {}


def _keep(units: Units, size: int) -> None:
    """Retain the first `size` units; any do, because the model is trained from scratch."""
    weight = units.layer.weight
    removed = units.count - size
    remove_units(units, range(size), weight.new_zeros(removed, size), weight.new_zeros(removed))


def _first_order(layer: QuadraticLinear | QuadraticConv2d) -> nn.Linear | nn.Conv2d:
    """Return a first-order layer of the same shape, with arbitrary weights."""
    weight = layer.weight if layer.square_weight is None else layer.square_weight
    bias = layer.bias is not None
    geometry = layer.convolution
    if geometry is None:
        plain: nn.Linear | nn.Conv2d = nn.Linear(weight.shape[1], layer.out, bias)
    else:
        kernel, (*pairs, groups) = (weight.shape[2], weight.shape[3]), geometry
        stride, padding, dilation = ((pair[0], pair[1]) for pair in pairs)
        plain = nn.Conv2d(
            weight.shape[1] * groups, layer.out, kernel, stride, padding, dilation, groups, bias
        )
    return plain.to(weight.device, weight.dtype).train(layer.training)
