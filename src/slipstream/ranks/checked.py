"""The processes that call a collective of ours: a group with limits, and what they agree on first.

A rank that calls with another shape, dtype or settings, or another collective, would send more than
the others have room for, and gloo ends a process that is sent too much. So everybody first says
what it is about to do; who differs is named on all ranks, and nothing has been sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slipstream.errors import CommunicationError, InvalidArgumentError
from slipstream.ranks.group import PATIENCE_S, TIMEOUT_S, Ranks, need_processes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What can be exchanged."""
_SAID = ("collective", "dtype", "settings", "shape", "length")
_T = TypeVar("_T")


class CheckedGroup:
    """Processes that communicate by messages; a failure is named on all of them.

    Args:
        group: whose ranks; None: all. A group of gloo is made beside it.
        timeout_s: how long a rank waits for the others in one communication.
        patience_s: how long, after a failure, all are given to say that they live.
        name: as of `Ranks`.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: a time that nobody can wait.
        CommunicationError: the ranks could not be connected.
    """

    def __init__(
        self, group: Any = None, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S,
        name: str = "collectives",
    ) -> None:  # fmt: skip
        need_processes(name)
        self.ranks = Ranks(group, timeout_s, patience_s, name)
        self.wire = self.ranks.wire

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
        if self.wire.size == 1:
            return [ours.tolist()]
        rows = torch.empty((self.wire.size, len(ours)), dtype=torch.int64)
        self.run(what, lambda: dist.all_gather(list(rows), ours, group=self.wire.group))
        found: list[list[int]] = rows.tolist()
        _need_equal(found, (0, 1, 2))
        return found

    def run(self, what: str, work: Callable[[], _T]) -> _T:
        """What `work`, which communicates, returns.

        Raises:
            CommunicationError: a rank ended, hung, or does something else.
        """
        with self.ranks.named_errors(what):
            return work()


_groups: dict[tuple[int, ...], tuple[Any, CheckedGroup]] = {}


def checked_group_of(group: Any) -> CheckedGroup:
    """The group that functions use for a group; made at its first use, by all its ranks."""
    need_processes("collectives")
    parent = group if group is not None else dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(parent))
    known = _groups.get(members)
    if known is None or known[0] is not parent:
        known = _groups[members] = (parent, CheckedGroup(parent))
    return known[1]


def need_dense(tensor: Any, argument: str = "tensor") -> torch.Tensor:
    """`tensor`, if its numbers can be exchanged.

    Raises:
        InvalidArgumentError: it is none, or not dense, floating and on a processor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(argument, f"is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.device.type != "cpu":
        raise InvalidArgumentError(
            argument, f"it is {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            remedy="dense float32, float64, float16 or bfloat16 on a processor",
        )  # fmt: skip
    return tensor


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
