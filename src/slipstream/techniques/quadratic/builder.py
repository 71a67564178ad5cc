"""The automatic builder: a trained network of quadratic layers, shorter within a budget.

Half of each layer's weights are set to zero, one layer at a time, and the score is asked for again.
Those that lose least for what they cost go first; where a whole layer is too much, or its shapes
forbid it, units of it go instead. What is left is trained from the start.

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
from slipstream.techniques.quadratic.nn import QuadraticConv2d, QuadraticLinear, converted

Measure = Literal["parameters", "operations"]
Score = Callable[[nn.Module], float]
# A layer goes as a whole if what is left is no further below the budget than this.
_TOLERANCE = 0.05
_KINDS = (QuadraticLinear, QuadraticConv2d)


@dataclass(frozen=True)
class Sensitivity:
    """What one layer costs, and what the score loses by a part of its weights.

    Attributes:
        parameters, operations: shares of the whole model's.
        drop: of the score, while the layer's weights were masked.
    """

    name: str
    parameters: float
    operations: float
    drop: float

    @property
    def redundancy(self) -> float:
        """The paper's indicator: the larger, the sooner it goes; infinite if nothing is lost."""
        return self.parameters * self.operations / self.drop if self.drop > 0 else math.inf


@dataclass(frozen=True)
class Shortened:
    """A shorter network, trained from the start.

    Attributes:
        layers: every quadratic layer of the original, the most redundant first.
        removed: names of those that are gone.
        narrowed: units before and after, of those that have fewer.
        share: of the original's parameters or operations, as the budget was in.
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
        """Layers, what they cost and lose, and what became of them."""
        number = Field[Sensitivity].number
        return Table.of(self.layers, [
            Field[Sensitivity].of("layer", lambda one: one.name),
            number("parameters", lambda one: f"{one.parameters:.1%}"),
            number("operations", lambda one: f"{one.operations:.1%}"),
            number("score lost", lambda one: f"{one.drop:.4g}"),
            number("redundancy", lambda one: f"{one.redundancy:.3g}"),
            Field[Sensitivity].of("now", lambda one: self._fate(one.name)),
        ], notes=[
            f"{self.share:.3f} of the original is left; score {self.after:.4g}, was "
            f"{self.before:.4g}"
        ])  # fmt: skip

    def _fate(self, name: str) -> str:
        if name in self.removed:
            return "removed"
        units = self.narrowed.get(name)
        return "as it was" if units is None else f"{units[1]} of {units[0]} units"


def sensitivities(
    model: nn.Module, score: Score, x: torch.Tensor, *, mask: float = 0.5, seed: int = 0
) -> tuple[Sensitivity, ...]:
    """Every quadratic layer of a trained model, the most redundant first; nothing is changed.

    Args:
        score: of a model, the higher the better; asked once for the whole and once a layer, of a
            copy in eval mode whose layers are masked one at a time.
        x: inputs, to count operations with.
        mask: share of a layer's weights that is set to zero; those that stay are not scaled.
        seed: of which weights these are.

    Raises:
        InvalidArgumentError: no quadratic layer; `mask` is not in (0, 1]; a score is no number.
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
    before = _score(score, probe, "the whole")
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for name in layers:
        weights = [
            one for key, one in probe.get_submodule(name).named_parameters() if "weight" in key
        ]
        kept = [one.detach().clone() for one in weights]
        with torch.no_grad():
            for one in weights:
                one.mul_((torch.rand(one.shape, generator=generator) >= mask).to(one))
        after = _score(score, probe, name)
        with torch.no_grad():
            for one, value in zip(weights, kept, strict=True):
                one.copy_(value)
        rows.append(Sensitivity(name, parameters[name], operations[name], before - after))
    order = sorted(rows, key=lambda one: (one.redundancy, one.parameters * one.operations))
    return tuple(reversed(order)), before


def shorten(
    model: nn.Module, train: Callable[[nn.Module], object], score: Score, x: torch.Tensor, *,
    budget: float, of: Measure = "parameters", mask: float = 0.5, seed: int = 0,
) -> Shortened:  # fmt: skip
    """A network with `budget` of what `model` has: without its redundant layers, trained anew.

    It begins as a first-order network does, of random weights, where the neuron has a linear term
    and no branch norm; otherwise at random branches.

    A layer can go whole if the shapes around it stay legal: it has as many inputs as outputs, or
    fewer and one layer alone reads it. It leaves its stride behind. Units go of layers that
    `slipstream.surgery.removable_units` knows, half of a layer's at most before the next one's.

    Args:
        model: trained, with quadratic layers; it stays as it is.
        train: trains a model in place, from its start; called once.
        budget: share of what `of` names that may be left, in (0, 1); as near as a unit allows.
        score, x, mask, seed: as of `sensitivities`.

    Raises:
        InvalidArgumentError: as `sensitivities`; or the budget is none that can be reached.
    """
    if not 0.0 < budget < 1.0:
        raise InvalidArgumentError("budget", f"{budget} is not in (0, 1)")
    if of not in ("parameters", "operations"):
        raise InvalidArgumentError("of", f"'{of}' is neither parameters nor operations")
    table, before = _probed(model, score, x, mask, seed)
    plan = _Plan(model, x, of)
    while plan.share > budget:
        share = plan.share
        for one in table:
            plan.reduce(one.name, budget)
        if plan.share == share:
            raise InvalidArgumentError(
                "budget", f"{budget} of the {of} cannot be reached: {share:.3f} is what stays",
                remedy=f"a budget from {share:.3f} on, or a model whose layers feed one other each",
            )  # fmt: skip
    shorter = plan.quadratic()
    train(shorter.train())
    after = _score(score, copy.deepcopy(shorter).eval(), "the shorter model")
    return Shortened(
        shorter, table, tuple(plan.removed), plan.narrowed(), plan.share, before, after
    )


class _Plan:
    """A copy of a model with first-order layers of the same shapes, that gets shorter.

    Attributes:
        share: of the original that is left.
        removed: names of layers that are gone.
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
        """Take a layer away, or where that is too much or not legal, up to half of its units."""
        if self.share <= budget or name in self.removed:
            return
        self._remove(name, budget * (1 - _TOLERANCE))
        if name not in self.removed and name in _units(self._plain):
            self._narrow(name, budget)

    def _remove(self, name: str, least: float) -> None:
        shorter = copy.deepcopy(self._plain)
        layer = _first(shorter, name)
        if isinstance(layer, nn.Conv2d):
            inputs, outputs, stride = layer.in_channels, layer.out_channels, layer.stride
        else:
            inputs, outputs, stride = layer.in_features, layer.out_features, (1,)
        units = _units(shorter).get(name)
        if inputs > outputs or (inputs < outputs and units is None):
            return
        if inputs < outputs and units is not None:
            _keep(units, inputs)
        pick = nn.Identity() if set(stride) == {1} else nn.AvgPool2d(1, (stride[0], stride[-1]))
        place(shorter, name, pick)
        if _shape(shorter, self._x) == self._shape and self._share(shorter) >= least:
            self._take(shorter)
            self.removed.append(name)

    def _narrow(self, name: str, budget: float) -> None:
        count = _count(_first(self._plain, name))
        sizes = range(count - 1, (count - 1) // 2, -1)
        if sizes:
            at = bisect.bisect_left(
                sizes, True, key=lambda size: self._share(self._with(name, size)) <= budget
            )
            self._take(self._with(name, sizes[min(at, len(sizes) - 1)]))

    def narrowed(self) -> dict[str, tuple[int, int]]:
        """Units before and now, of those layers left that have fewer."""
        counts = {
            name: (layer.out, _count(_first(self._plain, name)))
            for name, layer in self._layers.items()
            if name not in self.removed
        }
        return {name: both for name, both in counts.items() if both[0] != both[1]}

    def quadratic(self) -> nn.Module:
        """What is left, with quadratic layers again, at a start of its own throughout."""
        plain = copy.deepcopy(self._plain)
        for one in plain.modules():
            reset = getattr(one, "reset_parameters", None)
            if reset is not None:
                reset()
        return self._grown(plain)

    def _grown(self, plain: nn.Module) -> nn.Module:
        grown = copy.deepcopy(plain)
        for name, old in self._layers.items():
            layer = grown.get_submodule(name)
            if isinstance(layer, nn.Linear | nn.Conv2d):
                norm = old.gamma is not None
                # Products of random branches, layer upon layer, take long to learn anything.
                init = "first_order" if NEURONS[old.neuron].linear and not norm else "random"
                quadratic = converted(layer, old.neuron, init, branch_norm=norm, memory=old.memory)
                place(grown, name, quadratic)
        return grown

    def _with(self, name: str, size: int) -> nn.Module:
        narrower = copy.deepcopy(self._plain)
        _keep(_units(narrower)[name], size)
        return narrower

    def _take(self, plain: nn.Module) -> None:
        self._plain, self.share = plain, self._share(plain)

    def _share(self, plain: nn.Module) -> float:
        return self._size(self._grown(plain)) / self._whole

    def _size(self, model: nn.Module) -> float:
        if self._of == "parameters":
            return float(sum(one.numel() for one in model.parameters()))
        return float(_counted(model, self._x).get_total_flops())


def _first(plain: nn.Module, name: str) -> nn.Linear | nn.Conv2d:
    layer = plain.get_submodule(name)
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return layer


def _count(layer: nn.Linear | nn.Conv2d) -> int:
    return int(layer.weight.shape[0])


def _layers(model: nn.Module) -> dict[str, QuadraticLinear | QuadraticConv2d]:
    layers = {name: one for name, one in model.named_modules() if isinstance(one, _KINDS)}
    if not layers or "" in layers:
        raise InvalidArgumentError(
            "model", "is one layer" if layers else "has no quadratic layer",
            remedy="slipstream.quadratic.convert(model) makes layers quadratic; train it first",
        )  # fmt: skip
    return layers


def _parameters(model: nn.Module, names: Mapping[str, object]) -> dict[str, float]:
    """Shares of the whole."""
    count = {n: sum(p.numel() for p in model.get_submodule(n).parameters()) for n in ("", *names)}
    return {name: count[name] / count[""] for name in names}


def _operations(model: nn.Module, x: torch.Tensor, names: Mapping[str, object]) -> dict[str, float]:
    """Shares of the whole."""
    counted = _counted(model, x)
    of_modules, kind = counted.get_flop_counts(), type(model).__name__
    return {
        name: sum(of_modules.get(f"{kind}.{name}", {}).values()) / counted.get_total_flops()
        for name in names
    }


def _counted(model: nn.Module, x: torch.Tensor) -> FlopCounterMode:
    counter, still = FlopCounterMode(display=False), copy.deepcopy(model).eval()
    with counter, torch.no_grad():
        still(x)
    return counter


def _shape(model: nn.Module, x: torch.Tensor) -> torch.Size | None:
    """Of the output; None where layers no longer fit each other."""
    try:
        with torch.no_grad():
            output = copy.deepcopy(model).eval()(x)
    except RuntimeError:
        return None
    return output.shape if isinstance(output, torch.Tensor) else None


def _score(score: Score, model: nn.Module, of: str) -> float:
    value = float(score(model))
    if not math.isfinite(value):
        raise InvalidArgumentError("score", f"is {value} of {of}")
    return value


def _units(model: nn.Module) -> dict[str, Units]:
    try:
        return {units.name: units for units in removable_units(model)}
    except WorkloadError:  # whole layers may go all the same
        return {}


def _keep(units: Units, size: int) -> None:
    """The first `size` units alone; what is left is trained anew, so that none is better."""
    weight = units.layer.weight
    gone = units.count - size
    remove_units(units, range(size), weight.new_zeros(gone, size), weight.new_zeros(gone))


def _first_order(layer: QuadraticLinear | QuadraticConv2d) -> nn.Linear | nn.Conv2d:
    """Of the same shape; its weights mean nothing."""
    weight = layer.weight if layer.square_weight is None else layer.square_weight
    bias = layer.bias is not None
    geometry = layer.convolution
    if geometry is None:
        plain: nn.Linear | nn.Conv2d = nn.Linear(weight.shape[1], layer.out, bias)
    else:
        kernel, (*pairs, groups) = (weight.shape[2], weight.shape[3]), geometry
        stride, padding, dilation = ((one[0], one[1]) for one in pairs)
        plain = nn.Conv2d(
            weight.shape[1] * groups, layer.out, kernel, stride, padding, dilation, groups, bias
        )
    return plain.to(weight.device, weight.dtype).train(layer.training)
