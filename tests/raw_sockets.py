"""Bytes over a TCP connection to a server on this machine, as no well-behaved client sends them."""

from __future__ import annotations

import contextlib
import socket

PATIENCE_S = 60.0


def exchange(port: int, sent: bytes, *, then_close: bool = False) -> bytes:
    """Return the server's answer before it closes the connection.

    Args:
        then_close: whether to close our direction after sending.
    """
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        # A server that refuses early may reset the connection while we are still sending.
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            if then_close:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while received := connection.recv(1 << 16):
                answer += received
    return bytes(answer)
