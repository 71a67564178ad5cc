"""How an editor reaches the server: over stdin and stdout, or one connection of this machine."""

from __future__ import annotations

import logging
import os
import sys
from typing import BinaryIO

from slipstream.live.editor.requests import make_server
from slipstream.live.editor.server import MakeAnalyst

_SWITCH_S = 0.0005


def serve_stdio(make_analyst: MakeAnalyst, target: str | None = None) -> None:
    """Serve an editor over stdin and stdout until it leaves; what others print goes to stderr."""
    protocol = os.fdopen(os.dup(1), "wb")
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _serve(make_analyst, target, sys.stdin.buffer, protocol)


def serve_tcp(make_analyst: MakeAnalyst, port: int, target: str | None = None) -> None:
    """Serve the one editor that connects to a port of this machine, until it leaves.

    Args:
        port: 0 for a free one; which it is, stderr tells.

    Raises:
        SlipstreamError: the port is taken.
    """
    # Here: over stdin and stdout nothing of the page's server is needed.
    from slipstream.live.server import HOST, listen

    with listen(port) as listening:
        print(f"waiting for an editor on {HOST}:{listening.getsockname()[1]}", file=sys.stderr)
        connection, _ = listening.accept()
    # Nobody listens from here on: a second editor's connection is refused.
    with connection, connection.makefile("rb") as requests, connection.makefile("wb") as answers:
        _serve(make_analyst, target, requests, answers)


def _serve(
    make_analyst: MakeAnalyst, target: str | None, requests: BinaryIO, answers: BinaryIO
) -> None:
    # Answers pass the threads that hear of analyses.
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("pygls").setLevel(logging.ERROR)
    server = make_server(make_analyst, target)
    try:
        server.start_io(stdin=requests, stdout=answers)
    finally:
        server.close()
