"""What an optimizer remembers of a dense weight, as it would remember it of the factors.

With ``W = B A`` the gradient of A is ``B^T G`` and that of B is ``G A^T``; averages of gradients go
the same way. Averages of *squared* gradients go through the squares of the factors, as if the
numbers of a gradient were independent. Counts of steps stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.techniques.lowrank.nn import LowRankAttention, LowRankLSTM

_SQUARED = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg"})


def carry(optimizer: torch.optim.Optimizer, dense: Any, made: Any) -> dict[Any, dict[str, Any]]:
    """By new parameter, what `optimizer` shall remember of it; before it is given them."""
    states: dict[Any, dict[str, Any]] = {}
    for weight, cut, a, b in factor_pairs(dense, made):
        state = optimizer.state.get(weight)
        if not state:
            continue
        of_a: dict[str, Any] = {}
        of_b: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                left, right = _through(value, cut, a.detach(), b.detach(), key in _SQUARED)
                of_a[key], of_b[key] = left.view_as(a), right.view_as(b)
            else:
                of_a[key] = value.clone() if isinstance(value, Tensor) else value
                of_b[key] = value.clone() if isinstance(value, Tensor) else value
        states[a], states[b] = of_a, of_b
    states.update(_biases(optimizer, dense, made))
    return states


def _through(
    value: Tensor, cut: slice, a: Tensor, b: Tensor, squared: bool
) -> tuple[Tensor, Tensor]:
    """A moment [m, n, ...] of the dense weight, for both factors; gates and groups one by one."""
    whole = value[cut].flatten(1)
    count = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    if count == 1 and a.dim() > 2:
        # Of a convolution in groups every group has a product of its own.
        count = whole.shape[1] and max(1, a.shape[0] // b.shape[1])
    parts = whole.view(count, -1, whole.shape[1])
    thin_a = a.reshape(count, -1, whole.shape[1])
    thin_b = b.reshape(count, parts.shape[1], -1)
    if squared:
        thin_a, thin_b = thin_a.square(), thin_b.square()
    return torch.bmm(thin_b.transpose(1, 2), parts), torch.bmm(parts, thin_a.transpose(1, 2))


def factor_pairs(dense: Any, made: Any) -> list[tuple[Tensor, slice, Tensor, Tensor]]:
    """Dense weight, its rows that one product stands for, and the product's factors."""
    every = slice(None)
    if isinstance(made, LowRankLSTM):
        return [
            (
                getattr(dense, f"weight_{side}_{name}"), every,
                getattr(made, f"a_{side}_{name}"), getattr(made, f"b_{side}_{name}"),
            )
            for name in made._suffixes()
            for side in ("ih", "hh")
        ]  # fmt: skip
    if isinstance(made, LowRankAttention):
        e = made.embed_dim
        factors = []
        for number, name in enumerate("qkv"):
            layer = getattr(made, name)
            weight, rows = dense.in_proj_weight, slice(number * e, (number + 1) * e)
            if weight is None:
                weight, rows = getattr(dense, f"{name}_proj_weight"), every
            factors.append((weight, rows, layer.first.weight, layer.second.weight))
        out = made.out_proj
        return [*factors, (dense.out_proj.weight, every, out.first.weight, out.second.weight)]
    return [(dense.weight, every, made.first.weight, made.second.weight)]


def _biases(
    optimizer: torch.optim.Optimizer, dense: nn.Module, made: Any
) -> dict[Any, dict[str, Any]]:
    """Attention's common bias is cut in three; all others stay the parameters they are."""
    if not isinstance(made, LowRankAttention) or made.q.bias is None:
        return {}
    bias: Any = dense.in_proj_bias
    state = optimizer.state.get(bias) or {}
    if not state:
        return {}
    e = made.embed_dim
    return {
        layer.bias: {
            key: value[n * e : (n + 1) * e].clone()
            if isinstance(value, Tensor) and value.shape == bias.shape
            else value
            for key, value in state.items()
        }
        for n, layer in enumerate((made.q, made.k, made.v))
    }
