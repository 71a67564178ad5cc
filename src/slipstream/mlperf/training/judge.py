"""Train a task several times with and without techniques, and say which reaches its target sooner.

Every run has a process and a log of its own. Seeds are drawn from the system, never twice; all arms
train from each of them, in random order, so that whatever the machine does happens to all.
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
from slipstream.mlperf.training.compare import Outcome, Verdict, detectable
from slipstream.mlperf.training.foresight import Foresight, foresight_table
from slipstream.mlperf.training.log import Log, read, value_of
from slipstream.mlperf.training.rcp import Check, Reference
from slipstream.mlperf.training.rules import Violation, check_set, epochs_of
from slipstream.mlperf.training.score import LEAST_RUNS
from slipstream.mlperf.training.tasks import Task, recorded
from slipstream.ranks.launch import Host, joined
from slipstream.tables import Field, Table, to_json
from slipstream.units import format_duration

BASELINE = "as it is"
_RUN = "slipstream.mlperf.training.running:run"
_LIMIT_S = 3600.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Arm:
    """One way to train the task, and its runs in the order of their seeds."""

    name: str
    folder: Path
    runs: tuple[Outcome, ...]
    violations: tuple[Violation, ...] = ()
    check: Check | None = None


@dataclass(frozen=True)
class Judged:
    """All arms of a task, the baseline first.

    Attributes:
        division: ``open`` or ``closed``, as logged.
        predictions: by arm, of before the first run; see `slipstream.verbs.training`.
    """

    task: Task
    arms: tuple[Arm, ...]
    division: str
    predictions: Mapping[str, Foresight] = field(default_factory=dict)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of every arm but the first; none before the first run."""
        if not self.arms:
            return ()
        first, *others = self.arms
        return tuple(Verdict.of(arm.name, first.runs, arm.runs) for arm in others)

    @property
    def power(self) -> str:
        """The difference that as many runs would find, from the spread of these.

        Empty for tasks with recorded runs (`power_line`), and of fewer than three runs.
        """
        if not self.arms or self.task.typical:
            return ""
        samples = [run.samples for run in self.arms[0].runs if run.converged]
        if len(samples) < LEAST_RUNS:
            return ""
        spread = float(np.std(np.log(samples), ddof=1))
        if not spread:
            return (
                f"all runs reached the target after {samples[0]:,} samples: evaluate more often "
                "(evaluate_every) to measure a difference in samples"
            )
        return _power(spread, len(self.arms[0].runs)) + ", by the spread of these runs"

    def tables(self) -> list[Table]:
        """Arms with their scores, the factors of the candidates, and what was predicted of them."""
        notes = [one.sentence + "." for one in self.verdicts]
        notes += [line for line in [self.power] if line]
        notes += [f"{arm.name}: {arm.check.sentence}." for arm in self.arms if arm.check]
        notes += [f"{arm.name}: {one}" for arm in self.arms for one in arm.violations]
        direction = "at least" if self.task.higher else "at most"
        title = (
            f"{self.task.name}: {self.task.metric} of {direction} {self.task.target:g}, "
            f"{len(self.arms[0].runs)} runs each"
        )
        arms = Table.of(self.arms, _ARM_FIELDS, title)
        if not self.verdicts:
            return [Table.of(self.arms, _ARM_FIELDS, title, notes)]
        factors = Table.of(self.verdicts, _FACTOR_FIELDS, "Against the first, per pair", notes)
        if not self.predictions:
            return [arms, factors]
        return [arms, factors, foresight_table(self.predictions, self.verdicts)]

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "task": self.task.to_json(), "division": self.division,
            "arms": [
                {
                    "name": arm.name, "folder": str(arm.folder),
                    "runs": [vars(one) for one in arm.runs],
                    "violations": [str(one) for one in arm.violations],
                    "convergence": None if arm.check is None else arm.check.sentence,
                }
                for arm in self.arms
            ],
            "verdicts": [one.to_json() for one in self.verdicts],
            "predictions": {name: one.to_json() for name, one in self.predictions.items()},
        }  # fmt: skip


def _median(runs: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    done = [value(one) for one in runs if one.converged]
    return float(np.median(done)) if done else math.nan


_ARM_FIELDS = (
    Field[Arm].of("Training", lambda arm: arm.name),
    Field[Arm].number(
        "Reached", lambda arm: f"{sum(r.converged for r in arm.runs)} of {len(arm.runs)}"
    ),
    Field[Arm].number("Samples", lambda arm: f"{_median(arm.runs, lambda r: r.samples):,.0f}"),
    Field[Arm].number(
        "Processor time", lambda arm: _time(_median(arm.runs, lambda r: r.cpu_s))
    ),
    Field[Arm].number("Time", lambda arm: _time(_median(arm.runs, lambda r: r.seconds))),
    Field[Arm].of("Rules", lambda arm: f"{len(arm.violations)} broken" * bool(arm.violations)
                  or "kept"),
)  # fmt: skip


def _time(seconds: float) -> str:
    return "-" if math.isnan(seconds) else format_duration(seconds * 1e9)


def _ratio(factor: Any) -> str:
    return f"{factor.ratio:.3f} [{factor.low:.3f}, {factor.high:.3f}]"


_FACTOR_FIELDS = (
    Field[Verdict].of("Training", lambda one: one.name),
    Field[Verdict].of("Time of a sample", lambda one: _ratio(one.sample)),
    Field[Verdict].of("Samples", lambda one: _ratio(one.samples)),
    Field[Verdict].of("Time to quality", lambda one: _ratio(one.time)),
)


def describe(target: str, say: Say = lambda line: None) -> Task:
    """The task of a name or ``file.py:function``; its file runs in a child.

    Raises:
        UnknownNameError, WorkloadError: there is none.
    """
    with Child(target, environment=one_pool(1)) as child:
        facts = child.call(
            "slipstream.mlperf.training.running:describe", target=target, timeout_s=_LIMIT_S
        )
    return Task(**facts)


def power_line(target: str, task: Task, runs: int) -> str:
    """What so many runs can find, said before they are made; empty where nobody recorded it."""
    spread = spread_of(target, task)
    if math.isnan(spread) or runs < LEAST_RUNS:
        return ""
    return _power(spread, runs)


def _power(spread: float, runs: int) -> str:
    return (
        f"{runs} runs a side find a difference of {100 * detectable(spread, runs):.0f} % in "
        "samples to the target four times in five"
    )


def spread_of(target: str, task: Task) -> float:
    """How recorded runs' samples to the target scatter: standard deviation of their logarithm.

    NaN where nobody recorded any.
    """
    reference = recorded(task.name) if ":" not in target else None
    samples = reference["samples"].get(str(task.batch), []) if reference else []
    return float(np.std(np.log(samples), ddof=1)) if len(samples) >= LEAST_RUNS else math.nan


def arms_of(combinations: Sequence[str], against: str = "") -> list[str]:
    """The names of all arms, the one that others are compared with first.

    Raises:
        UnknownNameError, UsageError: a combination that cannot be, or the same twice.
    """
    first = techniques.combination_name(techniques.parse(against)) if against else BASELINE
    arms = [first, *(techniques.combination_name(techniques.parse(c)) for c in combinations)]
    if len(set(arms)) < len(arms):
        raise UsageError("a combination of techniques is given twice")
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
    predictions: Mapping[str, Foresight] | None = None,
    say: Say = lambda line: None,
) -> Judged:
    """Train a task `runs` times as it is, and with each combination of techniques.

    Args:
        target: a task of the suite, or ``file.py:function``.
        combinations: in the grammar: ``lowrank:0.25``, ``ddp:workers=2+powersgd:4``.
        against: the combination that all others are compared with; none by default.
        folder: for the logs; by default one of its own among this user's cached files.
        threads: of each process.
        batch, target_quality, most_epochs: in place of the task's; logged.
        seeds: only to repeat what was measured; else they are drawn.
        predictions: by arm, written to ``result.json`` before the first run. What they say does
            not apply is not trained.

    Raises:
        UnknownNameError, WorkloadError: there is no such task, or its code fails.
        UsageError: a combination that cannot be, or the same twice; none that applies.
        InvalidArgumentError: no runs, or a seed twice.
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
            remedy="another --technique",
        )
    seeds = list(seeds) if seeds is not None else drawn(runs)
    if len(set(seeds)) < len(seeds):
        raise InvalidArgumentError("seeds", "a seed stands there twice: runs would be the same")
    task = describe(target, say)
    say(
        power_line(target, task, len(seeds))
        or "what these runs can find is reported after them: the task has no recorded runs"
    )
    folder = folder or cache_folder() / "training" / f"{task.name}-{secrets.token_hex(4)}"
    places = [folder / f"arm_{number}" for number in range(len(arms))]
    for place in places:
        if place.exists() and any(place.iterdir()):
            raise UsageError(
                f"there are logs in {place} already: a run is not repeated or replaced",
                remedy="another --out",
            )
        place.mkdir(parents=True, exist_ok=True)
    judged = Judged(task, (), division, predictions)
    write_text(folder / "result.json", to_json(judged.to_json()))
    done: list[list[Outcome]] = [[] for _ in arms]
    mixed = np.random.default_rng(secrets.randbits(64))
    for number, seed in enumerate(seeds):
        for at in mixed.permutation(len(arms)).tolist():
            name = arms[at]
            say(f"{name}: run {number + 1} of {len(seeds)}")
            log = places[at] / f"result_{number}.txt"
            done[at].append(
                _one(
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
    """Raise a `UsageError` for techniques that change what a task does not have."""
    for text in combinations:
        for one in techniques.parse(text):
            if one.traits.edits_script:
                raise UsageError(
                    f"'{one.name}' edits the loop of a script, and the loop of a task is ours"
                )
            if one.traits.stage == techniques.Stage.BATCH:
                raise UsageError(
                    f"'{one.name}' changes how many samples a step takes, which a task's loop sets",
                    remedy="slipstream mlperf train --batch N",
                )


def drawn(runs: int) -> list[int]:
    """So many seeds from the system, none twice."""
    seeds: dict[int, None] = {}
    while len(seeds) < runs:
        seeds.setdefault(secrets.randbits(31))
    return list(seeds)


def _one(
    target: str, task: Task, combination: str, seed: int, log: Path, threads: int, **settings: Any
) -> Outcome:
    """One run; what dies is marked as aborted and never begun again."""
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
    """What `slipstream.mlperf.training.running.run` tells of one run, in processes of its own.

    Raises:
        ChildError: it died.
        WorkloadError: the task's code fails.
    """
    workers = [one.workers for one in _parsed(combination) if techniques.makes_replicas(one)]
    arguments = {
        "target": target, "combination": "" if combination == BASELINE else combination,
        "seed": seed, "log": str(log), **settings,
    }  # fmt: skip
    if workers:
        with joined([Host()] * workers[0], name=task.name, limit_s=_LIMIT_S) as call:
            ranks: list[dict[str, Any]] = call(_RUN, arguments)
            return ranks[0]
    with Child(task.name, environment=one_pool(threads)) as child:
        answer: dict[str, Any] = child.call(_RUN, timeout_s=_LIMIT_S, threads=threads, **arguments)
    return answer


def _parsed(combination: str) -> tuple[techniques.Technique, ...]:
    return () if combination == BASELINE else techniques.parse(combination)


def _abort(log: Path, task: Task, reason: str) -> None:
    """End the log of a run that did not end it by itself."""
    if log.exists() and not any(one.key == "run_stop" for one in read(log)):
        writer = Log(log, task.place)
        writer.stop("run_stop", status="aborted", reason=reason)
        writer.close()


def _arm(
    name: str, place: Path, outcomes: Sequence[Outcome], target: str, task: Task, runs: int
) -> Arm:
    logs = [read(Path(one.log)) for one in outcomes if Path(one.log).exists()]
    reference = recorded(task.name) if ":" not in target else None
    optimizer = reference["optimizer"] if reference else ""
    violations = check_set(logs, task, runs=runs, optimizer=optimizer)
    check = None
    if reference is not None and len(logs) >= LEAST_RUNS:
        points = {
            int(batch): [one / task.train_samples for one in samples]
            for batch, samples in reference["samples"].items()
        }
        size = int(value_of(logs[0], "global_batch_size", task.batch))
        check = Reference.of(points).check(size, [epochs_of(one) for one in logs])
    return Arm(name, place, tuple(outcomes), tuple(violations), check)
