"""What a log shows of a long run: what is new, nothing too often, and that it goes on."""

from __future__ import annotations

import re
import threading

import pytest

from slipstream.cli import _output
from slipstream.cli._output import progress


class Lines(list[str]):
    """Standard error that is no terminal; `seen` waits for a line with what a pattern says."""

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
    """In the test itself: pytest puts its own in place after fixtures."""
    found = Lines()
    monkeypatch.setattr("sys.stderr", found)
    return found


def test_what_takes_long_is_said_again_with_the_time_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = standard_error(monkeypatch)
    monkeypatch.setattr(_output, "_LOG_EVERY_S", 0.01)
    monkeypatch.setattr(_output, "_ALIVE_EVERY_S", 0.03)
    with progress("advising") as report:
        # Before anything is said, too.
        assert lines.seen(r"advising: \d+ s")
        report("a long step")
        assert lines.seen("advising: a long step")
        assert lines.seen(r"advising: a long step, \d+ s")


def test_what_was_held_back_is_said_later(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = standard_error(monkeypatch)
    monkeypatch.setattr(_output, "_LOG_EVERY_S", 0.2)
    with progress("advising") as report:
        for number in range(1000):
            report(f"step {number}")
        assert lines.seen("step 999")
    assert len(lines) < 500
    assert not any(thread.name.endswith("(keep_alive)") for thread in threading.enumerate())
