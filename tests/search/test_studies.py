"""The study loop: validation, failures, resumption and replay."""

from __future__ import annotations

import math
import operator
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import InvalidArgumentError, StoreError, UnknownNameError
from slipstream.provenance import Provenance
from slipstream.search import (
    Asha,
    Budget,
    Cost,
    Estimator,
    Float,
    Halving,
    Hyperband,
    Int,
    Processes,
    Space,
    State,
    StoredStudy,
    Study,
    estimator,
    study,
)
from slipstream.search.estimators import TrialRun, call
from slipstream.search.listing import Listing
from slipstream.search.metrics import parse_limits
from slipstream.search.strategies import Evolution

SPACE = Space({f"x{i}": Float(-1.0, 1.0) for i in range(4)} | {"n": Int(1, 9)})


def bowl(config: dict[str, Any]) -> float:
    return sum((config[f"x{i}"] - 0.3) ** 2 for i in range(4)) + 0.1 * config["n"]


def slowly(config: dict[str, Any]) -> float:
    time.sleep(0.004 * abs(config["x0"]))
    return bowl(config)


def crashes(config: dict[str, Any]) -> float:
    if config["n"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if config["n"] == 5:
        raise RuntimeError("no convergence")
    if config["n"] == 6:
        return math.nan
    if config["n"] == 7:
        time.sleep(60)
    return bowl(config)


def facts(made: Study) -> list[tuple[Any, ...]]:
    return [
        (t.candidate.id, t.state, t.values, t.ask_event, t.tell_event, t.fidelity)
        for t in made.trials
    ]


@pytest.mark.parametrize("strategy", ["random", "quasirandom", "evolution", "trees", "tpe"])
def test_an_interrupted_study_ends_like_an_uninterrupted_one(tmp_path: Path, strategy: str) -> None:
    def made(store: str) -> Study:
        return study("s", SPACE, "y", estimator=bowl, strategy=strategy, seed=3,
                     store=tmp_path / store)  # fmt: skip

    whole = made("whole.db").run(budget=Budget(trials=60))
    for trials in (1, 2, 25, 60):
        cut = made("cut.db").run(budget=Budget(trials=trials))
    assert facts(cut) == facts(whole)
    assert made("cut.db").load().replay() == len(whole.trials) >= 60
    assert whole.best() is not None


def test_trees_search_between_the_optima_of_two_objectives() -> None:
    pytest.importorskip("sklearn")
    made = study("s", Space({"x": Float(-8, 8)}), {"a": "min", "b": "min"}, strategy="trees",
                 estimator=lambda c: {"a": abs(c["x"]), "b": abs(c["x"] - 4)})  # fmt: skip
    made.run(budget=Budget(trials=48))
    inside = [0 <= trial.candidate.values["x"] <= 4 for trial in made.trials]
    assert sum(inside[20:]) >= 14 > 2 * sum(inside[:20])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_front_has_exactly_the_nondominated_trials(count: int) -> None:
    made = study("s", SPACE, {f"x{i}": "min" for i in range(count)}, strategy="random",
                 estimator=lambda c: {f"x{i}": c[f"x{i}"] for i in range(count)})  # fmt: skip
    points = [[*t.values.values()] for t in made.run(budget=Budget(trials=40)).trials]
    assert {trial.number for trial in Listing.of(made).front} == {
        number for number, point in enumerate(points)
        if not any(all(map(operator.lt, other, point)) for other in points)
    }  # fmt: skip


def test_evolution_begins_once_it_has_enough_parents() -> None:
    made = study("s", SPACE, "y", estimator=bowl, strategy=Evolution(sample=4)).run(
        budget=Budget(trials=5)
    )
    *parents, child = ({*trial.candidate.values.items()} for trial in made.trials)
    assert child & set.union(*parents) - {("n", n) for n in range(10)}


@pytest.mark.parametrize(
    "rungs", [None, Halving(1, 9), Hyperband(1, 9, rounds=1), Asha(1, 9, n=20)]
)
def test_a_parallel_study_replays(tmp_path: Path, rungs: Any) -> None:
    made = study("s", SPACE, "y", estimator=slowly, strategy="tpe", rungs=rungs,
                 store=tmp_path / "s.db", budget=Budget(trials=60))  # fmt: skip
    made.run(Processes(2))
    tells = [trial.number for trial in sorted(made.trials, key=lambda trial: trial.tell_event)]
    assert made.replay() == len(tells) > 12
    # A record that was tampered with does not replay.
    made.trials[5].candidate.values["x0"] = 0.0
    made._store = None
    reading = StoredStudy(tmp_path / "s.db")
    assert reading.trials[5].candidate.values["x0"] != 0.0


def test_failures_are_states_with_reasons(tmp_path: Path) -> None:
    grid = Space({"n": Int(3, 8), **{f"x{i}": Float(0.0, 0.0) for i in range(4)}})
    made = study("s", grid, "y", estimator=crashes, strategy="grid", store=tmp_path / "s.db")
    made.run(Processes(1, timeout_s=1.0))
    by_n = {trial.candidate.values["n"]: trial for trial in made.trials}
    states = {n: trial.state for n, trial in by_n.items()}
    failed = State.FAILED
    assert states == {3: State.COMPLETE, 4: State.LOST, 5: failed, 6: failed, 7: failed,
                      8: State.COMPLETE}  # fmt: skip
    assert by_n[4].attempts == 3
    assert "no convergence" in by_n[5].reason
    assert "nan" in by_n[6].reason
    assert "longer than 1 s" in by_n[7].reason
    best = made.best()
    assert best is not None
    assert best.candidate.values["n"] == 3


@pytest.mark.parametrize("where", ["estimator", "analytic", "cost", "tie"])
def test_failing_user_code_fails_only_its_trial(where: str) -> None:
    def fails(config: dict[str, Any]) -> Any:
        if config["n"] == 2:
            sys.exit("no data")
        if config["n"] == 3:
            return 1 / 0
        return 1.0 if where != "cost" else Cost(1.0)

    def fine(config: dict[str, Any]) -> float:
        return 1.0

    made = study(
        "s", Space({"n": Int(1, 4)}, ties={"t": "1 / (n - 3)"} if where == "tie" else {}), "y",
        estimator=Estimator(fails if where == "estimator" else fine,
                            cost=fails if where == "cost" else None),
        analytic=[Estimator(fails, {"z": ""})] if where == "analytic" else [], strategy="grid",
    ).run()  # fmt: skip
    reasons = {trial.candidate.values["n"]: trial.reason for trial in made.trials}
    assert "division by zero" in str(reasons.pop(3))
    if where != "tie":
        assert re.fullmatch(r"the estimator called sys.exit\(no data\) \(.*\)", str(reasons.pop(2)))
    assert set(reasons.values()) == {None}


def test_analytic_constraints_avoid_calls_of_the_estimator() -> None:
    called: list[float] = []

    @estimator({"y": "", "memory": "KB"})
    def measured(config: dict[str, Any]) -> dict[str, float]:
        called.append(config["x0"])
        return {"y": config["x0"], "memory": 100 * abs(config["x0"]) + 1}

    size_of = Estimator(lambda c: 100 * abs(c["x0"]), {"memory": "KB"}, Provenance.SIMULATED)
    made = study("s", Space({"x0": Float(-1, 1)}), {"y": "min"}, estimator=measured,
                 analytic=[size_of], constraints={"memory": "<= 0.05MB"},
                 strategy="random")  # fmt: skip
    made.run(budget=Budget(trials=40))
    assert len(called) == 40
    assert all(abs(x) <= 0.5 for x in called)
    rejected = [trial for trial in made.trials if trial.state is State.REJECTED]
    assert len(rejected) > 10
    assert all("memory <= 0.05MB" in trial.reason for trial in rejected)
    complete = next(trial for trial in made.trials if trial.state is State.COMPLETE)
    kinds = {kind for metric, kind in complete.measurements if metric == "memory"}
    assert kinds == {Provenance.SIMULATED, Provenance.MEASURED}
    # Trials that passed by prediction and not by measurement are infeasible, and never best.
    assert {trial.state for trial in made.trials} <= {
        State.REJECTED,
        State.COMPLETE,
        State.INFEASIBLE,
    }


@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_the_analytic_filter_learns_its_error(tmp_path: Path, ratio: float) -> None:
    measured = Estimator(lambda c: {"y": 0.0, "memory": 100 * ratio * c["x"]}, 
                         {"y": "", "memory": "KB"})  # fmt: skip
    predicted = Estimator(lambda c: 100 * c["x"], {"memory": "KB"}, Provenance.SIMULATED)

    def made(store: str, trials: int) -> Study:
        return study("s", Space({"x": Float(0.01, 1)}), "y", estimator=measured,
                     analytic=[predicted], constraints={"memory": "<= 60KB"}, strategy="random",
                     store=tmp_path / store).run(budget=Budget(trials=trials))  # fmt: skip

    whole = made("whole.db", 60)
    later = [trial for trial in whole.trials if trial.ask_event > 40]
    assert all((trial.state is State.COMPLETE) == (trial.candidate.values["x"] * ratio <= 0.6)
               for trial in later)  # fmt: skip
    reasons = [str(trial.reason) for trial in later if trial.state is State.REJECTED]
    assert all("corrected by 1.5)" in reason for reason in reasons)
    made("cut.db", 25)
    assert facts(made("cut.db", 60)) == facts(whole)


def test_a_grid_ends_after_its_last_candidate() -> None:
    made = study("s", Space({"n": Int(1, 3)}), "y", estimator=lambda c: c["n"], strategy="grid")
    made.run()
    assert [trial.candidate.values["n"] for trial in made.trials] == [1, 2, 3]
    assert re.search(r"\bstrategy\b", made.stopped or "")


@pytest.mark.parametrize(("text", "holds"), [
    ("<= 4", [True, True, False]), ("< 4", [True, False, False]),
    (">= 4", [False, True, True]), ("> 4", [False, False, True]),
])  # fmt: skip
def test_only_inclusive_limits_include_their_bound(text: str, holds: list[bool]) -> None:
    (limit,) = parse_limits({"memory": text}, {"memory": ""})
    assert [limit.violation(value) == 0 for value in (3.0, 4.0, 5.0)] == holds
    assert {limit.violation(value) for value in (3.0, 5.0)} == {0.0, 0.25}


def test_a_prediction_of_zero_gives_no_factor() -> None:
    made = study("s", Space({"x": Float(0, 1)}), "y",
                 estimator=Estimator(lambda c: {"y": c["x"], "memory": 1.0}),
                 analytic=[Estimator(lambda c: 0.0, {"memory": ""}, Provenance.SIMULATED)],
                 constraints={"memory": "<= 4"}, strategy="random")  # fmt: skip
    made.run(budget=Budget(trials=3))
    assert [trial.state for trial in made.trials] == [State.COMPLETE] * 3


def test_predictions_are_listed_with_their_median_ratio() -> None:
    predicted = Estimator(lambda c: c["n"], {"y": ""}, Provenance.SIMULATED)
    made = study("s", Space({"n": Int(1, 3)}), "y", estimator=lambda c: 2.0 * c["n"],
                 analytic=[predicted], strategy="grid").run()  # fmt: skip
    assert any(re.search(r"\by\b.*\b2 times\b", note) for note in Listing.of(made).status().notes)


@pytest.mark.parametrize(("function", "takes_run"), [
    (lambda config, run: run, True), (lambda config, run=None: run, True),
    (lambda config, depth=None: depth, False),
])  # fmt: skip
def test_a_second_parameter_gets_the_run_if_required_or_named_run(
    function: Callable[..., Any], takes_run: bool
) -> None:
    run = TrialRun(1.0, 0)
    assert call(function, {}, run) is (run if takes_run else None)


def test_nothing_is_evaluated_twice() -> None:
    called: list[int] = []

    def count(config: dict[str, Any]) -> float:
        called.append(config["n"])
        return float(config["n"])

    made = study("s", Space({"n": Int(1, 30)}), "y", estimator=count, strategy="random").run()
    assert sorted(called) == sorted(set(called))
    assert len(called) == 30
    assert re.search(r"\bstrategy\b", made.stopped or "")


def test_a_study_ends_once_every_candidate_failed() -> None:
    made = study(
        "s", Space({"n": Int(1, 3)}), "y", estimator=lambda config: 1 / 0, strategy="random"
    ).run(budget=Budget(seconds=60))
    assert made.stopped == "the strategy proposes nothing new"
    assert len(made.trials) < 2000


@estimator({"accuracy": "", "latency": "ms"})
def declared(config: dict[str, Any]) -> dict[str, float]:
    raise AssertionError("a study that cannot be right was begun")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"constraints": {"latency": "<= 128KB"}}, InvalidArgumentError, "a limit in KB"),
        ({"constraints": {"latency": ">= 9ms, <= 8ms"}}, InvalidArgumentError, "contradict"),
        ({"constraints": {"latency": "9ms"}}, InvalidArgumentError, "not a limit"),
        ({"constraints": {"size": "<= 9"}}, UnknownNameError, "'size'"),
        ({"objectives": {"acuracy": "max"}}, UnknownNameError, r" accuracy\?"),
        ({"objectives": {"accuracy": "up"}}, InvalidArgumentError, "min or max"),
        ({"objectives": {}}, InvalidArgumentError, "at least one"),
        ({"strategy": "tpee"}, UnknownNameError, r"\btpe\b"),
        ({"space": Space({"n": Int(1, 3)}, forbid=["n > 0"])}, InvalidArgumentError, "empty"),
    ],
)
def test_mistakes_are_reported_before_the_first_evaluation(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    right = {"space": SPACE, "objectives": {"accuracy": "max"}, "estimator": declared}
    with pytest.raises(error, match=message):
        study("s", **{**right, **settings})


def test_a_metric_that_is_never_reported_fails_the_trial_with_its_name() -> None:
    made = study("s", SPACE, {"acc": "max"}, estimator=lambda c: {"accuracy": 1.0},
                 strategy="random").run(budget=Budget(trials=2))  # fmt: skip
    assert re.search(r"\bnot report acc\b.*\baccuracy\b", made.trials[0].reason)
    assert made.best() is None


def test_a_stored_study_over_another_space_is_refused(tmp_path: Path) -> None:
    def made(hi: float, seed: int = 0) -> Study:
        return study("s", {"x": Float(0, hi)}, "y", estimator=lambda c: c["x"], strategy="random",
                     store=tmp_path / "s.db", seed=seed)  # fmt: skip

    made(1.0).run(budget=Budget(trials=3))
    with pytest.raises(StoreError, match=r"\bspace\b.*\bx\b"):
        made(2.0).run(budget=Budget(trials=6))
    with pytest.raises(StoreError, match=r"\bseed\b.*\b0\b.*\b1\b"):
        made(1.0, 1).run(budget=Budget(trials=6))
    warm = study("t", {"x": Float(0, 2.0)}, "y", estimator=bowl, warm_start=[tmp_path / "s.db"])
    with pytest.raises(InvalidArgumentError, match="another space"):
        warm.run(budget=Budget(trials=1))


def test_a_warm_start_begins_at_the_end_of_the_other_study(tmp_path: Path) -> None:
    first = study("first", SPACE, "y", estimator=bowl, strategy="tpe", store=tmp_path / "s.db")
    first.run(budget=Budget(trials=60))
    warm, cold = (
        study("warm", SPACE, "y", estimator=bowl, strategy="tpe", warm_start=source, seed=9)
        .run(budget=Budget(trials=8)) for source in ([tmp_path / "s.db"], [])
    )  # fmt: skip
    assert warm.best().values["y"] < cold.best().values["y"]


KILLED = """
import sys
from slipstream.search import Budget, study
sys.path.insert(0, {here!r})
from test_studies import SPACE, slowly
study("s", SPACE, "y", estimator=slowly, strategy="random", store=sys.argv[1]).run(
    budget=Budget(trials=400), progress=lambda s: print(len(s.trials), flush=True))
"""


def killed_and_resumed(folder: Path, kills: int) -> None:
    """Check that a study killed again and again ends bit for bit like an uninterrupted one."""
    program = KILLED.format(here=str(Path(__file__).parent))
    whole = study("s", SPACE, "y", estimator=slowly, strategy="random", store=folder / "whole.db")
    whole.run(budget=Budget(trials=400))
    path = folder / "killed.db"
    for number in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        acknowledged = process.stdout.readline()
        time.sleep(0.013 * (number % 17))
        process.kill()
        process.wait()
        if acknowledged.strip():
            finished = sum(trial.tell_event >= 0 for trial in StoredStudy(path).trials)
            assert finished >= int(acknowledged) - 1
        if finished >= 400:
            break
    cut = study("s", SPACE, "y", estimator=slowly, strategy="random", store=path)
    cut.run(budget=Budget(trials=400))
    assert facts(cut) == facts(whole)
    assert len({trial.candidate.id for trial in cut.trials}) == 400
    assert max(trial.attempts for trial in cut.trials) <= 1 + kills


def test_kill_9_loses_no_acknowledged_trial(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 3)


def test_two_drivers_do_not_write_the_same_file(tmp_path: Path) -> None:
    refused = []

    def runs_another(config: dict[str, Any]) -> float:
        with pytest.raises(StoreError, match="another process") as error:
            study("t", SPACE, "y", estimator=bowl, store=tmp_path / "s.db").run()
        refused.append(error)
        return bowl(config)

    made = study("s", SPACE, "y", estimator=runs_another, store=tmp_path / "s.db",
                 strategy="random")  # fmt: skip
    made.run(budget=Budget(trials=2))
    assert len(refused) == 2


def test_optuna_has_the_same_trials() -> None:
    optuna = pytest.importorskip("optuna")
    made = study("s", SPACE, {"y": "min", "n": "max"}, strategy="random",
                 estimator=lambda c: {"y": bowl(c), "n": c["n"]}, 
                 constraints={"y": "<= 2"})  # fmt: skip
    theirs = made.run(budget=Budget(trials=30)).to_optuna()
    assert isinstance(theirs, optuna.Study)
    ours = [[trial.values["y"], trial.values["n"]] for trial in made.trials]
    assert [trial.values for trial in theirs.trials] == ours
    assert theirs.trials[3].params["x0"] == made.trials[3].candidate.values["x0"]
    front = {tuple(trial.values) for trial in theirs.best_trials}
    assert front == {(trial.values["y"], trial.values["n"]) for trial in made.pareto()}


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_samplers_of_optuna_propose_the_same_as_in_optuna(kind: str) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    theirs = optuna.create_study(sampler=kinds[kind](seed=5))

    def objective(trial: Any) -> float:
        config = {"n": trial.suggest_int("n", 1, 9)}
        config |= {f"x{i}": trial.suggest_float(f"x{i}", -1.0, 1.0) for i in range(4)}
        return bowl(config)

    theirs.optimize(objective, n_trials=50)
    from slipstream.search.optuna_samplers import OptunaSampler

    made = study("s", SPACE, "y", estimator=bowl, strategy=OptunaSampler(kind), seed=5)
    made.run(budget=Budget(trials=50))
    assert [trial.values["y"] for trial in made.trials] == [trial.value for trial in theirs.trials]


@pytest.fixture
def small_disk(tmp_path: Path, require: Callable[[str, bool, str], None]) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    require("mount", not mounted.returncode, f"nothing can be mounted: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_ends_the_study_and_written_trials_are_intact(small_disk: Path) -> None:
    """It continues from there, bit for bit, once there is space again."""
    path = small_disk / "s.db"
    made = study("s", SPACE, "y", estimator=bowl, strategy="random", store=path)
    with pytest.raises(StoreError, match="full") as error:
        made.run(budget=Budget(trials=100_000))
    assert re.search(r"\bdisk space\b.*--store\b", str(error.value.remedy))
    stored = StoredStudy(path).trials
    assert len(stored) > 100
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    more = len(stored) + 50
    cut = study("s", SPACE, "y", estimator=bowl, strategy="random", store=path)
    cut.run(budget=Budget(trials=more))
    whole = study("s", SPACE, "y", estimator=bowl, strategy="random").run(
        budget=Budget(trials=more)
    )
    assert facts(cut) == facts(whole)
    assert cut.replay() == len(cut.trials)


# Every call after this many reports that the disk is unreachable.
_NO_SYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
static int fails(void) {
    static int left = -1;
    if (left < 0) left = atoi(getenv("SYNCS"));
    return left == 0 || --left == 0;
}
#define SYNC(name) \\
    int name(int fd) { \\
        if (fails()) { errno = EIO; return -1; } \\
        return ((int (*)(int))dlsym(RTLD_NEXT, #name))(fd); \\
    }
SYNC(fsync)
SYNC(fdatasync)
"""

_SYNCED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_studies import SPACE, bowl
from slipstream.search import Budget, study
study("s", SPACE, "y", estimator=bowl, strategy="random", store=Path(sys.argv[2])).run(
    budget=Budget(trials=2000),
    progress=lambda s: print(sum(t.tell_event >= 0 for t in s.trials), flush=True))
"""


@pytest.fixture(scope="module")
def no_sync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sync")
    (folder / "sync.c").write_text(_NO_SYNC)
    subprocess.run(
        ["g++", "-x", "c", "-shared", "-fPIC", "-o", "sync.so", "sync.c", "-ldl"],
        cwd=folder, check=True,
    )  # fmt: skip
    return folder / "sync.so"


@pytest.mark.parametrize("syncs", [3, 9, 11])
def test_a_disk_that_fails_to_sync_corrupts_no_study(
    tmp_path: Path, no_sync: Path, syncs: int
) -> None:
    """During file creation or later: it ends with that reason or continues; nothing is torn."""
    path = tmp_path / "s.db"
    ran = subprocess.run(
        [sys.executable, "-c", _SYNCED, str(Path(__file__).parent), str(path)], text=True,
        env={**os.environ, "LD_PRELOAD": str(no_sync), "SYNCS": str(syncs)}, capture_output=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0 or "disk I/O error" in ran.stderr
    acknowledged = max([0, *(int(line) for line in ran.stdout.split())])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    cut = study("s", SPACE, "y", estimator=bowl, strategy="random", store=path)
    assert len(cut.load().trials) >= acknowledged if ran.returncode == 0 else not acknowledged
    cut.run(budget=Budget(trials=2050))
    whole = study("s", SPACE, "y", estimator=bowl, strategy="random")
    assert facts(cut) == facts(whole.run(budget=Budget(trials=2050)))
