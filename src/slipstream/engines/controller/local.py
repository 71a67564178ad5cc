"""Hosts as child processes of this one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engines.controller.host import HostRuntime
from slipstream.errors import ChildError
from slipstream.files import temporary_folder
from slipstream.ranks.launch import count_niceness_everywhere
from slipstream.ranks.members import Connection, Frame, Members


class LocalEngine:
    """Hosts are processes of this machine; each computes on one thread."""

    name = "local"

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = str(self._stack.enter_context(temporary_folder("control")))
        self.members = Members("host", f"{__name__}:serve", {"OMP_NUM_THREADS": "1"})
        self._stack.callback(self.members.stop)

    def start(self, hosts: Sequence[int]) -> None:
        self.members.start({host: {"folder": self._folder} for host in hosts})

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        self.members.send(host, message, payload)

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        return self.members.gather(timeout_s)

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        if hosts is None:
            self._stack.close()
        else:
            self.members.stop(hosts)


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
