"""Cache of the hot rows of a tensor train.

A row with many look-ups is cached: it is read and trained like a row of ``nn.Embedding``. It starts
bit-identical to the train's row. When a hotter row evicts it, the train is refitted to it, by least
squares weighted by look-ups.

A step of plain gradient descent moves a row of the train further than a separate row, since it
changes all of its slices. The gradient of a cached row is therefore multiplied by this factor, its
*gain*, computed when the row is cached. Optimizers that normalize gradients, such as Adagrad and
Adam, are not affected.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.kernels import tt as kernels
from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream.techniques.embedding.tt_svd import refit

POLICIES = ("auto", "manual")
_LOOKUPS_PER_ROW = 100
"""Look-ups per cached row between refreshes, under the policy auto."""
_ANCHORS = 1 << 16
_GAINS_PER_CHUNK = 1 << 13
_RIDGE = 1e-3


class HotRows(nn.Module):
    """Cached rows, with exact counts of the ids looked up.

    Args:
        rows: number of rows to cache.
        dim: columns of a row.
        policy: ``auto`` refreshes after every 100 look-ups per cached row; ``manual`` when
            `refresh` is called, which all of several processes must do equally often. With
            ``auto`` they agree on a number of calls in between, since their numbers of ids can
            differ.

    Attributes:
        weight: the parameter, [rows, dim].
        table: int64 [capacity, 2], a hash table from ids to rows of `weight`; -1 is free.
        gain: float [rows], the factor of gradients of `weight`; at least 1.

    Raises:
        InvalidArgumentError: `rows` is negative, or the policy is unknown.
    """

    table: torch.Tensor
    gain: torch.Tensor

    def __init__(
        self,
        rows: int,
        dim: int,
        policy: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        rows = as_integer("cache_rows", rows, 0)
        if policy not in POLICIES:
            raise InvalidArgumentError(
                "cache_policy",
                f"'{policy}' is not a policy",
                remedy=f"use one of {', '.join(POLICIES)}",
            )
        self.policy = policy
        self.weight = nn.Parameter(torch.zeros(rows, dim, device=device, dtype=dtype))
        self.register_buffer(
            "table", torch.full((_capacity(rows), 2), -1, dtype=torch.int64, device=device)
        )
        gain = torch.ones(rows, device=device, dtype=dtype)
        self.register_buffer("gain", gain, persistent=False)
        self._seen = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.int64)
        self._hits = torch.zeros(rows, dtype=torch.int64)
        self._pending: list[torch.Tensor] = []
        self._waiting = self._since = 0
        # Calls since the last refresh and until the next: equal in all processes.
        self._calls, self._calls_until_due = 0, 1

    @property
    def ids(self) -> torch.Tensor:
        """The cached id of each row, int64 [rows]; -1 if the row is free."""
        ids = torch.full((len(self.weight),), -1, dtype=torch.int64, device=self.table.device)
        entries = self.table[self.table[:, 0] >= 0]
        ids[entries[:, 1]] = entries[:, 0]
        return ids

    def rows(self) -> torch.Tensor:
        """Return `weight`; its gradient is multiplied by `gain`."""
        rows: torch.Tensor = _Gained.apply(self.weight, self.gain)
        return rows

    @property
    def due(self) -> bool:
        """Whether the policy requires a refresh."""
        if self.policy != "auto":
            return False
        if _processes() > 1:
            return self._calls >= self._calls_until_due
        return self._since >= _LOOKUPS_PER_ROW * len(self.weight)

    def record(self, ids: torch.Tensor) -> None:
        """Count these look-ups."""
        looked_up = ids.detach().flatten().to("cpu", torch.int64, copy=True)
        self._since += looked_up.numel()
        self._calls += 1
        missed = kernels.count_hits(self.table, looked_up, self._hits)
        if not len(missed):
            return
        self._pending.append(missed)
        self._waiting += len(missed)
        # Merging costs time in proportion to all counted ids, so it waits for as many new ones.
        if self._waiting > max(1 << 16, len(self._seen)):
            self._merge()

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids, int64 ascending, and their look-ups; each refresh halves earlier counts."""
        self._merge()
        return self._seen, self._counts

    def refresh(
        self, cores: list[torch.Tensor], optimizer: torch.optim.Optimizer | None = None
    ) -> torch.Tensor:
        """Cache the ids with most look-ups, and return the reassigned rows, int64.

        Cached ids stay unless others have a quarter more look-ups. The counts of several processes
        are summed, so that all of them cache the same ids.

        Args:
            cores: cores of the train, refitted in place to evicted rows.
            optimizer: its state of the reassigned rows is set to zero.
        """
        self._merge_processes()
        seen, counts = self.counts()
        before = self.ids.cpu()
        chosen = self._hottest(seen, counts, before)
        leaving = (before >= 0) & ~torch.isin(before, chosen)
        coming = chosen[~torch.isin(chosen, before)]
        free = torch.nonzero(leaving | (before < 0)).flatten()[: len(coming)]
        with torch.no_grad():
            device = self.weight.device
            arriving, gain = _rows(cores, coming.to(device)), _gains(cores, coming.to(device))
            if bool(leaving.any()):
                others = ~torch.isin(seen, torch.cat([before, chosen]))
                self._absorb(cores, before, leaving, (seen, counts), others)
            self.weight[free.to(device)] = arriving
            self.gain[free.to(device)] = gain
            after = before.clone()
            after[leaving] = -1
            after[free] = coming
            self.table.copy_(_hashed(after, len(self.table)))
        if optimizer is not None:
            _forget(optimizer, self.weight, free)
        self._counts = counts // 2
        self._seen, self._counts = seen[self._counts > 0], self._counts[self._counts > 0]
        self._since = self._calls = 0
        self._clear_other_processes()
        return free

    def _hottest(
        self, seen: torch.Tensor, counts: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """Return ids by count, with a quarter more for cached ones; ties go to the lower id."""
        score = counts * (4 + torch.isin(seen, before).long())
        order = score.sort(descending=True, stable=True).indices
        hottest = seen[order[: len(self.weight)]]
        # Cached ids without look-ups stay while rows are free.
        idle = before[(before >= 0) & ~torch.isin(before, seen)]
        return torch.cat([hottest, idle[: len(self.weight) - len(hottest)]])

    def _absorb(
        self,
        cores: list[torch.Tensor],
        before: torch.Tensor,
        leaving: torch.Tensor,
        counted: tuple[torch.Tensor, torch.Tensor],
        others: torch.Tensor,
    ) -> None:
        """Refit the last core to the evicted rows, and to the present values of other rows."""
        (seen, counts), gone = counted, before[leaving]
        positions = torch.searchsorted(seen, gone).clamp(max=max(len(seen) - 1, 0))
        counted_before = (
            seen[positions] == gone if len(seen) else torch.zeros_like(gone, dtype=torch.bool)
        )
        weights = torch.where(counted_before, counts[positions] if len(seen) else 0, 0).clamp(min=1)
        digits = cores[-1].shape[0]
        near = torch.isin(seen % digits, gone % digits) & others
        anchors, often = seen[near], counts[near]
        if len(anchors) > _ANCHORS:
            most = often.topk(_ANCHORS).indices
            anchors, often = anchors[most], often[most]
        device = self.weight.device
        exact = [core.double() for core in cores]
        ids = torch.cat([gone, anchors]).to(device)
        targets = torch.cat(
            [self.weight[leaving.to(device)].double(),
             reference.rows_of(exact, anchors.to(device))]
        )  # fmt: skip
        refit(exact, ids, targets, torch.cat([weights, often]).to(device).double(), _RIDGE)
        cores[-1].copy_(exact[-1])

    def _merge(self) -> None:
        hit = torch.nonzero(self._hits).flatten()
        if not self._pending and not len(hit):
            return
        every = torch.cat([self._seen, *self._pending, self.ids.cpu()[hit]])
        once = torch.ones(self._waiting, dtype=torch.int64)
        self._seen, self._counts = _added_up(
            every, torch.cat([self._counts, once, self._hits[hit]])
        )
        self._pending, self._waiting = [], 0
        self._hits.zero_()

    def _merge_processes(self) -> None:
        processes = _processes()
        if processes == 1:
            return
        self._merge()
        every: list[Any] = [None] * processes
        local = self._seen, self._counts, self._since, self._calls
        torch.distributed.all_gather_object(every, local)
        seen, counts, lookups, calls = zip(*every, strict=True)
        self._seen, self._counts = _added_up(torch.cat(seen), torch.cat(counts))
        per_call = sum(lookups) / max(sum(calls), 1)
        lookups_due = _LOOKUPS_PER_ROW * len(self.weight)
        self._calls_until_due = max(1, math.ceil(lookups_due / max(per_call, 1)))

    def _clear_other_processes(self) -> None:
        """Clear the counts except in rank 0, so that the next merge adds the common counts once."""
        if _processes() > 1 and torch.distributed.get_rank():
            self._seen, self._counts = self._seen[:0], self._counts[:0]

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Return the counts and gains, which are saved with the rows."""
        seen, counts = self.counts()
        since = torch.tensor(self._since)
        return {"seen": seen, "counts": counts, "since": since, "gain": self.gain}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore saved counts and gains."""
        self._pending, self._waiting = [], 0
        self._hits.zero_()
        self._seen, self._counts = state["seen"], state["counts"]
        self._since = int(state["since"])
        if "gain" in state:  # older files have none
            self.gain.copy_(state["gain"])
        self._calls, self._calls_until_due = 0, 1
        self._clear_other_processes()

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, policy={self.policy!r}"


def cache_bytes(rows: int, dim: int, item_bytes: int) -> int:
    """Return the bytes of cached rows, their gains and their hash table."""
    return rows * (dim + 1) * item_bytes + _capacity(rows) * 2 * torch.int64.itemsize


def _processes() -> int:
    """Return the number of processes that train together."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def _capacity(rows: int) -> int:
    """Return the slots of the hash table, of which at most half are used."""
    return 1 << (2 * rows - 1).bit_length()


def _rows(cores: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return rows of the train, bit-identical to look-ups."""
    rows = math.prod(core.shape[0] for core in cores)
    return kernels.look_up(cores, None, None, ids, None, None, rows, -1, len(ids), 0)


class _Gained(torch.autograd.Function):
    """Identity of rows [n, dim] that multiplies their gradients by factors [n]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gain)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gain,) = ctx.saved_tensors
        return gradient * gain[:, None], None


def _gains(cores: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the gains of rows of the train, float [ids], at least 1.

    A gain is the sum of squared derivatives of a row by its slices, averaged over its numbers: per
    slice, its columns times the squared norms of the products to its left and to its right.
    """
    dim = math.prod(core.shape[2] for core in cores)
    gains = [torch.ones(0, device=ids.device, dtype=cores[0].dtype)]
    for part in ids.split(_GAINS_PER_CHUNK):
        slices: list[torch.Tensor] = []
        remaining = part
        for core in reversed(cores):
            slices.insert(0, core[remaining % core.shape[0]])
            remaining = remaining // core.shape[0]
        squares = torch.zeros(len(part), device=ids.device, dtype=cores[0].dtype)
        left = unit = slices[0].new_ones(len(part), 1, 1)
        for place, current in enumerate(slices):
            right = unit
            for following in reversed(slices[place + 1 :]):
                right = torch.einsum("nrqs,nsa->nrqa", following, right).flatten(2)
            squares += current.shape[2] * left.square().sum((1, 2)) * right.square().sum((1, 2))
            left = torch.einsum("nar,nrqs->naqs", left, current).flatten(1, 2)
        gains.append((squares / dim).clamp(min=1))
    return torch.cat(gains)


def _added_up(ids: torch.Tensor, each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen, place = torch.unique(ids, return_inverse=True)
    return seen, torch.zeros_like(seen).index_add_(0, place, each)


def _hashed(ids: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the hash table of hot rows, with linear probing from `start`."""
    table = torch.full((capacity, 2), -1, dtype=torch.int64)
    rows = torch.nonzero(ids >= 0).flatten()
    place = reference.start(ids[rows], capacity)
    while len(rows):
        # Of rows that claim the same free slot the last one gets it.
        claimed = torch.full((capacity,), -1, dtype=torch.int64)
        claimed[place] = rows
        got = (table[place, 0] < 0) & (claimed[place] == rows)
        table[place[got]] = torch.stack([ids[rows[got]], rows[got]], 1)
        rows, place = rows[~got], (place[~got] + 1) % capacity
    return table


def _forget(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, rows: torch.Tensor) -> None:
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            value[rows.to(value.device)] = 0
