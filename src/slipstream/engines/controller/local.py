"""Hosts as child processes of this one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engines.controller.engine import Engine
from slipstream.engines.controller.host import HostRuntime
from slipstream.errors import ChildError
from slipstream.ranks.launch import count_niceness_everywhere
from slipstream.ranks.members import Connection, Frame, Members


class LocalEngine(Engine):
    """Hosts are processes of this machine; each computes on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Members("host", f"{__name__}:serve", {"OMP_NUM_THREADS": "1"})

    def start(self, hosts: Sequence[int]) -> None:
        self.members.start({host: {"folder": self._folder} for host in hosts})

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        self.members.send(host, message, payload)

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        return self.members.gather(timeout_s)

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        self.members.stop(hosts)
        super().stop(hosts)


# Runs in a host's process.


def serve(connection: Connection, number: int, folder: str) -> None:
    """Run a host until the connection ends."""

    def emit(message: Mapping[str, Any], payload: bytes) -> None:
        # Without its controller, the host ends below.
        with contextlib.suppress(OSError):
            connection.send(message, payload)

    count_niceness_everywhere()
    runtime = HostRuntime(number, folder, emit)
    with contextlib.suppress(OSError):
        while True:
            runtime.post(*connection.receive())
