"""Layers of quadratic neurons, and conversion of first-order layers to them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, SlipstreamWarning, UnknownNameError
from slipstream.surgery import ModuleSelection, exchange, why_fixed
from slipstream.techniques.quadratic.neurons import (
    NEURONS,
    Norm,
    Projection,
    Quadratic,
    in_range,
    projections,
)

Memory = Literal["hybrid", "naive"]
# Factor of the two multiplied branches in a converted layer; their gradient steps are its square
# times those of the linear term. With 1, SGD diverges at half the learning rates at which the
# original model trains.
_PRODUCT_SCALE = 0.1**0.5
# Training passes between checks that outputs are finite; a check reads them once.
_CHECK_INTERVAL = 8


class _Layer(nn.Module):
    """Base of both layers: stacked weights, norm, bias.

    Attributes:
        weight: [branches * out, in, ...], by group, then by branch.
        square_weight: weight of the projection of x squared, [out, in, ...], or None.
        gamma, beta: scale and shift of the branches' batch norm, [branches * out], or None.
        row_scale: factor of each row of `weight` in the projection, [branches * out, 1, ...];
            None for 1.
    """

    def __init__(
        self, shape: tuple[int, ...], neuron: str, bias: bool, branch_norm: bool, memory: Memory,
        projection: Projection,
    ) -> None:  # fmt: skip
        super().__init__()
        if neuron not in NEURONS:
            raise UnknownNameError("neuron", neuron, NEURONS)
        if memory not in ("hybrid", "naive"):
            raise InvalidArgumentError("memory", f"'{memory}' is neither hybrid nor naive")
        kind = NEURONS[neuron]
        if branch_norm and not kind.branches:
            raise InvalidArgumentError(
                "branch_norm", f"neuron '{neuron}' has no branch to normalise"
            )
        self.neuron, self.memory, self._projection = neuron, memory, projection
        out, fan = shape[0], math.prod(shape[1:])
        # With unit variance in each branch, their product has unit variance, too.
        self.weight = nn.Parameter(torch.randn(kind.branches * out, *shape[1:]) / math.sqrt(fan))
        self.square_weight = (
            nn.Parameter(torch.randn(shape) / math.sqrt(3 * fan)) if kind.of_squares else None
        )
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None
        channels = kind.branches * out
        self.gamma = nn.Parameter(torch.ones(channels)) if branch_norm else None
        self.beta = nn.Parameter(torch.zeros(channels)) if branch_norm else None
        self.eps, self.momentum, self._passes = 1e-5, 0.1, 0
        self.running_mean: torch.Tensor | None
        self.running_variance: torch.Tensor | None
        self.register_buffer("running_mean", torch.zeros(channels) if branch_norm else None)
        self.register_buffer("running_variance", torch.ones(channels) if branch_norm else None)
        self.row_scale: torch.Tensor | None
        self.register_buffer("row_scale", None)

    @property
    def out(self) -> int:
        """Number of output channels."""
        square = self.square_weight
        return (
            len(square) if square is not None else len(self.weight) // NEURONS[self.neuron].branches
        )

    @property
    def scaled_weight(self) -> torch.Tensor:
        """`weight` times `row_scale`: the weight of the projections."""
        return self.weight if self.row_scale is None else self.weight * self.row_scale

    @property
    def convolution(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], int] | None:
        """Stride, padding, dilation, groups; None for a linear layer."""
        return self._projection.convolution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer for [..., in], or for [N, in, H, W] or [in, H, W]."""
        kind, project = NEURONS[self.neuron], self._projection
        if project.convolution is not None and x.dim() == 3:
            unbatched: torch.Tensor = self.forward(x.unsqueeze(0)).squeeze(0)
            return unbatched
        if project.convolution is None and self.gamma is not None and x.dim() != 2:
            rows = self.forward(x.reshape(-1, x.shape[-1]))
            return rows.view(*x.shape[:-1], rows.shape[-1])
        weight = self.scaled_weight
        projected = project(x, weight) if self.gamma is not None else None
        norm = None if projected is None else self._norm(projected.detach())
        early_bias = (
            self.bias if kind.linear and projected is None and project.groups == 1 else None
        )
        # Under autocast the operators must be autograd's, which casts gradients back.
        if self.memory == "hybrid" and not torch.is_autocast_enabled(x.device.type):
            detached = None if projected is None else projected.detach()
            y: torch.Tensor = Quadratic.apply(
                x,
                weight,
                self.square_weight,
                self.gamma,
                self.beta,
                norm,
                kind,
                project,
                detached,
                early_bias,
            )
        else:
            early_bias = None
            if projected is not None:
                projected, norm = self._normalised(projected), None
            elif kind.branches:
                projected = project(x, weight)
            parts = projections(x, projected, self.square_weight, kind, project, None, None, None)
            y = in_range(kind.combine, parts)
        self._check_finite(y.detach())
        if self.bias is None or early_bias is not None:
            return y
        return y + (self.bias if project.convolution is None else self.bias.view(-1, 1, 1))

    def _check_finite(self, y: torch.Tensor) -> None:
        """Warn if outputs are not finite; in training at intervals, because that persists."""
        if y.dtype is not torch.float16:
            if not self.training or self.gamma is not None or torch.compiler.is_compiling():
                return
            self._passes += 1
            if self._passes % _CHECK_INTERVAL:
                return
        if torch.isfinite(y).all():
            return
        warnings.warn(
            f"a product in a quadratic layer ({self}) overflows float16; use bfloat16"
            if y.dtype is torch.float16
            else f"the output of a quadratic layer ({self}) is not finite; use branch_norm=True "
            "and gradient clipping in deep stacks of them",
            SlipstreamWarning, stacklevel=3,
        )  # fmt: skip

    def _norm(self, projected: torch.Tensor) -> Norm:
        """Return the batch's statistics in training, after an update of the running ones."""
        if not self.training:
            assert self.running_mean is not None
            assert self.running_variance is not None
            return Norm(self.running_mean, (self.running_variance + self.eps).rsqrt(), False)
        dims = [dim for dim in range(projected.dim()) if dim != 1]
        variance, mean = torch.var_mean(projected, dims, correction=0)
        count = projected.numel() // projected.shape[1]
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_variance is not None
            self.running_mean.lerp_(mean, self.momentum)
            self.running_variance.lerp_(variance * count / max(count - 1, 1), self.momentum)
        return Norm(mean, (variance + self.eps).rsqrt(), True)

    def _normalised(self, projected: torch.Tensor) -> torch.Tensor:
        """Normalise by torch's batch norm; `_norm` has updated the running statistics."""
        mean, variance = (
            (None, None) if self.training else (self.running_mean, self.running_variance)
        )
        return nn.functional.batch_norm(
            projected, mean, variance, self.gamma, self.beta, self.training, 0.0, self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[-1]}, {self.out}, neuron={self.neuron}"


class QuadraticLinear(_Layer):
    """A linear layer of quadratic neurons, [..., in] to [..., out].

    Args:
        neuron: one of `NEURONS`.
        branch_norm: whether each branch is batch-normalised before the product.
        memory: ``hybrid`` saves only the input for the backward pass; ``naive`` saves what autograd
            does.

    Raises:
        UnknownNameError: there is no such neuron.
        InvalidArgumentError: there is no such `memory`, or no branch to normalise.
    """

    def __init__(
        self, in_features: int, out_features: int, *, neuron: str = "ours", bias: bool = True,
        branch_norm: bool = False, memory: Memory = "hybrid",
    ) -> None:  # fmt: skip
        shape = out_features, in_features
        super().__init__(shape, neuron, bias, branch_norm, memory, Projection())


class QuadraticConv2d(_Layer):
    """A convolution of quadratic neurons, [N, in, H, W] or [in, H, W].

    Arguments are those of ``nn.Conv2d`` and `QuadraticLinear`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int], *,
        stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1, groups: int = 1, neuron: str = "ours",
        bias: bool = True, branch_norm: bool = False, memory: Memory = "hybrid",
    ) -> None:  # fmt: skip
        kernel, stride, padding, dilation = map(_pair, (kernel_size, stride, padding, dilation))
        shape = out_channels, in_channels // groups, *kernel
        projection = Projection((stride, padding, dilation, groups))
        super().__init__(shape, neuron, bias, branch_norm, memory, projection)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


class FusedQuadratic(nn.Module):
    """A quadratic layer for inference: one matmul for all projections, with the norm folded in.

    Args:
        layer: computed as in eval mode; its parameters are copied.

    Raises:
        InvalidArgumentError: its neuron projects squares of the input, or it has several groups.
    """

    bias: torch.Tensor | None

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        kind = NEURONS[layer.neuron]
        if kind.of_squares or layer._projection.groups != 1:
            raise InvalidArgumentError("layer", f"{layer} cannot be computed as one matmul")
        self.neuron, self._projection = layer.neuron, layer._projection
        with torch.no_grad():
            weight = layer.scaled_weight.detach().clone()
            bias = weight.new_zeros(len(weight))
            if layer.gamma is not None and layer.beta is not None:
                assert layer.running_mean is not None
                assert layer.running_variance is not None
                scale = layer.gamma * (layer.running_variance + layer.eps).rsqrt()
                weight *= scale.view(-1, *[1] * (weight.dim() - 1))
                bias += layer.beta - layer.running_mean * scale
            offset = None if layer.bias is None else layer.bias.detach().clone()
            if offset is not None and kind.linear:
                bias[-len(offset) :] += offset
                offset = None
        self.register_buffer("weight", weight)
        self.register_buffer("branch_bias", bias)
        self.register_buffer("bias", offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer in eval mode, on inputs of the same shapes."""
        kind, project = NEURONS[self.neuron], self._projection
        if project.convolution is not None and x.dim() == 3:
            unbatched: torch.Tensor = self.forward(x.unsqueeze(0)).squeeze(0)
            return unbatched
        projected = project(x, self.get_buffer("weight"), self.get_buffer("branch_bias"))
        y = in_range(kind.combine, project.split(projected, kind.branches))
        if self.bias is None:
            return y
        bias = self.get_buffer("bias")
        return y + (bias if project.convolution is None else bias.view(-1, 1, 1))


def fuse(model: nn.Module) -> list[str]:
    """Replace quadratic layers by `FusedQuadratic` where possible, in place; return their names.

    Raises:
        InvalidArgumentError: `model` is itself a quadratic layer.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, _Layer)}
    if "" in layers:
        raise InvalidArgumentError(
            "model", "is a single layer", remedy="call FusedQuadratic(layer) instead"
        )
    names = []
    for name, layer in layers.items():
        if not NEURONS[layer.neuron].of_squares and layer._projection.groups == 1:
            exchange(model, name, FusedQuadratic(layer).train(layer.training))
            names.append(name)
    return names


def convert_layer(
    layer: nn.Linear | nn.Conv2d, neuron: str = "ours", init: str = "first_order", *,
    branch_norm: bool = False, memory: Memory = "hybrid",
) -> _Layer:  # fmt: skip
    """Return a quadratic layer to replace `layer`.

    Args:
        init: ``first_order`` computes what `layer` does until it is trained: its weight becomes the
            linear term, one branch starts at zero, and the multiplied branches take smaller steps
            (`row_scale`). ``random`` draws new weights.
        branch_norm, memory: see `QuadraticLinear`.

    Raises:
        InvalidArgumentError: `init` is ``first_order`` with a branch norm or a neuron without a
            linear term, or the padding is not numeric zero padding.
    """
    if init not in ("first_order", "random"):
        raise InvalidArgumentError("init", f"'{init}' is neither first_order nor random")
    bias, weight = layer.bias is not None, layer.weight
    if branch_norm and init == "first_order":
        raise InvalidArgumentError(
            "init",
            "first_order is not possible with branch_norm, which changes what the layer computes",
            remedy='pass init="random"',
        )
    quadratic: _Layer
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise InvalidArgumentError("layer", f"its padding is '{layer.padding_mode}'")
        pairs = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        kernel, stride, padding, dilation = map(_pair, pairs)
        quadratic = QuadraticConv2d(
            layer.in_channels, layer.out_channels, kernel, stride=stride, padding=padding,
            dilation=dilation, groups=layer.groups, neuron=neuron, bias=bias,
            branch_norm=branch_norm, memory=memory,
        )  # fmt: skip
    else:
        quadratic = QuadraticLinear(
            layer.in_features, layer.out_features, neuron=neuron, bias=bias,
            branch_norm=branch_norm, memory=memory,
        )  # fmt: skip
    quadratic = quadratic.to(weight.device, weight.dtype).train(layer.training)
    for name, parameter in quadratic.named_parameters():
        source = layer.bias if name == "bias" and layer.bias is not None else weight
        parameter.requires_grad_(source.requires_grad)
    if init == "random":
        return quadratic
    if not NEURONS[neuron].linear:
        raise InvalidArgumentError("init", f"neuron '{neuron}' has no linear term to start from")
    groups = quadratic._projection.groups
    with torch.no_grad():
        stacked = quadratic.weight.view(groups, 3, -1, *weight.shape[1:])
        stacked[:, 1] = 0.0
        stacked[:, 2] = weight.view(groups, -1, *weight.shape[1:])
        scale = weight.new_ones(groups, 3, len(weight) // groups)
        scale[:, :2] = _PRODUCT_SCALE
        quadratic.row_scale = scale.view(-1, *[1] * (weight.dim() - 1))
        if quadratic.bias is not None and layer.bias is not None:
            quadratic.bias.copy_(layer.bias)
    return quadratic


def convert(
    model: nn.Module, neuron: str = "ours", *, only: str = "*", except_: str = "",
    init: str = "first_order", branch_norm: bool = False,
) -> list[str]:  # fmt: skip
    """Make linear layers and convolutions of `model` quadratic, in place; return their names.

    Hooks of layers are retained, and frozen layers stay frozen. Layers stay first-order, with a
    warning, if their weight is shared, computed by a hook, or has hooks on its gradient.

    Args:
        only, except_: patterns of qualified names.
        init, branch_norm: see `convert_layer`.

    Raises:
        InvalidArgumentError: see `convert_layer`; or no layer can be replaced.
        WorkloadError: no layer matches the patterns.
    """
    layers = convertible(model, ModuleSelection(only, except_))
    for name, layer in layers.items():
        exchange(model, name, convert_layer(layer, neuron, init, branch_norm=branch_norm))
    return list(layers)


def convertible(model: nn.Module, selection: ModuleSelection) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the selected layers of `model` that can become quadratic, by name.

    Raises:
        InvalidArgumentError: no layer can be replaced.
        WorkloadError: no layer matches the patterns.
    """
    layers: dict[str, Any] = {
        n: m for n, m in model.named_modules() if type(m) in (nn.Linear, nn.Conv2d)
    }
    if not layers:
        raise InvalidArgumentError("model", "has no nn.Linear and no nn.Conv2d")
    if "" in layers:
        raise InvalidArgumentError(
            "model", "is a single layer", remedy="call converted(layer) instead"
        )
    selection.require_match("quadratic", layers)
    chosen = {name: layer for name, layer in layers.items() if name in selection}
    reasons = {name: why_fixed(model, layer) for name, layer in chosen.items()}
    fixed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    if all(reasons.values()):
        raise InvalidArgumentError("model", f"has no layer that can be replaced ({fixed})")
    if fixed:
        warnings.warn(f"layers stay first-order ({fixed})", SlipstreamWarning, stacklevel=3)
    return {name: layer for name, layer in chosen.items() if reasons[name] is None}


Conv2d, Linear = QuadraticConv2d, QuadraticLinear
"""Names of the layers in `slipstream.quadratic`."""
