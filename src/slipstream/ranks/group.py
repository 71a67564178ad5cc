"""Process groups with a time-out on every wait, whose errors name the failed ranks.

A rank that calls another collective, or passes another shape, dtype or settings, would send more
data than the others expect, and gloo aborts a process that receives too much. All ranks therefore
first announce their call; a rank that differs is named on all ranks, before any data is sent.

Collectives start in the same order on all ranks: those of buckets in one thread, bucket by bucket.
If a bucket's second collective started in the callback of its first, it could overtake the next
bucket's first on one rank but not on another, and the two would be summed.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slipstream.errors import CommunicationError, InvalidArgumentError, UsageError
from slipstream.ranks.lines import Line, gather
from slipstream.ranks.requests import Exchange, Gather
from slipstream.ranks.wire import DTYPES, Wire

TIMEOUT_S = 20.0
"""Default time-out of one communication."""
PATIENCE_S = 5.0
"""Default time, after a failure, for all ranks to report that they are alive."""
_POLL_S = 0.05
# Replaces a group that was left; None would be the default group.
_LEFT = object()
# Number of groups created by name and ranks; equal on all of these ranks.
_created: dict[tuple[str, str], int] = {}
_COLUMNS = ("collective", "dtype", "settings", "shape", "length")
_T = TypeVar("_T")


def need_processes(name: str) -> None:
    """Raise a `UsageError` unless a process group is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{name} needs a process group",
            remedy="torch.distributed.init_process_group('gloo'), in processes of torchrun",
        )


class ProcessGroup:
    """A gloo group of the ranks of `parent`, with a time-out on every wait.

    Attributes:
        group: the group of torch.
        wire: point-to-point messages within the group.

    Args:
        parent: group with the same ranks; None for the default group.
        timeout_s: time after which a collective fails that some rank has not joined.
        patience_s: time, after a failure, for all ranks to report that they are alive.
        name: purpose of the group. Several groups may have the same name.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: a time is not positive and finite.
        CommunicationError: the ranks could not be connected.
    """

    def __init__(
        self, parent: Any = None, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S,
        name: str = "collectives",
    ) -> None:  # fmt: skip
        need_processes(name)
        for argument, value in (("timeout_s", timeout_s), ("patience_s", patience_s)):
            if not isinstance(value, (int, float)) or not 0.0 < value < float("inf"):
                raise InvalidArgumentError(
                    argument,
                    f"{value!r} is not a positive time",
                    remedy="pass seconds, such as 25.0",
                )
        members = dist.get_process_group_ranks(parent)
        self.rank, self.size = dist.get_rank(parent), len(members)
        self.patience_s = patience_s
        self._members = members
        together = "-".join(map(str, members))
        number = _created[name, together] = _created.get((name, together), 0) + 1
        # Prefix of keys in the store, which other groups share.
        self._name = f"{name}{number}/{together}"
        self._store = dist.distributed_c10d._get_default_store()
        self._failed: CommunicationError | None = None
        self.group: Any = self._connected(timeout_s)
        self.wire = Wire(self.group, self.rank, self.size, timeout=timedelta(seconds=timeout_s))

    def _connected(self, timeout_s: float) -> Any:
        limit = timedelta(seconds=timeout_s)
        try:
            self._have_as_many_groups(limit)
            return dist.new_group(
                self._members, timeout=limit, backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [""]
            raise CommunicationError(
                f"the ranks {self._members} could not be connected within {timeout_s:g} s: "
                f"{lines[0]}",
                remedy="check that all ranks create the group; raise timeout_s for a slow start",
            ) from error

    def _have_as_many_groups(self, limit: timedelta) -> None:
        """Create empty groups until all ranks have the same number of groups.

        torch names a group by the number of groups in its process. Ranks with different numbers
        would wait for each other under different names.
        """
        names = dist.distributed_c10d._world.pg_names
        keys = [f"slipstream/{self._name}/groups/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], str(len(names)))
        self._store.wait(keys, limit)
        count = max(int(self._store.get(key)) for key in keys)
        while len(names) < count:
            _group_alone()

    def need_alive(self) -> None:
        """Raise the error of an earlier exchange, after which the ranks cannot continue."""
        if self._failed is not None:
            raise self._failed

    @contextlib.contextmanager
    def named_errors(self, where: str) -> Iterator[None]:
        """Convert errors of communication in the block.

        Raises:
            CommunicationError: a communication failed. Every rank that is alive raises it within
                the time-out and the patience, and names those that are not.
        """
        self.need_alive()
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error, where) from error

    def run(self, what: str, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, which communicates.

        Raises:
            CommunicationError: as for `named_errors`.
        """
        with self.named_errors(what):
            return work()

    def exchange(self, exchange: Exchange, where: str) -> bool:
        """Run all collectives that the exchange yields; return its result.

        Raises:
            CommunicationError: as for `named_errors`.
        """
        answer: torch.Tensor | None = None
        try:
            while True:
                request = exchange.send(answer)  # type: ignore[arg-type]
                with self.named_errors(where):
                    answer = self._communicate(request)
        except StopIteration as done:
            return bool(done.value)

    def _communicate(self, request: Any) -> torch.Tensor:
        tensor = request.tensor
        if isinstance(request, Gather):
            # gloo's own gather takes 50 % longer between two ranks, since it requests each half
            # piece only after sending the previous one.
            gathered = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype)
            gathered[self.rank] = tensor
            gather(Line.of(self.wire), list(gathered), "auto")
            return gathered
        result: torch.Tensor = tensor
        if self.size == 2 and tensor.layout is torch.strided:
            # Sends as many bytes as gloo's ring in a quarter of the messages, each of which waits
            # for a core during a backward pass. A sum of two terms does not depend on the order.
            received = self.wire.buffer(tensor.numel(), tensor.dtype).view(tensor.shape)
            self.wire.swap({1 - self.rank: tensor}, {1 - self.rank: received})
            result += received
        else:
            dist.all_reduce(tensor, group=self.group)
        return result

    def explain(self, error: Exception, where: str) -> CommunicationError:
        """Return an error that names the failed ranks, determined through the store.

        Every rank that fails reports it and leaves the group, so that ranks waiting for it fail and
        report too. The ranks that report nothing are the cause.
        """
        if self._failed is not None:
            return self._failed
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        # Locals of the failed frames, such as pending messages, would keep connections open.
        traceback.clear_frames(error.__traceback__)
        silent = self._roll_call(text)
        if silent is None:
            failure = CommunicationError(
                f"communication failed, and the store of the process group with it: the process "
                f"that holds it has ended (rank 0, or the launcher); {text}",
                ranks=(0,) if self.rank else (), where=where,
            )  # fmt: skip
        elif silent:
            named = ", ".join(map(str, silent))
            plural = "s" if len(silent) > 1 else ""
            failure = CommunicationError(
                f"rank{plural} {named} did not take part in a communication and did not answer for "
                f"{self.patience_s:g} s: exited, suspended, or stuck; {text}",
                ranks=tuple(silent), where=where,
                remedy=f"check the last output of rank {silent[0]}; resume all ranks from a "
                "checkpoint",
            )  # fmt: skip
        else:
            failure = CommunicationError(
                f"communication failed while all ranks are alive: {text}", where=where,
                remedy="check that all ranks run the same model and the same steps",
            )  # fmt: skip
        self._failed = failure
        return failure

    def _roll_call(self, text: str) -> list[int] | None:
        """Return the ranks that do not report; None if the store is gone."""
        key = f"slipstream/{self._name}/failed"
        try:
            self._store.set(f"{key}/{self.rank}", text[:500])
        except RuntimeError:
            return None
        self._leave()
        until = time.monotonic() + self.patience_s
        silent = [rank for rank in range(self.size) if rank != self.rank]
        try:
            while silent and time.monotonic() < until:
                silent = [rank for rank in silent if not self._store.check([f"{key}/{rank}"])]
                if silent:
                    time.sleep(_POLL_S)
        except RuntimeError:
            return None
        return silent

    def _leave(self) -> None:
        """Close all connections, which requires dropping every reference to the group."""
        group, parts = self.group, list(self.wire.aligned.values())
        self.group = self.wire.group = _LEFT
        self.wire.aligned.clear()
        for part in parts:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(part)
        del parts
        with contextlib.suppress(Exception):
            dist.destroy_process_group(group)
            # The next group of these ranks would have the same name, and find the addresses of
            # closed connections.
            _group_alone()
        del group
        gc.collect()

    def agree(self, text: str, what: str) -> None:
        """Raise unless `text` is the same on all ranks.

        Raises:
            CommunicationError: naming the ranks that differ from rank 0, on every rank.
        """
        texts: list[Any] = [None] * self.size
        with self.named_errors(what):
            dist.all_gather_object(texts, text, group=self.group)
        other = tuple(rank for rank, rank_text in enumerate(texts) if rank_text != texts[0])
        if other:
            named = ", ".join(map(str, other))
            raise CommunicationError(
                f"rank {named} has a different {what} than rank 0: {texts[other[0]][:200]}, not "
                f"{texts[0][:200]}",
                ranks=other, remedy="start all ranks with the same script and settings",
            )  # fmt: skip

    def need_same_call(self, what: str, tensor: torch.Tensor, settings: str = "") -> None:
        """Raise unless all ranks call `what` with the same shape, dtype and settings.

        Raises:
            CommunicationError: on every rank, naming those that differ from rank 0.
        """
        _need_equal(self.announce(what, tensor, settings), (3, 4))

    def announce(self, what: str, tensor: torch.Tensor, settings: str = "") -> list[list[int]]:
        """Return each rank's collective, dtype, settings, shape and length, as numbers.

        Raises:
            CommunicationError: on every rank, if one of the first three differs.
        """
        row = torch.tensor(
            [_number(what), DTYPES.index(tensor.dtype), _number(settings),
             _number(str(list(tensor.shape))), tensor.numel()]
        )  # fmt: skip
        if self.size == 1:
            return [row.tolist()]
        rows = torch.empty((self.size, len(row)), dtype=torch.int64)
        self.run(what, lambda: dist.all_gather(list(rows), row, group=self.group))
        calls: list[list[int]] = rows.tolist()
        _need_equal(calls, (0, 1, 2))
        return calls


_groups: dict[tuple[int, ...], tuple[Any, ProcessGroup]] = {}


def process_group(parent: Any) -> ProcessGroup:
    """Return our group for the ranks of `parent`; all of them create it at its first use."""
    need_processes("collectives")
    parent = parent if parent is not None else dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(parent))
    cached = _groups.get(members)
    if cached is None or cached[0] is not parent:
        cached = _groups[members] = (parent, ProcessGroup(parent))
    return cached[1]


def _group_alone() -> None:
    """Create a group of this process only, to advance the number by which torch names groups."""
    dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def _need_equal(rows: list[list[int]], columns: tuple[int, ...]) -> None:
    """Raise a `CommunicationError` that names the ranks whose row differs from the first."""
    for column in columns:
        other = tuple(rank for rank, row in enumerate(rows) if row[column] != rows[0][column])
        if other:
            raise CommunicationError(
                f"{_COLUMNS[column]} of the call on rank {', '.join(map(str, other))} differs from "
                "that on rank 0; no data was exchanged",
                ranks=other, remedy="call the same collective on all ranks, with equal tensors",
            )  # fmt: skip
