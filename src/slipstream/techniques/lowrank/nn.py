"""Layers whose weights are products of two thin matrices, without an activation in between.

`LowRankLinear` and `LowRankConv1d`/`2d` are sequences of two ordinary layers, so that
quantisation, folding and export work on them. The k x k convolution to `rank` channels has the
stride, padding and dilation; the 1 x 1 convolution after it has the bias.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.lowrank.factors import NEAREST, Start, truncate


class _Pair(nn.Sequential):
    """Two layers that replace one: `first` maps to `rank` channels, `second` from there."""

    first: Any
    second: Any

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__(OrderedDict(first=first, second=second))

    @property
    def bias(self) -> Tensor | None:
        """Bias of the second layer."""
        tensor: Tensor | None = self.second.bias
        return tensor

    @property
    def weight(self) -> Tensor:
        """The dense weight, multiplied at every access."""
        raise NotImplementedError

    def merged(self) -> nn.Module:
        """Return the dense layer."""
        raise NotImplementedError


class LowRankLinear(_Pair):
    """``y = B (A x) + bias``: [..., n] -> [..., m] through `rank` numbers.

    Source: Wang, Agarwal and Papailiopoulos, "Pufferfish: Communication-efficient Models At No
    Extra Cost", MLSys 2021.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__(
            nn.Linear(in_features, rank, bias=False), nn.Linear(rank, out_features, bias)
        )
        dense = nn.Linear(in_features, out_features, bias=False)
        factors = truncate(dense.weight, rank)
        _fill(self, factors.a, factors.b)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, rank: int, start: Start = NEAREST
           ) -> LowRankLinear:  # fmt: skip
        """Return the nearest layer to a dense `weight` [m, n]; `bias` is not copied."""
        rows, columns = weight.shape
        with torch.device("meta"):
            layer = cls.__new__(cls)
            _Pair.__init__(
                layer, nn.Linear(columns, rank, bias=False), nn.Linear(rank, rows, bias=False)
            )
        factors = truncate(weight, rank, start)
        _fill(layer, factors.a, factors.b)
        layer.second.bias = bias
        return layer

    @property
    def in_features(self) -> int:
        """Number of input features, n."""
        return int(self.first.in_features)

    @property
    def out_features(self) -> int:
        """Number of output features, m."""
        return int(self.second.out_features)

    @property
    def weight(self) -> Tensor:
        """The dense weight, [m, n]."""
        product: Tensor = self.second.weight @ self.first.weight
        return product

    def merged(self) -> nn.Linear:
        """Return the dense layer."""
        weight = self.weight.detach()
        with torch.device("meta"):
            dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        dense.weight = nn.Parameter(weight)
        dense.bias = self.bias  # type: ignore[assignment]
        return dense.train(self.training)


class _LowRankConv(_Pair):
    """A convolution of k x k to `rank` channels for each group, then one of 1 x 1.

    Arguments are those of torch's layer, with `rank` after `kernel_size`.
    """

    kind: ClassVar[type[Any]]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, rank: int,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros",
    ) -> None:  # fmt: skip
        dense = self.kind(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode,
        )  # fmt: skip
        super().__init__(*self._layers(dense, rank))
        self._fill_from(dense.weight, rank, NEAREST)
        self.second.bias = dense.bias

    @classmethod
    def of(cls, dense: Any, rank: int, start: Start = NEAREST) -> _LowRankConv:
        """Return the nearest layer to a dense convolution, whose bias is not copied."""
        layer = cls.__new__(cls)
        _Pair.__init__(layer, *cls._layers(dense, rank))
        layer._fill_from(dense.weight, rank, start)
        layer.second.bias = dense.bias
        return layer

    @classmethod
    def _layers(cls, dense: Any, rank: int) -> tuple[nn.Module, nn.Module]:
        with torch.device("meta"):
            channels = dense.groups * rank
            first = cls.kind(
                dense.in_channels, channels, dense.kernel_size, dense.stride, dense.padding,
                dense.dilation, dense.groups, False, dense.padding_mode,
            )  # fmt: skip
            second = cls.kind(channels, dense.out_channels, 1, groups=dense.groups, bias=False)
        return first, second

    def _fill_from(self, weight: Tensor, rank: int, start: Start) -> None:
        """Decompose each group's matrix [m / groups, n / groups * k]."""
        groups = self.first.groups
        matrices = [group.flatten(1) for group in weight.detach().chunk(groups)]
        factors = [truncate(matrix, rank, start) for matrix in matrices]
        a = torch.cat([pair.a for pair in factors]).view(groups * rank, *weight.shape[1:])
        b = torch.cat([pair.b for pair in factors])
        _fill(self, a, b.view(*b.shape, *[1] * (weight.dim() - 2)))

    @property
    def weight(self) -> Tensor:
        """The dense weight, [m, n / groups, *k]."""
        first, second = self.first.weight, self.second.weight
        groups = self.first.groups
        a = first.view(groups, -1, math.prod(first.shape[1:]))
        b = second.view(groups, -1, second.shape[1])
        return torch.bmm(b, a).view(second.shape[0], *first.shape[1:])

    def merged(self) -> nn.Module:
        """Return the dense convolution."""
        first = self.first
        with torch.device("meta"):
            dense = self.kind(
                first.in_channels, self.second.out_channels, first.kernel_size, first.stride,
                first.padding, first.dilation, first.groups, False, first.padding_mode,
            )  # fmt: skip
        dense.weight = nn.Parameter(self.weight.detach())
        dense.bias = self.bias
        trained: nn.Module = dense.train(self.training)
        return trained


class LowRankConv1d(_LowRankConv):
    """Low-rank replacement of ``nn.Conv1d``."""

    kind = nn.Conv1d


class LowRankConv2d(_LowRankConv):
    """Low-rank replacement of ``nn.Conv2d``."""

    kind = nn.Conv2d


class LowRankLSTM(nn.Module):
    """Low-rank replacement of ``nn.LSTM``: a product for each matrix of its 4 + 4 gates.

    4 d r + 12 h r parameters per layer of width h with d inputs. Inputs and states have the shapes
    of ``nn.LSTM``. Packed sequences run with the multiplied, dense weights.

    Attributes:
        ranks: ranks of input and recurrent matrices, by layer.
    """

    def __init__(self, dense: nn.LSTM, rank: float | int, start: Start = NEAREST) -> None:
        """
        Raises:
            InvalidArgumentError: `dense` projects its states, or `rank` is invalid for it.
        """
        from slipstream.techniques.lowrank.factors import rank_for

        super().__init__()
        if dense.proj_size:
            raise InvalidArgumentError("proj_size", "an LSTM that projects its states stays dense")
        self.input_size, self.hidden_size = dense.input_size, dense.hidden_size
        self.num_layers, self.bidirectional = dense.num_layers, dense.bidirectional
        self.batch_first, self.dropout, self.bias = dense.batch_first, dense.dropout, dense.bias
        self.ranks: list[tuple[int, int]] = []
        for suffix in self._suffixes():
            parts = {}
            for side in ("ih", "hh"):
                gates = getattr(dense, f"weight_{side}_{suffix}").detach().chunk(4)
                side_rank = rank_for(rank, *gates[0].shape)
                products = [truncate(gate, side_rank, start) for gate in gates]
                parts[side] = side_rank
                self.register_parameter(
                    f"a_{side}_{suffix}", nn.Parameter(torch.stack([pair.a for pair in products]))
                )
                self.register_parameter(
                    f"b_{side}_{suffix}", nn.Parameter(torch.stack([pair.b for pair in products]))
                )
                bias = getattr(dense, f"bias_{side}_{suffix}") if self.bias else None
                self.register_parameter(f"bias_{side}_{suffix}", bias)
            self.ranks.append((parts["ih"], parts["hh"]))
        self.train(dense.training)

    def _suffixes(self) -> list[str]:
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [
            f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions
        ]

    def merged(self) -> nn.LSTM:
        """Return the dense LSTM."""
        with torch.device("meta"):
            dense = nn.LSTM(
                self.input_size, self.hidden_size, self.num_layers, self.bias, self.batch_first,
                self.dropout, self.bidirectional,
            )  # fmt: skip
        for name in self._suffixes():
            for side in ("ih", "hh"):
                setattr(dense, f"weight_{side}_{name}", nn.Parameter(self._product(side, name)))
                if self.bias:
                    setattr(dense, f"bias_{side}_{name}", getattr(self, f"bias_{side}_{name}"))
        return dense.train(self.training)

    def _product(self, side: str, name: str) -> Tensor:
        """Return a dense weight, [4 h, d or h]."""
        return torch.bmm(
            getattr(self, f"b_{side}_{name}"), getattr(self, f"a_{side}_{name}")
        ).flatten(0, 1).detach()  # fmt: skip

    def forward(self, input: Any, state: Any = None) -> Any:
        """Return (output, (h, c)), as ``nn.LSTM`` does."""
        if isinstance(input, PackedSequence):
            return self._packed(input, state)
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if self.batch_first and batched else x
        directions = 2 if self.bidirectional else 1
        if state is None:
            zeros = x.new_zeros(self.num_layers * directions, x.shape[1], self.hidden_size)
            hidden, cell = zeros, zeros
        else:
            hidden, cell = (tensor if batched else tensor.unsqueeze(1) for tensor in state)
        last_h, last_c = [], []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in range(directions):
                at = layer * directions + reverse
                name = f"l{layer}" + "_reverse" * reverse
                y, h, c = self._run_direction(
                    x.flip(0) if reverse else x, hidden[at], cell[at], name
                )
                outputs.append(y.flip(0) if reverse else y)
                last_h.append(h)
                last_c.append(c)
            x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                x = functional.dropout(x, self.dropout, self.training)
        h, c = torch.stack(last_h), torch.stack(last_c)
        if not batched:
            return x.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (x.transpose(0, 1) if self.batch_first else x), (h, c)

    def _run_direction(
        self, x: Tensor, h: Tensor, c: Tensor, name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a layer in one direction: x [time, batch, d], h and c [batch, hidden]."""
        a_input, b_input = getattr(self, f"a_ih_{name}"), getattr(self, f"b_ih_{name}")
        a, b = getattr(self, f"a_hh_{name}"), getattr(self, f"b_hh_{name}")
        time, batch, _ = x.shape
        # Input products of all time steps: [4, time * batch, hidden].
        thin = functional.linear(x.reshape(time * batch, -1), a_input.flatten(0, 1))
        thin = thin.view(time * batch, 4, -1).transpose(0, 1)
        gates = torch.bmm(thin, b_input.transpose(1, 2))
        if self.bias:
            bias = getattr(self, f"bias_ih_{name}") + getattr(self, f"bias_hh_{name}")
            gates = gates + bias.view(4, 1, -1)
        steps = gates.view(4, time, batch, -1).unbind(1)
        flat, across = a.flatten(0, 1), b.transpose(1, 2)
        outputs = []
        for step in steps:
            thin = functional.linear(h, flat).view(batch, 4, -1).transpose(0, 1)
            i, f, g, o = torch.baddbmm(step, thin, across).unbind(0)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), h, c

    def _packed(self, input: PackedSequence, state: Any) -> Any:
        parameters: dict[str, Tensor] = {}
        for name in self._suffixes():
            for side in ("ih", "hh"):
                a, b = getattr(self, f"a_{side}_{name}"), getattr(self, f"b_{side}_{name}")
                parameters[f"weight_{side}_{name}"] = torch.bmm(b, a).flatten(0, 1)
                if self.bias:
                    parameters[f"bias_{side}_{name}"] = getattr(self, f"bias_{side}_{name}")
        with torch.device("meta"):
            dense = nn.LSTM(
                self.input_size, self.hidden_size, self.num_layers, self.bias, self.batch_first,
                self.dropout, self.bidirectional,
            )  # fmt: skip
        return torch.func.functional_call(dense.train(self.training), parameters, (input, state))


class LowRankAttention(nn.Module):
    """Low-rank replacement of ``nn.MultiheadAttention``, with products as its four projections.

    8 p d r parameters for p heads of width d; takes the same arguments in calls.
    """

    # Torch's encoder layers check these before a fast path that reads dense weights.
    in_proj_bias = None
    in_proj_weight = None
    q: LowRankLinear
    k: LowRankLinear
    v: LowRankLinear

    def __init__(
        self, dense: nn.MultiheadAttention, rank: float | int, start: Start = NEAREST
    ) -> None:
        """
        Raises:
            InvalidArgumentError: `dense` adds bias or zero keys, or `rank` is invalid for it.
        """
        from slipstream.techniques.lowrank.factors import rank_for

        super().__init__()
        if dense.bias_k is not None or dense.add_zero_attn:
            raise InvalidArgumentError(
                "bias_k", "attention that adds bias or zero keys stays dense"
            )
        self.embed_dim, self.num_heads = dense.embed_dim, dense.num_heads
        self.kdim, self.vdim = dense.kdim, dense.vdim
        self.batch_first, self.dropout = dense.batch_first, dense.dropout
        self._qkv_same_embed_dim = dense._qkv_same_embed_dim
        if dense._qkv_same_embed_dim:
            weights = dense.in_proj_weight.detach().chunk(3)
        else:
            weights = (dense.q_proj_weight, dense.k_proj_weight, dense.v_proj_weight)
        bias = dense.in_proj_bias
        biases: Any = (None,) * 3 if bias is None else [b.clone() for b in bias.detach().chunk(3)]
        for name, weight, vec in zip("qkv", weights, biases, strict=True):
            layer = LowRankLinear.of(
                weight, None if vec is None else nn.Parameter(vec), rank_for(rank, *weight.shape),
                start,
            )  # fmt: skip
            self.add_module(name, layer)
        out = dense.out_proj
        self.out_proj = LowRankLinear.of(
            out.weight, out.bias, rank_for(rank, *out.weight.shape), start
        )
        self.train(dense.training)

    def merged(self) -> nn.MultiheadAttention:
        """Return the dense attention."""
        dense = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, self.q.bias is not None,
            kdim=self.kdim, vdim=self.vdim, batch_first=self.batch_first,
        )  # fmt: skip
        parts = (self.q, self.k, self.v)
        weights = [part.weight.detach() for part in parts]
        dense.to(weights[0].dtype)
        if dense._qkv_same_embed_dim:
            dense.in_proj_weight = nn.Parameter(torch.cat(weights))
        else:
            for name, weight in zip("qkv", weights, strict=True):
                setattr(dense, f"{name}_proj_weight", nn.Parameter(weight))
        if self.q.bias is not None:
            biases = [part.bias for part in parts if part.bias is not None]
            dense.in_proj_bias = nn.Parameter(torch.cat(biases).detach())
        dense.out_proj.weight = nn.Parameter(self.out_proj.weight.detach())
        dense.out_proj.bias = self.out_proj.bias  # type: ignore[assignment]
        return dense.train(self.training)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return (output, weights or None), as ``nn.MultiheadAttention`` does."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        n, length, _ = query.shape
        q, k, v = (
            layer(tensor).view(n, tensor.shape[1], self.num_heads, -1).transpose(1, 2)
            for layer, tensor in ((self.q, query), (self.k, key), (self.v, value))
        )
        mask = self._mask(attn_mask, key_padding_mask, n, q.dtype)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = functional.dropout(weights, dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(n, length, -1))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, n: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Combine both masks into one that is added to scores [n, heads, length, keys]."""

        def added(mask: Tensor) -> Tensor:
            if mask.dtype is not torch.bool:
                return mask.to(dtype)
            return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)

        combined: Tensor | None = None
        if attn_mask is not None:
            combined = added(attn_mask)
            if combined.dim() == 3:
                combined = combined.view(n, self.num_heads, *combined.shape[1:])
        if padding is not None:
            keys = added(padding).view(n, 1, 1, -1)
            combined = keys if combined is None else combined + keys
        return combined


LOW_RANK = (LowRankLinear, LowRankConv1d, LowRankConv2d, LowRankLSTM, LowRankAttention)
"""All low-rank layers."""


def _fill(pair: _Pair, a: Tensor, b: Tensor) -> None:
    pair.first.weight, pair.second.weight = nn.Parameter(a), nn.Parameter(b)
