"""Progress of a long run in a log: new messages, at a limited rate, and signs of life."""

from __future__ import annotations

import re
import threading

import pytest

from slipstream.cli import _output
from slipstream.cli._output import progress


class Lines(list[str]):
    """Standard error that is not a terminal; `seen` waits for a line that matches a pattern."""

    def __init__(self) -> None:
        super().__init__()
        self._new = threading.Condition()

    def write(self, text: str) -> int:
        with self._new:
            if text.strip():
                self.append(text)
                self._new.notify_all()
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def seen(self, pattern: str) -> bool:
        with self._new:
            found = re.compile(pattern).search
            return self._new.wait_for(lambda: any(map(found, self)), timeout=600)


def standard_error(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Replaced in the test itself, because pytest replaces it after fixtures."""
    found = Lines()
    monkeypatch.setattr("sys.stderr", found)
    return found


def test_a_long_phase_is_repeated_with_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = standard_error(monkeypatch)
    monkeypatch.setattr(_output, "_LOG_EVERY_S", 0.01)
    monkeypatch.setattr(_output, "_ALIVE_EVERY_S", 0.03)
    with progress("advising") as report:
        # Also before the first message.
        assert lines.seen(r"advising: \d+ s")
        report("a long step")
        assert lines.seen("advising: a long step")
        assert lines.seen(r"advising: a long step, \d+ s")


def test_a_delayed_message_is_shown_later(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = standard_error(monkeypatch)
    monkeypatch.setattr(_output, "_LOG_EVERY_S", 0.2)
    with progress("advising") as report:
        for number in range(1000):
            report(f"step {number}")
        assert lines.seen("step 999")
    assert len(lines) < 500
    assert not any(thread.name.endswith("(keep_alive)") for thread in threading.enumerate())
