"""The processes of a session: those of the analysis that runs, and the desks that answer."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.child import Child, end_group, started_by
from slipstream.live._zygote import Zygote

# Simulating every technique may micro-benchmark for long; silence of this length is a hang.
DESK_TIMEOUT_S = 600.0
SIMULATING, MEASURING, EDITING = "simulating", "measuring a device", "editing"
"""Desks. Each has a process of its own: timing another device takes up to a minute, and neither a
switch nor an edit waits for that."""


class Processes:
    """Starts processes, and ends them. Thread-safe.

    Args:
        zygote: what they are forked from; None to start each afresh.
    """

    def __init__(self, zygote: Zygote | None) -> None:
        self._zygote = zygote
        self._lock = threading.Lock()
        self._running: list[Any] = []
        self._desks = {name: _Desk(name, self._fork) for name in (SIMULATING, MEASURING, EDITING)}

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """As `subprocess.Popen`; it lives no longer than to the next `end_running`."""
        process = self._fork(command, **options)
        with self._lock:
            self._running = [one for one in self._running if one.returncode is None]
            self._running.append(process)
        return process

    def end_running(self) -> None:
        """End what `start` has started."""
        with self._lock:
            running = list(self._running)
        for process in running:
            if process.returncode is None:
                end_group(process.pid)

    def ask(
        self, graph: Path | None, function: str, *, desk: str = SIMULATING, **arguments: Any
    ) -> Any:
        """``module:function(**arguments)`` at a desk, which has `graph` loaded, one at a time.

        Args:
            desk: `SIMULATING`, `MEASURING` or `EDITING`.

        Raises:
            SlipstreamError: what the function raised.
        """
        folder = graph.parent if graph is not None else None
        return self._desks[desk].ask(folder, function, arguments)

    def interrupt(self) -> None:
        """End what runs now, and what was asked of desks."""
        self.end_running()
        for desk in self._desks.values():
            desk.kill()

    def close(self) -> None:
        """End the desks; `interrupt` has come before."""
        for desk in self._desks.values():
            desk.close()

    def _fork(self, command: Sequence[str], **options: Any) -> Any:
        if self._zygote is None:
            return subprocess.Popen(command, **options)
        return self._zygote.start(command, **options)


class _Desk:
    """A process that answers one question after the other.

    There is one for the recordings of an analysis, so that it never grows.
    """

    def __init__(self, name: str, fork: Callable[..., Any]) -> None:
        self._name, self._fork = name, fork
        self._lock = threading.Lock()
        self._open: tuple[Path | None, Child] | None = None

    def ask(self, folder: Path | None, function: str, arguments: Mapping[str, Any]) -> Any:
        with self._lock:
            if self._open is None or self._open[0] != folder:
                self._leave()
                with started_by(self._fork):
                    self._open = folder, Child(self._name)
            return self._open[1].call(function, timeout_s=DESK_TIMEOUT_S, **arguments)

    def kill(self) -> None:
        # While it is asked, too.
        if (found := self._open) is not None:
            found[1].kill()

    def close(self) -> None:
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        if self._open is not None:
            child, self._open = self._open[1], None
            child.kill()
            child.close()
