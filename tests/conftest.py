"""What a test may skip for, and where it may not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


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


@pytest.fixture(name="require")
def _require() -> Callable[[str, bool, str], None]:
    """The function `require`, for tests that prefer a fixture to an import."""
    return require


@pytest.fixture
def shared_data() -> Path:
    """The folder ``$SLIPSTREAM_DATA``; the test is skipped, or fails, where there is none."""
    folder = os.environ.get("SLIPSTREAM_DATA", "")
    require("data", bool(folder) and Path(folder).is_dir(), "SLIPSTREAM_DATA names no folder")
    return Path(folder)
