"""Torch's attention as modules whose parts can be replaced.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` pass parameters to a single function
instead of calling submodules, so a low-bit layer in their place would never run. `split_attention`
replaces these matmuls by modules, with the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from slipstream.surgery import place

PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Names of the layers of a `SplitAttention`."""


class SplitAttention(nn.Module):
    """``nn.MultiheadAttention`` with a linear layer for each of its four matmuls.

    Args:
        attention: the module to split; separate parameters are shared, joined ones copied.
    """

    # With these, ``nn.TransformerEncoderLayer`` does not bypass the submodules.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.dropout, self.batch_first = attention.dropout, attention.batch_first
        joined = attention.in_proj_weight
        weights = (
            (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
            if joined is None
            else joined.detach().chunk(3)
        )
        bias = attention.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.detach().chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(_linear, weights, biases)
        out = attention.out_proj
        self.out_proj = _linear(out.weight, out.bias)
        self.train(attention.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute like ``nn.MultiheadAttention.forward``."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        q, k, v = (
            layer(tensor).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, tensor in (
                (self.q_proj, query), (self.k_proj, key), (self.v_proj, value),
            )
        )  # fmt: skip
        mask = _combined_mask(attn_mask, key_padding_mask, self.num_heads, q.dtype)
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = functional.dropout(weights, rate) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, rate)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights


def split_attention(
    model: nn.Module, selected: Callable[[str], bool] = lambda name: True
) -> dict[str, nn.MultiheadAttention]:
    """Replace attention in `model` by `SplitAttention`, with the same results.

    Args:
        selected: whether to replace an attention, called with the names of its new layers.

    Returns:
        The replaced modules, by name.
    """
    replaced = {
        name: module for name, module in model.named_modules()
        if name and isinstance(module, nn.MultiheadAttention) and why_not_split(module) is None
        and any(selected(f"{name}.{part}") for part in PARTS)
    }  # fmt: skip
    for name, module in replaced.items():
        place(model, name, SplitAttention(module))
    for encoder in model.modules():
        # Otherwise both may bypass their submodules.
        if isinstance(encoder, nn.TransformerEncoderLayer):
            encoder.activation_relu_or_gelu = 0
        elif isinstance(encoder, nn.TransformerEncoder):
            encoder.use_nested_tensor = False
    return replaced


def why_not_split(module: nn.MultiheadAttention) -> str | None:
    """Return why `split_attention` does not replace `module`, or None."""
    if type(module) is not nn.MultiheadAttention:
        return "it is a subclass of nn.MultiheadAttention"
    if module.bias_k is not None or module.add_zero_attn:
        return "it appends another key"
    return None


def _linear(weight: torch.Tensor | None, bias: torch.Tensor | None) -> nn.Linear:
    assert weight is not None
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    if bias is not None:
        layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
    return layer


def _combined_mask(
    mask: torch.Tensor | None, padding: torch.Tensor | None, heads: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Combine both masks to a summand of the scores [batch, heads, queries, keys]."""
    if mask is not None:
        mask = _additive(mask, dtype)
        mask = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
    if padding is None:
        return mask
    padding = _additive(padding, dtype)[:, None, None, :]
    return padding if mask is None else mask + padding


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a mask to a summand of the scores; True means not attended."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
