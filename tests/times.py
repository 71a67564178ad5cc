"""``pytest --times``: CPU seconds of every folder of tests.

CPU time, of a test and of the processes it started and waited for, hardly depends on the load of
the machine; the time of fixtures counts for the first test that uses them.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

_PROPERTY = "cpu_s"
_BEGIN: pytest.StashKey[float] = pytest.StashKey()
# Number of tests that are listed by name.
_SLOWEST = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="print the CPU seconds of every folder")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note the test's CPU time in its reports, which reach the controlling process."""
    item.stash[_BEGIN] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Each phase's report has the seconds up to its end; the last one has them all."""
    report = yield
    report.user_properties.append((_PROPERTY, _cpu_s() - item.stash[_BEGIN]))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table for ``--times``, and always the sum."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _PROPERTY:
                    seconds[report.nodeid] = max(seconds.get(report.nodeid, 0.0), value)
    total = sum(seconds.values())
    if not terminalreporter.config.getoption("--times"):
        terminalreporter.write_line(f"{total:.0f} CPU seconds in {len(seconds)} tests")
        return
    terminalreporter.section("CPU seconds by folder")
    folders: dict[str, list[float]] = defaultdict(list)
    for nodeid, value in seconds.items():
        folders[nodeid.partition("::")[0].rpartition("/")[0]].append(value)
    for folder, values in sorted(folders.items(), key=lambda item: -sum(item[1])):
        terminalreporter.write_line(
            f"{sum(values):8.1f}  {len(values):5d} tests  slowest {max(values):6.1f}  {folder}"
        )
    terminalreporter.write_line(f"{total:8.1f}  {len(seconds):5d} tests")
    terminalreporter.section("slowest tests, CPU seconds")
    for nodeid, value in sorted(seconds.items(), key=lambda item: -item[1])[:_SLOWEST]:
        terminalreporter.write_line(f"{value:8.1f}  {nodeid}")


def _cpu_s() -> float:
    """Return CPU seconds of this process and of those it waited for."""
    own, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
