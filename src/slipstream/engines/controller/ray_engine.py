"""Hosts as Ray actors on this machine, in Ray that runs already or is started here."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engines.controller.host import HostRuntime
from slipstream.engines.trials.ray_executor import end_processes, ray_module, start_ray
from slipstream.errors import ChildError
from slipstream.files import temporary_folder
from slipstream.ranks.members import Frame, drained


class RayEngine:
    """Hosts are actors that need no CPU of Ray's; they meet through files of this machine."""

    name = "ray"

    def __init__(self) -> None:
        self._ray = ray_module()
        self._stack = contextlib.ExitStack()
        self._folder = str(self._stack.enter_context(temporary_folder("control")))
        self._actors: dict[int, Any] = {}
        self._events: dict[Any, int] = {}
        # Calls whose failure is that of the actor, and arrives through its events.
        self._last: dict[int, Any] = {}
        self._processes: list[Any] = []
        self._own = not self._ray.is_initialized()

    def start(self, hosts: Sequence[int]) -> None:
        if not self._ray.is_initialized():
            self._processes = start_ray(self._ray, len(hosts), None)
        kind = self._ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"events": 1})
        for host in hosts:
            self._actors[host] = kind(_HostActor).remote(host, self._folder)
            self._listen(host)

    def _listen(self, host: int) -> None:
        events = self._actors[host].events.options(concurrency_group="events")
        self._events[events.remote()] = host

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        if (actor := self._actors.get(host)) is not None:
            self._last[host] = actor.post.remote(dict(message), payload)

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        found: list[tuple[int, Frame | ChildError]] = []
        waiting = list(self._events)
        ended, _ = self._ray.wait(waiting, num_returns=1, timeout=timeout_s) if waiting else ([], 0)
        for reference in ended:
            host = self._events.pop(reference)
            try:
                found += [(host, (message, data)) for message, data in self._ray.get(reference)]
                self._listen(host)
            except self._ray.exceptions.RayError as error:
                if self._actors.pop(host, None) is not None:
                    found.append((host, ChildError(f"its actor ended: {str(error).strip()}")))
        return found

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        for host in list(self._actors) if hosts is None else hosts:
            if (actor := self._actors.pop(host, None)) is not None:
                self._ray.kill(actor)
        if hosts is None:
            if self._own:
                self._ray.shutdown()
                end_processes(self._processes)
            self._stack.close()


class _HostActor:
    """A host in Ray: `post` runs in order in one thread, `events` in another."""

    def __init__(self, host: int, folder: str) -> None:
        self._waiting: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._runtime = HostRuntime(
            host, folder, lambda message, payload: self._waiting.put((message, payload))
        )

    def post(self, message: dict[str, Any], payload: bytes) -> None:
        self._runtime.post(message, payload)

    def events(self) -> list[Frame]:
        """Return all events, waiting for the first."""
        return drained(self._waiting, None)
