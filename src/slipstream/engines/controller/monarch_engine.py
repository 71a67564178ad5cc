"""Hosts as Monarch actors on this machine, one process each."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engines.controller.host import HostRuntime
from slipstream.errors import ChildError, MissingExtraError
from slipstream.files import temporary_folder
from slipstream.ranks.members import Frame, drained


class MonarchEngine:
    """Hosts are actors in processes of `this_host`; they meet through files of this machine."""

    name = "monarch"

    def __init__(self) -> None:
        try:
            import monarch.actor
        except ImportError as error:
            raise MissingExtraError("the engine monarch", "torchmonarch", "monarch") from error
        self._monarch: Any = monarch.actor
        self._stack = contextlib.ExitStack()
        self._folder = str(self._stack.enter_context(temporary_folder("control")))
        self._hosts: dict[int, Any] = {}
        self._procs: dict[int, Any] = {}
        self._events: queue.SimpleQueue[tuple[int, Frame | ChildError]] = queue.SimpleQueue()
        # Monarch's default ends this process when an actor dies.
        self._before = monarch.actor.unhandled_fault_hook
        monarch.actor.unhandled_fault_hook = self._note_fault

    def start(self, hosts: Sequence[int]) -> None:
        kind = actor_kind(self._monarch)
        begun = []
        for host in hosts:
            self._procs[host] = self._monarch.this_host().spawn_procs(
                per_host={"procs": 1}, name=f"slipstream_host{host}"
            )
            actor = self._procs[host].spawn(f"slipstream_host{host}", kind)
            port, receiver = self._monarch.Channel.open()
            begun.append(actor.begin.call_one(host, self._folder, port))
            self._hosts[host] = actor
            threading.Thread(
                target=self._receive, args=(host, actor, receiver), daemon=True
            ).start()
        for answer in begun:
            answer.get()

    def _receive(self, host: int, actor: Any, receiver: Any) -> None:
        with contextlib.suppress(Exception):
            while self._hosts.get(host) is actor:
                self._events.put((host, receiver.recv().get()))

    def _note_fault(self, failure: Any) -> None:
        text = str(failure)
        for host in list(self._hosts):
            if f"slipstream_host{host}" in text:
                self._events.put((host, ChildError(f"its actor ended: {text.splitlines()[0]}")))

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        if (actor := self._hosts.get(host)) is not None:
            actor.post.broadcast(dict(message), payload)

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        return drained(self._events, timeout_s)

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        for host in list(self._hosts) if hosts is None else hosts:
            self._hosts.pop(host, None)
            if (procs := self._procs.pop(host, None)) is not None:
                with contextlib.suppress(Exception):
                    procs.stop().get(timeout=10.0)
        if hosts is None:
            self._monarch.unhandled_fault_hook = self._before
            self._stack.close()


def actor_kind(monarch: Any) -> Any:
    """Return the actor class of a host, whose base exists only where Monarch is installed."""

    class HostActor(monarch.Actor):  # type: ignore[misc]
        @monarch.endpoint  # type: ignore[untyped-decorator]
        def begin(self, host: int, folder: str, port: Any) -> None:
            self._runtime = HostRuntime(
                host, folder, lambda message, payload: port.send((message, payload))
            )

        @monarch.endpoint  # type: ignore[untyped-decorator]
        def post(self, message: dict[str, Any], payload: bytes) -> None:
            self._runtime.post(message, payload)

    return HostActor
