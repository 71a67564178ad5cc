"""Servers of ours on the loopback interface: the socket, and the thread a server runs in."""

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
# Of a default, as many more ports are tried: several of a kind may run at once.
_PORTS_TRIED = 20
_START_S, _END_S = 30.0, 10.0


def new_key() -> str:
    """A random key for one server: a client must send it with what it asks for."""
    return secrets.token_urlsafe(_KEY_BYTES)


def same_key(candidate: str, key: str) -> bool:
    """Whether `candidate` is `key`, in a time that does not depend on where they differ."""
    return secrets.compare_digest(candidate.encode(errors="replace"), key.encode())


def listen(port: int | None, default: int) -> socket.socket:
    """A socket that waits for connections on the loopback interface.

    Args:
        port: 0 or None for a free one, the latter for `default` if that is.

    Raises:
        SlipstreamError: the port is taken.
    """
    wanted = [port] if port is not None else [*range(default, default + _PORTS_TRIED), 0]
    for number in wanted:
        try:
            server = socket.create_server((HOST, number), backlog=128)
            # Connections inherit it; asyncio does not ask for it by itself on sockets it is given,
            # and an answer in two parts would wait 40 ms for the first one's acknowledgement.
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return server
        except OSError as error:
            if number == wanted[-1]:
                raise SlipstreamError(
                    f"port {number} cannot be listened on: {os.strerror(error.errno or 0)}",
                    remedy="another one with --port, or none: a free one is found",
                ) from error
    raise AssertionError


@contextlib.contextmanager
def running(
    application: Any, listening: socket.socket, what: str, **settings: Any
) -> Iterator[None]:
    """Serve an ASGI application in a thread of its own until the block ends.

    Args:
        what: the server, as errors should call it.
        settings: of uvicorn.

    Raises:
        MissingExtraError: the extra ``[live]`` is not installed.
        SlipstreamError: it does not start.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError(what, "uvicorn", "live") from error
    # h11: of uvicorn's two parsers the one that limits the size of a request's header.
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
