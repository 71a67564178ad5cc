"""Affine recurrences ``h_t = A_t h_(t-1) + b_t``, computed by a parallel scan.

Two steps compose to one: ``(A, b)`` followed by ``(A', b')`` is ``(A' A, A' b + b')``. Composition
is associative but not commutative, so that the scan must preserve the order of operands, unlike
that of Blelloch, "Prefix sums and their applications", 1990.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.techniques.scan import kernels

Element = TypeVar("Element")
Structure = Literal["dense", "diag", "block"]
STRUCTURES = ("dense", "diag", "block")
# Maximum element of products of matrices in a tree: the square root of the dtype's maximum, so that
# products with vectors of that size stay finite.
_MAX_PRODUCT = {torch.float32: 1e19, torch.float64: 1e150}
# Maximum width for which the compiled kernel is faster than torch's batched matmul.
_MAX_KERNEL_WIDTH = 64


def exclusive_scan(
    elements: Sequence[Element],
    operate: Callable[[Element, Element], Element],
    identity: Element,
    levels: int | None = None,
) -> list[Element]:
    """Compute ``[identity, e_0, e_0.e_1, ...]`` in up to ``2 ceil(log2(n + 1))`` dependent rounds.

    Args:
        operate: associative function; it need not be commutative.
        levels: maximum levels of the tree; the remaining elements are scanned sequentially. None:
            all levels.

    Raises:
        InvalidArgumentError: `levels` is negative.
    """
    if levels is not None and levels < 0:
        raise InvalidArgumentError("levels", f"{levels} is negative")
    count = len(elements)
    if count <= 1 or levels == 0:
        prefixes, prefix = [], identity
        for number, element in enumerate(elements):
            prefixes.append(prefix)
            if number + 1 < count:
                prefix = element if number == 0 else operate(prefix, element)
        return prefixes
    pairs = [operate(elements[i], elements[i + 1]) for i in range(0, count - 2, 2)]
    pairs.append(elements[-1])  # the product of the last pair would not be read
    outer = exclusive_scan(pairs, operate, identity, None if levels is None else levels - 1)
    prefixes = []
    for number, before in enumerate(outer):
        prefixes.append(before)
        if 2 * number + 1 < count:
            first = elements[2 * number]
            prefixes.append(first if number == 0 else operate(before, first))
    return prefixes


def dense_recurrence(a: torch.Tensor, b: torch.Tensor, levels: int | None = None) -> torch.Tensor:
    """Compute ``h_t = a_t h_(t-1) + b_t`` from ``h_(-1) = 0`` as a tree; return [T, ..., H].

    Args:
        a: [T, ..., H, H].
        b: [T, ..., H].
        levels: maximum levels of the tree; the remaining steps are computed sequentially. None: as
            many as guarantee that no product of matrices overflows.
    """
    if levels is None:
        levels = _safe_levels(a)
    return _tree(a, b, levels)


def _tree(a: torch.Tensor, b: torch.Tensor, levels: int) -> torch.Tensor:
    steps = a.shape[0]
    if steps == 1:
        return b
    if levels == 0:
        computed = [b[0]]
        for t in range(1, steps):
            computed.append(_apply(a[t], computed[-1]) + b[t])
        return torch.stack(computed)
    pairs = steps // 2
    even, odd = a[0 : 2 * pairs : 2], a[1 : 2 * pairs : 2]
    pair_b = _apply(odd, b[0 : 2 * pairs : 2]) + b[1 : 2 * pairs : 2]
    if pairs > 1:
        # The product of the first pair is never read.
        pair_a = torch.empty(odd.shape, dtype=odd.dtype, device=odd.device)
        _products(odd[1:], even[1:], pair_a[1:])
    else:
        pair_a = odd
    odd_states = _tree(pair_a, pair_b, levels - 1)
    states = torch.empty_like(b)
    states[0] = b[0]
    states[1 : 2 * pairs : 2] = odd_states
    even_count = (steps - 1) // 2  # even steps after the first
    states[2::2] = _apply(a[2::2], odd_states[:even_count]) + b[2::2]
    return states


def _apply(a: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return (a @ h.unsqueeze(-1)).squeeze(-1)


def _products(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``left @ right``, [T, ..., H, H], to `out`.

    The kernel is called once per sequence of the batch, which avoids a copy.
    """
    width, dtype = left.shape[-1], left.dtype
    if (
        width > _MAX_KERNEL_WIDTH
        or dtype not in kernels.DTYPES
        or not left.is_cpu
        or not kernels.available()
    ):
        torch.matmul(left, right, out=out)
        return
    flattened = [matrix.reshape(matrix.shape[0], -1, width, width) for matrix in (left, right)]
    flattened = [
        matrix.contiguous() if matrix.stride()[-2:] != (width, 1) else matrix
        for matrix in flattened
    ]
    parts = out.view(out.shape[0], -1, width, width).unbind(1)
    for lefts, rights, part in zip(*(each.unbind(1) for each in flattened), parts, strict=True):
        kernels.products(lefts, rights, part)


def _safe_levels(a: torch.Tensor) -> int:
    """Return the number of levels in which row sums bound products by `_MAX_PRODUCT`."""
    all_levels = math.ceil(math.log2(max(a.shape[0], 2)))
    norm = float(a.abs().sum(-1).amax()) if a.numel() else 1.0
    if not math.isfinite(norm):
        return 0
    if norm <= 1.0:
        return all_levels
    factors = math.log(_MAX_PRODUCT.get(a.dtype, 1e19)) / math.log(norm)
    return max(0, min(all_levels, math.floor(math.log2(max(factors, 1.0)))))


def linear_recurrence(
    a: torch.Tensor,
    b: torch.Tensor,
    h0: torch.Tensor | None = None,
    *,
    reverse: bool = False,
    structure: Structure = "dense",
) -> torch.Tensor:
    """Return every state of ``h_t = A_t h_(t-1) + b_t``; once differentiable in all arguments.

    Args:
        a: ``dense``: [T, ..., H, H]; ``diag``: [T, ..., H]; ``block``: [T, ..., K, H, H].
        b: [T, ..., H]; for ``block`` [T, ..., K, H].
        h0: the state before the first step, of b's shape without T; None for zeros.
        reverse: whether to run from the last step to the first.

    Raises:
        InvalidArgumentError: there is no step, no such structure, or shapes do not match.
    """
    if structure not in STRUCTURES:
        raise InvalidArgumentError(
            "structure", f"'{structure}' is not one of {', '.join(STRUCTURES)}"
        )
    if b.dim() < 2 or b.shape[0] == 0:
        raise InvalidArgumentError(
            "b",
            f"has shape {tuple(b.shape)}, without a step",
            remedy="pass shape [T, ..., H] with T > 0",
        )
    expected = b.shape if structure == "diag" else (*b.shape, b.shape[-1])
    if a.shape != expected:
        raise InvalidArgumentError(
            "a", f"has shape {tuple(a.shape)}, which does not match b's {tuple(b.shape)}",
            remedy=f"pass shape {tuple(expected)} for structure='{structure}'",
        )  # fmt: skip
    h0 = torch.zeros_like(b[0]) if h0 is None else h0
    if h0.shape != b.shape[1:]:
        raise InvalidArgumentError("h0", f"has shape {tuple(h0.shape)}, not {tuple(b.shape[1:])}")
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
    """Check, in a backward pass, that it is not differentiated, which would omit terms.

    Raises:
        SlipstreamError: the backward pass runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():  # set by create_graph=True
        raise SlipstreamError(
            "the backward pass of this recurrence cannot be differentiated",
            remedy="call torch.autograd.grad without create_graph=True",
        )


class _Diagonal(torch.autograd.Function):
    """Diagonal recurrence of a, b [T, N] and h0 [N]."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, reverse: bool
    ) -> torch.Tensor:
        if kernels.available() and a.dtype in kernels.DTYPES and a.is_cpu:
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
        if kernels.available() and a.dtype in kernels.DTYPES and a.is_cpu:
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
        da_db = (da.flip(0), gradient.flip(0)) if ctx.reverse else (da, gradient)
        return *da_db, carried, None


class _Dense(torch.autograd.Function):
    """Dense recurrence of a [T, ..., H, H], b [T, ..., H] and h0 [..., H]."""

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
        transposed = torch.cat([torch.zeros_like(a[:1]), a[1:].flip(0).mT])
        db = dense_recurrence(transposed, dh.flip(0)).flip(0)
        before = torch.cat([h0[None], h[:-1]])
        da = db.unsqueeze(-1) * before.unsqueeze(-2)
        dh0 = _apply(a[0].mT, db[0])
        return *((da.flip(0), db.flip(0)) if ctx.reverse else (da, db)), dh0, None
