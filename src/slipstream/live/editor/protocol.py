"""pygls' protocol, which also knows whether a request was cancelled.

pygls cancels what it waits for itself; a command goes on in a task of its own, and nobody tells it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from lsprotocol import types
from pygls.protocol import LanguageServerProtocol

# An edit takes a moment; what was cancelled before the last so many is over.
_REMEMBERED = 256


class Protocol(LanguageServerProtocol):
    """Remembers which requests the editor cancelled."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._cancelled: deque[int | str] = deque(maxlen=_REMEMBERED)

    def handle_message(self, message: Any) -> None:
        """Do what the editor says."""
        if isinstance(message, types.CancelNotification):
            self._cancelled.append(message.params.id)
        super().handle_message(message)

    def is_cancelled(self, request: int | str | None) -> bool:
        """Whether the editor does not want this request's answer any more."""
        return request in self._cancelled
