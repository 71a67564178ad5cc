"""`RNN`, `GRU`, `LSTM`: torch's modules, with all steps of a layer in one call.

Parameters, ``state_dict``, arguments and outputs are torch's. Unsupported inputs (packed sequences,
projections, autocast, other devices and dtypes, ``torch.func``, compilation or tracing) use torch's
code, as do shapes for which it was measured to be faster.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020.
Its chunks and tree take T H^3 operations; the fused loop takes T H^2, and is faster on few cores.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.scan import cells, kernels, plan

Backward = Literal["auto", "fused", "chunked", "tree", "framework"]
BACKWARDS = ("auto", *plan.WAYS)
_Cell = nn.RNNCell | nn.GRUCell | nn.LSTMCell
# Steps per chunk. The batched part has twice this many dependent steps, the loop over chunks
# T / CHUNK; near the square root of T, for a thousand steps, both are of similar length.
CHUNK = 32


class _FusedRNNBase(nn.RNNBase):
    """Base of `RNN`, `GRU` and `LSTM`.

    Attributes:
        backward_as: how gradients are computed, see `rnn`.
    """

    backward_as: Backward = "auto"

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Run on [T, B, I] ([B, T, I] if ``batch_first``), [T, I] or a packed sequence."""
        return rnn(self, input, hx, backward=self.backward_as)


class RNN(_FusedRNNBase, nn.RNN):
    """``torch.nn.RNN`` with all steps of a layer in one call."""


class GRU(_FusedRNNBase, nn.GRU):
    """``torch.nn.GRU`` with all steps of a layer in one call."""


class LSTM(_FusedRNNBase, nn.LSTM):
    """``torch.nn.LSTM`` with all steps of a layer in one call."""


CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM}
"""Replacement class for each of torch's classes."""


def rnn(module: nn.Module, x: Any, hx: Any = None, *, backward: Backward = "auto") -> Any:
    """Run a recurrent module on `x`, all steps of a layer in one call.

    Args:
        module: an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``; or a cell, which is run over all steps of
            x [T, B, I] and returns (states [T, B, H], the last state).
        x, hx: inputs of the module.
        backward: how gradients are computed: ``fused`` in one loop, ``chunked`` or ``tree`` by
            products of Jacobians, ``framework`` by torch, or ``auto``, the way measured to be
            fastest for the shape.

    Raises:
        InvalidArgumentError: there is no step, no such `backward`, shapes do not match, or the
            module is not recurrent.
    """
    if backward not in BACKWARDS:
        raise InvalidArgumentError(
            "backward",
            f"'{backward}' is not a way to compute gradients",
            remedy=f"pass one of {', '.join(BACKWARDS)}",
        )
    if isinstance(module, _Cell):
        return _over_steps(module, x, hx, backward)
    kind: Any = next((o for o in (nn.RNN, nn.GRU, nn.LSTM) if isinstance(module, o)), None)
    if kind is None or not isinstance(module, nn.RNNBase):
        raise InvalidArgumentError(
            "module",
            f"{type(module).__name__} is not an nn.RNN, nn.GRU or nn.LSTM, or one of their cells",
        )
    time = 1 if module.batch_first and getattr(x, "dim", lambda: 0)() == 3 else 0
    if isinstance(x, torch.Tensor) and x.dim() in (2, 3) and x.shape[time] == 0:
        raise InvalidArgumentError("input", f"has shape {tuple(x.shape)}, without a step")
    way = _way(module, x, hx, backward)
    if way == "framework":
        return kind.forward(module, x, hx)
    return _layers(module, x, hx, way)


def _way(module: nn.RNNBase, x: Any, hx: Any, backward: Backward) -> plan.Way:
    if backward == "framework" or not _supported(module, x, hx):
        return "framework"
    if backward != "auto":
        return backward
    batch = 1 if x.dim() == 2 else x.shape[0 if module.batch_first else 1]
    steps = x.shape[1 if module.batch_first and x.dim() == 3 else 0]
    return plan.choose(_shape(module, batch, x), steps, rnn)


def _shape(module: Any, batch: int, x: torch.Tensor) -> plan.Shape:
    training = torch.is_grad_enabled() and (
        x.requires_grad or any(parameter.requires_grad for parameter in _parameters_of(module))
    )
    return plan.Shape(
        kind_of(module), batch, module.input_size, module.hidden_size, x.dtype, training,
        torch.get_num_threads(),
    )  # fmt: skip


def _parameters_of(module: Any) -> Iterable[torch.Tensor]:
    """Return the parameters without ``module.parameters()``, a tenth of a short call's time."""
    if module._modules:  # parametrised
        parameters: Iterable[torch.Tensor] = module.parameters()
        return parameters
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _supported(module: nn.RNNBase | _Cell, x: Any, hx: Any) -> bool:
    """Return whether the kernels support this module and these inputs."""
    if isinstance(x, PackedSequence) or torch.compiler.is_compiling() or not kernels.available():
        return False
    if torch._C._get_tracing_state() is not None:  # within torch.jit.trace
        return False
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and x.dim() in (2, 3)
        and x.is_cpu
        and x.dtype in kernels.DTYPES
        and getattr(module, "proj_size", 0) == 0
        and all(
            parameter.dtype == x.dtype and parameter.is_cpu and not _wrapped(parameter)
            for parameter in _parameters_of(module)
        )
        and not any(map(_wrapped, hx if isinstance(hx, tuple) else (hx,)))
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not _wrapped(x)
        and forward_ad._current_level < 0
    )


def _wrapped(value: Any) -> bool:
    """Return whether `value` is a tensor wrapped by a ``torch.func`` transform."""
    tensor = isinstance(value, torch.Tensor)
    return tensor and bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def kind_of(module: Any) -> str:
    """Return the kind of cell, one of `kernels.KINDS`."""
    if isinstance(module, nn.GRU | nn.GRUCell):
        return "gru"
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    return str(module.nonlinearity)


def _layers(module: nn.RNNBase, x: torch.Tensor, hx: Any, way: plan.Way) -> Any:
    batched, kind = x.dim() == 3, kind_of(module)
    if not batched:
        x = x.unsqueeze(1)
        hx = None if hx is None else _each(hx, lambda state: state.unsqueeze(1))
    elif module.batch_first:
        x = x.transpose(0, 1)
    directions, batch = 2 if module.bidirectional else 1, x.shape[1]
    state_shape = (module.num_layers * directions, batch, module.hidden_size)
    if hx is None:
        zeros = x.new_zeros(state_shape)
        hx = (zeros, zeros) if kind == "lstm" else zeros
    for state in hx if kind == "lstm" else (hx,):
        if tuple(state.shape) != state_shape or state.dtype != x.dtype:
            raise InvalidArgumentError(
                "hx", f"has shape {tuple(state.shape)} and {state.dtype}",
                remedy=f"pass shape {state_shape} and {x.dtype}",
            )  # fmt: skip
    if x.shape[2] != module.input_size:
        raise InvalidArgumentError("input", f"has {x.shape[2]} features, not {module.input_size}")
    final: list[tuple[torch.Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"_l{layer}" + "_reverse" * direction
            initial = _each(hx, operator.itemgetter(len(final)))
            y, *ends = _one_layer(
                x.flip(0) if direction else x, _parameters(module, suffix), initial, kind, way
            )
            outputs.append(y.flip(0) if direction else y)
            final.append(tuple(ends))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if module.dropout and module.training and layer + 1 < module.num_layers:
            x = functional.dropout(x, module.dropout)
    if directions == 1:
        x = _owned(x)
    ends = tuple(torch.stack(state) for state in zip(*final, strict=True))
    if not batched:
        x, ends = x.squeeze(1), tuple(state.squeeze(1) for state in ends)
    elif module.batch_first:
        x = x.transpose(0, 1)
    return x, ends if kind == "lstm" else ends[0]


def _over_steps(cell: _Cell, x: torch.Tensor, hx: Any, backward: Backward) -> Any:
    if x.dim() != 3 or x.shape[0] == 0:
        raise InvalidArgumentError("x", f"has shape {tuple(x.shape)}, not [T, B, I] with T > 0")
    kind = kind_of(cell)
    if hx is None:
        zeros = x.new_zeros(x.shape[1], cell.hidden_size)
        hx = (zeros, zeros) if kind == "lstm" else zeros
    supported = _supported(cell, x, hx)
    way: plan.Way = "framework" if backward == "auto" or not supported else backward
    if backward == "auto" and supported:
        shape = replace(_shape(cell, x.shape[1], x), of_cell=True)
        way = plan.choose(shape, x.shape[0], rnn)
    if way == "framework":
        states = []
        for step in x:
            hx = cell(step, hx)
            states.append(hx[0] if kind == "lstm" else hx)
        return torch.stack(states), hx
    y, *ends = _one_layer(x, _parameters(cell, ""), hx, kind, way)
    ends[0] = _owned(ends[0])
    return _owned(y), tuple(ends) if kind == "lstm" else ends[0]


def _owned(states: torch.Tensor) -> torch.Tensor:
    """Return a copy if the backward pass reads `states`, because callers may write to them."""
    return states.clone() if states.requires_grad else states


def _parameters(module: Any, suffix: str) -> tuple[Any, Any, Any, Any]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weight_ih, weight_hh, bias_ih, bias_hh = (
        getattr(module, name + suffix, None) for name in names
    )
    return weight_ih, weight_hh, bias_ih, bias_hh


def _each(state: Any, change: Any) -> Any:
    return tuple(map(change, state)) if isinstance(state, tuple) else change(state)


def _one_layer(x: torch.Tensor, parameters: Any, start: Any, kind: str, way: plan.Way) -> Any:
    """Return states [T, B, H], and the last state (and cell state), [B, H]."""
    h0, c0 = start if kind == "lstm" else (start, None)
    y, last_c = _Recurrence.apply(x, *parameters, h0, c0, kind, way)
    return (y, y[-1], last_c) if kind == "lstm" else (y, y[-1])


class _Recurrence(torch.autograd.Function):
    """A layer: projection of its input, all steps, and all gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor,
        bias_ih: torch.Tensor | None, bias_hh: torch.Tensor | None, h0: torch.Tensor,
        c0: torch.Tensor | None, kind: str, way: plan.Way,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        hidden = weight_hh.shape[1]
        bias, candidate = bias_ih, None
        if kind == "gru":
            candidate = x.new_zeros(hidden) if bias_hh is None else bias_hh[2 * hidden :]
            if bias_ih is not None and bias_hh is not None:
                bias = bias_ih.clone()
                bias[: 2 * hidden] += bias_hh[: 2 * hidden]
        elif bias_ih is not None and bias_hh is not None:
            bias = bias_ih + bias_hh
        projected = functional.linear(x, weight_ih, bias)
        y, gates, extra = torch.ops.slipstream.scan_forward(
            projected, weight_hh, candidate, h0, c0, kind
        )
        inputs = x, weight_ih, weight_hh, bias_ih, bias_hh, h0, c0
        ctx.save_for_backward(*inputs, gates, extra, y)
        ctx.kind, ctx.way = kind, way
        ctx.set_materialize_grads(False)
        return y, None if c0 is None else extra[-1].clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dc: torch.Tensor | None) -> Any:
        *inputs, gates, extra, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True needs differentiable operators
            return (*_differentiable(ctx, inputs, dy, dc), None, None)
        x, weight_ih, weight_hh, _, _, h0, c0 = inputs
        dy = None if dy is None else dy.contiguous()
        dc = None if dc is None else dc.contiguous()
        if ctx.way == "fused":
            dgates, dweight, dbias, dh0, dc0 = torch.ops.slipstream.scan_backward(
                y, gates, extra, weight_hh, h0, c0, dy, None, dc, ctx.kind
            )
        else:
            saved = cells.Saved(ctx.kind, weight_hh, y, gates, extra, h0, c0)
            dh = torch.zeros_like(h0)
            dc = torch.zeros_like(h0) if dc is None and c0 is not None else dc
            if ctx.way == "chunked":
                grads = cells.chunked(saved, dy, dh, dc, CHUNK)
            else:
                grads = cells.tree(saved, dy, dh, dc)
            dgates, dweight, dbias = grads.dgates, grads.dweight, grads.dbias
            dh0, dc0 = grads.dh0, grads.dc0
        needs_grad = ctx.needs_input_grad
        flat = dgates.flatten(0, 1)
        dbias_input = None
        if needs_grad[3]:
            # For the GRU's candidate, gradients on the input and the hidden side differ.
            shared = dbias[: 2 * h0.shape[1]] if ctx.kind == "gru" else dbias
            dbias_input = (
                torch.cat([shared, flat[:, len(shared) :].sum(0)]) if ctx.kind == "gru" else shared
            )
        return (
            (flat @ weight_ih).view(x.shape) if needs_grad[0] else None,
            flat.T @ x.flatten(0, 1) if needs_grad[1] else None,
            dweight if needs_grad[2] else None, dbias_input, dbias if needs_grad[4] else None,
            dh0 if needs_grad[5] else None, dc0 if needs_grad[6] else None, None, None,
        )  # fmt: skip


def _differentiable(
    ctx: Any, inputs: list[Any], dy: torch.Tensor | None, dc: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return differentiable gradients of `inputs`, through torch's recurrence."""
    x, *_, h0, c0 = inputs
    weights = [weight for weight in inputs[1:5] if weight is not None]
    start = h0[None] if c0 is None else (h0[None], c0[None])
    run: dict[str, Any] = {
        "tanh": torch._VF.rnn_tanh, "relu": torch._VF.rnn_relu, "gru": torch._VF.gru,
        "lstm": torch._VF.lstm,
    }  # fmt: skip
    y, _, *last_c = run[ctx.kind](
        x, start, weights, inputs[3] is not None, 1, 0.0, False, False, False
    )
    pairs = [(y, dy), *((state[0], dc) for state in last_c)]
    outputs, upstream = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
    needed = [n for n in range(len(inputs)) if ctx.needs_input_grad[n]]
    gradients = torch.autograd.grad(
        outputs, [inputs[n] for n in needed], upstream, create_graph=True, allow_unused=True
    )
    by_input = dict(zip(needed, gradients, strict=True))
    return [by_input.get(n) for n in range(len(inputs))]
