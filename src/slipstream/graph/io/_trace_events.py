"""Streaming reader of Chrome traces, which discards events that are not needed."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

_PIECE_BYTES = 1 << 20
# Maximum size of one event or header value.
_MAX_VALUE_BYTES = 16 << 20
_SPACE = re.compile("[ \t\n\r]*")
_EVENTS = "traceEvents"
_DECODER = json.JSONDecoder()


class NoTraceError(Exception):
    """The JSON is valid, but not a trace."""


def read_events(file: BinaryIO, needed: Callable[[Any], bool]) -> tuple[list[Any], dict[str, Any]]:
    """Read the `needed` events, in order, and the other entries of the trace.

    A list entry that is not a JSON object ends the list, as its last entry.

    Raises:
        ValueError, RecursionError: invalid or truncated JSON, or a value of more than 16 MiB.
        NoTraceError: the JSON has no list of events.
    """
    text = _Text(file)
    events: list[Any] | None = None
    header: dict[str, Any] = {}
    if text.peek() == "[":
        events = list(_needed(text, needed))
        if not _is_cut(events):
            text.end()
        return events, header
    if text.peek() != "{":
        text.value()
        text.end()
        raise NoTraceError
    for key in text.fields():
        if key == _EVENTS and text.peek() == "[":
            events = list(_needed(text, needed))
            if _is_cut(events):
                return events, header
        elif key == _EVENTS:
            raise NoTraceError
        else:
            header[key] = text.value()
    text.end()
    if events is None:
        raise NoTraceError
    return events, header


def _is_cut(events: list[Any]) -> bool:
    return bool(events) and not isinstance(events[-1], dict)


def _needed(text: _Text, needed: Callable[[Any], bool]) -> Iterator[Any]:
    for event in text.entries():
        if not isinstance(event, dict):
            yield event
            return
        if needed(event):
            yield event


class _Text:
    """JSON text that is read lazily."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._ended = file, False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._text, self._at = "", 0

    def peek(self) -> str:
        """Return the next character other than whitespace; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def end(self) -> None:
        """Check that only whitespace follows."""
        if self.peek():
            raise ValueError("more text follows the end of the JSON value")

    def value(self) -> Any:
        """Read the next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if self._more():
                    continue
                raise
            # A number may continue in the unread part.
            if end == len(self._text) and self._more():
                continue
            self._at = end
            return value

    def fields(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads the value after each."""
        self._take("{")
        if self.peek() == "}":
            self._at += 1
            return
        while True:
            if self.peek() != '"':
                raise ValueError("a key is missing")
            key = self.value()
            self._take(":")
            yield key
            if self.peek() != ",":
                break
            self._at += 1
        self._take("}")

    def entries(self) -> Iterator[Any]:
        """Yield the entries of a list, many of them decoded together so that they share keys."""
        self._take("[")
        if self.peek() == "]":
            self._at += 1
            return
        while True:
            yield from self._slab()
            yield self.value()
            if self.peek() != ",":
                break
            self._at += 1
        self._take("]")

    def _slab(self) -> list[Any]:
        """Decode complete entries in memory, up to the likely last but one; may be empty."""
        if len(self._text) - self._at < _PIECE_BYTES // 2:
            self._more()
        cut = max(self._text.rfind(separator, self._at) for separator in ("},{", "},\n", "}, "))
        if cut < 0:
            return []
        try:
            entries = json.loads(f"[{self._text[self._at : cut + 1]}]")
        except (ValueError, RecursionError):
            return []  # the separator was inside an entry
        self._at = cut + 2
        return list(entries)

    def _take(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"'{character}' is missing")
        self._at += 1

    def _more(self) -> bool:
        """Read at least as many bytes as are unused; return False at the end of the file."""
        if self._ended:
            return False
        unused = len(self._text) - self._at
        if unused > _MAX_VALUE_BYTES:
            raise ValueError(f"a value of more than {_MAX_VALUE_BYTES >> 20} MiB")
        piece = self._file.read(max(_PIECE_BYTES, unused))
        self._ended = not piece
        self._text = self._text[self._at :] + self._utf8.decode(piece, self._ended)
        self._at = 0
        return True
