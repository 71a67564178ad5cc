"""Local servers: a socket on the loopback interface and a thread that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

from slipstream.errors import MissingExtraError, SlipstreamError

HOST = "127.0.0.1"
_KEY_BYTES = 24
# Number of ports tried from the default on, since several servers of a kind may run.
_PORTS_TRIED = 20
_START_S, _END_S = 30.0, 10.0


def new_key() -> str:
    """Return a random key that clients of one server must send."""
    return secrets.token_urlsafe(_KEY_BYTES)


def same_key(candidate: str, key: str) -> bool:
    """Whether `candidate` equals `key`, compared in constant time."""
    return secrets.compare_digest(candidate.encode(errors="replace"), key.encode())


def listen(port: int | None, default: int) -> socket.socket:
    """Return a socket that listens on the loopback interface.

    Args:
        port: 0 for any free port; None for `default`, or another free port if it is in use.

    Raises:
        SlipstreamError: the port is in use.
    """
    candidates = [port] if port is not None else [*range(default, default + _PORTS_TRIED), 0]
    for number in candidates:
        try:
            server = socket.create_server((HOST, number), backlog=128)
            # Connections inherit it. asyncio does not set it on sockets passed in, and a response
            # in two parts would wait 40 ms for the first part's acknowledgement.
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return server
        except OSError as error:
            if number == candidates[-1]:
                raise SlipstreamError(
                    f"port {number} cannot be listened on: {os.strerror(error.errno or 0)}",
                    remedy="name another port with --port, or omit it to use a free one",
                ) from error
    raise AssertionError


@contextlib.contextmanager
def running(
    application: Any, listening: socket.socket, what: str, **settings: Any
) -> Iterator[None]:
    """Serve an ASGI application in a separate thread until the block ends.

    Args:
        what: name of the server in errors.
        settings: passed to uvicorn.

    Raises:
        MissingExtraError: the extra ``[live]`` is not installed.
        SlipstreamError: the server does not start.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError(what, "uvicorn", "live") from error
    # h11 is the one of uvicorn's two parsers that limits the size of request headers.
    config = uvicorn.Config(
        application, log_config=None, log_level="error", access_log=False, server_header=False,
        date_header=False, timeout_graceful_shutdown=2, http="h11", **settings,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listening])),
        name="slipstream-server",
        daemon=True,
    )
    thread.start()
    try:
        _await_start(server, thread, what)
        yield
    finally:
        server.should_exit = True
        thread.join(_END_S)
        listening.close()


def _await_start(server: Any, thread: threading.Thread, what: str) -> None:
    for _ in range(int(_START_S / 0.01)):
        if server.started:
            return
        if not thread.is_alive():
            break
        thread.join(0.01)
    raise SlipstreamError(f"{what} does not start")
