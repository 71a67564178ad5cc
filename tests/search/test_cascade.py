"""A cascade saves expensive evaluations if its cheap level is informative, and none if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.provenance import Provenance
from slipstream.search import Budget, Cascade, Float, Processes, Space, State, Study, study
from slipstream.search.cascade import Agreement
from slipstream.search.estimators import estimator
from slipstream.search.listing import Listing

SPACE = Space({f"x{i}": Float(-1.0, 1.0) for i in range(4)})


@estimator({"y": ""}, provenance="simulated")
def roughly(config: dict[str, Any]) -> float:
    """Like `truth`, except for one parameter that it ignores."""
    return sum(config[f"x{i}"] ** 2 for i in range(3))


@estimator({"y": ""}, provenance="simulated")
def by_chance(config: dict[str, Any], run: Any) -> float:
    return float(run.seed)


@estimator({"y": "", "size": "KB"})
def truth(config: dict[str, Any]) -> dict[str, float]:
    return {"y": sum(config[f"x{i}"] ** 2 for i in range(4)), "size": abs(config["x0"])}


def made(*levels: Any, store: Path | None = None, **settings: Any) -> Study:
    rungs = Cascade(*levels, **{"eta": 8.0, **settings})
    return study("s", SPACE, "y", estimator=truth, strategy="random", rungs=rungs, store=store)


def dear(run: Study) -> list[Any]:
    return [trial for trial in run.trials if trial.rung == len(run.rungs.levels)]


def test_few_are_measured_if_the_cheap_level_is_informative_and_they_are_its_best() -> None:
    run = made(roughly, n=400).run()
    assert len(dear(run)) < 110  # 8 or more unselected ones, an eighth, a sixteenth as probes
    cheap = sorted(t.values["y"] for t in run.trials if t.rung == 0)
    went_on = {run.trials[t.parent].values["y"] for t in dear(run)}
    assert set(cheap[:20]) <= went_on
    best = run.best()
    assert best is not None
    simulated = best.measurements["y", Provenance.SIMULATED].value
    assert simulated == roughly.function(best.config) < best.values["y"]


def test_a_random_level_prunes_nothing() -> None:
    run = made(by_chance, n=150).run()
    assert len(dear(run)) == 150
    notes = " ".join(note for table in [Listing.of(run).status()] for note in table.notes)
    assert "by_chance" in notes
    assert "may not prune" in notes


def test_levels_build_on_each_other() -> None:
    run = made(by_chance, roughly, n=200).run()
    counts = [sum(t.rung == rung for t in run.trials) for rung in range(3)]
    assert counts[:2] == [200, 200]
    assert counts[2] < 80


def test_an_interrupted_cascade_continues_and_replays(tmp_path: Path) -> None:
    whole = made(roughly, store=tmp_path / "whole.db").run(budget=Budget(trials=120))
    for trials in (7, 40, 120):
        cut = made(roughly, store=tmp_path / "cut.db").run(budget=Budget(trials=trials))
    assert [t.candidate.id for t in cut.trials] == [t.candidate.id for t in whole.trials]
    assert made(roughly, store=tmp_path / "cut.db").load().replay() == len(whole.trials)


def test_workers_measure_with_the_level_of_the_trial() -> None:
    run = made(roughly, n=30).run(Processes(2))
    for trial in run.trials:
        source = (roughly, truth)[trial.rung].function
        expected = source(trial.config)
        assert trial.state is State.COMPLETE
        assert trial.values["y"] == (expected if trial.rung == 0 else expected["y"])


def test_a_limit_that_only_the_last_level_reports_is_judged_there() -> None:
    run = study(
        "s", SPACE, "y", estimator=truth, rungs=Cascade(roughly, n=20), strategy="random",
        constraints={"size": "<= 0.5KB"},
    ).run()  # fmt: skip
    assert {t.state for t in run.trials if t.rung == 0} == {State.COMPLETE}
    assert {t.state for t in dear(run)} == {State.COMPLETE, State.INFEASIBLE}


def test_an_invalid_cascade_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        Cascade()
    with pytest.raises(InvalidArgumentError):
        Cascade(roughly, eta=1.0)
    size_alone = estimator({"size": "KB"})(lambda config: 1.0)
    with pytest.raises(UnknownNameError):
        made(size_alone)
    in_ms = estimator({"y": "ms"})(lambda config: 1.0)
    with pytest.raises(InvalidArgumentError):
        made(in_ms)


def test_agreement_is_kendalls() -> None:
    equal = Agreement.of([(i, i) for i in range(10)])
    assert equal.tau == pytest.approx(1.0)
    # 2 * 25 / (9 * 10 * 9) = 0.0617
    assert equal.margin == pytest.approx(1.96 * 0.0617**0.5, rel=0.01)
    assert equal.prunes
    assert not Agreement.of([(i, i) for i in range(5)]).prunes
    assert not Agreement.of([(i, -i) for i in range(10)]).prunes


def test_values_of_a_cheap_level_are_not_results_in_optuna() -> None:
    pytest.importorskip("optuna")
    run = made(roughly, n=40).run()
    best = run.best()
    assert best is not None
    assert run.to_optuna().best_value == best.values["y"]
