"""Functions of a bench that run on every rank, over shaped links or in this machine's memory.

    def losses(steps: int) -> list[float]: ...  # of a module; arguments and results are JSON

    with Netlab(4, 60 * MBIT) as network:
        results = on_ranks(network, losses, steps=50)
    results = on_ranks(4, losses, steps=50)

Comparisons are arms of the harness, which all ranks call together:

    def sums(numbers: int) -> dict[str, Turn]: ...  # built on every rank

    with arms_on_ranks(4, sums, numbers=1 << 20) as arms:
        runs = paired(arms, clock="wall")

Every rank has joined torch's default process group, and computes on one thread.
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
"""Bytes per second of a link of 1 Mbit/s."""
SENT = "sent"
"""Mean bytes that left a rank's interface in a call: a metric of samples."""
_LIMIT_S = 3600.0
_NICE = -20
Where = Netlab | int
"""One rank on each host of a lab, or this many ranks in this machine's memory."""


def on_ranks(
    where: Where,
    function: Callable[..., Any],
    *,
    limit_s: float = _LIMIT_S,
    timeout_s: float = RANK_TIMEOUT_S,
    **arguments: Any,
) -> list[Any]:
    """Return the result of ``function(**arguments)`` on every rank.

    Args:
        function: a function of a module; arguments and result are JSON.
        limit_s: time limit of the whole call.
        timeout_s: time limit of each communication.

    Raises:
        ClusterError: a rank failed, or all took longer than `limit_s`; no process remains.
    """
    with _ranks(where, limit_s, timeout_s) as call:
        return call(_path(function), arguments)


@dataclass(frozen=True)
class Turn:
    """Work of a rank in one call of an arm.

    Attributes:
        call: timed from when all ranks begin until the last one ends.
        before: called before `call`, not timed.
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
    """Return arms by name, in the order in which ``build(**arguments)`` creates them on every rank.

    A sample has the time of the slowest rank, and `SENT`.

    Raises:
        ClusterError: a rank failed, or all took longer than `limit_s` for one call.
    """
    with _ranks(where, limit_s, timeout_s) as call:
        request = {"build": _path(build), "arguments": arguments}
        names = call(_path(build_turns), request)[0]
        yield {name: _RanksArm(name, call) for name in names}


class _RanksArm(Arm):
    """An arm that all ranks call together."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(name)
        self._call = call

    def sample(self, inner: int, timeout_s: float | None) -> dict[str, float]:
        """Make one call, whatever `inner` is."""
        results = self._call(_path(take_turn), {"name": self.name})
        sent = sum(result["sent"] for result in results) / len(results)
        return {"wall": max(result["wall_ns"] for result in results), SENT: sent}


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
    """Give this process and its children scheduling priority, if permitted."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, _NICE))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


# The rest runs in the process of a rank.

_turns: dict[str, Turn] = {}


def build_turns(build: str, arguments: Mapping[str, Any]) -> list[str]:
    """Create the arms of this rank and return their names."""
    import importlib

    module, _, function = build.partition(":")
    _turns.update(getattr(importlib.import_module(module), function)(**arguments))
    return list(_turns)


def take_turn(name: str) -> dict[str, int]:
    """Call an arm; return its nanoseconds on this rank, and the bytes that left its interface."""
    import torch.distributed as dist

    turn = _turns[name]
    turn.before()
    wire = own_interface()
    dist.barrier()
    began = time.perf_counter_ns()
    turn.call()
    wall_ns = time.perf_counter_ns() - began
    # Other ranks may still receive data of this rank.
    dist.barrier()
    return {"wall_ns": wall_ns, "sent": wire.sent_bytes}


def own_interface() -> Interface:
    """Return a counter of traffic over the calling rank's interface from now on."""
    return Interface(os.environ["GLOO_SOCKET_IFNAME"])
