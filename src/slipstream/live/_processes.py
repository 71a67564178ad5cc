"""The processes of a session: those of the analysis that runs, and the desk that answers."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.child import Child, end_group, started_by
from slipstream.live._zygote import Zygote

# Simulating every technique may micro-benchmark for long; silence of this length is a hang.
DESK_TIMEOUT_S = 600.0


class Processes:
    """Starts processes, and ends them. Thread-safe.

    Args:
        zygote: what they are forked from; None to start each afresh.
    """

    def __init__(self, zygote: Zygote | None) -> None:
        self._zygote = zygote
        self._lock, self._desk_lock = threading.Lock(), threading.Lock()
        self._running: list[Any] = []
        self._desk: tuple[Path | None, Child] | None = None

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

    def ask(self, graph: Path | None, function: str, **arguments: Any) -> Any:
        """``module:function(**arguments)`` in the process that has `graph` loaded, one at a time.

        There is one for the recordings of an analysis, so that it never grows.

        Raises:
            SlipstreamError: what the function raised.
        """
        folder = graph.parent if graph is not None else None
        with self._desk_lock:
            if self._desk is None or self._desk[0] != folder:
                self._leave_desk()
                with started_by(self._fork):
                    self._desk = folder, Child("simulating")
            return self._desk[1].call(function, timeout_s=DESK_TIMEOUT_S, **arguments)

    def interrupt(self) -> None:
        """End what runs now, and what was asked of the desk."""
        self.end_running()
        desk = self._desk
        if desk is not None:
            desk[1].kill()

    def close(self) -> None:
        """End the desk; `interrupt` has come before."""
        with self._desk_lock:
            self._leave_desk()

    def _fork(self, command: Sequence[str], **options: Any) -> Any:
        if self._zygote is None:
            return subprocess.Popen(command, **options)
        return self._zygote.start(command, **options)

    def _leave_desk(self) -> None:
        if self._desk is not None:
            desk, self._desk = self._desk[1], None
            desk.kill()
            desk.close()
