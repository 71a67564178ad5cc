"""Affine recurrences ``h_t = A_t h_(t-1) + b_t``, whose steps may be put together in any order.

Two steps make one: ``(A, b)`` and then ``(A', b')`` is ``(A' A, A' b + b')``. The operation is
associative and does not commute, so that a scan over it must keep left and right apart where the
textbook's (Blelloch, "Prefix sums and their applications", 1990) does not.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.techniques.scan import kernels as door

Element = TypeVar("Element")
Structure = Literal["dense", "diag", "block"]
STRUCTURES = ("dense", "diag", "block")
# What a product of matrices may grow to before a tree is cut: its square root, so that vectors of
# the same size can still be multiplied with it.
_LARGEST = {torch.float32: 1e19, torch.float64: 1e150}
# Beyond this width torch's batched product is the faster one.
_SMALL = 64


def exclusive_scan(
    elements: Sequence[Element],
    operate: Callable[[Element, Element], Element],
    identity: Element,
    levels: int | None = None,
) -> list[Element]:
    """``[identity, e_0, e_0.e_1, ...]`` in at most ``2 ceil(log2(n + 1))`` dependent rounds.

    Args:
        operate: associative; it need not commute, and its operands may have any shapes that fit.
        levels: of the tree; what is left is scanned one after the other. None: all.

    Raises:
        InvalidArgumentError: `levels` is negative.
    """
    if levels is not None and levels < 0:
        raise InvalidArgumentError("levels", f"{levels} is negative")
    count = len(elements)
    if count <= 1 or levels == 0:
        prefixes, sofar = [], identity
        for number, one in enumerate(elements):
            prefixes.append(sofar)
            if number + 1 < count:
                sofar = one if number == 0 else operate(sofar, one)
        return prefixes
    pairs = [operate(elements[i], elements[i + 1]) for i in range(0, count - 2, 2)]
    pairs.append(elements[-1])  # nobody reads what the last one or two make together
    outer = exclusive_scan(pairs, operate, identity, None if levels is None else levels - 1)
    prefixes = []
    for number, before in enumerate(outer):
        prefixes.append(before)
        if 2 * number + 1 < count:
            first = elements[2 * number]
            prefixes.append(first if number == 0 else operate(before, first))
    return prefixes


def dense_recurrence(a: torch.Tensor, b: torch.Tensor, levels: int | None = None) -> torch.Tensor:
    """``h_t = a_t h_(t-1) + b_t`` from ``h_(-1) = 0``, as a tree; [T, ..., H].

    Args:
        a: [T, ..., H, H].
        b: [T, ..., H].
        levels: of the tree; None for as many as no product of matrices can overflow in. What the
            tree leaves is walked step by step.
    """
    if levels is None:
        levels = _safe_levels(a)
    return _tree(a, b, levels)


def _tree(a: torch.Tensor, b: torch.Tensor, levels: int) -> torch.Tensor:
    steps = a.shape[0]
    if steps == 1:
        return b
    if levels == 0:
        walked = [b[0]]
        for t in range(1, steps):
            walked.append(_apply(a[t], walked[-1]) + b[t])
        return torch.stack(walked)
    pairs = steps // 2
    even, odd = a[0 : 2 * pairs : 2], a[1 : 2 * pairs : 2]
    together_b = _apply(odd, b[0 : 2 * pairs : 2]) + b[1 : 2 * pairs : 2]
    if pairs > 1:
        # Nothing comes before the first pair: its product is never read.
        together_a = torch.empty(odd.shape, dtype=odd.dtype, device=odd.device)
        _products(odd[1:], even[1:], together_a[1:])
    else:
        together_a = odd
    at_odd = _tree(together_a, together_b, levels - 1)
    states = torch.empty_like(b)
    states[0] = b[0]
    states[1 : 2 * pairs : 2] = at_odd
    inner = (steps - 1) // 2  # even steps behind the first
    states[2::2] = _apply(a[2::2], at_odd[:inner]) + b[2::2]
    return states


def _apply(a: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return (a @ h.unsqueeze(-1)).squeeze(-1)


def _products(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """``left @ right``, [T, ..., H, H], where the matrices of a step lie one after another.

    A call for each sequence of the batch, so that those are read where they are.
    """
    width, dtype = left.shape[-1], left.dtype
    if width > _SMALL or dtype not in door.DTYPES or not left.is_cpu or not door.available():
        torch.matmul(left, right, out=out)
        return
    flat = [one.reshape(one.shape[0], -1, width, width) for one in (left, right)]
    flat = [one.contiguous() if one.stride()[-2:] != (width, 1) else one for one in flat]
    parts = out.view(out.shape[0], -1, width, width).unbind(1)
    for one, other, part in zip(*(each.unbind(1) for each in flat), parts, strict=True):
        door.products(one, other, part)


def _safe_levels(a: torch.Tensor) -> int:
    """Levels in which products of matrices stay below `_LARGEST`, by their row sums."""
    most = math.ceil(math.log2(max(a.shape[0], 2)))
    norm = float(a.abs().sum(-1).amax()) if a.numel() else 1.0
    if not math.isfinite(norm):
        return 0
    if norm <= 1.0:
        return most
    factors = math.log(_LARGEST.get(a.dtype, 1e19)) / math.log(norm)
    return max(0, min(most, math.floor(math.log2(max(factors, 1.0)))))


def linear_recurrence(
    a: torch.Tensor,
    b: torch.Tensor,
    h0: torch.Tensor | None = None,
    *,
    reverse: bool = False,
    structure: Structure = "dense",
) -> torch.Tensor:
    """Every state of ``h_t = A_t h_(t-1) + b_t``; differentiable once, in all arguments.

    Args:
        a: ``dense``: [T, ..., H, H]; ``diag``: [T, ..., H]; ``block``: [T, ..., K, H, H].
        b: [T, ..., H]; of blocks [T, ..., K, H].
        h0: the state before the first step, of b's shape without T; zeros if None.
        reverse: from the last step to the first.

    Raises:
        InvalidArgumentError: no step, another structure, or shapes that do not fit.
    """
    if structure not in STRUCTURES:
        raise InvalidArgumentError("structure", f"'{structure}' is none of {STRUCTURES}")
    if b.dim() < 2 or b.shape[0] == 0:
        raise InvalidArgumentError("b", f"{tuple(b.shape)} has no step", remedy="[T, ..., H]")
    expected = b.shape if structure == "diag" else (*b.shape, b.shape[-1])
    if a.shape != expected:
        raise InvalidArgumentError(
            "a", f"{tuple(a.shape)} does not fit b's {tuple(b.shape)}",
            remedy=f"{tuple(expected)} for structure='{structure}'",
        )  # fmt: skip
    h0 = torch.zeros_like(b[0]) if h0 is None else h0
    if h0.shape != b.shape[1:]:
        raise InvalidArgumentError("h0", f"{tuple(h0.shape)} is not {tuple(b.shape[1:])}")
    if structure == "diag":
        flat = b.shape[0], -1
        h: torch.Tensor = _Diagonal.apply(
            a.reshape(flat).contiguous(), b.reshape(flat).contiguous(), h0.reshape(-1).contiguous(),
            reverse,
        )  # fmt: skip
        return h.view(b.shape)
    states: torch.Tensor = _Dense.apply(a, b, h0, reverse)
    return states


def need_first_order() -> None:
    """See that the backward pass that runs is not itself to be differentiated.

    Raises:
        SlipstreamError: it is, which would silently leave terms out.
    """
    if torch.is_grad_enabled():  # in a backward pass: of create_graph=True
        raise SlipstreamError(
            "the backward pass of this recurrence has no derivatives of its own",
            remedy='torch.autograd.grad without create_graph=True, or backward="framework"',
        )


class _Diagonal(torch.autograd.Function):
    """Arguments a, b [T, N], h0 [N]."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, reverse: bool
    ) -> torch.Tensor:
        if door.available() and a.dtype in door.DTYPES and a.is_cpu:
            h: torch.Tensor = torch.ops.slipstream.scan_diagonal(a, b, h0, reverse)
        else:
            states, order = [h0], range(len(a))
            for t in reversed(order) if reverse else order:
                states.append(a[t] * states[-1] + b[t])
            h = torch.stack(states[:0:-1] if reverse else states[1:])
        ctx.save_for_backward(a, h0, h)
        ctx.reverse = reverse
        return h

    @staticmethod
    def backward(ctx: Any, dh: torch.Tensor) -> Any:
        need_first_order()
        a, h0, h = ctx.saved_tensors
        if door.available() and a.dtype in door.DTYPES and a.is_cpu:
            grads = torch.ops.slipstream.scan_diagonal_backward(
                a, h0, h, dh.contiguous(), ctx.reverse
            )
            return *grads, None
        if ctx.reverse:
            a, h, dh = a.flip(0), h.flip(0), dh.flip(0)
        carried, db = torch.zeros_like(h0), []
        for t in reversed(range(len(a))):
            db.append(dh[t] + carried)
            carried = a[t] * db[-1]
        gradient = torch.stack(db[::-1])
        da = gradient * torch.cat([h0[None], h[:-1]])
        both = (da.flip(0), gradient.flip(0)) if ctx.reverse else (da, gradient)
        return *both, carried, None


class _Dense(torch.autograd.Function):
    """Arguments a [T, ..., H, H], b [T, ..., H], h0 [..., H]."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, reverse: bool
    ) -> torch.Tensor:
        if reverse:
            a, b = a.flip(0), b.flip(0)
        first = (b[0] + _apply(a[0], h0))[None]
        h = dense_recurrence(a, torch.cat([first, b[1:]]))
        ctx.save_for_backward(a, h0, h)
        ctx.reverse = reverse
        return h.flip(0) if reverse else h

    @staticmethod
    def backward(ctx: Any, dh: torch.Tensor) -> Any:
        need_first_order()
        a, h0, h = ctx.saved_tensors
        dh = dh.flip(0) if ctx.reverse else dh
        behind = torch.cat([torch.zeros_like(a[:1]), a[1:].flip(0).mT])
        db = dense_recurrence(behind, dh.flip(0)).flip(0)
        before = torch.cat([h0[None], h[:-1]])
        da = db.unsqueeze(-1) * before.unsqueeze(-2)
        dh0 = _apply(a[0].mT, db[0])
        return *((da.flip(0), db.flip(0)) if ctx.reverse else (da, db)), dh0, None
