"""``slipstream bench health``: how far tests and records can be trusted, and their cost.

It runs the tests of a clone of slipstream with its Makefile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from slipstream_bench import records
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_MUTANTS = "small faults in our code that a test notices"
_COMMITS = "recorded rows of commits that are not in the history"
_FUZZ = "broken files that end neither in a typed error nor in an answer"
_COST = "processor seconds of the tests of every change"
_PAIRS = "pairs of torch and Python on which the smoke tests pass"
_QUICK_MUTANTS = 4
# Two cores for ten minutes.
_MAX_CPU_S = 1200.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows."""
    if not Path("tests/mutants.py").exists():
        for bar in (_MUTANTS, _COMMITS, _FUZZ, _COST, _PAIRS):
            if options.wants(bar):
                yield not_judged(
                    bar, "", "", "the tests are in a clone of slipstream: run it there"
                )
        return
    if options.wants(_COMMITS):
        rows = [
            row for path in sorted(records.RESULTS.glob("*.jsonl")) for row in records.read(path)
        ]
        lost = records.unknown_commits(rows)
        count = sum(row.commit in lost for row in rows)
        yield at_most(_COMMITS, count, 0, "rows", n=len(rows))
    if options.wants(_FUZZ, takes_s=0 if options.full else 60):
        options.progress(_FUZZ)
        yield _fuzz(options.full)
    if options.wants(_MUTANTS, takes_s=0 if options.full else 100):
        options.progress(_MUTANTS)
        yield _mutants(options.full)
    if options.wants(_PAIRS):
        yield _pairs(options)
    if options.wants(_COST):
        yield _cost(options)


def _run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, errors="replace"
    )
    return ran.stdout


def _python(*words: str) -> str:
    return _run(sys.executable, *words)


def _mutants(full: bool) -> Bar:
    report = Path("build/mutants.jsonl")
    _python("tests/mutants.py", *([] if full else ["--sample", str(_QUICK_MUTANTS)]))
    rows = [json.loads(line) for line in report.read_text("utf-8").splitlines()]
    rows = [row for row in rows if not row["excused"]]
    caught = sum(row["caught"] for row in rows)
    survived = [row["fault"] for row in rows if not row["caught"]]
    # With few, even all that survive would show nothing.
    return at_least(
        _MUTANTS, 100 * caught / max(len(rows), 1), 85 if full else 25, "%", n=len(rows),
        data={"survived": survived},
    )  # fmt: skip


def _fuzz(full: bool) -> Bar:
    tier = "full" if full else "not full"
    said = _python("-m", "pytest", "tests/outside", "-q", "-m", tier, "-p", "no:cacheprovider")
    failed = len(re.findall(r"^E .*input \d+ of ", said, re.MULTILINE))
    ended = re.search(r"(\d+) passed", said) is not None and "failed" not in said
    return at_most(
        _FUZZ, failed if ended or failed else 1, 0, "files", n=3000 if full else 90,
        detail="" if ended else said[-300:],
    )  # fmt: skip


def _pairs(options: BenchOptions) -> Bar:
    if not options.full:
        return not_judged(_PAIRS, "pairs", ">= 4", "installs several torches: needs --full")
    options.progress(_PAIRS)
    said = _run("bash", ".ci/smoke")
    green = re.findall(r"^smoke: green (.*)$", said, re.MULTILINE)
    skipped = re.findall(r"^smoke: SKIPPED (.*)$", said, re.MULTILINE)
    return at_least(
        _PAIRS, len(green), 4, "pairs", n=len(green) + len(skipped),
        detail="; ".join(skipped), data={"green": green},
    )  # fmt: skip


def _cost(options: BenchOptions) -> Bar:
    if not options.full:
        return not_judged(_COST, "s", f"<= {_MAX_CPU_S:g}", "runs all tests: needs --full")
    options.progress(_COST)
    said = _run("make", "test-times")
    total = re.findall(r"^ *([\d.]+) +(\d+) tests$", said, re.MULTILINE)
    if not total:
        return not_judged(
            _COST, "s", f"<= {_MAX_CPU_S:g}", f"make test-times failed: {said[-200:]}"
        )
    seconds, count = total[-1]
    folder = r"^ *([\d.]+) +\d+ tests  slowest +[\d.]+  tests/(\S+)$"
    folders = {name: float(value) for value, name in re.findall(folder, said, re.MULTILINE)}
    slow = re.findall(r"^ *([\d.]+)  (tests/\S+::.*)$", said, re.MULTILINE)
    largest = ", ".join(f"{name} {value:.0f}" for name, value in list(folders.items())[:6])
    return at_most(
        _COST, float(seconds), _MAX_CPU_S, "s", n=int(count), detail=f"largest: {largest}",
        data={"folders": folders, "slowest": {name: float(value) for value, name in slow}},
    )  # fmt: skip
