"""`RNN`, `GRU`, `LSTM`: torch's modules, with all steps of a layer in one call.

Parameters, ``state_dict``, arguments and what is returned are torch's. What these do not take
(packed sequences, projections, autocast, other devices and dtypes, ``torch.func``, a compiler's
trace) goes to torch's own code, as do shapes for which that was measured to be faster.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020; on
few cores its chunks and tree stand beside one fused loop, of T H^2 work where theirs is T H^3.
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
from slipstream.techniques.scan import cells, plan
from slipstream.techniques.scan import kernels as door

Backward = Literal["auto", "fused", "chunked", "tree", "framework"]
BACKWARDS = ("auto", *plan.WAYS)
_Cell = nn.RNNCell | nn.GRUCell | nn.LSTMCell
# Steps of a chunk: the batched part has so many dependent steps twice, the loop over chunks the
# rest; near the square root of a thousand both are alike.
CHUNK = 32


class _OneCall(nn.RNNBase):
    """The forward of all three.

    Attributes:
        backward_as: how gradients are computed; `auto` as measured for the shape.
    """

    backward_as: Backward = "auto"

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch's: [T, B, I], [B, T, I] with ``batch_first``, [T, I], or a packed sequence."""
        return rnn(self, input, hx, backward=self.backward_as)


class RNN(_OneCall, nn.RNN):
    """``torch.nn.RNN`` with all steps of a layer in one call."""


class GRU(_OneCall, nn.GRU):
    """``torch.nn.GRU`` with all steps of a layer in one call."""


class LSTM(_OneCall, nn.LSTM):
    """``torch.nn.LSTM`` with all steps of a layer in one call."""


CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM}
"""Of torch's class, ours."""


def rnn(module: nn.Module, x: Any, hx: Any = None, *, backward: Backward = "auto") -> Any:
    """What `module` makes of `x`, all steps of a layer in one call.

    Args:
        module: an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``; or the cell of one, which is then run over
            all steps of x [T, B, I] and gives (states [T, B, H], the last state).
        x, hx: as of the module.
        backward: ``fused`` in one loop, ``chunked`` or ``tree`` as products of Jacobians,
            ``framework`` as torch does, or ``auto``: as measured for this shape.

    Raises:
        InvalidArgumentError: no step, another `backward`, or a module that is no recurrence.
    """
    if backward not in BACKWARDS:
        raise InvalidArgumentError(
            "backward", f"'{backward}' is not possible", remedy=f"one of {', '.join(BACKWARDS)}"
        )
    if isinstance(module, _Cell):
        return _over_steps(module, x, hx, backward)
    kind: Any = next((o for o in (nn.RNN, nn.GRU, nn.LSTM) if isinstance(module, o)), None)
    if kind is None or not isinstance(module, nn.RNNBase):
        raise InvalidArgumentError(
            "module", f"{type(module).__name__} is no nn.RNN, nn.GRU, nn.LSTM, or cell of one"
        )
    time = 1 if module.batch_first and getattr(x, "dim", lambda: 0)() == 3 else 0
    if isinstance(x, torch.Tensor) and x.dim() in (2, 3) and x.shape[time] == 0:
        raise InvalidArgumentError("input", f"{tuple(x.shape)} has no step")
    way = _way(module, x, hx, backward)
    if way == "framework":
        return kind.forward(module, x, hx)
    return _layers(module, x, hx, way)


def _way(module: nn.RNNBase, x: Any, hx: Any, backward: Backward) -> plan.Way:
    if backward == "framework" or not _taken(module, x, hx):
        return "framework"
    if backward != "auto":
        return backward
    batch = 1 if x.dim() == 2 else x.shape[0 if module.batch_first else 1]
    steps = x.shape[1 if module.batch_first and x.dim() == 3 else 0]
    return plan.choose(_shape(module, batch, x), steps, rnn)


def _shape(module: Any, batch: int, x: torch.Tensor) -> plan.Shape:
    training = torch.is_grad_enabled() and (
        x.requires_grad or any(one.requires_grad for one in _listed(module))
    )
    return plan.Shape(
        kind_of(module), batch, module.input_size, module.hidden_size, x.dtype, training,
        torch.get_num_threads(),
    )  # fmt: skip


def _listed(module: Any) -> Iterable[torch.Tensor]:
    """Its parameters; without a walk through modules, which takes a tenth of a short call."""
    if module._modules:  # parametrised
        parameters: Iterable[torch.Tensor] = module.parameters()
        return parameters
    return [one for one in module._parameters.values() if one is not None]


def _taken(module: nn.RNNBase | _Cell, x: Any, hx: Any) -> bool:
    """Whether the kernels take this module and these inputs."""
    if isinstance(x, PackedSequence) or torch.compiler.is_compiling() or not door.available():
        return False
    if torch._C._get_tracing_state() is not None:  # of torch.jit.trace
        return False
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and x.dim() in (2, 3)
        and x.is_cpu
        and x.dtype in door.DTYPES
        and getattr(module, "proj_size", 0) == 0
        and all(
            one.dtype == x.dtype and one.is_cpu and not _wrapped(one) for one in _listed(module)
        )
        and not any(map(_wrapped, hx if isinstance(hx, tuple) else (hx,)))
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not _wrapped(x)
        and forward_ad._current_level < 0
    )


def _wrapped(value: Any) -> bool:
    """Whether `value` is a tensor that a transform of ``torch.func`` wraps."""
    tensor = isinstance(value, torch.Tensor)
    return tensor and bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def kind_of(module: Any) -> str:
    """One of `kernels.KINDS`."""
    if isinstance(module, nn.GRU | nn.GRUCell):
        return "gru"
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    return str(module.nonlinearity)


def _layers(module: nn.RNNBase, x: torch.Tensor, hx: Any, way: plan.Way) -> Any:
    batched, kind = x.dim() == 3, kind_of(module)
    if not batched:
        x = x.unsqueeze(1)
        hx = None if hx is None else _each(hx, lambda one: one.unsqueeze(1))
    elif module.batch_first:
        x = x.transpose(0, 1)
    directions, batch = 2 if module.bidirectional else 1, x.shape[1]
    expected = (module.num_layers * directions, batch, module.hidden_size)
    if hx is None:
        zeros = x.new_zeros(expected)
        hx = (zeros, zeros) if kind == "lstm" else zeros
    for one in hx if kind == "lstm" else (hx,):
        if tuple(one.shape) != expected or one.dtype != x.dtype:
            raise InvalidArgumentError(
                "hx", f"{tuple(one.shape)} of {one.dtype} does not fit",
                remedy=f"{expected} of {x.dtype}",
            )  # fmt: skip
    if x.shape[2] != module.input_size:
        raise InvalidArgumentError("input", f"is {x.shape[2]} wide, not {module.input_size}")
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"_l{layer}" + "_reverse" * direction
            start = _each(hx, operator.itemgetter(len(last)))
            y, *ends = _one_layer(
                x.flip(0) if direction else x, _parameters(module, suffix), start, kind, way
            )
            outputs.append(y.flip(0) if direction else y)
            last.append(tuple(ends))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if module.dropout and module.training and layer + 1 < module.num_layers:
            x = functional.dropout(x, module.dropout)
    if directions == 1:
        x = _owned(x)
    ends = tuple(torch.stack(one) for one in zip(*last, strict=True))
    if not batched:
        x, ends = x.squeeze(1), tuple(one.squeeze(1) for one in ends)
    elif module.batch_first:
        x = x.transpose(0, 1)
    return x, ends if kind == "lstm" else ends[0]


def _over_steps(cell: _Cell, x: torch.Tensor, hx: Any, backward: Backward) -> Any:
    if x.dim() != 3 or x.shape[0] == 0:
        raise InvalidArgumentError("x", f"{tuple(x.shape)} is not [T, B, I] with a step")
    kind = kind_of(cell)
    if hx is None:
        zeros = x.new_zeros(x.shape[1], cell.hidden_size)
        hx = (zeros, zeros) if kind == "lstm" else zeros
    usable = _taken(cell, x, hx)
    way: plan.Way = "framework" if backward == "auto" or not usable else backward
    if backward == "auto" and usable:
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
    """Return `states`, or a copy if the backward pass reads them: callers may write to theirs."""
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
    """States [T, B, H], and the last state (and cell state), [B, H]."""
    h0, c0 = start if kind == "lstm" else (start, None)
    y, last_c = _Recurrence.apply(x, *parameters, h0, c0, kind, way)
    return (y, y[-1], last_c) if kind == "lstm" else (y, y[-1])


class _Recurrence(torch.autograd.Function):
    """A layer: its input's projection, all steps, and all of its gradients."""

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
        if torch.is_grad_enabled():  # create_graph=True: torch's operators have second derivatives
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
        wanted = ctx.needs_input_grad
        flat = dgates.flatten(0, 1)
        on_input = None
        if wanted[3]:
            # Of the GRU's candidate what the input adds, and what the state adds, are not the same.
            kept = dbias[: 2 * h0.shape[1]] if ctx.kind == "gru" else dbias
            on_input = torch.cat([kept, flat[:, len(kept) :].sum(0)]) if ctx.kind == "gru" else kept
        return (
            (flat @ weight_ih).view(x.shape) if wanted[0] else None,
            flat.T @ x.flatten(0, 1) if wanted[1] else None,
            dweight if wanted[2] else None, on_input, dbias if wanted[4] else None,
            dh0 if wanted[5] else None, dc0 if wanted[6] else None, None, None,
        )  # fmt: skip


def _differentiable(
    ctx: Any, inputs: list[Any], dy: torch.Tensor | None, dc: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return differentiable gradients of `inputs`, through torch's own recurrence."""
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
