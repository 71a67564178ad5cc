"""``pytest --flakes``: retry failed tests once, and record those that pass then.

A test that passes the second time is a flake: it is named in the output, and recorded on this
machine for all clones. From its third time on it fails, and has to be fixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

_LIMIT = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--flakes", action="store_true",
        help="retry failed tests: record those that pass, and fail them at the third time",
    )  # fmt: skip


def record_path() -> Path:
    """Return the file of known flakes: ``$SLIPSTREAM_FLAKES``, or one in the user's cache."""
    if named := os.environ.get("SLIPSTREAM_FLAKES"):
        return Path(named)
    return Path.home() / ".cache" / "slipstream-tests" / "flakes.json"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the flakes, with how often each was seen."""
    if not terminalreporter.config.getoption("--flakes"):
        return
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", [])]
    if not passed:
        return
    seen = _remember(passed)
    terminalreporter.section("flakes")
    for nodeid in passed:
        count = len(seen[nodeid])
        fate = ": fix it" if count >= _LIMIT else ""
        terminalreporter.write_line(f"FLAKE {nodeid} (seen {count} of {_LIMIT} times{fate})")
    if any(len(seen[nodeid]) >= _LIMIT for nodeid in passed):
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _remember(passed: list[str]) -> dict[str, list[str]]:
    path = record_path()
    seen: dict[str, list[str]] = {}
    with contextlib.suppress(OSError, ValueError):
        seen = json.loads(path.read_text("utf-8"))
    today = time.strftime("%Y-%m-%d")
    for nodeid in passed:
        seen.setdefault(nodeid, []).append(today)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(seen, indent=1, sort_keys=True), "utf-8")
    return seen
