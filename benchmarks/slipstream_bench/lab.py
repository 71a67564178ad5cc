"""Ranks of a bench: a function of it on every rank, on shaped cables or in this machine's memory.

    def sums(numbers: int) -> list[float]: ...  # in a module, on JSON

    with Netlab(4, 60 * MBIT) as cables:
        answers = on_ranks(cables, sums, numbers=1 << 20)
    answers = on_ranks(4, sums, numbers=1 << 20)

A function finds torch's default process group joined, and computes on one thread. What is compared
takes turns within one call, so that whatever else the machine does happens to all of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.measure.wire import Interface
from slipstream.ranks import Netlab
from slipstream.ranks.launch import RANK_TIMEOUT_S, Host, ask

MBIT = 1e6 / 8
"""Bytes a second of a cable of 1 Mbit/s."""
_LIMIT_S = 3600.0
_NICE = -20


def on_ranks(
    where: Netlab | int,
    function: Callable[..., Any],
    *,
    limit_s: float = _LIMIT_S,
    timeout_s: float = RANK_TIMEOUT_S,
    **arguments: Any,
) -> list[Any]:
    """What ``function(**arguments)`` answers on every rank.

    Args:
        where: one rank on each host of a lab; or as many ranks in this machine's memory.
        function: of a module; arguments and answer are JSON.
        limit_s: of all of it.
        timeout_s: of each communication.

    Raises:
        ClusterError: one failed, or all took longer than `limit_s`; none is left behind.
    """
    hosts = [Host()] * where if isinstance(where, int) else where.ranks()
    with first_served():
        return ask(
            hosts, f"{function.__module__}:{function.__qualname__}", arguments, name="the bench",
            limit_s=limit_s, timeout_s=timeout_s,
        )  # fmt: skip


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


def own_interface() -> Interface:
    """Counts what goes over the calling rank's interface from now on."""
    return Interface(os.environ["GLOO_SOCKET_IFNAME"])
