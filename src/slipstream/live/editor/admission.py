"""Admission of the editor's TCP connection: the first that sends `initialize` with the key.

Any program on this machine can connect to a loopback port, and so can any web page in a browser,
whose HTTP header the protocol's own framing would skip. Until a connection has sent the key,
nothing that it sends reaches the language server.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import selectors
import socket
from typing import Any, BinaryIO

from slipstream import loopback

_HEADER = re.compile(rb"(?:Content-Type: [^\r\n]*\r\n)?Content-Length: (\d{1,7})\r\n"
                     rb"(?:Content-Type: [^\r\n]*\r\n)?\r\n")  # fmt: skip
_MAX_HEADER_BYTES = 1 << 10
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_PENDING = 64
_NOT_INITIALIZED, _REQUEST_FAILED = -32002, -32803  # JSON-RPC error codes of the protocol


def wait_for_editor(listening: socket.socket, key: str) -> tuple[socket.socket, BinaryIO]:
    """Return the editor's connection and a reader of all that it has sent; close all others.

    A connection whose first message is not `initialize` with ``{"key": key}`` in its
    `initializationOptions` is refused and closed. At most 64 connections may be undecided; one
    more closes the oldest.
    """
    pending: dict[socket.socket, bytearray] = {}
    with selectors.DefaultSelector() as selector:

        def drop(connection: socket.socket) -> None:
            selector.unregister(connection)
            pending.pop(connection).clear()
            connection.close()

        def accept() -> None:
            connection, _ = listening.accept()
            connection.setblocking(False)
            pending[connection] = bytearray()
            selector.register(connection, selectors.EVENT_READ)
            if len(pending) > _MAX_PENDING:
                drop(next(iter(pending)))

        selector.register(listening, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                connection: Any = ready.fileobj
                if connection is listening:
                    with contextlib.suppress(OSError):
                        accept()
                    continue
                if connection not in pending:
                    continue  # dropped in this iteration
                try:
                    received = connection.recv(1 << 16)
                    pending[connection] += received
                    if not received:
                        raise _RefusedError
                    if _is_admitted(pending[connection], key):
                        first = bytes(pending.pop(connection))
                        for other in list(pending):
                            drop(other)
                        connection.setblocking(True)
                        return connection, io.BufferedReader(_Resumed(first, connection))
                except _RefusedError as refused:
                    with contextlib.suppress(OSError):
                        connection.send(refused.answer)
                    drop(connection)
                except OSError:
                    drop(connection)


class _RefusedError(Exception):
    """A connection is not the editor's.

    Attributes:
        answer: bytes to send before it is closed; empty where no request can be answered.
    """

    def __init__(self, request: Any = None, code: int = 0, message: str = "") -> None:
        self.answer = b""
        if isinstance(request, (int, str)):
            error = {"code": code, "message": message}
            body = json.dumps({"jsonrpc": "2.0", "id": request, "error": error}).encode()
            self.answer = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def _is_admitted(received: bytearray, key: str) -> bool:
    """Whether the first message is complete and carries the key.

    Raises:
        _RefusedError: it is not a message, is too long, or is not `initialize` with the key.
    """
    if received[:8] != b"Content-"[: len(received)]:
        raise _RefusedError  # a request line of HTTP, or another protocol
    header = _HEADER.match(received)
    if header is None:
        if b"\r\n\r\n" in received or len(received) > _MAX_HEADER_BYTES:
            raise _RefusedError
        return False
    end = header.end() + int(header[1])
    if end > _MAX_MESSAGE_BYTES:
        raise _RefusedError
    if len(received) < end:
        return False
    try:
        message = json.loads(received[header.end() : end])
        method, request = message["method"], message["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _RefusedError from None
    if method != "initialize":
        raise _RefusedError(request, _NOT_INITIALIZED, "the first request must be initialize")
    try:
        sent = message["params"]["initializationOptions"]["key"]
    except (KeyError, TypeError):
        sent = None
    if not isinstance(sent, str) or not loopback.same_key(sent, key):
        raise _RefusedError(
            request,
            _REQUEST_FAILED,
            "initializationOptions has no valid key; slipstream lsp prints it when it starts",
        )
    return True


class _Resumed(io.RawIOBase):
    """A connection, read from its beginning although its first bytes were already received."""

    def __init__(self, first: bytes, connection: socket.socket) -> None:
        self._first = io.BytesIO(first)
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        return self._first.readinto(target) or self._connection.recv_into(target)
