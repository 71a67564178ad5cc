"""The operators ``slipstream::scan_*``: all steps of a recurrence in one call.

Frameworks run a dozen operators per step, whose overhead dominates short steps. These operators run
all steps in one compiled loop, and accumulate the gradient of the weights in the backward loop.
Without the compiled library `available` is False, and modules use torch's recurrence.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.native import InstructionSet
from slipstream.native.family import INT32, INT64, POINTER, Family, structure, tensor_pointer
from slipstream.native.operators import define

KINDS = ("tanh", "relu", "gru", "lstm")
GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
"""Gates of a cell, in torch's order: r, z, n; i, f, g, o."""
DTYPES = {torch.float32: 0, torch.float64: 1}

_CELL = structure(
    "int64_t steps, batch, hidden; int32_t kind, workers; void* weight, bias, projections, gates, "
    "extra, h0, c0, y, dy, dh, dc, dgates, dweight, dbias, dh0, dc0;"
)
_DIAGONAL = structure(
    "int64_t steps, width; int32_t reverse, workers; void* a, b, h0, h, dh, da, db, dh0;"
)
_FAMILY = Family("scan", {
    "scan_forward": [INT32, INT32, POINTER], "scan_backward": [INT32, INT32, POINTER],
    "scan_diagonal_forward": [INT32, INT32, POINTER],
    "scan_diagonal_backward": [INT32, INT32, POINTER],
    "scan_products": [INT32, INT32, INT64, INT64, POINTER, INT64, POINTER, INT64, POINTER, INT64],
})  # fmt: skip


def kernels() -> dict[InstructionSet, int]:
    """Return the kernels that run on this machine, see `Family.kernels`."""
    return _FAMILY.kernels


def available() -> bool:
    """Return whether a compiled kernel runs on this machine."""
    return bool(_FAMILY.kernels)


def _run(function: str, form: Any, dtype: torch.dtype, kernel: int | None, **fields: Any) -> None:
    values = {
        name: tensor_pointer(value) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }
    number = _FAMILY.kernel() if kernel is None else kernel
    if number is None:
        raise InvalidArgumentError("kernel", "no compiled kernel runs on this machine")
    _FAMILY.call(function, number, DTYPES[dtype], ctypes.byref(form(**values)))


def run_forward(
    projections: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, h0: torch.Tensor,
    c0: torch.Tensor | None, kind: str, kernel: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return all states [T, B, H], and the tensors saved for the backward pass: gates, extra.

    Gates and extra are empty ([0]) for ``tanh`` and ``relu``.

    Args:
        projections: input projections with their biases, [T, B, G H].
        weight: [G H, H], as ``weight_hh_l0``.
        bias: hidden-side bias of the GRU's candidate, [H]; None for other cells.
        h0, c0: initial states [B, H]; `c0` is None except for the LSTM.
        kernel: one of `kernels`; the best by default.

    Raises:
        InvalidArgumentError: shapes or dtypes do not match, or no kernel runs on this machine.
    """
    steps, batch, hidden = _sizes("projections", projections, kind, GATES.get(kind, 1))
    projections, weight, bias, h0, c0 = _checked(
        projections,
        projections=(projections, (steps, batch, GATES[kind] * hidden)),
        weight=(weight, (GATES[kind] * hidden, hidden)),
        bias=(bias, (hidden,) if kind == "gru" else None),
        h0=(h0, (batch, hidden)), c0=(c0, (batch, hidden) if kind == "lstm" else None),
    )  # fmt: skip
    y = projections.new_empty(steps, batch, hidden)
    gated = kind in ("gru", "lstm")
    gates = torch.empty_like(projections) if gated else projections.new_empty(0)
    extra = torch.empty_like(y) if gated else projections.new_empty(0)
    _run(
        "scan_forward", _CELL, y.dtype, kernel, steps=steps, batch=batch, hidden=hidden,
        kind=KINDS.index(kind), workers=_workers(batch), weight=weight, bias=bias,
        projections=projections, gates=gates, extra=extra, h0=h0, c0=c0, y=y,
    )  # fmt: skip
    return y, gates, extra


def run_backward(
    y: torch.Tensor, gates: torch.Tensor, extra: torch.Tensor, weight: torch.Tensor,
    h0: torch.Tensor, c0: torch.Tensor | None, dy: torch.Tensor | None, dh: torch.Tensor | None,
    dc: torch.Tensor | None, kind: str, kernel: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return gradients of projections [T, B, G H], weight, hidden-side biases [G H], h0 and c0.

    The gradient of c0 is empty ([0]) except for the LSTM.

    Args:
        dy: gradient of every state, [T, B, H], or None.
        dh, dc: gradients of the last states, [B, H], or None.

    Raises:
        InvalidArgumentError: shapes or dtypes do not match, or no kernel runs on this machine.
    """
    steps, batch, hidden = _sizes("y", y, kind, 1)
    count, workers, gated = GATES[kind] * hidden, _workers(batch), kind in ("gru", "lstm")
    state, cell = (batch, hidden), (batch, hidden) if kind == "lstm" else None
    optional = {
        "c0": (c0, cell), "dy": (dy, None if dy is None else (steps, batch, hidden)),
        "dh": (dh, None if dh is None else state), "dc": (dc, None if dc is None else cell),
    }  # fmt: skip
    y, gates, extra, weight, h0, c0, dy, dh, dc = _checked(
        y, y=(y, (steps, batch, hidden)),
        gates=(gates, (steps, batch, count) if gated else (0,)),
        extra=(extra, (steps, batch, hidden) if gated else (0,)),
        weight=(weight, (count, hidden)), h0=(h0, state), **optional,
    )  # fmt: skip
    dgates = y.new_empty(steps, batch, count)
    dweight, dbias = y.new_empty(workers, count, hidden), y.new_empty(workers, count)
    dh0 = torch.empty_like(h0)
    dc0 = y.new_empty(0) if c0 is None else torch.empty_like(c0)
    _run(
        "scan_backward", _CELL, y.dtype, kernel, steps=steps, batch=batch, hidden=hidden,
        kind=KINDS.index(kind), workers=workers, weight=weight, gates=gates, extra=extra, h0=h0,
        c0=c0, y=y, dy=dy, dh=dh, dc=dc, dgates=dgates, dweight=dweight, dbias=dbias, dh0=dh0,
        dc0=dc0 if c0 is not None else None,
    )  # fmt: skip
    if workers == 1:
        return dgates, dweight[0], dbias[0], dh0, dc0
    return dgates, dweight.sum(0), dbias.sum(0), dh0, dc0


def _sizes(name: str, tensor: torch.Tensor, kind: str, gates: int) -> tuple[int, int, int]:
    """Return the numbers of steps, sequences and hidden units; none is 0."""
    if kind not in KINDS:
        raise InvalidArgumentError("kind", f"'{kind}' is not one of {', '.join(KINDS)}")
    if tensor.dim() != 3 or not tensor.numel() or tensor.shape[2] % gates:
        raise InvalidArgumentError(name, f"{tuple(tensor.shape)} is not [T, B, {gates} H]")
    return tensor.shape[0], tensor.shape[1], tensor.shape[2] // gates


def _checked(like: torch.Tensor, **tensors: tuple[Any, Any]) -> list[Any]:
    """Check shapes, devices and dtypes (that of `like`); return the tensors, contiguous.

    Args:
        tensors: a tensor or None, and the expected shape or None if it must be None, by name.
    """
    if like.dtype not in DTYPES:
        raise InvalidArgumentError("dtype", f"{like.dtype} is neither float32 nor float64")
    contiguous = []
    for name, (tensor, shape) in tensors.items():
        if (tensor is None) != (shape is None):
            raise InvalidArgumentError(name, "is missing" if tensor is None else "must be None")
        if tensor is not None:
            fits = tuple(tensor.shape) == shape and tensor.dtype == like.dtype
            if not fits or tensor.device.type != "cpu":
                raise InvalidArgumentError(
                    name, f"has shape {tuple(tensor.shape)} and {tensor.dtype}, on {tensor.device}",
                    remedy=f"pass shape {shape} and {like.dtype}, on cpu",
                )  # fmt: skip
            tensor = tensor.contiguous()
        contiguous.append(tensor)
    return contiguous


def run_diagonal(
    a: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, reverse: bool, kernel: int | None = None
) -> torch.Tensor:
    """Compute ``h_t = a_t h_(t-1) + b_t`` elementwise; a, b and the states [T, N], h0 [N]."""
    a, b, h0 = _diagonal(a, b=b, h0=h0)
    h = torch.empty_like(b)
    _run(
        "scan_diagonal_forward", _DIAGONAL, a.dtype, kernel, steps=a.shape[0], width=a.shape[1],
        reverse=int(reverse), workers=torch.get_num_threads(), a=a, b=b, h0=h0, h=h,
    )  # fmt: skip
    return h


def run_diagonal_backward(
    a: torch.Tensor, h0: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, reverse: bool,
    kernel: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of `run_diagonal` with respect to a, b and h0."""
    a, h0, h, dh = _diagonal(a, h0=h0, h=h, dh=dh)
    da, db, dh0 = torch.empty_like(a), torch.empty_like(a), torch.empty_like(h0)
    _run(
        "scan_diagonal_backward", _DIAGONAL, a.dtype, kernel, steps=a.shape[0], width=a.shape[1],
        reverse=int(reverse), workers=torch.get_num_threads(), a=a, h0=h0, h=h, dh=dh, da=da,
        db=db, dh0=dh0,
    )  # fmt: skip
    return da, db, dh0


def _diagonal(a: torch.Tensor, **others: torch.Tensor) -> list[Any]:
    if a.dim() != 2 or not a.numel():
        raise InvalidArgumentError("a", f"{tuple(a.shape)} is not [T, N]")
    shape: tuple[int, ...] = tuple(a.shape)
    expected = {
        name: (tensor, shape[1:] if name == "h0" else shape) for name, tensor in others.items()
    }
    return _checked(a, a=(a, shape), **expected)


def products(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None,
    kernel: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``left @ right`` for many small square matrices, [N, H, H].

    Each matrix is contiguous; the stride between matrices is a multiple of its size.
    """
    count, width = left.shape[0], left.shape[-1]
    product = left.new_empty(count, width, width) if out is None else out
    number = _FAMILY.kernel() if kernel is None else kernel
    operands = [
        (matrices.data_ptr(), matrices.stride(0) // width**2) for matrices in (left, right, product)
    ]
    _FAMILY.call(
        "scan_products", number, DTYPES[left.dtype], count, width, *itertools.chain(*operands)
    )
    return product


def _workers(batch: int) -> int:
    return max(1, min(batch, torch.get_num_threads()))


_GRADIENT = "slipstream.scan.rnn and linear_recurrence have one"
_FORWARD = (
    "scan_forward(Tensor projections, Tensor weight, Tensor? bias, Tensor h0, Tensor? c0, "
    "str kind) -> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "scan_backward(Tensor y, Tensor gates, Tensor extra, Tensor weight, Tensor h0, Tensor? c0, "
    "Tensor? dy, Tensor? dh, Tensor? dc, str kind) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward_shapes(
    projections: Any, weight: Any, bias: Any, h0: Any, c0: Any, kind: str
) -> tuple[Any, Any, Any]:
    y = projections.new_empty(*projections.shape[:2], weight.shape[1])
    if kind not in ("gru", "lstm"):
        return y, projections.new_empty(0), projections.new_empty(0)
    return y, projections.new_empty(projections.shape), torch.empty_like(y)


def _backward_shapes(
    y: Any, gates: Any, extra: Any, weight: Any, h0: Any, c0: Any, dy: Any, dh: Any, dc: Any,
    kind: str,
) -> Any:  # fmt: skip
    count = GATES[kind] * y.shape[2]
    dc0 = y.new_empty(0) if c0 is None else c0.new_empty(c0.shape)
    return (
        y.new_empty(*y.shape[:2], count), weight.new_empty(weight.shape), y.new_empty(count),
        h0.new_empty(h0.shape), dc0,
    )  # fmt: skip


define(_FORWARD, run_forward, _forward_shapes, ("CPU",), no_gradient=_GRADIENT)
define(_BACKWARD, run_backward, _backward_shapes, ("CPU",), no_gradient=_GRADIENT)
define(
    "scan_diagonal(Tensor a, Tensor b, Tensor h0, bool reverse) -> Tensor",
    run_diagonal, lambda a, b, h0, reverse: b.new_empty(b.shape), ("CPU",), no_gradient=_GRADIENT,
)  # fmt: skip
define(
    "scan_diagonal_backward(Tensor a, Tensor h0, Tensor h, Tensor dh, bool reverse) "
    "-> (Tensor, Tensor, Tensor)",
    run_diagonal_backward,
    lambda a, h0, h, dh, reverse: (
        a.new_empty(a.shape), a.new_empty(a.shape), h0.new_empty(h0.shape)
    ),
    ("CPU",), no_gradient=_GRADIENT,
)  # fmt: skip
