"""Engines: what starts host processes and carries messages to them."""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.errors import ChildError, SlipstreamError, UnknownNameError
from slipstream.files import temporary_folder
from slipstream.ranks.members import Frame, drained

_ENGINES = {
    "local": "local:LocalEngine", "monarch": "monarch_engine:MonarchEngine",
    "ray": "ray_engine:RayEngine", "sim": "simulating:SimEngine",
}  # fmt: skip


class Engine:
    """Starts hosts, and exchanges frames with their `HostRuntime`; by default, hosts are actors."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = str(self._stack.enter_context(temporary_folder("control")))
        self._actors: dict[int, Any] = {}
        self._events: queue.SimpleQueue[tuple[int, Frame | ChildError]] = queue.SimpleQueue()

    def start(self, hosts: Sequence[int]) -> None:
        """Start hosts with these numbers; returns once they run.

        Raises:
            SlipstreamError: a host cannot be started.
        """
        for host in hosts:
            self._actors[host] = self._spawn(host)
        for host in hosts:
            actor = self._actors[host]
            try:
                self._await(actor)
            except Exception as error:
                raise SlipstreamError(f"host {host} cannot be started: {error}") from error
            threading.Thread(target=self._listen, args=(host, actor), daemon=True).start()

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send to a host, in order; returns at once. Failures arrive through `gather`."""
        if (actor := self._actors.get(host)) is not None:
            self._post(actor, dict(message), payload)

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        """Return what hosts sent, waiting for the first frame; an error if a host has ended."""
        return drained(self._events, timeout_s)

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        """End hosts; by default all, and everything that the engine started."""
        numbers = list(self._actors) if hosts is None else hosts
        self._end([actor for host in numbers if (actor := self._actors.pop(host, None))])
        if hosts is None:
            self._stack.close()

    def _listen(self, host: int, actor: Any) -> None:
        try:
            while self._actors.get(host) is actor:
                for frame in self._receive(actor):
                    self._events.put((host, frame))
        except Exception as error:
            self._lose(host, actor, str(error))

    def _lose(self, host: int, actor: Any, reason: str) -> None:
        if self._actors.get(host) is actor:
            self._events.put((host, ChildError(f"its actor ended: {reason.strip()}")))

    # An engine with actors implements these.

    def _spawn(self, host: int) -> Any:
        """Begin to start a host; return its actor."""
        raise NotImplementedError

    def _await(self, actor: Any) -> None:
        """Wait until an actor runs."""
        raise NotImplementedError

    def _post(self, actor: Any, message: dict[str, Any], payload: bytes) -> None:
        """Pass a message to an actor's host."""
        raise NotImplementedError

    def _receive(self, actor: Any) -> Iterable[Frame]:
        """Return events of an actor's host, waiting for the first."""
        raise NotImplementedError

    def _end(self, actors: Sequence[Any]) -> None:
        """End actors."""


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
