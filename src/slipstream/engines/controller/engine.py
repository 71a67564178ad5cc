"""Engines: what starts host processes and carries messages to them."""

from __future__ import annotations

import abc
import contextlib
import importlib
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import ChildError, UnknownNameError
from slipstream.files import temporary_folder
from slipstream.ranks.members import Frame, drained

_ENGINES = {
    "local": "local:LocalEngine", "monarch": "monarch_engine:MonarchEngine",
    "ray": "ray_engine:RayEngine", "sim": "simulating:SimEngine",
}  # fmt: skip


class Engine(abc.ABC):
    """Starts hosts, and exchanges frames with their `HostRuntime`."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = str(self._stack.enter_context(temporary_folder("control")))
        self._events: queue.SimpleQueue[tuple[int, Frame | ChildError]] = queue.SimpleQueue()

    @abc.abstractmethod
    def start(self, hosts: Sequence[int]) -> None:
        """Start hosts with these numbers; returns once they run.

        Raises:
            SlipstreamError: a host cannot be started.
        """

    @abc.abstractmethod
    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send to a host, in order; returns at once. Failures arrive through `gather`."""

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        """Return what hosts sent, waiting for the first frame; an error if a host has ended."""
        return drained(self._events, timeout_s)

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        """End hosts; by default all, and everything that the engine started."""
        if hosts is None:
            self._stack.close()


def engine_by_name(name: str) -> Engine:
    """Return the engine called `name`, not started.

    Raises:
        UnknownNameError: no engine has this name.
        MissingExtraError: the engine's package is not installed.
    """
    if name not in _ENGINES:
        raise UnknownNameError("engine", name, tuple(_ENGINES))
    module, kind = _ENGINES[name].split(":")
    engine: Engine = getattr(importlib.import_module(f"{__package__}.{module}"), kind)()
    return engine
