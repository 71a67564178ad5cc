"""Hosts as Ray actors on this machine, in Ray that runs already or is started here."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from slipstream.engines.controller.actors import ActorEngine
from slipstream.engines.controller.host import HostRuntime
from slipstream.engines.trials.ray_executor import end_processes, ray_module, start_ray
from slipstream.ranks.members import Frame, drained


class RayEngine(ActorEngine):
    """Hosts are actors that need no CPU of Ray's; they meet through files of this machine."""

    def __init__(self) -> None:
        self._ray = ray_module()
        super().__init__()

    def start(self, hosts: Sequence[int]) -> None:
        if not self._ray.is_initialized():
            # After Ray has shut down, which takes longer without its processes.
            self._stack.callback(end_processes, start_ray(self._ray, len(hosts), None))
            self._stack.callback(self._ray.shutdown)
        super().start(hosts)

    def _spawn(self, host: int) -> Any:
        kind = self._ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"events": 1})
        return kind(_HostActor).remote(host, self._folder)

    def _await(self, actor: Any) -> None:
        self._ray.get(actor.__ray_ready__.remote())

    def _post(self, actor: Any, message: dict[str, Any], payload: bytes) -> None:
        actor.post.remote(message, payload)

    def _receive(self, actor: Any) -> list[Frame]:
        events = actor.events.options(concurrency_group="events")
        frames: list[Frame] = self._ray.get(events.remote())
        return frames

    def _end(self, actors: Sequence[Any]) -> None:
        for actor in actors:
            self._ray.kill(actor)


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
