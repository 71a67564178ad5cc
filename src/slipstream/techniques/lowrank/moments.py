"""Conversion of an optimizer's state of a dense weight to state of its factors.

With ``W = B A`` the gradient of A is ``B^T G`` and that of B is ``G A^T``; averages of gradients
transform identically. Averages of *squared* gradients are multiplied by the squared factors, as if
the elements of a gradient were independent. Step counts are unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.techniques.lowrank.nn import LowRankAttention, LowRankLSTM

_SQUARED = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg"})


def carry(optimizer: torch.optim.Optimizer, dense: Any, product: Any) -> dict[Any, dict[str, Any]]:
    """Return the state of each new parameter, before `optimizer` gets the parameters."""
    states: dict[Any, dict[str, Any]] = {}
    for weight, rows, a, b in factor_pairs(dense, product):
        state = optimizer.state.get(weight)
        if not state:
            continue
        state_a: dict[str, Any] = {}
        state_b: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                moment_a, moment_b = _through(value, rows, a.detach(), b.detach(), key in _SQUARED)
                state_a[key], state_b[key] = moment_a.view_as(a), moment_b.view_as(b)
            else:
                state_a[key] = value.clone() if isinstance(value, Tensor) else value
                state_b[key] = value.clone() if isinstance(value, Tensor) else value
        states[a], states[b] = state_a, state_b
    states.update(_biases(optimizer, dense, product))
    return states


def _through(
    value: Tensor, rows: slice, a: Tensor, b: Tensor, squared: bool
) -> tuple[Tensor, Tensor]:
    """Convert a moment [m, n, ...] of the dense weight to both factors, by gate or group."""
    whole = value[rows].flatten(1)
    count = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    if count == 1 and a.dim() > 2:
        # Every group of a convolution has a separate product.
        count = whole.shape[1] and max(1, a.shape[0] // b.shape[1])
    parts = whole.view(count, -1, whole.shape[1])
    thin_a = a.reshape(count, -1, whole.shape[1])
    thin_b = b.reshape(count, parts.shape[1], -1)
    if squared:
        thin_a, thin_b = thin_a.square(), thin_b.square()
    return torch.bmm(thin_b.transpose(1, 2), parts), torch.bmm(parts, thin_a.transpose(1, 2))


def factor_pairs(dense: Any, product: Any) -> list[tuple[Tensor, slice, Tensor, Tensor]]:
    """Return each dense weight, its rows that a product represents, and the product's factors."""
    all_rows = slice(None)
    if isinstance(product, LowRankLSTM):
        return [
            (
                getattr(dense, f"weight_{side}_{name}"), all_rows,
                getattr(product, f"a_{side}_{name}"), getattr(product, f"b_{side}_{name}"),
            )
            for name in product._suffixes()
            for side in ("ih", "hh")
        ]  # fmt: skip
    if isinstance(product, LowRankAttention):
        e = product.embed_dim
        factors = []
        for number, name in enumerate("qkv"):
            layer = getattr(product, name)
            weight, rows = dense.in_proj_weight, slice(number * e, (number + 1) * e)
            if weight is None:
                weight, rows = getattr(dense, f"{name}_proj_weight"), all_rows
            factors.append((weight, rows, layer.first.weight, layer.second.weight))
        out = product.out_proj
        return [*factors, (dense.out_proj.weight, all_rows, out.first.weight, out.second.weight)]
    return [(dense.weight, all_rows, product.first.weight, product.second.weight)]


def _biases(
    optimizer: torch.optim.Optimizer, dense: nn.Module, product: Any
) -> dict[Any, dict[str, Any]]:
    """Split the state of attention's common bias; other biases remain the same parameters."""
    if not isinstance(product, LowRankAttention) or product.q.bias is None:
        return {}
    bias: Any = dense.in_proj_bias
    state = optimizer.state.get(bias) or {}
    if not state:
        return {}
    e = product.embed_dim
    return {
        layer.bias: {
            key: value[n * e : (n + 1) * e].clone()
            if isinstance(value, Tensor) and value.shape == bias.shape
            else value
            for key, value in state.items()
        }
        for n, layer in enumerate((product.q, product.k, product.v))
    }
