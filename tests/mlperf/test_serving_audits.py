"""Audits pass the honest and catch every cheat there is in `serving_systems`."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.mlperf.serving import SCENARIOS, Session, Wishes
from slipstream.mlperf.serving.audits import AUDITS, audit
from slipstream.runtimes import BatchPolicy

SYSTEMS = Path(__file__).parent / "serving_systems.py"


@pytest.mark.parametrize(
    ("system", "scenario", "caught"),
    [
        ("working", "single-stream", set()),
        ("caching", "single-stream", {"TEST04", "COLD"}),
        ("prepared", "single-stream", {"COLD"}),
        ("careless", "single-stream", {"TEST01"}),
        ("dropping", "offline", {"TEST01"}),
    ],
)
def test_cheats_are_caught_and_the_honest_pass(
    system: str, scenario: str, caught: set[str]
) -> None:
    def opened() -> Session:
        return Session(f"{SYSTEMS}:{system}", f"{SYSTEMS}:many", policy=BatchPolicy(8))

    with opened() as session:
        found = audit(AUDITS, opened, session, SCENARIOS[scenario], Wishes(seconds=0.5))
    failed = {one.name for one in found if not one.passed}
    assert (failed == set()) is (caught == set()), found
    assert failed & caught or not caught, found
