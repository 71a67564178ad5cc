"""Hosts as actors of a library."""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.engines.controller.engine import Engine
from slipstream.errors import ChildError, SlipstreamError
from slipstream.ranks.members import Frame


class ActorEngine(Engine):
    """An engine whose hosts are actors; a thread per host receives its events."""

    def __init__(self) -> None:
        super().__init__()
        self._actors: dict[int, Any] = {}

    def start(self, hosts: Sequence[int]) -> None:
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
        if (actor := self._actors.get(host)) is not None:
            self._post(actor, dict(message), payload)

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        numbers = list(self._actors) if hosts is None else hosts
        self._end([actor for host in numbers if (actor := self._actors.pop(host, None))])
        super().stop(hosts)

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

    @abc.abstractmethod
    def _spawn(self, host: int) -> Any:
        """Begin to start a host; return its actor."""

    @abc.abstractmethod
    def _await(self, actor: Any) -> None:
        """Wait until an actor runs."""

    @abc.abstractmethod
    def _post(self, actor: Any, message: dict[str, Any], payload: bytes) -> None:
        """Pass a message to an actor's host."""

    @abc.abstractmethod
    def _receive(self, actor: Any) -> Iterable[Frame]:
        """Return events of an actor's host, waiting for the first."""

    @abc.abstractmethod
    def _end(self, actors: Sequence[Any]) -> None:
        """End actors."""
