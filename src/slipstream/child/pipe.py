"""The message pipe between a child and its parent."""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
# Interval at which a wait checks whether the other process is still running.
TICK_S = 0.5
_PIPE_BYTES = 1 << 16


class Channel:
    """One end of the pipe; messages are lines of JSON."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._buffer = bytearray()
        # Length of the buffer's prefix that is known to hold no newline.
        self._searched = 0
        os.set_blocking(write_fd, False)

    def send(
        self,
        message: Message,
        *,
        alive: Callable[[], bool] = lambda: True,
        timeout_s: float | None = None,
    ) -> None:
        """Send one message of any size; messages that arrive meanwhile are buffered for `receive`.

        Args:
            alive: called repeatedly while the other end is not reading.
            timeout_s: maximum time without a read by the other end; None for no maximum.

        Raises:
            BrokenPipeError: the other end is closed, or not alive.
            TimeoutError: the other end read nothing for `timeout_s`.
            TypeError, ValueError: the message is not JSON.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        self._check_open()
        reading = [self._read_fd]
        read_last = time.monotonic()
        while data:
            readable, writable, _ = select.select(reading, [self._write_fd], [], TICK_S)
            # If both ends send more than the pipe holds, one of them must read.
            if readable and not self._read():
                reading = []
            if writable:
                data = data[os.write(self._write_fd, data[:_PIPE_BYTES]) :]
                read_last = time.monotonic()
            elif not readable and not alive():
                raise BrokenPipeError("the process at the other end of the pipe has exited")
            elif timeout_s is not None and time.monotonic() - read_last > timeout_s:
                raise TimeoutError("the other end of the pipe does not read")

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None after `timeout_s`.

        Raises:
            EOFError: the other end is closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            self._check_open()
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read_fd], [], [], remaining)[0]:
                return None
            if not self._read():
                raise EOFError("the other end of the pipe is closed")
        message: Message = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return message

    def fileno(self) -> int:
        """Return the descriptor on which `select` waits for messages."""
        return self._read_fd

    @property
    def has_message(self) -> bool:
        """Whether a complete message is buffered."""
        return b"\n" in self._buffer

    def close(self) -> None:
        """Close both directions."""
        for fd in (self._read_fd, self._write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        # The descriptors may be reused by other files.
        self._read_fd = self._write_fd = -1

    def _read(self) -> bool:
        chunk = os.read(self._read_fd, _PIPE_BYTES)
        self._buffer += chunk
        return bool(chunk)

    def _check_open(self) -> None:
        if self._read_fd < 0:
            raise BrokenPipeError("this end of the pipe is closed")
