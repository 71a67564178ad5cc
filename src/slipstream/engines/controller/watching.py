"""Detection of hosts that do not answer, and of hosts that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

ANSWER_S = 30.0
"""Time after which a host that does not answer counts as hanging."""


class HostWatch:
    """The latest positions of hosts, from their answers.

    Args:
        stall_s: time without progress after which hosts that wait for each other are deadlocked.
        describe: returns the name of a launch's program.
    """

    def __init__(self, stall_s: float, describe: Callable[[int], str]) -> None:
        self._stall_s, self._describe = stall_s, describe
        self._watched: Collection[int] = ()
        self._asked: dict[int, float] = {}
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}

    def ask(self, hosts: Collection[int], now: float) -> list[int]:
        """Return the hosts to ask; those that are not listed are no longer watched."""
        self._watched = hosts
        self._seen = {host: seen for host, seen in self._seen.items() if host in hosts}
        waiting = {host: since for host, since in self._asked.items() if host in hosts}
        self._asked = dict.fromkeys(hosts, now) | waiting
        return [host for host in hosts if host not in waiting]

    def answer(self, host: int, message: dict[str, Any], now: float) -> None:
        """Note an answer; an equal one means that the host has not made progress."""
        self._asked.pop(host, None)
        before = self._seen.get(host)
        same = before is not None and before[0] == message
        self._seen[host] = message, before[1] if before is not None and same else now

    def stuck(self, now: float) -> Iterator[tuple[list[int], str]]:
        """Yield hosts that will not continue, and the reason."""
        for host, since in self._asked.items():
            if now - since > ANSWER_S:
                yield [host], f"it did not answer for {ANSWER_S:g} s"
        waits = {
            host: message["waits_for"] for host, (message, since) in self._seen.items()
            if message["waits_for"] is not None and now - since > self._stall_s
        }  # fmt: skip
        for first in waits:
            chain = [first]
            while (after := waits[chain[-1]]) in waits and after not in chain:
                chain.append(after)
            if after in chain:
                cycle = chain[chain.index(after) :]
                yield cycle, "a deadlock: " + "; ".join(map(self._wait_of, cycle))
                return
            if after not in self._watched:
                yield chain[-1:], f"{self._wait_of(chain[-1])}, which runs nothing"
                return

    def _wait_of(self, host: int) -> str:
        message, _ = self._seen[host]
        launch, node = message["at"]
        return (
            f"host {host} waits for host {message['waits_for']} in node {node} of launch {launch} "
            f"of '{self._describe(launch)}'"
        )
