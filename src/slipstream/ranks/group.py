"""Process groups of our own, with a limit on every wait: who fails is named on all that live.

A rank that calls with another shape, dtype or settings, or another collective, would send more than
the others have room for, and gloo ends a process that is sent too much. So everybody first says
what it is about to do; who differs is named on all ranks, and nothing has been sent.

Collectives are begun in an order that is the same on all ranks: those of buckets by one thread,
bucket after bucket. Were a bucket's second collective started when its first is done, as a future's
callback, it could overtake the next bucket's first on one rank and not on another, and the two
would be added up.
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
"""How long a rank waits for the others in one communication, unless told otherwise."""
PATIENCE_S = 5.0
"""How long, after a failure, all are given to say that they live, unless told otherwise."""
_POLL_S = 0.05
# In the place of a group that was left; None would be that of all processes.
_LEFT = object()
# How often groups of a name were made of the same ranks: as often on each of them.
_made: dict[tuple[str, str], int] = {}
_SAID = ("collective", "dtype", "settings", "shape", "length")
_T = TypeVar("_T")


def need_processes(name: str) -> None:
    """Raise a `UsageError` unless a process group is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{name} needs a process group",
            remedy="torch.distributed.init_process_group('gloo'), in processes of torchrun",
        )


class ProcessGroup:
    """Processes that communicate: a group of gloo beside `parent`, with a limit on every wait.

    Attributes:
        group: torch's.
        wire: the group, for messages from one to another.

    Args:
        parent: whose ranks; None: all.
        timeout_s: after which a collective that somebody has not joined fails.
        patience_s: how long, after a failure, everybody is given to say that they live.
        name: of what they are for. There may be several groups of one name.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: a time that nobody can wait.
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
                    argument, f"{value!r} is not a time to wait", remedy="seconds, as 25.0"
                )
        members = dist.get_process_group_ranks(parent)
        self.rank, self.size = dist.get_rank(parent), len(members)
        self.patience_s = patience_s
        self._members = members
        together = "-".join(map(str, members))
        number = _made[name, together] = _made.get((name, together), 0) + 1
        # In the store: what members of another group have said there is not for this one.
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
                remedy="do all of them make it? a longer timeout_s where they start slowly",
            ) from error

    def _have_as_many_groups(self, limit: timedelta) -> None:
        """torch names a group by how many its process has: one that some ranks made without the
        others would have them wait for each other under two names."""
        known = dist.distributed_c10d._world.pg_names
        keys = [f"slipstream/{self._name}/groups/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], str(len(known)))
        self._store.wait(keys, limit)
        most = max(int(self._store.get(key)) for key in keys)
        while len(known) < most:
            _group_alone()

    def need_alive(self) -> None:
        """Raise what an earlier exchange failed with: the ranks cannot go on."""
        if self._failed is not None:
            raise self._failed

    @contextlib.contextmanager
    def named_errors(self, where: str) -> Iterator[None]:
        """What is communicated inside fails as what it is.

        Raises:
            CommunicationError: a communication failed; on every rank that lives, within the
                time-out and the patience, naming those that do not.
        """
        self.need_alive()
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error, where) from error

    def run(self, what: str, work: Callable[[], _T]) -> _T:
        """What `work`, which communicates, returns.

        Raises:
            CommunicationError: a rank ended, hung, or does something else.
        """
        with self.named_errors(what):
            return work()

    def exchange(self, exchange: Exchange, where: str) -> bool:
        """Communicate all that the exchange asks for; what it returns.

        Raises:
            CommunicationError: as of `named_errors`.
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
            # gloo's own takes half as long again between two ranks: it asks for every half piece
            # behind the one that it sends.
            everybody = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype)
            everybody[self.rank] = tensor
            gather(Line.of(self.wire), list(everybody), "auto")
            return everybody
        result: torch.Tensor = tensor
        if self.size == 2 and tensor.layout is torch.strided:
            # As many bytes as around gloo's ring, in a quarter of the messages: beside a backward
            # pass on every core, each of them waits for its turn. A sum of two has one order.
            theirs = self.wire.buffer(tensor.numel(), tensor.dtype).view(tensor.shape)
            self.wire.swap({1 - self.rank: tensor}, {1 - self.rank: theirs})
            result += theirs
        else:
            dist.all_reduce(tensor, group=self.group)
        return result

    def explain(self, error: Exception, where: str) -> CommunicationError:
        """Who is the cause, as far as the living can tell each other through the store.

        Everybody who fails says so and leaves the group, so that whoever waits for them fails,
        too, and says so. Whoever says nothing is the cause.
        """
        if self._failed is not None:
            return self._failed
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        # What the failed frames hold, messages under way among it, keeps connections open.
        traceback.clear_frames(error.__traceback__)
        silent = self._roll_call(text)
        if silent is None:
            failure = CommunicationError(
                f"the exchange of gradients failed, and the store of the process group with it: "
                f"the process that holds it has ended (rank 0, or the launcher); {text}",
                ranks=(0,) if self.rank else (), where=where,
            )  # fmt: skip
        elif silent:
            named = ", ".join(map(str, silent))
            plural = "s" if len(silent) > 1 else ""
            failure = CommunicationError(
                f"rank{plural} {named} did not take part in the exchange of gradients and did not "
                f"answer for {self.patience_s:g} s: ended, stopped, or stuck; {text}",
                ranks=tuple(silent), where=where,
                remedy=f"look at the end of rank {silent[0]}'s output; resume all ranks from a "
                "checkpoint",
            )  # fmt: skip
        else:
            failure = CommunicationError(
                f"the exchange of gradients failed while all ranks live: {text}", where=where,
                remedy="do all ranks run the same model, and the same steps?",
            )  # fmt: skip
        self._failed = failure
        return failure

    def _roll_call(self, text: str) -> list[int] | None:
        """Ranks that stay silent; None where the store has gone."""
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
        """Close all connections: they are when nobody has the group any more."""
        group, parts = self.group, list(self.wire.aligned.values())
        self.group = self.wire.group = _LEFT
        self.wire.aligned.clear()
        for part in parts:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(part)
        del parts
        with contextlib.suppress(Exception):
            dist.destroy_process_group(group)
            # The next one of these ranks would have this one's name, and find the addresses of
            # connections that are closed.
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
        other = tuple(rank for rank, one in enumerate(texts) if one != texts[0])
        if other:
            named = ", ".join(map(str, other))
            raise CommunicationError(
                f"rank {named} has another {what} than rank 0: {texts[other[0]][:200]}, not "
                f"{texts[0][:200]}",
                ranks=other, remedy="start all ranks with the same script and settings",
            )  # fmt: skip

    def alike(self, what: str, tensor: torch.Tensor, settings: str = "") -> None:
        """Raise unless all ranks do `what`, with as many numbers of one shape, dtype and settings.

        Raises:
            CommunicationError: on every rank, naming those that differ from rank 0.
        """
        _need_equal(self.say(what, tensor, settings), (3, 4))

    def say(self, what: str, tensor: torch.Tensor, settings: str = "") -> list[list[int]]:
        """What every rank is about to do: collective, dtype, settings, shape, length; as numbers.

        Raises:
            CommunicationError: on every rank, where the first three differ.
        """
        ours = torch.tensor(
            [_number(what), DTYPES.index(tensor.dtype), _number(settings),
             _number(str(list(tensor.shape))), tensor.numel()]
        )  # fmt: skip
        if self.size == 1:
            return [ours.tolist()]
        rows = torch.empty((self.size, len(ours)), dtype=torch.int64)
        self.run(what, lambda: dist.all_gather(list(rows), ours, group=self.group))
        of_ranks: list[list[int]] = rows.tolist()
        _need_equal(of_ranks, (0, 1, 2))
        return of_ranks


_groups: dict[tuple[int, ...], tuple[Any, ProcessGroup]] = {}


def process_group(parent: Any) -> ProcessGroup:
    """The group that functions use beside torch's; made at its first use, by all its ranks."""
    need_processes("collectives")
    beside = parent if parent is not None else dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(beside))
    known = _groups.get(members)
    if known is None or known[0] is not beside:
        known = _groups[members] = (beside, ProcessGroup(beside))
    return known[1]


def _group_alone() -> None:
    """One group more, of this process: it counts where torch names groups by their number."""
    dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def _need_equal(rows: list[list[int]], columns: tuple[int, ...]) -> None:
    """Raise a `CommunicationError` that names the ranks whose row differs from the first."""
    for column in columns:
        other = tuple(rank for rank, row in enumerate(rows) if row[column] != rows[0][column])
        if other:
            raise CommunicationError(
                f"rank {', '.join(map(str, other))} called with another {_SAID[column]} than "
                "rank 0; nothing was exchanged",
                ranks=other, remedy="the same collective on all ranks, of tensors alike",
            )  # fmt: skip
