"""Log files of a training run, line by line as the official package writes and reads them.

``:::MLLOG {"namespace", "time_ms", "event_type", "key", "value", "metadata"}``; a monotonic stamp
stands in the metadata, since ``time_ms`` steps with the clock of the wall.

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
    """One line.

    Attributes:
        time_ms: milliseconds since 1970, by the wall.
        kind: ``INTERVAL_START``, ``INTERVAL_END`` or ``POINT_IN_TIME``.
        line: its number in the file, from 1.
    """

    key: str
    value: Any
    time_ms: float
    kind: str
    metadata: dict[str, Any]
    line: int = 0


class Log:
    """Writes events to a file, each at once, so that a crash leaves all that came before it."""

    def __init__(self, path: Path | None, place: str = "") -> None:
        """
        Args:
            path: None to write nothing.
            place: ``file:line`` of the task, for the metadata.
        """
        self._file = None if path is None else path.open("a", encoding="utf-8", buffering=1)
        self._place = place.rpartition(":")

    def event(self, key: str, value: Any = None, kind: str = "POINT_IN_TIME", **metadata: Any
              ) -> None:  # fmt: skip
        """Write one line."""
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
        """An interval begins; `key` ends in ``_start``."""
        self.event(key, kind="INTERVAL_START", **metadata)

    def stop(self, key: str, **metadata: Any) -> None:
        """It ends; `key` ends in ``_stop``."""
        self.event(key, kind="INTERVAL_END", **metadata)

    def close(self) -> None:
        """Nothing more will be written."""
        if self._file is not None:
            self._file.close()


class LogError(SlipstreamError):
    """A log file that cannot be read."""


def read(path: Path) -> list[Event]:
    """The events of a log file; other lines are left out.

    Raises:
        LogError: there is no such file, or a line of it is malformed.
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
                f"line {number} is no event: {type(error).__name__}: {error}", where=str(path)
            ) from error


def found(events: Sequence[Event], key: str) -> list[Event]:
    """Those of that key, in order."""
    return [one for one in events if one.key == key]


def value_of(events: Sequence[Event], key: str, otherwise: Any = None) -> Any:
    """Of the first event of that key."""
    return next((one.value for one in events if one.key == key), otherwise)
