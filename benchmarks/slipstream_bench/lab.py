"""Ranks of a bench: a function of it on every rank, on shaped cables or in this machine's memory.

    def losses(steps: int) -> list[float]: ...  # in a module; arguments and answer are JSON

    with Netlab(4, 60 * MBIT) as cables:
        answers = on_ranks(cables, losses, steps=50)
    answers = on_ranks(4, losses, steps=50)

What is compared are arms of the harness, whose calls all ranks make together:

    def sums(numbers: int) -> dict[str, Turn]: ...  # built on every rank

    with arms_on_ranks(4, sums, numbers=1 << 20) as arms:
        taken = paired(arms, clock="wall")

A rank has joined torch's default process group, and computes on one thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.measure import Arm
from slipstream.measure.wire import Interface
from slipstream.ranks import Netlab
from slipstream.ranks.launch import RANK_TIMEOUT_S, Call, Host, joined

MBIT = 1e6 / 8
"""Bytes a second of a cable of 1 Mbit/s."""
SENT = "sent"
"""Bytes that left a rank's interface in a call, in the mean of all ranks: a metric of samples."""
_LIMIT_S = 3600.0
_NICE = -20
Where = Netlab | int
"""One rank on each host of a lab; or as many ranks in this machine's memory."""


def on_ranks(
    where: Where,
    function: Callable[..., Any],
    *,
    limit_s: float = _LIMIT_S,
    timeout_s: float = RANK_TIMEOUT_S,
    **arguments: Any,
) -> list[Any]:
    """What ``function(**arguments)`` answers on every rank.

    Args:
        function: of a module; arguments and answer are JSON.
        limit_s: of all of it.
        timeout_s: of each communication.

    Raises:
        ClusterError: one failed, or all took longer than `limit_s`; none is left behind.
    """
    with _ranks(where, limit_s, timeout_s) as call:
        return call(_path(function), arguments)


@dataclass(frozen=True)
class Turn:
    """What every rank does for a call of an arm.

    Attributes:
        call: this is timed, from when all ranks begin to when the last one is done.
        before: what comes first, not timed.
    """

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


@contextlib.contextmanager
def arms_on_ranks(
    where: Where,
    build: Callable[..., Mapping[str, Turn]],
    *,
    limit_s: float = _LIMIT_S,
    timeout_s: float = RANK_TIMEOUT_S,
    **arguments: Any,
) -> Iterator[dict[str, Arm]]:
    """Arms by name: what ``build(**arguments)`` makes on every rank, in its order.

    A sample has the time of the slowest rank, and `SENT`.

    Raises:
        ClusterError: a rank failed, or all took longer than `limit_s` for one call.
    """
    with _ranks(where, limit_s, timeout_s) as call:
        asked = {"build": _path(build), "arguments": arguments}
        names = call(_path(build_turns), asked)[0]
        yield {name: _RanksArm(name, call) for name in names}


class _RanksArm(Arm):
    """An arm whose calls all ranks make together."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(name)
        self._call = call

    def sample(self, inner: int, timeout_s: float | None) -> dict[str, float]:
        """One call, however many are asked for."""
        answers = self._call(_path(take_turn), {"name": self.name})
        sent = sum(one["sent"] for one in answers) / len(answers)
        return {"wall": max(one["wall_ns"] for one in answers), SENT: sent}


@contextlib.contextmanager
def _ranks(where: Where, limit_s: float, timeout_s: float) -> Iterator[Call]:
    hosts = [Host()] * where if isinstance(where, int) else where.ranks()
    with (
        first_served(),
        joined(hosts, name="the bench", limit_s=limit_s, timeout_s=timeout_s) as call,
    ):
        yield call


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


@contextlib.contextmanager
def first_served() -> Iterator[None]:
    """This process and those it starts before other programs, where that is allowed."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, _NICE))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


# What follows runs in a rank's process.

_turns: dict[str, Turn] = {}


def build_turns(build: str, arguments: Mapping[str, Any]) -> list[str]:
    """Make the arms of this rank; their names."""
    import importlib

    module, _, function = build.partition(":")
    _turns.update(getattr(importlib.import_module(module), function)(**arguments))
    return list(_turns)


def take_turn(name: str) -> dict[str, int]:
    """A call of an arm: its nanoseconds on this rank, and the bytes that left its interface."""
    import torch.distributed as dist

    turn = _turns[name]
    turn.before()
    wire = own_interface()
    dist.barrier()
    began = time.perf_counter_ns()
    turn.call()
    wall_ns = time.perf_counter_ns() - began
    # The others may still be receiving what this rank has sent.
    dist.barrier()
    return {"wall_ns": wall_ns, "sent": wire.sent_bytes}


def own_interface() -> Interface:
    """Counts what goes over the calling rank's interface from now on."""
    return Interface(os.environ["GLOO_SOCKET_IFNAME"])
