"""Train a task repeatedly with and without techniques, and report which reaches its target first.

Every run has its own process and log. Seeds are random and distinct. All arms train from each seed,
in random order, so that disturbances of the machine affect all of them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import technique as techniques
from slipstream.child import Child
from slipstream.durations.durations import cache_folder, one_pool
from slipstream.errors import ChildError, InvalidArgumentError, UsageError
from slipstream.files import write_text
from slipstream.measure.records import arm_label
from slipstream.mlperf.training.compare import Outcome, Verdict, detectable
from slipstream.mlperf.training.forecast import ArmForecast, forecast_table
from slipstream.mlperf.training.log import Log, read, value_of
from slipstream.mlperf.training.rcp import Check, Reference
from slipstream.mlperf.training.rules import Violation, check_set, epochs_of
from slipstream.mlperf.training.score import MIN_RUNS
from slipstream.mlperf.training.tasks import Task, recorded, recorded_epochs
from slipstream.ranks.launch import Host, joined
from slipstream.tables import Field, Table, to_json
from slipstream.units import format_duration

BASELINE = techniques.combination_name(())
_RUN = "slipstream.mlperf.training.running:run"
_TIMEOUT_S = 3600.0
Report = Callable[[str], None]


@dataclass(frozen=True)
class Arm:
    """One way to train the task, and its runs in order of their seeds."""

    name: str
    folder: Path
    runs: tuple[Outcome, ...]
    violations: tuple[Violation, ...] = ()
    check: Check | None = None


@dataclass(frozen=True)
class TrainingResult:
    """All arms of a task, the baseline first.

    Attributes:
        division: ``open`` or ``closed``.
        predictions: predictions made before the first run, by arm; see `slipstream.verbs.training`.
    """

    task: Task
    arms: tuple[Arm, ...]
    division: str
    predictions: Mapping[str, ArmForecast] = field(default_factory=dict)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Comparisons of every other arm with the first; empty before the first run."""
        if not self.arms:
            return ()
        first, *others = self.arms
        return tuple(Verdict.of(arm.name, first.runs, arm.runs) for arm in others)

    @property
    def power(self) -> str:
        """Smallest difference that this many runs detect, given their own spread.

        Empty for tasks with recorded runs (see `power_line`) and for fewer than three runs.
        """
        if not self.arms or self.task.typical:
            return ""
        samples = [run.samples for run in self.arms[0].runs if run.converged]
        if len(samples) < MIN_RUNS:
            return ""
        spread = float(np.std(np.log(samples), ddof=1))
        if not spread:
            return (
                f"all runs reached the target after {samples[0]:,} samples: evaluate more often "
                "(evaluate_every) to measure a difference in samples"
            )
        return _power(spread, len(self.arms[0].runs)) + ", given the spread of these runs"

    def tables(self) -> list[Table]:
        """Return tables of the arms, the candidates' factors and their predictions."""
        notes = [verdict.sentence + "." for verdict in self.verdicts]
        notes += [line for line in [self.power] if line]
        notes += [f"{arm.name}: {arm.check.sentence}." for arm in self.arms if arm.check]
        notes += [f"{arm.name}: {violation}" for arm in self.arms for violation in arm.violations]
        direction = "at least" if self.task.higher else "at most"
        title = (
            f"{self.task.name}: {self.task.metric} of {direction} {self.task.target:g}, "
            f"{len(self.arms[0].runs)} runs each"
        )
        arms = Table.of(self.arms, _ARM_FIELDS, title)
        if not self.verdicts:
            return [Table.of(self.arms, _ARM_FIELDS, title, notes)]
        factors = Table.of(
            self.verdicts, _FACTOR_FIELDS, "Speed-up over the first, per pair", notes
        )
        if not self.predictions:
            return [arms, factors]
        return [arms, factors, forecast_table(self.predictions, self.verdicts)]

    def to_json(self) -> dict[str, Any]:
        """Return all arms, verdicts and predictions as JSON."""
        return {
            "task": self.task.to_json(), "division": self.division,
            "arms": [
                {
                    "name": arm.name, "folder": str(arm.folder),
                    "runs": [vars(run) for run in arm.runs],
                    "violations": [str(violation) for violation in arm.violations],
                    "convergence": None if arm.check is None else arm.check.sentence,
                }
                for arm in self.arms
            ],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "predictions": {name: arm.to_json() for name, arm in self.predictions.items()},
        }  # fmt: skip


def _median(runs: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    values = [value(run) for run in runs if run.converged]
    return float(np.median(values)) if values else math.nan


_ARM_FIELDS = (
    Field[Arm].of("Training", lambda arm: arm_label(arm.name)),
    Field[Arm].number(
        "Reached", lambda arm: f"{sum(r.converged for r in arm.runs)} of {len(arm.runs)}"
    ),
    Field[Arm].number("Samples", lambda arm: f"{_median(arm.runs, lambda r: r.samples):,.0f}"),
    Field[Arm].number("CPU time", lambda arm: _time(_median(arm.runs, lambda r: r.cpu_s))),
    Field[Arm].number("Time", lambda arm: _time(_median(arm.runs, lambda r: r.seconds))),
    Field[Arm].of("Rules", lambda arm: f"{len(arm.violations)} broken" if arm.violations else "ok"),
)


def _time(seconds: float) -> str:
    return "-" if math.isnan(seconds) else format_duration(seconds * 1e9)


_FACTOR_FIELDS = (
    Field[Verdict].of("Training", lambda verdict: verdict.name),
    Field[Verdict].of("Time per sample", lambda verdict: str(verdict.sample)),
    Field[Verdict].of("Samples", lambda verdict: str(verdict.samples)),
    Field[Verdict].of("Time to quality", lambda verdict: str(verdict.time)),
)


def describe(target: str, report: Report = lambda line: None) -> Task:
    """Load the task of a name or ``file.py:function``, running its file in a child process.

    Raises:
        UnknownNameError, WorkloadError: there is no such task.
    """
    with Child(target, environment=one_pool(1)) as child:
        facts = child.call(
            "slipstream.mlperf.training.running:describe", target=target, timeout_s=_TIMEOUT_S
        )
    return Task(**facts)


def power_line(target: str, task: Task, runs: int) -> str:
    """Describe the difference that `runs` runs detect; empty for a task without recorded runs."""
    spread = spread_of(target, task)
    if math.isnan(spread) or runs < MIN_RUNS:
        return ""
    return _power(spread, runs)


def _power(spread: float, runs: int) -> str:
    return (
        f"{runs} runs per arm detect a difference of {100 * detectable(spread, runs):.0f} % in "
        "samples to the target with a power of 80 %"
    )


def spread_of(target: str, task: Task) -> float:
    """Return the standard deviation of the logarithm of recorded runs' samples to the target.

    NaN for a task without recorded runs.
    """
    reference = recorded(task.name) if ":" not in target else None
    samples = reference["samples"].get(str(task.batch), []) if reference else []
    return float(np.std(np.log(samples), ddof=1)) if len(samples) >= MIN_RUNS else math.nan


def arms_of(combinations: Sequence[str], against: str = "") -> list[str]:
    """Return the names of all arms, the baseline first.

    Raises:
        UnknownNameError, UsageError: a combination is invalid or repeated.
    """
    first = techniques.combination_name(techniques.parse(against)) if against else BASELINE
    arms = [first, *(techniques.combination_name(techniques.parse(c)) for c in combinations)]
    if len(set(arms)) < len(arms):
        raise UsageError("the same combination of techniques was passed twice")
    _need_trainable([*combinations, *filter(None, [against])])
    return arms


def time_to_quality(
    target: str,
    combinations: Sequence[str] = (),
    *,
    against: str = "",
    runs: int = 5,
    division: str = "open",
    folder: Path | None = None,
    threads: int = 1,
    batch: int | None = None,
    target_quality: float | None = None,
    most_epochs: float | None = None,
    seeds: Sequence[int] | None = None,
    predictions: Mapping[str, ArmForecast] | None = None,
    report: Report = lambda line: None,
) -> TrainingResult:
    """Train a task `runs` times without techniques and with each combination of techniques.

    Args:
        target: a task of the suite, or ``file.py:function``.
        combinations: technique specs: ``lowrank:0.25``, ``ddp:workers=2+powersgd:4``.
        against: the technique spec of the baseline; by default the unmodified task.
        folder: folder for the logs; by default a new one in the user's cache.
        threads: threads per process.
        batch, target_quality, most_epochs: override the task's values; logged.
        seeds: seeds of an earlier measurement to repeat; random by default.
        predictions: predictions by arm, written to ``result.json`` before the first run. Arms that
            do not apply according to them are not trained.

    Raises:
        UnknownNameError, WorkloadError: there is no such task, or its code fails.
        UsageError: a combination is invalid or repeated, or none applies.
        InvalidArgumentError: no runs, or a repeated seed.
    """
    if runs < 1:
        raise InvalidArgumentError("runs", f"{runs} is less than 1")
    predictions = predictions or {}
    arms = arms_of(combinations, against)
    refused = [name for name in arms if name in predictions and not predictions[name].applies]
    arms = [name for name in arms if name not in refused]
    if refused and len(arms) == 1:
        raise UsageError(
            f"nothing to train: {'; '.join(predictions[name].sample.basis for name in refused)}",
            remedy="choose another --technique",
        )
    seeds = list(seeds) if seeds is not None else random_seeds(runs)
    if len(set(seeds)) < len(seeds):
        raise InvalidArgumentError("seeds", "a seed is repeated, so its runs would be identical")
    task = describe(target, report)
    report(
        power_line(target, task, len(seeds))
        or "the task has no recorded runs: the detectable difference is reported after training"
    )
    folder = folder or cache_folder() / "training" / f"{task.name}-{secrets.token_hex(4)}"
    places = [folder / f"arm_{number}" for number in range(len(arms))]
    for place in places:
        if place.exists() and any(place.iterdir()):
            raise UsageError(
                f"{place} already contains logs, which are never replaced",
                remedy="choose another --output",
            )
        place.mkdir(parents=True, exist_ok=True)
    judged = TrainingResult(task, (), division, predictions)
    write_text(folder / "result.json", to_json(judged.to_json()))
    done: list[list[Outcome]] = [[] for _ in arms]
    order = np.random.default_rng(secrets.randbits(64))
    for number, seed in enumerate(seeds):
        for at in order.permutation(len(arms)).tolist():
            name = arms[at]
            report(f"{name}: run {number + 1} of {len(seeds)}")
            log = places[at] / f"result_{number}.txt"
            done[at].append(
                _train(
                    target, task, name, seed, log, threads, division=division, batch=batch,
                    target_quality=target_quality, most_epochs=most_epochs,
                )
            )  # fmt: skip
    results = [
        _arm(name, place, outcomes, target, task, len(seeds))
        for name, place, outcomes in zip(arms, places, done, strict=True)
    ]
    judged = replace(judged, arms=tuple(results))
    write_text(folder / "result.json", to_json(judged.to_json()))
    return judged


def _need_trainable(combinations: Sequence[str]) -> None:
    """Raise a `UsageError` for techniques that a task cannot apply."""
    for text in combinations:
        for technique in techniques.parse(text):
            if technique.traits.edits_script:
                raise UsageError(
                    f"'{technique.name}' edits a script's training loop, which a task does not have"
                )
            if technique.traits.stage == techniques.Stage.BATCH:
                raise UsageError(
                    f"'{technique.name}' changes the batch size, which is part of the task",
                    remedy="slipstream mlperf train --batch N",
                )


def random_seeds(runs: int) -> list[int]:
    """Return `runs` distinct random seeds."""
    seeds: dict[int, None] = {}
    while len(seeds) < runs:
        seeds.setdefault(secrets.randbits(31))
    return list(seeds)


def _train(
    target: str, task: Task, combination: str, seed: int, log: Path, threads: int, **settings: Any
) -> Outcome:
    """Train once; a run that crashes is logged as aborted and never restarted."""
    wall = techniques.clock(_parsed(combination)) == "wall"
    try:
        answer = train_once(target, task, combination, seed, log, threads, **settings)
        return Outcome.of(answer, str(log), wall=wall)
    except ChildError as error:
        _abort(log, task, error.what)
        return Outcome(seed, "aborted", 0, math.nan, math.nan, math.nan, "", (), error.what,
                       str(log))  # fmt: skip
    except BaseException as error:
        _abort(log, task, type(error).__name__)
        raise


def train_once(
    target: str, task: Task, combination: str, seed: int, log: Path, threads: int, **settings: Any
) -> dict[str, Any]:
    """Call `slipstream.mlperf.training.running.run` in child processes and return its result.

    Raises:
        ChildError: a process died.
        WorkloadError: the task's code fails.
    """
    workers = [part.workers for part in _parsed(combination) if techniques.makes_replicas(part)]
    arguments = {
        "target": target, "combination": "" if combination == BASELINE else combination,
        "seed": seed, "log": str(log), **settings,
    }  # fmt: skip
    if workers:
        with joined([Host()] * workers[0], name=task.name, limit_s=_TIMEOUT_S) as call:
            ranks: list[dict[str, Any]] = call(_RUN, arguments)
            return ranks[0]
    with Child(task.name, environment=one_pool(threads)) as child:
        answer: dict[str, Any] = child.call(
            _RUN, timeout_s=_TIMEOUT_S, threads=threads, **arguments
        )
    return answer


def _parsed(combination: str) -> tuple[techniques.Technique, ...]:
    return () if combination == BASELINE else techniques.parse(combination)


def _abort(log: Path, task: Task, reason: str) -> None:
    """Add the missing ``run_stop`` to the log of a crashed run."""
    if log.exists() and not any(event.key == "run_stop" for event in read(log)):
        writer = Log(log, task.place)
        writer.stop("run_stop", status="aborted", reason=reason)
        writer.close()


def _arm(
    name: str, place: Path, outcomes: Sequence[Outcome], target: str, task: Task, runs: int
) -> Arm:
    logs = [read(Path(run.log)) for run in outcomes if Path(run.log).exists()]
    reference = recorded(task.name) if ":" not in target else None
    optimizer = reference["optimizer"] if reference else ""
    violations = check_set(logs, task, runs=runs, optimizer=optimizer)
    check = None
    if reference is not None and len(logs) >= MIN_RUNS:
        size = int(value_of(logs[0], "global_batch_size", task.batch))
        epochs = [epochs_of(events) for events in logs]
        check = Reference.of(recorded_epochs(reference, task)).check(size, epochs)
    return Arm(name, place, tuple(outcomes), tuple(violations), check)
