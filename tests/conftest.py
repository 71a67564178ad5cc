"""Rules for skipping tests, and fixtures for all tests."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import known_clock
from forks import start_children_as_forks
from known_clock import KnownClock

pytest_plugins = ("times", "changed", "flakes")

# Applies if a test imports ONNX Runtime directly.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Example durations depend on machine load. The same examples are used every time, so that
# results depend on the change alone; `make test-all` tries others.
hypothesis.settings.register_profile("slipstream", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("slipstream")


def pytest_configure() -> None:
    """Handle Ctrl-C and hang-up as on a terminal, here and in commands that tests start.

    A shell that runs the tests in its background ignores them, and so would every child.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_runtest_setup() -> None:
    torch = sys.modules.get("torch")
    if hasattr(torch, "autograd"):
        _run_a_backward_pass(torch)


@functools.cache
def _run_a_backward_pass(torch: Any) -> None:
    """Keep forks of this process able to run backward passes.

    Fake tensors make torch built for CUDA imitate eight GPUs if it finds none. A first backward
    pass after that starts a thread for each, and later forks refuse to run any.
    """
    if not torch.cuda.is_available():
        torch.ones(1, requires_grad=True).sum().backward()


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
    """Return the function `require`, for tests that prefer a fixture to an import."""
    return require


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store timings of tests apart from the user's cache, which may be of another version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user cache")))
        yield


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every `slipstream.child.Child` a fork of this process with one thread."""
    start_children_as_forks(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> KnownClock:
    """Measure functions on a clock that only they advance."""
    return known_clock.install(monkeypatch)


@pytest.fixture
def shared_data() -> Path:
    """Return the folder ``$SLIPSTREAM_DATA``; skip or fail the test without it."""
    folder = os.environ.get("SLIPSTREAM_DATA", "")
    require("data", bool(folder) and Path(folder).is_dir(), "SLIPSTREAM_DATA names no folder")
    return Path(folder)
