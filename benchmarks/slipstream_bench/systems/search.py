"""``slipstream bench search``: cost of the loop compared with Optuna's, and safety of its file.

Both sides propose at random over ten real parameters and evaluate nothing, in one run, so that only
the loop, the checks and the record remain.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.provenance import Provenance
from slipstream.search import (
    Budget,
    Choice,
    Executor,
    Float,
    Int,
    Processes,
    Space,
    State,
    Study,
    Trial,
    Value,
    study,
)
from slipstream.search.store import Store
from slipstream_bench import strategies
from slipstream_bench.harness import paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_TRIALS = 300
SPACE = Space({f"x{i}": Float(-1.0, 1.0) for i in range(10)})


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer trials per call, ten kills."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _loop_rows(options, Path(folder))
        yield from _process_row(options, Path(folder))
        yield from _tune_rows(options, Path(folder))
        yield from _array_row(options)
        yield from _kill_row(options, Path(folder))
        yield from _identity_row(options)
        yield from _store_rows(options, Path(folder))
    yield from strategies.bars(options)


def nothing(config: Mapping[str, Any]) -> float:
    """Return 0: a trial that takes no time."""
    return float(config["x0"])


def _study(path: Path | None, name: str = "s") -> Study:
    return study(name, SPACE, "y", estimator=nothing, strategy="random", store=path)


def _loop_rows(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    memory, sqlite = "loop and file over Optuna in memory", "Optuna's SQLite over loop and file"
    if not (options.wants(memory) or options.wants(sqlite)):
        return
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    numbers = itertools.count()

    def objective(trial: Any) -> float:
        return float(sum(trial.suggest_float(f"x{i}", -1.0, 1.0) for i in range(10)))

    def theirs(storage: str | None, count: int) -> None:
        created = optuna.create_study(
            storage=storage, sampler=optuna.samplers.RandomSampler(seed=0),
            study_name=f"s{next(numbers)}",
        )  # fmt: skip
        created.optimize(objective, n_trials=count)

    def ours(count: int) -> None:
        _study(folder / f"ours{next(numbers)}.db").run(budget=Budget(trials=count))

    if options.wants(memory):
        options.progress(memory)
        arms = {"ours": lambda: ours(_TRIALS), "optuna": lambda: theirs(None, _TRIALS)}
        taken = paired(arms, blocks=15, budget_s=40.0)
        ms = 1e3 * taken.median_s("ours") / _TRIALS
        yield taken.ratio("ours", "optuna").at_most(
            memory, 1.2, detail=f"{ms:.3f} ms per trial with the file"
        )
    if options.wants(sqlite):
        options.progress(sqlite)
        count = 30
        database = f"sqlite:///{folder / 'optuna.db'}"
        arms = {"ours": lambda: ours(count), "optuna": lambda: theirs(database, count)}
        taken = paired(arms, clock="wall", blocks=9, budget_s=60.0)
        yield taken.ratio("optuna", "ours").at_least(
            sqlite, 50.0, detail=f"{count} trials per study, in new files"
        )


def _each_ms(ends: Iterable[float], settle: int = 1) -> float:
    """Return milliseconds per trial, without the first `settle`, in which workers started."""
    counted = sorted(ends)[settle:]
    return 1e3 * (counted[-1] - counted[0]) / (len(counted) - 1)


def _ours_ms(executor: Executor, folder: Path, count: int) -> float:
    """Return milliseconds of one of our trivial trials, with its record."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "s.db"
    completed = _study(path).run(executor, budget=Budget(trials=count))
    assert all(trial.state is State.COMPLETE for trial in completed.trials)
    return _each_ms(trial.ended for trial in completed.trials)


def _process_row(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    bar = "a trivial trial in worker processes"
    if not options.wants(bar, 20.0):
        return
    options.progress(bar)
    count = 1000
    elapsed_ms = _ours_ms(Processes(2), folder, count)
    yield at_most(
        bar, elapsed_ms, 1.0, "ms", n=count, detail="from end to end, two workers already started"
    )


def _tune_rows(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    """Compare Ray Tune with both executors, in one Ray of two slots.

    Times are between the ends of trials: starting Ray, a study and its first worker is on neither
    side. Tune starts a worker per trial unless it reuses them.
    """
    selected = {
        f"Ray Tune{variant} over {ours}, a trivial trial": (variant, ours, target)
        for variant, target in (("", 100.0), (" that keeps its workers", 50.0))
        for ours in ("worker processes", "our Ray executor")
    }
    rounds = 3 if options.full else 1
    rows = {bar: row for bar, row in selected.items() if options.wants(bar, 60.0 * rounds)}
    if not rows:
        return
    try:
        from ray import tune  # noqa: F401
    except ImportError as error:
        for bar, (_, _, target) in rows.items():
            yield not_judged(bar, "x", f">= {target:g}", f"Ray Tune is not installed: {error}")
        return
    from slipstream.engines.trials.ray_executor import RayExecutor

    times_ms: dict[str, list[float]] = {}
    owner = RayExecutor(2)  # later executors find Ray running and leave it so
    try:
        for number in range(rounds):
            options.progress(f"Ray Tune and our executors, round {number + 1} of {rounds}")
            for name, value in (
                ("worker processes", _ours_ms(Processes(2), folder, 1000)),
                ("our Ray executor", _ours_ms(RayExecutor(2), folder, 1000)),
                ("", _tune_ms(folder, 5, keep=False)),
                (" that keeps its workers", _tune_ms(folder, 12, keep=True)),
            ):
                times_ms.setdefault(name, []).append(value)
    finally:
        owner.close()
    for bar, (variant, ours, target) in rows.items():
        ratios = [
            theirs / own for theirs, own in zip(times_ms[variant], times_ms[ours], strict=True)
        ]
        detail = (
            f"{statistics.median(times_ms[variant]):.0f} ms and "
            f"{statistics.median(times_ms[ours]):.2f} ms; "
            f"ratios {min(ratios):.0f} to {max(ratios):.0f}"
        )
        yield at_least(
            bar,
            statistics.median(ratios),
            target,
            "x",
            n=rounds,
            detail=detail,
            data=dict(times_ms),
        )


def _tune_ms(folder: Path, count: int, *, keep: bool) -> float:
    """Return milliseconds of a trivial trial of Ray Tune, two at a time.

    Args:
        keep: whether a worker continues with the next trial (``reuse_actors``).
    """
    from ray import tune

    def trivial(config: dict[str, Any]) -> None:
        tune.report({"y": config["x0"], "ended": time.time()})

    tuner = tune.Tuner(
        tune.with_resources(trivial, {"cpu": 1}),
        param_space={leaf.path: tune.uniform(-1.0, 1.0) for leaf in SPACE.leaves},
        tune_config=tune.TuneConfig(num_samples=count, metric="y", mode="min", reuse_actors=keep),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(dir=folder), verbose=0),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        results = tuner.fit()
    assert not results.errors
    metrics = [results[at].metrics or {} for at in range(len(results))]
    return _each_ms((metric["ended"] for metric in metrics), settle=2)


NETS = Space(
    {
        f"stage{i}": {
            "depth": Int(1, 4), "width": Int(16, 256, 8), "kernel": Int(3, 7, 2),
            "block": Choice(plain={}, bottleneck={"ratio": Int(2, 6)}),
        }
        for i in range(5)
    },
    forbid=[f"stage{i}.width > stage{i + 1}.width" for i in range(4)],
)  # fmt: skip


def _array_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "a million candidates drawn, encoded and checked"
    if not options.wants(bar, 15.0):
        return
    options.progress(bar)
    began = time.process_time()
    columns = NETS.sample_columns(1_000_000, np.random.default_rng(0))
    allowed = NETS.allowed(columns)
    points = NETS.encode(columns)
    elapsed_s = time.process_time() - began
    detail = (
        f"{len(NETS.leaves)} parameters, {allowed.mean():.2%} satisfy the rules, {points.shape}"
    )
    yield at_most(bar, elapsed_s, 5.0, "s", detail=detail)


def slowly(config: Mapping[str, Any]) -> float:
    """Wait two milliseconds, so that a study that is killed a hundred times stays short."""
    time.sleep(float(os.environ.get("SLIPSTREAM_TRIAL_S", "0")))
    return float(config["x0"])


_KILLED = """
import sys
from pathlib import Path
from slipstream.search import Budget
from slipstream_bench.systems.search import killed
print(0, flush=True)
killed(Path(sys.argv[1])).run(budget=Budget(trials=10**6),
    progress=lambda s: print(sum(t.tell_event >= 0 for t in s.trials), flush=True))
"""


def killed(path: Path | None) -> Study:
    """Return the study that is killed while it runs in `path`."""
    return study("s", SPACE, "y", estimator=slowly, strategy="random", store=path)


def _facts(made: Study) -> list[tuple[Any, ...]]:
    return [
        (t.candidate.id, str(t.state), t.values, t.ask_event, t.tell_event) for t in made.trials
    ]


def _kill_row(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    """Kill a study at random times after it opens its file.

    It may be reading stored events then, or be between any two trials.
    """
    bar = "kill -9 at random points"
    kills = 100 if options.full else 10
    if not options.wants(bar, 4.0 * kills):
        return
    rng = np.random.default_rng(1)
    path = folder / "killed.db"
    lost, broken, again, done = 0, 0, 0, 0
    for number in range(kills):
        options.progress(f"{bar}: {number} of {kills}")
        acknowledged = _killed_once(path, float(rng.uniform(0.0, 1.2)))
        stored, whole = _stored(path)
        lost += stored < max(acknowledged, done)
        broken += not whole
        again += stored > done
        done = stored
    cut, uncut = killed(path), killed(None)
    cut.run(budget=Budget(trials=done + 50))
    uncut.run(budget=Budget(trials=done + 50))
    same = _facts(cut) == _facts(uncut)
    doubled = len(cut.trials) - len({trial.candidate.id for trial in cut.trials})
    yield Bar(
        bar, kills - lost - broken, f"of {kills}", f"= {kills}",
        lost == broken == doubled == 0 and same, kills,
        f"{done} trials in all, more of them after {again} of the kills; acknowledged trials were "
        f"lost {lost} times, the file was broken {broken} times, {doubled} trials doubled; the end "
        f"is {'bit for bit that' if same else 'NOT that'} of a study that was never killed",
    )  # fmt: skip


def _killed_once(path: Path, after_s: float) -> int:
    """Run the study until it is killed; return the number of trials that it acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "SLIPSTREAM_TRIAL_S": "0.002"},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    # Ignore an incomplete last line.
    whole = process.communicate()[0].rpartition("\n")[0]
    return max([0, *(int(line) for line in whole.split())])


def _stored(path: Path) -> tuple[int, bool]:
    """Return the number of completed trials in the file, and whether SQLite finds it intact."""
    if not path.exists():
        return 0, True
    # Read-only, since the study itself recovers what the kill left.
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        whole = connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
        if "trial" not in tables:
            return 0, whole
        counted = connection.execute("SELECT count(*) FROM trial WHERE told >= 0").fetchone()
    return int(counted[0]), whole


def _identity_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "identity of candidates of random spaces"
    count = 100_000 if options.full else 10_000
    if not options.wants(bar, 30.0):
        return
    options.progress(bar)
    rng = np.random.default_rng(2)
    wrong, made = 0, 0
    seen: dict[bytes, tuple[bytes, str]] = {}
    while made < count:
        tree: dict[str, Any] = {}
        for name in rng.permutation(list("abcdef"))[: rng.integers(1, 6)]:
            kind = rng.integers(3)
            leaf = (
                Int(0, int(rng.integers(1, 40))) if kind else Float(0.0, float(rng.integers(1, 9)))
            )
            tree[str(name)] = Choice(p={"q": leaf}, r={}) if kind == 2 else leaf
        space = Space(tree)
        turned = Space.from_json(Space(dict(reversed(tree.items()))).to_json())
        for _ in range(200):
            candidate = space.sample(rng)
            again = turned.candidate(dict(reversed(candidate.config.items())))
            wrong += again.id != candidate.id or space.load(candidate.json).id != candidate.id
            if space.size is not None:
                wrong += space.from_index(space.to_index(candidate)) != candidate
            wrong += seen.setdefault(candidate.id, (space.id, candidate.json)) != (
                space.id,
                candidate.json,
            )
            made += 1
    yield at_most(bar, float(wrong), 0.0, "wrong", n=made, detail="JSON, order, index, collisions")


_SIZE = "bytes of file a trial"
_WRITTEN = "trials of three metrics written a second"
# Time limits for a study of 100,000 trials.
_ASKS = {"the ten best": 0.2, "the front": 1.0, "going on": 2.0}


def _store_rows(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    count = 100_000 if options.full else 10_000
    rows = {
        f"{what} of a study of many trials": (what, most * count / 100_000)
        for what, most in _ASKS.items()
    }
    if not any(options.wants(row, 30.0) for row in (_SIZE, _WRITTEN, *rows)):
        return
    options.progress(_SIZE)
    path = folder / "many.db"
    _study(path).run(budget=Budget(trials=count))
    if options.wants(_SIZE):
        each = path.stat().st_size / count
        yield at_most(_SIZE, each, 500.0, "B", n=count, detail="ten parameters, one metric")
    loaded = _study(path).load()
    asks: dict[str, Callable[[], object]] = {
        "the ten best": lambda: loaded.top(10),
        "the front": loaded.pareto,
        "going on": lambda: _study(path).run(budget=Budget(trials=count)),
    }
    for row, (what, most) in rows.items():
        if options.wants(row):
            began = time.process_time()
            asks[what]()
            detail = "the file is read" if what == "going on" else "in memory"
            yield at_most(row, time.process_time() - began, most, "s", n=count, detail=detail)
    if options.wants(_WRITTEN):
        options.progress(_WRITTEN)
        yield _written_row(folder / "written.db", 1_000_000 if options.full else 20_000)


def _written_row(path: Path, count: int) -> Bar:
    """Put completed trials into the store, which writes them in batches."""
    rng = np.random.default_rng(3)
    kind = Provenance.MEASURED
    store = Store(path)
    store.open_study("s", SPACE, {}, None)
    candidates = [SPACE.sample(rng) for _ in range(1000)]
    began = time.perf_counter()
    for number in range(count):
        values = {"y": 1.0 * number, "ms": 2.0, "bytes": 3.0}
        measurements = {(metric, kind): Value(value, kind) for metric, value in values.items()}
        store.put(
            Trial(number, candidates[number % 1000], state=State.COMPLETE, values=values,
                  measurements=measurements, ask_event=2 * number, tell_event=2 * number + 1), {},
        )  # fmt: skip
    store.close()
    rate = count / (time.perf_counter() - began)
    size = path.stat().st_size / count
    return at_least(
        _WRITTEN, rate, 5000.0, "/s", n=count, detail=f"ten parameters; {size:.0f} B per trial"
    )
