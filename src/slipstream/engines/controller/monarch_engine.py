"""Hosts as Monarch actors on this machine, one process each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engines.controller.actors import ActorEngine
from slipstream.engines.controller.host import HostRuntime
from slipstream.errors import MissingExtraError
from slipstream.ranks.members import Frame

_NAME, _STOP_S = "slipstream_host{}", 10.0


@dataclass(eq=False)
class _Host:
    process: Any
    actor: Any
    begun: Any
    receiver: Any


class MonarchEngine(ActorEngine):
    """Hosts are actors in processes of `this_host`; they meet through files of this machine."""

    def __init__(self) -> None:
        try:
            import monarch.actor
        except ImportError as error:
            raise MissingExtraError("the engine monarch", "torchmonarch", "monarch") from error
        super().__init__()
        self._monarch: Any = monarch.actor
        # Monarch's default ends this process when an actor dies.
        self._stack.callback(
            setattr, monarch.actor, "unhandled_fault_hook", monarch.actor.unhandled_fault_hook
        )
        monarch.actor.unhandled_fault_hook = self._note_fault

    def _spawn(self, host: int) -> _Host:
        name = _NAME.format(host)
        process = self._monarch.this_host().spawn_procs(per_host={"procs": 1}, name=name)
        actor = process.spawn(name, actor_kind(self._monarch))
        port, receiver = self._monarch.Channel.open()
        begun = actor.begin.call_one(host, self._folder, port)
        return _Host(process, actor, begun, receiver)

    def _await(self, actor: _Host) -> None:
        actor.begun.get()

    def _post(self, actor: _Host, message: dict[str, Any], payload: bytes) -> None:
        actor.actor.post.broadcast(message, payload)

    def _receive(self, actor: _Host) -> list[Frame]:
        return [actor.receiver.recv().get()]

    def _note_fault(self, failure: Any) -> None:
        text = str(failure)
        for host, actor in list(self._actors.items()):
            if f"mesh_name={_NAME.format(host)}-" in text:
                self._lose(host, actor, text.splitlines()[-1].removesuffix(")"))

    def _end(self, actors: Sequence[_Host]) -> None:
        for answer in [actor.process.stop() for actor in actors]:
            with contextlib.suppress(Exception):
                answer.get(timeout=_STOP_S)


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
