"""Backward passes of recurrent cells in plain torch: step by step, in chunks, or as a tree.

With ``J_t`` the Jacobian of a state with respect to the preceding one, gradients of states follow
``g_(t-1) = J_t^T g_t + dy_(t-1)``: an affine recurrence, which can be split anywhere because
products of Jacobians are associative (they do not commute). A Jacobian is computed by the function
of a step's gradient, applied to the columns of the identity.

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
    """Tensors that the forward pass of a cell saved.

    Attributes:
        kind: one of `kernels.KINDS`.
        weight: [G H, H].
        y: states [T, B, H].
        gates: values of the gates (GRU, LSTM), [T, B, G H].
        extra: ``W_hn h + b_hn`` of the GRU, or cell states of the LSTM, [T, B, H].
        h0, c0: initial states, [B, H].
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
        """Return the tensors that a step's gradient reads, each [T, B, H], by name."""
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
    """Return gradients of the gates on the input and hidden side, and direct state gradients.

    The third value is the part of the state's gradient that bypasses the weights, the fourth the
    gradient of the cell state; both are those of the preceding step.

    Args:
        at: `Saved.columns` of one or more steps, broadcast with `dh`, [..., H].
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


def _step_back(
    saved: Saved, at: dict[str, torch.Tensor], dh: torch.Tensor, dc: torch.Tensor | None
) -> _Pair:
    """Return the gradients of the preceding state and cell state."""
    _, on_hidden, passed, dc = step_gradient(saved.kind, at, dh, dc)
    before = on_hidden @ saved.weight
    return before if passed is None else before + passed, dc


@dataclass(frozen=True)
class Gradients:
    """Gradients of projections, weight, hidden-side biases, h0 and c0; see `run_backward`."""

    dgates: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor
    dh0: torch.Tensor
    dc0: torch.Tensor | None


def chunked(
    saved: Saved, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None, chunk: int
) -> Gradients:
    """Compute all chunks of `chunk` steps as a batch: their affine maps first, then their insides.

    Jacobians are multiplied within chunks only, so that memory is one Jacobian per chunk. If one is
    not finite, though gradients may be, chunks are halved; single steps need no product.
    """
    steps, batch, hidden = saved.y.shape
    count = max(steps // chunk, 1)
    chunk = min(chunk, steps)
    remainder = steps - count * chunk  # steps before all chunks, computed sequentially
    size = hidden if saved.c0 is None else 2 * hidden
    at = {
        name: tensor[remainder:].view(count, chunk, batch, hidden)
        for name, tensor in saved.columns().items()
    }
    dy_chunks = None if dy is None else dy[remainder:].view(count, chunk, batch, hidden)
    # Rows: the identity, and a zero gradient to which the chunk's own losses are added.
    initial = torch.cat([torch.eye(size, dtype=dh.dtype), dh.new_zeros(1, size)])
    rows = initial.expand(count, batch, size + 1, size).clone()
    rows_h, rows_c = rows[..., :hidden], rows[..., hidden:] if dc is not None else None
    del rows  # lets the first step free them
    for k in reversed(range(chunk)):
        if dy_chunks is not None:
            rows_h[..., -1, :] += dy_chunks[:, k]
        columns = {name: tensor[:, k, :, None] for name, tensor in at.items()}
        rows_h, rows_c = _step_back(saved, columns, rows_h, rows_c)
    maps = rows_h if rows_c is None else torch.cat([rows_h, rows_c], -1)
    if chunk > 1 and not torch.isfinite(maps).all():
        return chunked(saved, dy, dh, dc, chunk // 2)
    ends = [dh if dc is None else torch.cat([dh, dc], -1)]
    for number in reversed(range(1, count)):
        moved = torch.einsum("bs,bsr->br", ends[-1], maps[number, :, :-1])
        ends.append(moved + maps[number, :, -1])
    inside = torch.stack(ends[::-1])
    inside_h, inside_c = inside[..., :hidden], inside[..., hidden:] if dc is not None else None
    del maps, rows_h, rows_c
    # Only for the GRU do gate gradients on the input and hidden side differ.
    dgates = saved.y.new_empty(steps, batch, saved.weight.shape[0])
    dhidden = torch.empty_like(dgates) if saved.kind == "gru" else dgates
    gates, hidden_gates = (
        tensor[remainder:].view(count, chunk, batch, -1) for tensor in (dgates, dhidden)
    )
    for k in reversed(range(chunk)):
        if dy_chunks is not None:
            inside_h = inside_h + dy_chunks[:, k]
        columns = {name: tensor[:, k] for name, tensor in at.items()}
        on_input, on_hidden, _, _ = step_gradient(saved.kind, columns, inside_h, inside_c)
        gates[:, k], hidden_gates[:, k] = on_input, on_hidden
        inside_h, inside_c = _step_back(saved, columns, inside_h, inside_c)
    first_h, first_c = inside_h[0], None if inside_c is None else inside_c[0]
    if remainder:
        early = sequential(
            _first(saved, remainder), None if dy is None else dy[:remainder], first_h, first_c
        )
        late = _gradients(
            _last(saved, remainder), dgates[remainder:], dhidden[remainder:], first_h, first_c
        )
        dgates[:remainder] = early.dgates
        return Gradients(
            dgates, early.dweight + late.dweight, early.dbias + late.dbias, early.dh0, early.dc0
        )
    return _gradients(saved, dgates, dhidden, first_h, first_c)


def sequential(
    saved: Saved, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None
) -> Gradients:
    """Compute gradients step by step; the reference that the other ways equal up to rounding."""
    at = saved.columns()
    on_inputs, on_hiddens = [], []
    for t in reversed(range(saved.steps)):
        columns = {name: tensor[t] for name, tensor in at.items()}
        dh = dh if dy is None else dh + dy[t]
        on_input, on_hidden, _, _ = step_gradient(saved.kind, columns, dh, dc)
        on_inputs.append(on_input)
        on_hiddens.append(on_hidden)
        dh, dc = _step_back(saved, columns, dh, dc)
    return _gradients(saved, torch.stack(on_inputs[::-1]), torch.stack(on_hiddens[::-1]), dh, dc)


def tree(
    saved: Saved, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None
) -> Gradients:
    """Scan the Jacobians of all steps as a tree: at most 2 log2(T + 1) dependent products."""
    steps, batch, hidden = saved.y.shape
    size = hidden if dc is None else 2 * hidden
    at = saved.columns()
    rows = torch.eye(size, dtype=dh.dtype).expand(steps, batch, size, size)
    columns = {name: tensor[:, :, None] for name, tensor in at.items()}
    back = _step_back(
        saved, columns, rows[..., :hidden], rows[..., hidden:] if dc is not None else None
    )
    jacobians = torch.cat([part for part in back if part is not None], -1)  # row s: of J^T e_s
    losses = dh.new_zeros(steps, batch, size)
    if dy is not None:
        losses[..., :hidden] = dy
    end = dh if dc is None else torch.cat([dh, dc], -1)
    # From the end: g_(T-1) = end + loss; each earlier step multiplies by the Jacobian after it.
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
    # The first step reads h0, the others the preceding state; concatenating would copy all states.
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
