"""The events of a Chrome trace, read piece by piece: what nobody needs is never held in memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

_PIECE_BYTES = 1 << 20
# Of one event, and of one value beside the events.
_LARGEST_VALUE = 16 << 20
_SPACE = re.compile("[ \t\n\r]*")
_EVENTS = "traceEvents"
_DECODER = json.JSONDecoder()


class NoTraceError(Exception):
    """The JSON is whole as far as it was read, and no trace."""


def read_events(file: BinaryIO, wanted: Callable[[Any], bool]) -> tuple[list[Any], dict[str, Any]]:
    """The events that are `wanted`, in order, and what stands beside the list of events.

    What is no JSON object ends the list: it is its last entry.

    Raises:
        ValueError, RecursionError: broken or cut-off JSON, or a value of more than 16 MiB.
        NoTraceError: there is no list of events.
    """
    text = _Text(file)
    events: list[Any] | None = None
    header: dict[str, Any] = {}
    if text.peek() == "[":
        events = list(_wanted(text, wanted))
        if not _is_cut(events):
            text.end()
        return events, header
    if text.peek() != "{":
        text.value()
        text.end()
        raise NoTraceError
    for key in text.fields():
        if key == _EVENTS and text.peek() == "[":
            events = list(_wanted(text, wanted))
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


def _wanted(text: _Text, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    for event in text.entries():
        if not isinstance(event, dict):
            yield event
            return
        if wanted(event):
            yield event


class _Text:
    """JSON text that is read as it is needed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._ended = file, False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._text, self._at = "", 0

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def end(self) -> None:
        """Nothing may follow."""
        if self.peek():
            raise ValueError("something follows after its end")

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if self._more():
                    continue
                raise
            # A number may go on in what was not read yet.
            if end == len(self._text) and self._more():
                continue
            self._at = end
            return value

    def fields(self) -> Iterator[str]:
        """The keys of an object, each when its value is next."""
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
        """The entries of a list. Many are decoded at once, so that they share their keys."""
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
        """Whole entries of what is in memory, up to what looks like the last but one; or none."""
        if len(self._text) - self._at < _PIECE_BYTES // 2:
            self._more()
        cut = max(self._text.rfind(one, self._at) for one in ("},{", "},\n", "}, "))
        if cut < 0:
            return []
        try:
            entries = json.loads(f"[{self._text[self._at : cut + 1]}]")
        except (ValueError, RecursionError):
            return []  # what seemed to be between two entries was inside of one
        self._at = cut + 2
        return list(entries)

    def _take(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"'{character}' is missing")
        self._at += 1

    def _more(self) -> bool:
        """Read on, as much again as is not used yet; False at the end of the file."""
        if self._ended:
            return False
        left = len(self._text) - self._at
        if left > _LARGEST_VALUE:
            raise ValueError(f"a value of more than {_LARGEST_VALUE >> 20} MiB")
        piece = self._file.read(max(_PIECE_BYTES, left))
        self._ended = not piece
        self._text = self._text[self._at :] + self._utf8.decode(piece, self._ended)
        self._at = 0
        return True
