"""``slipstream advise``: every technique on paper, ranked, with one line on what to do next."""

from __future__ import annotations

import json
from typing import Any

from slipstream import technique
from slipstream.cli.advise import _next
from slipstream.verbs._predict import Prediction


def test_every_installed_technique_is_judged(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name, "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {one["technique"].partition(":")[0] for one in found} == set(technique.registry())
    ratios = [one["ratio"] for one in found if one["why_not"] is None]
    assert ratios == sorted(ratios)


def test_the_table_ends_with_what_to_do(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name)
    assert run.returncode == 0, run.stderr
    assert "next: slipstream prove WORKLOAD" in run.stdout or "keep the step" in run.stdout


def prediction(name: str, low: float, high: float) -> Prediction:
    return Prediction(name, 100.0, 50.0 * (low + high), (low + high) / 2, low, high)


def test_the_best_that_is_sure_to_pay_comes_before_one_that_only_may() -> None:
    found = [prediction("maybe", 0.5, 1.1), prediction("sure", 0.7, 0.8)]
    assert _next(found, "t.py:make") == "next: slipstream prove t.py:make --technique sure"


def test_what_is_undecided_is_to_be_proved() -> None:
    found = [prediction("slower", 1.2, 1.3), prediction("maybe", 0.9, 1.1)]
    assert _next(found, "t.py") == "next: slipstream prove t.py --technique maybe"


def test_nothing_that_pays_is_said_plainly() -> None:
    assert "keep the step as it is" in _next([prediction("slower", 1.2, 1.3)], "t.py")
