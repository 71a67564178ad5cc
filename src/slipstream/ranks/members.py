"""Member processes that exchange frames of JSON and bytes with this one, over loopback sockets.

A member is a `Child` that connects back and proves with a key that this process started it. Frames
are read as JSON and raw bytes; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from slipstream.child import Child, wait_any
from slipstream.errors import ChildError, SlipstreamError
from slipstream.loopback import HOST, listen, new_key, same_key

Frame = tuple[dict[str, Any], bytes]
T = TypeVar("T")
_SIZES = struct.Struct("<IQ")
_HELLO_BYTES = 4096
_START_S, _HELLO_S, _SEND_S, _DEATH_S = 120.0, 5.0, 15.0, 3.0


class Connection:
    """One end of a connection between two processes of this machine; sends from any thread."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lock = connected, threading.Lock()

    def send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send one frame.

        Raises:
            OSError: the other process has ended, or reads nothing.
        """
        text = json.dumps(header).encode()
        with self._lock:
            self._socket.sendall(_SIZES.pack(len(text), len(payload)) + text)
            if payload:
                self._socket.sendall(payload)

    def receive(self, max_bytes: int | None = None) -> Frame:
        """Return the next frame.

        Args:
            max_bytes: size above which a frame is refused.

        Raises:
            OSError: the connection ended, or the frame is too large.
        """
        header, payload = _SIZES.unpack(self._read(_SIZES.size))
        if max_bytes is not None and header + payload > max_bytes:
            raise ConnectionError("the frame is too large")
        return json.loads(self._read(header)), bytes(self._read(payload))

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            read = self._socket.recv_into(view[done:])
            if not read:
                raise ConnectionError("the connection ended")
            done += read
        return data

    def limit(self, timeout_s: float | None) -> None:
        """Set the time after which a send or receive fails."""
        self._socket.settimeout(timeout_s)

    def limit_sends(self, timeout_s: float) -> None:
        """Set the time after which a send fails that the other process does not read."""
        seconds = struct.pack("ll", int(timeout_s), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def close(self) -> None:
        # Unlike `close` alone, this ends a receive in another thread.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def drained(waiting: queue.SimpleQueue[T], timeout_s: float | None) -> list[T]:
    """Remove and return all items of a queue, waiting for the first; None for no time limit."""
    found: list[T] = []
    with contextlib.suppress(queue.Empty):
        found.append(waiting.get(timeout=timeout_s))
        while True:
            found.append(waiting.get_nowait())
    return found


class Members:
    """Processes, by number, that run ``serve(connection, **arguments)``.

    Args:
        name: of the group, in errors.
        serve: ``module:function`` that runs in each process.
        environment: variables of all processes.
    """

    def __init__(self, name: str, serve: str, environment: Mapping[str, str]) -> None:
        self._name, self._serve, self._environment = name, serve, environment
        self._key = new_key()
        self._listener = listen(0, 0)
        self._children: dict[int, Child] = {}
        self._connections: dict[int, Connection] = {}
        self._frames: queue.SimpleQueue[tuple[int, Frame | ChildError]] = queue.SimpleQueue()

    def start(self, arguments: Mapping[int, Mapping[str, Any]]) -> None:
        """Start a process per key, with its arguments.

        Raises:
            SlipstreamError: a process ended, or did not connect in time.
        """
        for number, own in arguments.items():
            child = Child(f"{self._name} {number}", environment=self._environment)
            self._children[number] = child
            child.start_call(
                "slipstream.ranks.members:connect_and_serve", serve=self._serve,
                port=self.address[1], key=self._key, number=number, arguments=dict(own),
            )  # fmt: skip
        missing, until = set(arguments), time.monotonic() + _START_S
        self._listener.settimeout(0.2)
        while missing:
            with contextlib.suppress(TimeoutError):
                missing -= {self._accept(self._listener.accept()[0])}
            for number in missing:
                self._need_running(number, until)

    def _accept(self, connected: socket.socket) -> int | None:
        """Return the number of the member that connected; None for a stranger."""
        connection = Connection(connected)
        connection.limit(_HELLO_S)
        try:
            hello, _ = connection.receive(_HELLO_BYTES)
            number, key = hello["number"], hello["key"]
            if not same_key(key, self._key) or number not in self._children:
                raise ConnectionError("another process connected")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            connection.close()
            return None
        connection.limit(None)
        connection.limit_sends(_SEND_S)
        self._connections[number] = connection
        threading.Thread(
            target=self._read, args=(number, connection), daemon=True, name="slipstream-member"
        ).start()
        return int(number)

    def _need_running(self, number: int, until: float) -> None:
        child = self._children[number]
        if time.monotonic() > until:
            raise SlipstreamError(f"{child.name} did not start within {_START_S:g} s")
        if wait_any([child], 0.0):
            raise self._death(number)

    def _read(self, number: int, connection: Connection) -> None:
        try:
            while True:
                self._frames.put((number, connection.receive()))
        except (OSError, ValueError):
            if self._connections.get(number) is connection:
                self._frames.put((number, ChildError("the connection ended")))

    def send(self, number: int, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send one frame; a failure arrives as an error in `gather`."""
        connection = self._connections.get(number)
        if connection is not None:
            try:
                connection.send(header, payload)
            except OSError:
                connection.close()

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        """Return frames that arrived, waiting for the first; an error if a member has ended."""
        found = drained(self._frames, timeout_s)
        ended = {number for number, frame in found if isinstance(frame, ChildError)}
        errors = {number: self._death(number) for number in ended if number in self._children}
        return [
            (number, errors.get(number, frame) if isinstance(frame, ChildError) else frame)
            for number, frame in found
        ]

    def _death(self, number: int) -> ChildError:
        """Stop a member that ended or does not answer; return the reason."""
        child = self._children[number]
        try:
            child.finish_call(timeout_s=_DEATH_S)
            error = ChildError(f"{child.name} ended its connection")
        except ChildError as reason:
            error = reason
        except SlipstreamError as reason:
            error = ChildError(f"{child.name} failed: {reason.what}", where=reason.where)
        self.stop([number])
        return error

    def stop(self, numbers: Sequence[int] | None = None) -> None:
        """Kill members; by default all of them, and close the socket."""
        stopped = list(self._children) if numbers is None else list(numbers)
        children = [self._children.pop(number) for number in stopped if number in self._children]
        for number in stopped:
            if (connection := self._connections.pop(number, None)) is not None:
                connection.close()
        for child in children:
            child.kill()
        for child in children:
            child.close()
        if numbers is None:
            self._listener.close()

    @property
    def address(self) -> tuple[str, int]:
        """The address on which members connect."""
        host, port = self._listener.getsockname()
        return str(host), int(port)

    def pid(self, number: int) -> int:
        """Return the process id of a member."""
        return self._children[number].pid


# Runs in a member's process.


def connect_and_serve(
    serve: str, port: int, key: str, number: int, arguments: Mapping[str, Any]
) -> None:
    """Connect to the process that started this one, and serve it."""
    from slipstream.child import resolve

    function: Callable[..., None] = resolve(serve)
    connection = Connection(socket.create_connection((HOST, port)))
    connection.send({"number": number, "key": key})
    function(connection, number=number, **arguments)
