"""Results on stdout, progress on stderr: the same for every command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream.tables import Table, to_json

# Often enough to see that it lives, seldom enough to read.
_LOG_EVERY_S = 2.0

Say = Callable[[str], None]


def emit(
    table: Table | Sequence[Table], payload: Mapping[str, Any] | Sequence[Any], *, as_json: bool
) -> None:
    """Print the result: `payload` as JSON when asked for, else the tables."""
    if as_json:
        sys.stdout.write(to_json(payload) + "\n")
        return
    tables = [table] if isinstance(table, Table) else list(table)
    for number, one in enumerate(tables):
        if number:
            sys.stdout.write("\n")
        one.print()


@contextmanager
def progress(title: str) -> Iterator[Say]:
    """Show what is going on while something takes long; yields a function that updates it.

    On a terminal one line is rewritten with the seconds passed; elsewhere a line is printed every
    few seconds, so that a log shows how far a run came.
    """
    if not sys.stderr.isatty():
        last, shown = "", 0.0

        def say(line: str) -> None:
            nonlocal last, shown
            now = time.monotonic()
            if line != last and now - shown >= _LOG_EVERY_S:
                print(f"{title}: {line}", file=sys.stderr, flush=True)
                last, shown = line, now

        yield say
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(title)
        yield lambda line: bar.update(task, description=f"{title}: {line}")


def note(line: str) -> None:
    """One line for the person, never part of the result."""
    print(line, file=sys.stderr, flush=True)


def today() -> str:
    """The UTC date and time, ISO 8601 to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
