"""Results on stdout and progress on stderr, for every command."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.errors import UsageError
from slipstream.tables import Table, escape_control, to_json

if TYPE_CHECKING:
    from slipstream.measure.records import Claim
    from slipstream.measure.runner import Progress

# Minimum time between two lines of a log.
_LOG_EVERY_S = 2.0
# An unchanged line is repeated after this long, so that a long phase does not look like a hang.
_ALIVE_EVERY_S = 3.0

# Time between two lines of a running comparison, on a terminal and in a log, where lines add up.
_EVERY_S, _EVERY_IN_A_LOG_S = 1.0, 5.0
_MAX_ARMS = 3

Report = Callable[[str], None]


class Result(Protocol):
    """The printable result of a command."""

    def to_json(self) -> Mapping[str, Any] | Sequence[Any]:
        """Return the result for ``--json``."""


def emit(
    table: Table | Sequence[Table], payload: Mapping[str, Any] | Sequence[Any], *, as_json: bool
) -> None:
    """Print `payload` as JSON if `as_json`, else the tables."""
    if as_json:
        sys.stdout.write(to_json(payload) + "\n")
        return
    tables = [table] if isinstance(table, Table) else list(table)
    for number, printed in enumerate(tables):
        if number:
            sys.stdout.write("\n")
        printed.print()


def emit_result(result: Result, *tables: Table, as_json: bool) -> None:
    """Print `result` as JSON if `as_json`, else `tables`."""
    emit(tables, result.to_json() if as_json else (), as_json=as_json)


def need_place(output: Path, *endings: str, option: str = "-o") -> None:
    """Check before the work starts that its result can be written to `output`.

    Args:
        endings: accepted suffixes, the usual one first.
        option: the command-line option that sets `output`.

    Raises:
        UsageError: the suffix is not accepted, or the folder does not exist or is read-only.
    """
    import os

    if output.suffix.lower() not in endings:
        raise UsageError(
            f"'{output}' does not end in {endings[0]}",
            remedy=f"for example {option} {output.stem}{endings[0]}",
        )
    if output.is_dir():
        raise UsageError(
            f"'{output}' is a folder", remedy=f"for example {option} {output / 'run'}{endings[0]}"
        )
    if not output.parent.is_dir():
        raise UsageError(
            f"'{output.parent}', the folder of {output.name}, does not exist",
            remedy=f"mkdir -p {output.parent}",
        )
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise UsageError(
            f"'{output}' cannot be written", remedy=f"name another file: {option} FILE{endings[0]}"
        )


class _Log:
    """Progress as log lines: rate-limited, and repeated while nothing changes."""

    def __init__(self, title: str) -> None:
        self.ended = threading.Event()
        self._title = title
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._line, self._since = "", self._began
        self._printed, self._shown = "", -math.inf

    def report(self, line: str) -> None:
        with self._lock:
            now = time.monotonic()
            if line != self._line:
                self._line, self._since = line, now
            if line != self._printed and now - self._shown >= _LOG_EVERY_S:
                self._print(line, now)

    def keep_alive(self) -> None:
        """Print delayed lines, and repeat unchanged ones, until `ended` is set."""
        while not self.ended.wait(_LOG_EVERY_S / 4):
            with self._lock:
                now = time.monotonic()
                if self._line != self._printed:
                    if now - self._shown >= _LOG_EVERY_S and self._line:
                        self._print(self._line, now)
                elif now - max(self._shown, self._began) >= _ALIVE_EVERY_S:
                    self._print(self._line, now, f"{now - self._since:.0f} s")

    def _print(self, line: str, now: float, passed: str = "") -> None:
        self._printed, self._shown = line, now
        text = ", ".join(part for part in (line, passed) if part)
        note(f"{self._title}: {text}")


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """Show progress on stderr; yields a function that updates the text.

    On a terminal, one line is rewritten with the elapsed seconds. Otherwise a line is printed every
    few seconds, so that a log shows how far the run is and that it is still alive.
    """
    if not sys.stderr.isatty():
        log = _Log(title)
        alive = threading.Thread(target=log.keep_alive, daemon=True)
        alive.start()
        try:
            yield log.report
        finally:
            log.ended.set()
            alive.join()
        return
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    with bars.Progress(
        bars.SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
        bars.TextColumn("{task.description}", markup=False),
        bars.TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(title)
        yield lambda line: bar.update(task, description=escape_control(f"{title}: {line}"))


def show_progress(report: Report) -> Callable[[Progress], None]:
    """Return a callback that reports a comparison periodically and at every change of phase."""
    every_s = _EVERY_S if sys.stderr.isatty() else _EVERY_IN_A_LOG_S
    shown, due = "", 0.0

    def show(now: Progress) -> None:
        nonlocal shown, due
        if now.phase == shown and time.monotonic() < due:
            return
        shown, due = now.phase, time.monotonic() + every_s
        line = now.phase
        if now.phase == "measure":
            line = f"process {now.launch} of {now.launches}, " if now.launches > 1 else ""
            line += f"block {now.block}, at most {now.seconds_left:.0f} s left"
            line += f" ({now.widened})" if now.widened else ""
        report("; ".join([line, *_speedups([claim for claim in now.claims if claim.carries])]))

    return show


def _speedups(claims: Sequence[Claim]) -> list[str]:
    """Return the speed-ups of the best arms, and the number of the others, to fit one line."""
    from slipstream.measure.render import format_change

    best = sorted(claims, key=lambda claim: claim.ratio)
    speedups = [f"{claim.arm} {format_change(claim, 2)}" for claim in best[:_MAX_ARMS]]
    omitted = len(best) - _MAX_ARMS
    return speedups + ([f"{omitted} more"] if omitted > 0 else [])


def note(line: str) -> None:
    """Print a line for the user on stderr, apart from the result."""
    print(escape_control(line), file=sys.stderr, flush=True)
