"""Recurrent cells in plain torch, backward: one step, all chunks at once, or a tree of Jacobians.

With ``J_t`` the Jacobian of a state by the one before, the gradient of states follows
``g_(t-1) = J_t^T g_t + dy_(t-1)``: an affine recurrence, which may be cut anywhere because products
of Jacobians are associative (they do not commute). One function gives a step's gradient; a Jacobian
is that function of the columns of the identity.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.techniques.scan.affine import dense_recurrence
from slipstream.techniques.scan.kernels import GATES

_Pair = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Saved:
    """What the forward pass of a cell left.

    Attributes:
        kind: one of `kernels.KINDS`.
        weight: [G H, H].
        y: states [T, B, H].
        gates: [T, B, G H], what the gates are (GRU, LSTM).
        extra: [T, B, H]: ``W_hn h + b_hn`` of the GRU, the LSTM's cell states.
        h0, c0: [B, H].
    """

    kind: str
    weight: torch.Tensor
    y: torch.Tensor
    gates: torch.Tensor
    extra: torch.Tensor
    h0: torch.Tensor
    c0: torch.Tensor | None

    @property
    def steps(self) -> int:
        return self.y.shape[0]

    def columns(self) -> dict[str, torch.Tensor]:
        """What a step's gradient reads, by name: each [T, B, H]."""
        reads = {"h": self.y}
        if self.kind in ("gru", "lstm"):
            names = "rzn" if self.kind == "gru" else "ifgo"
            reads |= dict(zip(names, self.gates.chunk(GATES[self.kind], -1), strict=True))
        if self.kind == "gru":
            reads["m"] = self.extra
            reads["before"] = torch.cat([self.h0[None], self.y[:-1]])
        if self.c0 is not None:
            reads["c"] = self.extra.tanh()
            reads["c_before"] = torch.cat([self.c0[None], self.extra[:-1]])
        return reads


def step_gradient(
    kind: str, at: dict[str, torch.Tensor], dh: torch.Tensor, dc: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """A step backward: gradients of the gates on the input's and on the hidden side.

    Behind them what of the state's gradient passes by the weights, and the cell state's gradient.

    Args:
        at: `Saved.columns` of the step, or of many; all are broadcast with `dh`, [..., H].
    """
    if kind == "tanh":
        d = dh * (1 - at["h"] * at["h"])
        return d, d, None, None
    if kind == "relu":
        d = torch.where(at["h"] > 0, dh, torch.zeros((), dtype=dh.dtype))
        return d, d, None, None
    if kind == "gru":
        r, z, n = at["r"], at["z"], at["n"]
        dn = dh * (1 - z) * (1 - n * n)
        dz = dh * (at["before"] - n) * z * (1 - z)
        dr = dn * at["m"] * r * (1 - r)
        return torch.cat([dr, dz, dn], -1), torch.cat([dr, dz, dn * r], -1), dh * z, None
    assert dc is not None
    i, f, g, o, c = at["i"], at["f"], at["g"], at["o"], at["c"]
    dc = dc + dh * o * (1 - c * c)
    d = torch.cat(
        [
            dc * g * i * (1 - i), dc * at["c_before"] * f * (1 - f), dc * i * (1 - g * g),
            dh * c * o * (1 - o),
        ],
        -1,
    )  # fmt: skip
    return d, d, None, dc * f


def _back(
    saved: Saved, at: dict[str, torch.Tensor], dh: torch.Tensor, dc: torch.Tensor | None
) -> _Pair:
    """The gradient one step earlier."""
    _, on_hidden, passed, dc = step_gradient(saved.kind, at, dh, dc)
    before = on_hidden @ saved.weight
    return before if passed is None else before + passed, dc


@dataclass(frozen=True)
class Gradients:
    """As `kernels.run_backward` gives them: of the projections, the weight, biases, h0 and c0."""

    dgates: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor
    dh0: torch.Tensor
    dc0: torch.Tensor | None


def chunked(
    saved: Saved, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None, chunk: int
) -> Gradients:
    """All chunks of `chunk` steps at once: first their products of Jacobians, then their insides.

    Products are made only of chunks, so that memory is that of one Jacobian a chunk. Where one is
    not finite, though gradients may be, chunks are halved: at one step nothing is multiplied.
    """
    steps, batch, hidden = saved.y.shape
    count = max(steps // chunk, 1)
    chunk = min(chunk, steps)
    rest = steps - count * chunk  # before all chunks, walked step by step
    size = hidden if saved.c0 is None else 2 * hidden
    at = {
        name: one[rest:].view(count, chunk, batch, hidden) for name, one in saved.columns().items()
    }
    given = None if dy is None else dy[rest:].view(count, chunk, batch, hidden)
    # Rows: the identity, and what the chunk's own losses make of no gradient at its end.
    start = torch.cat([torch.eye(size, dtype=dh.dtype), dh.new_zeros(1, size)])
    rows = start.expand(count, batch, size + 1, size).clone()
    rows_h, rows_c = rows[..., :hidden], rows[..., hidden:] if dc is not None else None
    del rows  # so that the first step's go when the second's are there
    for k in reversed(range(chunk)):
        if given is not None:
            rows_h[..., -1, :] += given[:, k]
        now = {name: one[:, k, :, None] for name, one in at.items()}
        rows_h, rows_c = _back(saved, now, rows_h, rows_c)
    whole = rows_h if rows_c is None else torch.cat([rows_h, rows_c], -1)
    if chunk > 1 and not torch.isfinite(whole).all():
        return chunked(saved, dy, dh, dc, chunk // 2)
    ends = [dh if dc is None else torch.cat([dh, dc], -1)]
    for number in reversed(range(1, count)):
        moved = torch.einsum("bs,bsr->br", ends[-1], whole[number, :, :-1])
        ends.append(moved + whole[number, :, -1])
    inside = torch.stack(ends[::-1])
    inside_h, inside_c = inside[..., :hidden], inside[..., hidden:] if dc is not None else None
    del whole, rows_h, rows_c
    # Of the GRU alone they differ on the input's and on the hidden side.
    dgates = saved.y.new_empty(steps, batch, saved.weight.shape[0])
    dhidden = torch.empty_like(dgates) if saved.kind == "gru" else dgates
    gates, felt = (one[rest:].view(count, chunk, batch, -1) for one in (dgates, dhidden))
    for k in reversed(range(chunk)):
        if given is not None:
            inside_h = inside_h + given[:, k]
        now = {name: one[:, k] for name, one in at.items()}
        on_input, on_hidden, _, _ = step_gradient(saved.kind, now, inside_h, inside_c)
        gates[:, k], felt[:, k] = on_input, on_hidden
        inside_h, inside_c = _back(saved, now, inside_h, inside_c)
    first_h, first_c = inside_h[0], None if inside_c is None else inside_c[0]
    if rest:
        early = sequential(_first(saved, rest), None if dy is None else dy[:rest], first_h, first_c)
        ours = _gradients(_last(saved, rest), dgates[rest:], dhidden[rest:], first_h, first_c)
        dgates[:rest] = early.dgates
        return Gradients(
            dgates, early.dweight + ours.dweight, early.dbias + ours.dbias, early.dh0, early.dc0
        )
    return _gradients(saved, dgates, dhidden, first_h, first_c)


def sequential(
    saved: Saved, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None
) -> Gradients:
    """Step by step, in a loop of Python: what all others must equal up to rounding."""
    at = saved.columns()
    on_inputs, felt = [], []
    for t in reversed(range(saved.steps)):
        now = {name: one[t] for name, one in at.items()}
        dh = dh if dy is None else dh + dy[t]
        on_input, on_hidden, _, _ = step_gradient(saved.kind, now, dh, dc)
        on_inputs.append(on_input)
        felt.append(on_hidden)
        dh, dc = _back(saved, now, dh, dc)
    return _gradients(saved, torch.stack(on_inputs[::-1]), torch.stack(felt[::-1]), dh, dc)


def tree(
    saved: Saved, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None
) -> Gradients:
    """The Jacobian of every step, scanned as a tree: at most 2 log2(T + 1) dependent products."""
    steps, batch, hidden = saved.y.shape
    size = hidden if dc is None else 2 * hidden
    at = saved.columns()
    rows = torch.eye(size, dtype=dh.dtype).expand(steps, batch, size, size)
    now = {name: one[:, :, None] for name, one in at.items()}
    back = _back(saved, now, rows[..., :hidden], rows[..., hidden:] if dc is not None else None)
    jacobians = torch.cat([one for one in back if one is not None], -1)  # row s: of J^T e_s
    losses = dh.new_zeros(steps, batch, size)
    if dy is not None:
        losses[..., :hidden] = dy
    end = dh if dc is None else torch.cat([dh, dc], -1)
    # From the end: g_(T-1) = end + loss, then each step by the Jacobian behind it.
    a = torch.cat([jacobians.new_zeros(1, batch, size, size), jacobians[1:].flip(0).mT])
    b = losses.flip(0)
    b[0] += end
    g = dense_recurrence(a, b).flip(0)
    dc_all = g[..., hidden:] if dc is not None else None
    on_input, on_hidden, _, _ = step_gradient(saved.kind, at, g[..., :hidden], dc_all)
    first = torch.einsum("bs,bsr->br", g[0], jacobians[0])
    dc0 = None if dc is None else first[..., hidden:]
    return _gradients(saved, on_input, on_hidden, first[..., :hidden], dc0)


def _gradients(
    saved: Saved, dgates: torch.Tensor, dhidden: torch.Tensor, dh0: torch.Tensor,
    dc0: torch.Tensor | None,
) -> Gradients:  # fmt: skip
    # The first step read h0, the others the state before: without a copy of all states.
    dweight = dhidden[0].T @ saved.h0
    dweight += dhidden[1:].flatten(0, 1).T @ saved.y[:-1].flatten(0, 1)
    return Gradients(dgates, dweight, dhidden.flatten(0, 1).sum(0), dh0, dc0)


def _first(saved: Saved, count: int) -> Saved:
    return Saved(
        saved.kind, saved.weight, saved.y[:count], saved.gates[:count], saved.extra[:count],
        saved.h0, saved.c0,
    )  # fmt: skip


def _last(saved: Saved, begin: int) -> Saved:
    c0 = None if saved.c0 is None else saved.extra[begin - 1]
    return Saved(
        saved.kind, saved.weight, saved.y[begin:], saved.gates[begin:], saved.extra[begin:],
        saved.y[begin - 1], c0,
    )  # fmt: skip
