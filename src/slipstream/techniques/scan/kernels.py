"""The operators ``slipstream::scan_*``: all steps of a recurrence in one call.

What frameworks pay for a recurrence of many short steps is a dozen operators for each step. These
run the steps in one loop of compiled code, and their backward adds up the gradient of the weights
as it goes. Where the compiled library is missing, `available` is False and modules stay torch's.
"""

from __future__ import annotations

import ctypes
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
    "int64_t steps, batch, hidden; int32_t kind, workers; void* weight, bias, gates, extra, h0, "
    "c0, y, dy, dh, dc, dgates, dweight, dbias, dh0, dc0;"
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
    """The kernels that run here, see `Family.kernels`."""
    return _FAMILY.kernels


def available() -> bool:
    """Whether compiled kernels are here."""
    return bool(_FAMILY.kernels)


def _run(function: str, form: Any, dtype: torch.dtype, kernel: int | None, **fields: Any) -> None:
    values = {
        name: tensor_pointer(value) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }
    number = _FAMILY.kernel() if kernel is None else kernel
    if number is None:
        raise InvalidArgumentError("kernel", "no compiled kernel runs here")
    _FAMILY.call(function, number, DTYPES[dtype], ctypes.byref(form(**values)))


def run_forward(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, h0: torch.Tensor,
    c0: torch.Tensor | None, kind: str, kernel: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """All states, [T, B, H], and what else the backward pass reads, [T, B, H] or [0].

    Args:
        gates: [T, B, G H], projections of the input with their biases; a GRU's and an LSTM's are
            overwritten by what the gates are.
        weight: [G H, H], as ``weight_hh_l0``.
        bias: [H] of the GRU's candidate on the hidden side.
        h0, c0: [B, H].
        kernel: one of `kernels`; the best by default.
    """
    steps, batch, hidden = *gates.shape[:2], weight.shape[1]
    y = gates.new_empty(steps, batch, hidden)
    extra = torch.empty_like(y) if kind in ("gru", "lstm") else gates.new_empty(0)
    _run(
        "scan_forward", _CELL, gates.dtype, kernel, steps=steps, batch=batch, hidden=hidden,
        kind=KINDS.index(kind), workers=_workers(batch), weight=weight, bias=bias, gates=gates,
        extra=extra, h0=h0, c0=c0, y=y,
    )  # fmt: skip
    return y, extra


def run_backward(
    y: torch.Tensor, gates: torch.Tensor, extra: torch.Tensor, weight: torch.Tensor,
    h0: torch.Tensor, c0: torch.Tensor | None, dy: torch.Tensor | None, dh: torch.Tensor | None,
    dc: torch.Tensor | None, kind: str, kernel: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of the projections [T, B, G H], weight, hidden-side biases [G H], h0 and c0.

    Args:
        dy: [T, B, H], of every state; None for none.
        dh, dc: [B, H], of the last ones.
    """
    steps, batch, hidden = y.shape
    count, workers = GATES[kind] * hidden, _workers(batch)
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
    one = workers == 1
    return (
        dgates,
        dweight[0] if one else dweight.sum(0),
        dbias[0] if one else dbias.sum(0),
        dh0,
        dc0,
    )


def run_diagonal(
    a: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, reverse: bool, kernel: int | None = None
) -> torch.Tensor:
    """``h_t = a_t h_(t-1) + b_t`` element by element; a, b and h [T, N], h0 [N]."""
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
    """Gradients of a, b and h0, of `run_diagonal`."""
    da, db, dh0 = torch.empty_like(a), torch.empty_like(a), torch.empty_like(h0)
    _run(
        "scan_diagonal_backward", _DIAGONAL, a.dtype, kernel, steps=a.shape[0], width=a.shape[1],
        reverse=int(reverse), workers=torch.get_num_threads(), a=a, h0=h0, h=h, dh=dh, da=da,
        db=db, dh0=dh0,
    )  # fmt: skip
    return da, db, dh0


def products(left: torch.Tensor, right: torch.Tensor, kernel: int | None = None) -> torch.Tensor:
    """``left @ right`` of many small square matrices, both [N, H, H] and contiguous in each."""
    count, width = left.shape[0], left.shape[-1]
    made = left.new_empty(count, width, width)
    number = _FAMILY.kernel() if kernel is None else kernel
    _FAMILY.call(
        "scan_products", number, DTYPES[left.dtype], count, width, left.data_ptr(),
        left.stride(0) // width**2, right.data_ptr(), right.stride(0) // width**2, made.data_ptr(),
        1,
    )  # fmt: skip
    return made


def _workers(batch: int) -> int:
    return max(1, min(batch, torch.get_num_threads()))


_FORWARD = (
    "scan_forward(Tensor(a!) gates, Tensor weight, Tensor? bias, Tensor h0, Tensor? c0, str kind) "
    "-> (Tensor, Tensor)"
)
_BACKWARD = (
    "scan_backward(Tensor y, Tensor gates, Tensor extra, Tensor weight, Tensor h0, Tensor? c0, "
    "Tensor? dy, Tensor? dh, Tensor? dc, str kind) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward_shapes(gates: Any, weight: Any, bias: Any, h0: Any, c0: Any, kind: str) -> Any:
    y = gates.new_empty(*gates.shape[:2], weight.shape[1])
    return y, torch.empty_like(y) if kind in ("gru", "lstm") else gates.new_empty(0)


def _backward_shapes(
    y: Any, gates: Any, extra: Any, weight: Any, h0: Any, c0: Any, dy: Any, dh: Any, dc: Any,
    kind: str,
) -> Any:  # fmt: skip
    count = GATES[kind] * y.shape[2]
    dc0 = y.new_empty(0) if c0 is None else torch.empty_like(c0)
    return (
        y.new_empty(*y.shape[:2], count), torch.empty_like(weight), y.new_empty(count),
        torch.empty_like(h0), dc0,
    )  # fmt: skip


define(_FORWARD, run_forward, _forward_shapes, ("CPU",))
define(_BACKWARD, run_backward, _backward_shapes, ("CPU",))
define(
    "scan_diagonal(Tensor a, Tensor b, Tensor h0, bool reverse) -> Tensor",
    run_diagonal, lambda a, b, h0, reverse: torch.empty_like(b), ("CPU",),
)  # fmt: skip
define(
    "scan_diagonal_backward(Tensor a, Tensor h0, Tensor h, Tensor dh, bool reverse) "
    "-> (Tensor, Tensor, Tensor)",
    run_diagonal_backward,
    lambda a, h0, h, dh, reverse: (torch.empty_like(a), torch.empty_like(a), torch.empty_like(h0)),
    ("CPU",),
)
