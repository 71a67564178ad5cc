"""The interface of engines: what starts host processes and carries messages to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.errors import ChildError, UnknownNameError
from slipstream.ranks.members import Frame

_ENGINES = ("local", "monarch", "ray", "sim")


class Engine(Protocol):
    """Starts hosts, and exchanges frames with their `HostRuntime`.

    Attributes:
        name: as on the command line.
    """

    name: str

    def start(self, hosts: Sequence[int]) -> None:
        """Start hosts with these numbers.

        Raises:
            SlipstreamError: a host cannot be started.
        """

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send to a host, in order; returns at once. Failures arrive through `gather`."""

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        """Return what hosts sent, waiting for the first frame; an error if a host has ended."""

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        """End hosts; by default all, and everything that the engine started."""


def engine_by_name(name: str) -> Engine:
    """Return the engine called `name`, not started.

    Raises:
        UnknownNameError: no engine has this name.
        MissingExtraError: the engine's package is not installed.
    """
    if name == "local":
        from slipstream.engines.controller.local import LocalEngine

        return LocalEngine()
    if name == "ray":
        from slipstream.engines.controller.ray_engine import RayEngine

        return RayEngine()
    if name == "monarch":
        from slipstream.engines.controller.monarch_engine import MonarchEngine

        return MonarchEngine()
    if name == "sim":
        from slipstream.engines.controller.simulating import SimEngine

        return SimEngine()
    raise UnknownNameError("engine", name, _ENGINES)
