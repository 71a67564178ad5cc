"""Read and write logs of training runs in the format of the official package.

``:::MLLOG {"namespace", "time_ms", "event_type", "key", "value", "metadata"}``; the metadata holds
a monotonic timestamp, since ``time_ms`` jumps when the wall clock is set.

Source: mlcommons/logging; the rules, mlcommons/training_policies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError

TOKEN = ":::MLLOG "


@dataclass(frozen=True)
class Event:
    """One line of a log.

    Attributes:
        time_ms: wall time in ms since 1970.
        kind: ``INTERVAL_START``, ``INTERVAL_END`` or ``POINT_IN_TIME``.
        line: line number in the file, from 1.
    """

    key: str
    value: Any
    time_ms: float
    kind: str
    metadata: dict[str, Any]
    line: int = 0


class Log:
    """Writer of events, line-buffered so that a crash loses none of them."""

    def __init__(self, path: Path | None, place: str = "") -> None:
        """
        Args:
            path: None to write nothing.
            place: ``file:line`` of the task, stored in the metadata.
        """
        self._file = None if path is None else path.open("a", encoding="utf-8", buffering=1)
        self._place = place.rpartition(":")

    def event(self, key: str, value: Any = None, kind: str = "POINT_IN_TIME", **metadata: Any
              ) -> None:  # fmt: skip
        """Write one event."""
        if self._file is None:
            return
        file, _, line = self._place
        where = {
            "file": file, "lineno": int(line) if line.isdecimal() else 0,
            "monotonic_ms": time.monotonic() * 1e3,
        }  # fmt: skip
        row = {
            "namespace": "", "time_ms": int(time.time() * 1e3), "event_type": kind, "key": key,
            "value": value, "metadata": {**where, **metadata},
        }  # fmt: skip
        self._file.write(TOKEN + json.dumps(row) + "\n")

    def start(self, key: str, **metadata: Any) -> None:
        """Write the start of an interval; `key` ends in ``_start``."""
        self.event(key, kind="INTERVAL_START", **metadata)

    def stop(self, key: str, **metadata: Any) -> None:
        """Write the end of an interval; `key` ends in ``_stop``."""
        self.event(key, kind="INTERVAL_END", **metadata)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class LogError(SlipstreamError):
    """A log file that is missing, unreadable or malformed."""


def read(path: Path) -> list[Event]:
    """Return the events of a log file, skipping other lines.

    Raises:
        LogError: the file cannot be read, or an event is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LogError(f"the log cannot be read: {error.strerror}", where=str(path)) from error
    return list(_events(lines, path))


def _events(lines: Sequence[str], path: Path) -> Iterator[Event]:
    for number, line in enumerate(lines, 1):
        _, token, text = line.partition(TOKEN)
        if not token:
            continue
        try:
            row = json.loads(text)
            yield Event(
                str(row["key"]), row["value"], float(row["time_ms"]), str(row["event_type"]),
                dict(row["metadata"] or {}), number,
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise LogError(
                f"line {number} is not a valid event: {type(error).__name__}: {error}",
                where=str(path),
            ) from error


def found(events: Sequence[Event], key: str) -> list[Event]:
    """Return the events with that key, in order."""
    return [event for event in events if event.key == key]


def value_of(events: Sequence[Event], key: str, default: Any = None) -> Any:
    """Return the value of the first event with that key, or `default`."""
    return next((event.value for event in events if event.key == key), default)
