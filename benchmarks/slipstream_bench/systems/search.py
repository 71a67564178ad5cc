"""``slipstream bench search``: what the loop costs beside Optuna's, and what its file survives.

Both sides propose at random over ten real parameters and evaluate nothing, in one run: what is left
is the loop, the checks and the record.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.search import Budget, Choice, Float, Int, Processes, Reading, Space, Study, study
from slipstream_bench.harness import paired
from slipstream_bench.rows import Bar, BenchOptions, at_most

_TRIALS = 300
SPACE = Space({f"x{i}": Float(-1.0, 1.0) for i in range(10)})


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: fewer trials a call, ten kills."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _loop_rows(options, Path(folder))
        yield from _process_row(options, Path(folder))
        yield from _array_row(options)
        yield from _kill_row(options, Path(folder))
        yield from _identity_row(options)
        yield from _store_rows(options, Path(folder))


def nothing(config: Mapping[str, Any]) -> float:
    """A trial that takes no time."""
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
        made = optuna.create_study(
            storage=storage, sampler=optuna.samplers.RandomSampler(seed=0),
            study_name=f"s{next(numbers)}",
        )  # fmt: skip
        made.optimize(objective, n_trials=count)

    def ours(count: int) -> None:
        _study(folder / f"ours{next(numbers)}.db").run(budget=Budget(trials=count))

    if options.wants(memory):
        options.progress(memory)
        arms = {"ours": lambda: ours(_TRIALS), "optuna": lambda: theirs(None, _TRIALS)}
        taken = paired(arms, blocks=15, budget_s=40.0)
        ms = 1e3 * taken.median_s("ours") / _TRIALS
        yield taken.ratio("ours", "optuna").at_most(
            memory, 1.2, detail=f"{ms:.3f} ms a trial with the file"
        )
    if options.wants(sqlite):
        options.progress(sqlite)
        count = 30
        database = f"sqlite:///{folder / 'optuna.db'}"
        arms = {"ours": lambda: ours(count), "optuna": lambda: theirs(database, count)}
        taken = paired(arms, clock="wall", blocks=9, budget_s=60.0)
        yield taken.ratio("optuna", "ours").at_least(
            sqlite, 50.0, detail=f"{count} trials a study, files made anew"
        )


def _process_row(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    bar = "a trivial trial in worker processes"
    if not options.wants(bar, 20.0):
        return
    options.progress(bar)
    count = 1000
    executor = Processes(2)
    made = _study(folder / "processes.db")
    made.run(executor, budget=Budget(trials=count))
    ends = sorted(one.ended for one in made.trials)
    took = 1e3 * (ends[-1] - ends[1]) / (count - 2)
    yield at_most(bar, took, 1.0, "ms", n=count, detail="from end to end, two workers that began")


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
    took = time.process_time() - began
    detail = f"{len(NETS.leaves)} parameters, {allowed.mean():.2%} keep the rules, {points.shape}"
    yield at_most(bar, took, 5.0, "s", detail=detail)


_KILLED = """
import sys
from slipstream.search import Budget
from slipstream_bench.systems.search import _study
from pathlib import Path
_study(Path(sys.argv[1])).run(budget=Budget(trials=int(sys.argv[2])),
    progress=lambda s: print(sum(t.told >= 0 for t in s.trials), flush=True))
"""


def _facts(made: Study) -> list[tuple[Any, ...]]:
    return [(t.candidate.id, str(t.state), t.values, t.asked, t.told) for t in made.trials]


def _kill_row(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    bar = "kill -9 at random points"
    kills = 100 if options.full else 10
    if not options.wants(bar, 4.0 * kills):
        return
    trials, rng = 1_000_000, np.random.default_rng(1)
    path = folder / "killed.db"
    lost = 0
    for number in range(kills):
        options.progress(f"{bar}: {number} of {kills}")
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(path), str(trials)], stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stdout is not None
        # Its first report says that it began; from then on it writes all the time.
        acknowledged = int(process.stdout.readline() or 0)
        time.sleep(float(rng.uniform(0.0, 0.3)))
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
        acknowledged = max([acknowledged, *(int(x) for x in rest[:-1])])
        lost += sum(one.told >= 0 for one in Reading(path).trials) < acknowledged
    cut = _study(path)
    done = len(Reading(path).trials)
    cut.run(budget=Budget(trials=done + 50))
    whole = _study(None)
    whole.run(budget=Budget(trials=done + 50))
    same = _facts(cut) == _facts(whole)
    doubled = len(cut.trials) - len({one.candidate.id for one in cut.trials})
    yield Bar(
        bar, kills - lost, f"of {kills}", f"= {kills}", lost == 0 and same and doubled == 0, kills,
        f"{done} trials in all; {lost} times acknowledged ones were lost, {doubled} doubled; the "
        f"end is {'bit for bit that' if same else 'not that'} of a study that was never killed",
    )  # fmt: skip


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
            one = space.sample(rng)
            again = turned.candidate(dict(reversed(one.config.items())))
            wrong += again.id != one.id or space.load(one.json).id != one.id
            if space.size is not None:
                wrong += space.from_index(space.to_index(one)) != one
            wrong += seen.setdefault(one.id, (space.id, one.json)) != (space.id, one.json)
            made += 1
    yield at_most(bar, float(wrong), 0.0, "wrong", n=made, detail="JSON, order, index, collisions")


def _store_rows(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    size, resume = "bytes of file a trial", "going on with a study of many trials"
    if not (options.wants(size, 30.0) or options.wants(resume, 30.0)):
        return
    count = 100_000 if options.full else 10_000
    options.progress(size)
    path = folder / "many.db"
    _study(path).run(budget=Budget(trials=count))
    if options.wants(size):
        each = path.stat().st_size / count
        yield at_most(size, each, 500.0, "B", n=count, detail="ten parameters, one metric")
    if options.wants(resume):
        began = time.perf_counter()
        _study(path).run(budget=Budget(trials=count))
        took = time.perf_counter() - began
        target = 2.0 * count / 100_000
        yield at_most(resume, took, target, "s", n=count)
