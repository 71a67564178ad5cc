"""Quadratic neurons: projections of the input, and how they are combined.

All projections of a layer are one matmul with a stacked weight. Only the input is saved for the
backward pass, which recomputes the projections and concatenates their gradients, so that the
gradient of the weights is one matmul and that of the input another.

Source: Xu et al., "QuadraLib: A Performant Quadratic Neural Network Library for Architecture
Optimization and Design Exploration", MLSys 2022; gated forms: Shazeer, "GLU Variants Improve
Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import SlipstreamError

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Neuron:
    """A kind of neuron.

    Attributes:
        formula: the output in terms of the projections a, b, c.
        branches: number of projections of x.
        of_squares: whether there is another projection, the last, of x squared.
        combine: maps the projections to the output.
        gradients: maps the projections and the output's gradient to each projection's gradient.
        linear: whether the last projection is a plain summand, so that the neuron can start as a
            first-order one.
    """

    formula: str
    branches: int
    of_squares: bool
    combine: Callable[[Tensors], torch.Tensor]
    gradients: Callable[[Tensors, torch.Tensor], Tensors]
    linear: bool = False

    @property
    def projections(self) -> int:
        """Number of projections, including that of x squared."""
        return self.branches + self.of_squares


def _glu_gradients(p: Tensors, g: torch.Tensor) -> Tensors:
    gate = p[1].sigmoid()
    return [g * gate, g * p[0] * gate * (1 - gate)]


_PRODUCT = Neuron("a * b", 2, False, lambda p: p[0] * p[1], lambda p, g: [g * p[1], g * p[0]])

NEURONS: dict[str, Neuron] = {
    "t2": Neuron("W (x * x)", 0, True, lambda p: p[0], lambda p, g: [g]),
    "t3": Neuron("a * a", 1, False, lambda p: p[0] * p[0], lambda p, g: [2 * g * p[0]]),
    "t4": _PRODUCT,
    "bilinear": _PRODUCT,
    "t2&4": Neuron(
        "a * b + W (x * x)", 2, True, lambda p: torch.addcmul(p[2], p[0], p[1]),
        lambda p, g: [g * p[1], g * p[0], g],
    ),
    "ours": Neuron(
        "a * b + c", 3, False, lambda p: torch.addcmul(p[2], p[0], p[1]),
        lambda p, g: [g * p[1], g * p[0], g], linear=True,
    ),
    "glu": Neuron("a * sigmoid(b)", 2, False, lambda p: p[0] * p[1].sigmoid(), _glu_gradients),
}  # fmt: skip
"""Neurons by name; `ours` is the neuron that the paper proposes."""


@dataclass(frozen=True)
class Projection:
    """A linear map with a stacked weight [groups, projections, out / groups, ...].

    Attributes:
        convolution: stride, padding, dilation, groups; None for a linear layer.
    """

    convolution: tuple[Sequence[int], Sequence[int], Sequence[int], int] | None = None

    @property
    def channels(self) -> int:
        """Dimension of the output channels."""
        return -1 if self.convolution is None else 1

    @property
    def groups(self) -> int:
        return 1 if self.convolution is None else self.convolution[3]

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the map with `weight` and `bias` to `x`."""
        if self.convolution is None:
            return torch.nn.functional.linear(x, weight, bias)
        stride, padding, dilation, groups = self.convolution
        return torch.nn.functional.conv2d(
            x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups
        )

    def backward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        g: torch.Tensor,
        want_x: bool,
        want_weight: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of x and the weight; None for those not requested."""
        if self.convolution is None:
            rows, columns = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
            return g @ weight if want_x else None, rows.T @ columns if want_weight else None
        stride, padding, dilation, groups = self.convolution
        gradients = torch.ops.aten.convolution_backward(
            g, x, weight, None, list(stride), list(padding), list(dilation), False, [0, 0], groups,
            [want_x, want_weight, False],
        )  # fmt: skip
        return gradients[0], gradients[1]

    def split(self, stacked: torch.Tensor, count: int) -> Tensors:
        """Split stacked outputs into those of `count` projections."""
        dim = self.channels
        if self.groups == 1:
            return list(stacked.chunk(count, dim))
        shape = (stacked.shape[0], self.groups, count, -1, *stacked.shape[2:])
        parts = stacked.view(shape).unbind(2)
        return [part.flatten(1, 2) for part in parts]

    def join(self, parts: Tensors) -> torch.Tensor:
        """Stack outputs of projections; the inverse of `split`."""
        if self.groups == 1:
            return torch.cat(parts, self.channels)
        shape = (parts[0].shape[0], self.groups, -1, *parts[0].shape[2:])
        return torch.stack([part.view(shape) for part in parts], 2).flatten(1, 3)


@dataclass(frozen=True)
class Norm:
    """Batch-norm statistics of the projections.

    Attributes:
        mean, scale: of all stacked channels, float32 [channels]; scale is 1 / standard deviation.
        batch: whether they are statistics of this batch, through which gradients flow.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    batch: bool


class Quadratic(torch.autograd.Function):
    """Layer that saves only x, the weights and the statistics for the backward pass.

    A bias is accepted if the neuron has a linear term, without norm and groups.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, square_weight: torch.Tensor | None,
        gamma: torch.Tensor | None, beta: torch.Tensor | None, norm: Norm | None, neuron: Neuron,
        projection: Projection, stacked: torch.Tensor | None, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if stacked is None and neuron.branches:
            out = len(weight) // neuron.branches
            biases = None if bias is None else torch.cat([bias.new_zeros(2 * out), bias])
            stacked = projection(x, weight, biases)
        parts = projections(x, stacked, square_weight, neuron, projection, gamma, beta, norm)
        ctx.save_for_backward(x, weight, square_weight, gamma, beta)
        ctx.norm, ctx.neuron, ctx.projection = norm, neuron, projection
        return in_range(neuron.combine, parts)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # set by create_graph=True
            raise SlipstreamError(
                "the backward pass of a quadratic layer cannot be differentiated",
                remedy='create the layer with memory="naive", which autograd differentiates',
            )
        x, weight, square_weight, gamma, beta = ctx.saved_tensors
        neuron, projection, norm = ctx.neuron, ctx.projection, ctx.norm
        needs_grad = ctx.needs_input_grad
        if neuron.linear and norm is None and projection.groups == 1:
            dx, dweight = _product_backward(ctx, g)
            dims = [at for at in range(g.dim()) if at != projection.channels % g.dim()]
            dbias = g.sum(dims) if needs_grad[9] else None
            return dx, dweight, *[None] * 7, dbias
        projected = projection(x, weight) if neuron.branches else None
        parts = projections(x, projected, square_weight, neuron, projection, gamma, beta, norm)
        gradients = neuron.gradients(parts, g)
        dx = dweight = dsquare = dgamma = dbeta = None
        if neuron.branches:
            assert projected is not None
            stacked = projection.join([part.contiguous() for part in gradients[: neuron.branches]])
            if norm is not None:
                stacked, dgamma, dbeta = _norm_backward(stacked, projected, gamma, norm)
            dx, dweight = projection.backward(x, weight, stacked, needs_grad[0], needs_grad[1])
        if square_weight is not None:
            of_square, dsquare = projection.backward(
                x * x, square_weight, gradients[-1].contiguous(), needs_grad[0], needs_grad[2]
            )
            if of_square is not None:
                of_square = 2 * x * of_square
                dx = of_square if dx is None else dx + of_square
        return dx, dweight, dsquare, dgamma, dbeta, *[None] * 5


def _product_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, Any]:
    """Return the gradients of a * b + c, without recomputing c and without a concatenation."""
    x, weight, *_ = ctx.saved_tensors
    dim = ctx.projection.channels
    out = len(weight) // 3
    projected = ctx.projection(x, weight[: 2 * out])
    shape = list(projected.shape)
    shape[dim] = 3 * out
    stacked = torch.empty(shape, dtype=g.dtype, device=g.device)
    parts = stacked.chunk(3, dim)
    a, b = projected.chunk(2, dim)
    torch.mul(g, b, out=parts[0])
    torch.mul(g, a, out=parts[1])
    parts[2].copy_(g)
    projection: Projection = ctx.projection
    return projection.backward(x, weight, stacked, *ctx.needs_input_grad[:2])


def projections(
    x: torch.Tensor, stacked: torch.Tensor | None, square_weight: torch.Tensor | None,
    neuron: Neuron, projection: Projection, gamma: torch.Tensor | None,
    beta: torch.Tensor | None, norm: Norm | None,
) -> Tensors:  # fmt: skip
    """Return every projection, normalised if `norm` is set; `stacked` are those of x."""
    parts: Tensors = []
    if stacked is not None:
        if norm is not None:
            assert gamma is not None
            assert beta is not None
            scale = norm.scale * gamma
            stacked = stacked * _broadcast(scale, stacked) + _broadcast(
                beta - norm.mean * scale, stacked
            )
        parts = projection.split(stacked, neuron.branches)
    if square_weight is not None:
        parts.append(projection(x * x, square_weight))
    return parts


def in_range(combine: Callable[[Tensors], torch.Tensor], parts: Tensors) -> torch.Tensor:
    """Combine the projections; those of float16 in float32, against overflow."""
    if parts[0].dtype is not torch.float16:
        return combine(parts)
    return combine([part.float() for part in parts]).to(torch.float16)


def _broadcast(values: torch.Tensor, stacked: torch.Tensor) -> torch.Tensor:
    """Reshape [channels] so that it broadcasts with the output of a projection."""
    return values.view(-1, *[1] * (stacked.dim() - 2)) if stacked.dim() > 2 else values


def _norm_backward(
    g: torch.Tensor, stacked: torch.Tensor, gamma: torch.Tensor, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of the input, gamma and beta of a batch norm from its input."""
    dims = [dim for dim in range(g.dim()) if dim != 1]
    hat = (stacked - _broadcast(norm.mean, stacked)) * _broadcast(norm.scale, stacked)
    dbeta, dgamma = g.sum(dims), (g * hat).sum(dims)
    scale = _broadcast(gamma * norm.scale, stacked)
    if not norm.batch:
        return g * scale, dgamma, dbeta
    count = g.numel() // g.shape[1]
    g = g - _broadcast(dbeta / count, stacked) - hat * _broadcast(dgamma / count, stacked)
    return g * scale, dgamma, dbeta
