"""What a test may skip for, and where it may not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

import known_clock
from forks import start_children_as_forks
from known_clock import KnownClock

pytest_plugins = ("times", "changed", "flakes")

# Obeyed when a test imports ONNX Runtime by itself.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# How long an example takes says how busy the machine is. The same examples every time, so that a
# change is judged by what it changes; `make test-all` looks for others.
hypothesis.settings.register_profile("slipstream", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("slipstream")


def pytest_configure() -> None:
    """Ctrl-C and hang-up as a terminal has them, for us and for the commands that tests start.

    A shell that runs the tests in its background ignores them, and so would every child.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def require(feature: str, present: bool, reason: str) -> None:
    """Skip the test where `feature` is absent; fail it where the environment promises it.

    ``SLIPSTREAM_REQUIRE`` is a comma list of features that must be there (continuous integration
    sets it), so that a test never goes quiet because something fell away.

    Args:
        feature: a short word: ``data``, ``sklearn``, ``netlab``.
        present: whether it is there.
        reason: what is missing, for the report.
    """
    if present:
        return
    promised = {word.strip() for word in os.environ.get("SLIPSTREAM_REQUIRE", "").split(",")}
    if feature in promised:
        pytest.fail(f"{reason} (SLIPSTREAM_REQUIRE promises '{feature}')", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(name="require", scope="session")
def _require() -> Callable[[str, bool, str], None]:
    """The function `require`, for tests that prefer a fixture to an import."""
    return require


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Timings that tests keep are not the user's, whose cache may be of another version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user cache")))
        yield


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test every `slipstream.child.Child` is a fork of this process, with one thread."""
    start_children_as_forks(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> KnownClock:
    """In this test functions are measured on a clock that only they move."""
    return known_clock.install(monkeypatch)


@pytest.fixture
def shared_data() -> Path:
    """The folder ``$SLIPSTREAM_DATA``; the test is skipped, or fails, where there is none."""
    folder = os.environ.get("SLIPSTREAM_DATA", "")
    require("data", bool(folder) and Path(folder).is_dir(), "SLIPSTREAM_DATA names no folder")
    return Path(folder)
