"""Hot rows of a tensor train, kept whole: which they are, and how they come and go.

A row that is looked up often is cached: read like a row of ``nn.Embedding`` and trained on its own.
It begins as the train's row, to the bit. When it makes room for a hotter one, what it has learned
goes back into the train, by least squares that count every row by how often it is looked up.

A step of plain gradient descent moves a row of the train further than a row by itself: through all
of its slices. A cached row's gradient is multiplied by how much further, its *gain* when it came;
else it would lag behind what the train would have made of it. Optimizers that divide steps by the
size of gradients, as Adagrad and Adam do, do not notice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.kernels import tt as door
from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream.techniques.embedding.tt_svd import refit

POLICIES = ("auto", "manual")
_LOOKUPS_A_ROW = 100
"""Look-ups for each cached row between refreshes, under the policy auto."""
_ANCHORS = 1 << 16
_GAINS_AT_ONCE = 1 << 13
_RIDGE = 1e-3


class HotRows(nn.Module):
    """Cached rows with exact counts of the ids that were looked up.

    Args:
        rows: to keep.
        dim: numbers in each.
        policy: ``auto`` refreshes after every 100 look-ups for each row of the cache; ``manual``
            when `refresh` is called. Of several processes each must call it, as often as the
            others; with ``auto`` they agree on the number of calls in between, since the ids that
            each has looked up may be more or fewer.

    Attributes:
        weight: the parameter, [rows, dim].
        table: int64 [capacity, 2], ids and their rows in `weight`, found by hashing; -1 is free.
        gain: float [rows], what gradients of `weight` are multiplied by; 1 at least.

    Raises:
        InvalidArgumentError: no rows, or another policy.
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
                "cache_policy", f"'{policy}' is not possible", remedy=", ".join(POLICIES)
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
        # Calls since the last refresh and until the next: what processes count alike.
        self._calls, self._calls_until_due = 0, 1

    @property
    def ids(self) -> torch.Tensor:
        """The cached ids by their row, int64 [rows]; -1 where a row is free."""
        ids = torch.full((len(self.weight),), -1, dtype=torch.int64, device=self.table.device)
        known = self.table[self.table[:, 0] >= 0]
        ids[known[:, 1]] = known[:, 0]
        return ids

    def rows(self) -> torch.Tensor:
        """`weight`, whose gradient is multiplied by `gain`."""
        rows: torch.Tensor = _Gained.apply(self.weight, self.gain)
        return rows

    @property
    def due(self) -> bool:
        """Whether the policy asks for a refresh."""
        if self.policy != "auto":
            return False
        if _processes() > 1:
            return self._calls >= self._calls_until_due
        return self._since >= _LOOKUPS_A_ROW * len(self.weight)

    def record(self, ids: torch.Tensor) -> None:
        """Count these look-ups, exactly."""
        looked_up = ids.detach().flatten().to("cpu", torch.int64, copy=True)
        self._since += looked_up.numel()
        self._calls += 1
        missed = door.count_hits(self.table, looked_up, self._hits)
        if not len(missed):
            return
        self._pending.append(missed)
        self._waiting += len(missed)
        # Merging costs as much as there is to merge into: done when as much again has come.
        if self._waiting > max(1 << 16, len(self._seen)):
            self._merge()

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids looked up, int64 rising, and how often; those before a refresh count half."""
        self._merge()
        return self._seen, self._counts

    def refresh(
        self, cores: list[torch.Tensor], optimizer: torch.optim.Optimizer | None = None
    ) -> torch.Tensor:
        """Cache the ids that were looked up most; the rows that changed hands, int64.

        Cached ids stay unless others have been looked up a quarter more often. With several
        processes the counts of all are taken together, so that all cache the same.

        Args:
            cores: of the train, changed in place by what rows that leave have learned.
            optimizer: forgets what it remembers of the rows that changed hands.
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
        self._leave_to_the_first()
        return free

    def _hottest(
        self, seen: torch.Tensor, counts: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """By count, a quarter more for those that are cached; of equals the lower ids."""
        score = counts * (4 + torch.isin(seen, before).long())
        order = score.sort(descending=True, stable=True).indices
        kept = seen[order[: len(self.weight)]]
        # Cached ids that nobody asked for stay while there is room.
        idle = before[(before >= 0) & ~torch.isin(before, seen)]
        return torch.cat([kept, idle[: len(self.weight) - len(kept)]])

    def _absorb(
        self,
        cores: list[torch.Tensor],
        before: torch.Tensor,
        leaving: torch.Tensor,
        counted: tuple[torch.Tensor, torch.Tensor],
        others: torch.Tensor,
    ) -> None:
        """Refit the last core to the rows that leave, and to the others counted as they are."""
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
        a_call = sum(lookups) / max(sum(calls), 1)
        wanted = _LOOKUPS_A_ROW * len(self.weight)
        self._calls_until_due = max(1, math.ceil(wanted / max(a_call, 1)))

    def _leave_to_the_first(self) -> None:
        """What all processes counted together is kept by one, lest it is added up once for each."""
        if _processes() > 1 and torch.distributed.get_rank():
            self._seen, self._counts = self._seen[:0], self._counts[:0]

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """The counts; saved with the rows."""
        seen, counts = self.counts()
        since = torch.tensor(self._since)
        return {"seen": seen, "counts": counts, "since": since, "gain": self.gain}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Counts that were saved."""
        self._pending, self._waiting = [], 0
        self._hits.zero_()
        self._seen, self._counts = state["seen"], state["counts"]
        self._since = int(state["since"])
        if "gain" in state:  # else it was saved when gradients were as they came
            self.gain.copy_(state["gain"])
        self._calls, self._calls_until_due = 0, 1
        self._leave_to_the_first()

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, policy={self.policy!r}"


def cache_bytes(rows: int, dim: int, item_bytes: int) -> int:
    """Of so many cached rows: their numbers and gains, and the table that finds them."""
    return rows * (dim + 1) * item_bytes + _capacity(rows) * 2 * torch.int64.itemsize


def _processes() -> int:
    """That train together."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def _capacity(rows: int) -> int:
    """Places of the table: at most half of them are taken."""
    return 1 << (2 * rows - 1).bit_length()


def _rows(cores: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Rows of the train to the bit as they are looked up."""
    rows = math.prod(core.shape[0] for core in cores)
    return door.look_up(cores, None, None, ids, None, None, rows, -1, len(ids), 0)


class _Gained(torch.autograd.Function):
    """Rows [n, dim] as they are; their gradient times a factor each, [n]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gain)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gain,) = ctx.saved_tensors
        return gradient * gain[:, None], None


def _gains(cores: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """How much further a step of gradient descent moves rows of the train, float [ids].

    The mean over a row's numbers of the squares of their derivatives by all slices: for each slice
    its columns, times the squares of what stands left of it, and of what stands right. 1 at least.
    """
    dim = math.prod(core.shape[2] for core in cores)
    gains = [torch.ones(0, device=ids.device, dtype=cores[0].dtype)]
    for part in ids.split(_GAINS_AT_ONCE):
        slices: list[torch.Tensor] = []
        left_over = part
        for core in reversed(cores):
            slices.insert(0, core[left_over % core.shape[0]])
            left_over = left_over // core.shape[0]
        squares = torch.zeros(len(part), device=ids.device, dtype=cores[0].dtype)
        left = one = slices[0].new_ones(len(part), 1, 1)
        for place, current in enumerate(slices):
            right = one
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
    """A table of hot rows in which a search from `start` on, one place after the other, ends."""
    table = torch.full((capacity, 2), -1, dtype=torch.int64)
    rows = torch.nonzero(ids >= 0).flatten()
    place = reference.start(ids[rows], capacity)
    while len(rows):
        # Of those that want the same free place the last one gets it.
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
