"""Tests of warnings before a step is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.verbs import profiling, request
from slipstream.verbs.request import Request


@pytest.mark.parametrize("busy", ["", "tasks waited for a core 80 % of the last 10 s"])
def test_warns_of_a_busy_machine_before_recording(
    monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    heard: list[str] = []

    def profile(*arguments: Any, **options: Any) -> str:
        heard.append("recording")
        return "the graph"

    monkeypatch.setattr(request, "busy_in_words", lambda: busy)
    monkeypatch.setattr(profiling, "profile", profile)
    parsed = Request.parse(f"{__file__}:anything")
    monkeypatch.setattr(Request, "workload", lambda self: None)
    assert parsed.graph(warn=heard.append) == "the graph"
    assert heard[-1] == "recording"
    assert len(heard) == (2 if busy else 1)
    assert busy in heard[0]
