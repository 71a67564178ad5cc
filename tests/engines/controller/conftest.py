"""Pools of hosts that are forks of the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forks import start_children_as_forks
from slipstream.engines.controller import Controller


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Start hosts as forks in this module."""
    with pytest.MonkeyPatch.context() as patch:
        start_children_as_forks(patch)
        yield


@pytest.fixture(scope="module")
def pool(forked: None) -> Iterator[Controller]:
    """Two hosts with two devices each, for tests that kill none."""
    with Controller(2, 2, stall_s=2.0) as controller:
        yield controller
