"""``slipstream bench cli``: how long a person waits for the help."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

from slipstream.bars import Bar, BenchOptions, at_most

_COMMAND = [sys.executable, "-c", "from slipstream.cli import main; main()", "--help"]
_HEAVY = ("torch", "numpy", "scipy")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Wall time of ``slipstream --help`` in fresh processes, and what it imports."""
    runs = 40 if options.full else 15
    name = "slipstream --help"
    if options.wants(name):
        options.progress(name)
        seconds = sorted(_seconds() for _ in range(runs))
        detail = f"median of {runs} fresh processes; least {seconds[0]:.3f} s"
        yield at_most(name, median(seconds), 0.3, "s", n=runs, detail=detail)
    name = "heavy libraries imported by --help"
    if options.wants(name):
        options.progress(name)
        found = [library for library in _HEAVY if library in _imported()]
        yield at_most(name, len(found), 0, "libraries", detail=", ".join(found) or "none")


def _seconds() -> float:
    begin = time.perf_counter()
    subprocess.run(_COMMAND, check=True, capture_output=True)
    return time.perf_counter() - begin


def _imported() -> set[str]:
    command = [_COMMAND[0], "-X", "importtime", *_COMMAND[1:]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
