"""User-written loops: ask and tell, reports that prune, callbacks that stop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import InvalidArgumentError, StoreError, WorkloadError
from slipstream.provenance import Provenance
from slipstream.search import (
    Budget,
    Candidate,
    Categorical,
    Estimator,
    Float,
    Halving,
    Int,
    Processes,
    Space,
    State,
    StoredStudy,
    Study,
    Trial,
    TrialPruned,
    TrialRun,
    study,
)
from slipstream.search.strategies import Random

SPACE = Space({"x": Float(-1, 1), "n": Int(1, 5)})


def loss(config: dict[str, Any]) -> float:
    return config["x"] ** 2 + config["n"]


def facts(made: Study) -> list[tuple[Any, ...]]:
    return [
        (t.candidate.id, t.state, t.values, t.reports, t.ask_event, t.tell_event)
        for t in made.trials
    ]


@pytest.mark.parametrize("rungs", [None, Halving(1, 9)])
@pytest.mark.parametrize("strategy", ["random", "tpe"])
def test_ask_and_tell_equals_the_loop_of_run(tmp_path: Path, strategy: str, rungs: Any) -> None:
    def made(store: str, estimator: Any = None) -> Study:
        return study("s", SPACE, "y", estimator=estimator, strategy=strategy, rungs=rungs,
                     budget=Budget(trials=25), constraints={"y": "<= 4"},
                     analytic=[Estimator(lambda c: c["n"], {"y": ""}, Provenance.SIMULATED)],
                     store=tmp_path / store)  # fmt: skip

    own = made("own.db")
    for task in itertools.islice(iter(own.ask, None), 5):
        own.tell(task, loss(task.config))
    # After one more ask the process ends: that trial is asked again.
    forgotten = own.ask()
    own.close()
    own = made("own.db")
    again = own.ask()
    assert forgotten is not None
    assert again is not None
    assert (again.number, again.config) == (forgotten.number, forgotten.config)
    own.tell(again.number, {"y": loss(again.config)})
    while (task := own.ask()) is not None:
        own.tell(task, loss(task.config))
        assert StoredStudy(tmp_path / "own.db").trials[task.number].tell_event >= 0
    own.close()
    run = made("run.db", loss).run()
    assert facts(own) == facts(run)
    assert own.replay() == len(run.trials)
    assert State.REJECTED in {trial.state for trial in run.trials}


def test_an_invalid_tell_is_refused() -> None:
    made = study("s", SPACE, "y", strategy="random")
    with pytest.raises(InvalidArgumentError, match="has no estimator to run"):
        made.run(budget=Budget(trials=1))
    with pytest.raises(InvalidArgumentError, match="trial 0 is not running"):
        made.tell(0, 1.0)
    tasks = [made.ask() for _ in range(5)]
    first, second, third, fourth, fifth = (task for task in tasks if task is not None)
    with pytest.raises(InvalidArgumentError, match="complete trial needs values"):
        made.tell(first)
    with pytest.raises(InvalidArgumentError, match="failed trial takes no values"):
        made.tell(first, 1.0, state="failed")
    with pytest.raises(InvalidArgumentError, match="'done'"):
        made.tell(first, 1.0, state="done")
    assert made.tell(first, 1.0).values == {"y": 1.0}
    with pytest.raises(InvalidArgumentError, match="trial 0 is not running"):
        made.tell(first, 1.0)
    assert made.tell(second, float("nan")).reason == "y is nan, which is not finite"
    assert made.tell(third, {"z": 1.0}).state is State.FAILED
    assert made.tell(fourth, state="failed", reason="no data").reason == "no data"
    for step in (-1, 2**53):
        with pytest.raises(InvalidArgumentError, match="is not a valid step"):
            fifth.run.report(0.5, step)
    fifth.run.report(0.5, 3)
    assert made.tell(fifth, state="pruned").reports == {3: 0.5}
    assert [trial.number for trial in made.top()] == [0]


def test_a_file_with_open_asks_is_closed_to_others(tmp_path: Path) -> None:
    made = study("s", SPACE, "y", estimator=loss, strategy="random", store=tmp_path / "s.db")
    task = made.ask()
    other = study("s", SPACE, "y", estimator=loss, strategy="random", store=tmp_path / "s.db")
    with pytest.raises(StoreError, match="another process"):
        other.ask()
    made.close()
    assert other.run(budget=Budget(trials=3)).trials[0].config == (task and task.config)


def descent(config: dict[str, Any], run: TrialRun) -> float:
    for epoch in range(4):
        run.report(loss(config) + 1 / (1 + epoch), epoch)
        if run.should_prune():
            raise TrialPruned
    return loss(config)


@pytest.mark.parametrize("direction", ["min", "max"])
def test_should_prune_compares_with_the_median_of_complete_trials(direction: str) -> None:
    sign = 1.0 if direction == "min" else -1.0
    run = TrialRun(1.0, 0, medians=[(step, sign * 1.0) for step in range(3)], sign=sign)
    assert not run.should_prune()
    for step, value, prunes in ((0, 3.0, True), (1, 0.5, False), (2, 9.0, False), (7, 9.0, False)):
        run.report(sign * value, step)
        assert run.should_prune() == prunes
    run.report(float("nan"), 1)
    assert run.should_prune()
    with pytest.raises(InvalidArgumentError, match="-1"):
        run.report(1.0, -1)


@pytest.mark.parametrize("strategy", ["random", "tpe"])
def test_pruned_trials_keep_their_reports(tmp_path: Path, strategy: str) -> None:
    def made(store: str) -> Study:
        return study("s", SPACE, "y", estimator=descent, strategy=strategy, store=tmp_path / store)

    whole = made("whole.db").run(budget=Budget(trials=40))
    medians: dict[int, list[float]] = {}
    for trial in whole.trials:
        if trial.state is State.COMPLETE:
            assert list(trial.reports) == [0, 1, 2, 3]
            for step, value in trial.reports.items():
                medians.setdefault(step, []).append(value)
        else:
            assert trial.state is State.PRUNED
            assert trial.values == {}
            assert len(medians[0]) >= 5
            at = sorted(medians[max(trial.reports)])
            assert min(trial.reports.values()) > (at[(len(at) - 1) // 2] + at[len(at) // 2]) / 2
    assert {State.COMPLETE, State.PRUNED} == {trial.state for trial in whole.trials}
    for trials in (9, 23, 40):
        cut = made("cut.db").run(budget=Budget(trials=trials))
    assert facts(cut) == facts(whole)
    assert facts(made("cut.db").load()) == facts(whole)


def test_workers_report_and_prune(tmp_path: Path) -> None:
    made = study("s", SPACE, "y", estimator=descent, strategy="random", store=tmp_path / "s.db")
    made.run(Processes(2), budget=Budget(trials=30))
    assert {State.COMPLETE, State.PRUNED} == {trial.state for trial in made.trials}
    assert all(0 in trial.reports for trial in made.trials)


def test_callbacks_see_every_trial_and_may_stop() -> None:
    seen: list[Trial] = []

    def third(made: Study, trial: Trial) -> None:
        seen.append(trial)
        if len(seen) == 3:
            made.stop()

    made = study("s", SPACE, "y", estimator=loss, strategy="random", callbacks=[third]).run()
    assert seen == made.trials
    assert (len(seen), made.stopped) == (3, "stopped by Study.stop")

    def fails(made: Study, trial: Trial) -> None:
        raise KeyError("wandb")

    with pytest.raises(WorkloadError, match="callback failed after trial 0: KeyError: 'wandb'"):
        study("s", SPACE, "y", estimator=loss, strategy="random", callbacks=[fails]).run()


class Counted(Random):
    def ask(self, number: int) -> Candidate | None:
        assert number < 5000
        return super().ask(number)


def test_more_workers_than_candidates_finish() -> None:
    made = study("s", {"n": Int(1, 2)}, "y", strategy=Counted())
    tasks = [made.ask(), made.ask()]
    assert made.ask() is None
    for task in tasks:
        assert task is not None
        made.tell(task, 1.0)
    assert {trial.state for trial in made.trials} == {State.COMPLETE, State.CACHED}


def test_optuna_gets_the_same_categories_times_and_reports() -> None:
    optuna = pytest.importorskip("optuna")
    space = Space({
        "x": Float(-1, 1, step=0.25), "n": Int(1, 2), "act": Categorical(("relu", None)),
        "size": Categorical((16, 32), ordered=True), "shape": Categorical(((1, 2), (3, 4))),
    })  # fmt: skip
    made = study("s", space, "y", estimator=descent, strategy="tpe").run(budget=Budget(trials=30))
    theirs = made.to_optuna()
    for ours, trial in zip(made.trials, theirs.trials, strict=True):
        values = ours.candidate.values
        assert trial.params == {**values, "shape": str(list(values["shape"]))}
        assert trial.intermediate_values == ours.reports
        if ours.state is not State.CACHED:
            assert trial.datetime_start.timestamp() == pytest.approx(ours.started, abs=1e-5)
            assert trial.datetime_complete.timestamp() == pytest.approx(ours.ended, abs=1e-5)
    kinds = {trial.state for trial in theirs.trials}
    assert kinds == {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED}
    # A lower rung has one intermediate value, at its fidelity.
    halved = study("h", SPACE, "y", estimator=loss, strategy="random", rungs=Halving(1, 9)).run()
    first = halved.to_optuna().trials[0]
    assert first.intermediate_values == {1: halved.trials[0].values["y"]}
