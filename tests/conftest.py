"""What a test may skip for, and where it may not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest


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


@pytest.fixture
def shared_data() -> Path:
    """The folder ``$SLIPSTREAM_DATA``; the test is skipped, or fails, where there is none."""
    folder = os.environ.get("SLIPSTREAM_DATA", "")
    require("data", bool(folder) and Path(folder).is_dir(), "SLIPSTREAM_DATA names no folder")
    return Path(folder)
