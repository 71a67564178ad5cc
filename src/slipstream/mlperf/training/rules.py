"""Check logs against the rules. Each rule has its own name and message.

`check_run` checks one log, `check_set` all runs of a result.

Source: mlcommons/training_policies; mlcommons/logging, compliance checker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slipstream.mlperf.training.log import Event, found, value_of
from slipstream.mlperf.training.rcp import Reference
from slipstream.mlperf.training.tasks import Task

_INIT_MIN = {"closed": 30, "open": 240}
# Maximum drift between wall clock and monotonic clock within a run.
_MAX_DRIFT_MS = 2_000.0
# Data sets contain duplicates: in the suite, up to 0.1 % of the evaluated inputs are trained on.
_MAX_TRAINED_ON = 0.05
_ONCE = (
    "submission_benchmark", "submission_org", "submission_division", "submission_platform", "seed",
    "global_batch_size", "train_samples", "eval_samples", "target_quality", "init_stop",
)  # fmt: skip


@dataclass(frozen=True)
class Violation:
    """A violation of a rule.

    Attributes:
        rule: name of the rule.
        text: what was found.
        where: the log, by number; empty for the whole set.
    """

    rule: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" + (f" ({self.where})" if self.where else "")


def check_run(events: Sequence[Event], task: Task, optimizer: str = "") -> list[Violation]:
    """Return the violations of one run.

    Args:
        optimizer: the reference's optimizer, which the closed division must use.
    """
    return [
        Violation(rule, text)
        for rule, check in _RULES.items()
        for text in check(_Run(events, task, optimizer))
    ]


def check_set(
    logs: Sequence[Sequence[Event]], task: Task, *, runs: int, optimizer: str = "",
    reference: Reference | None = None,
) -> list[Violation]:  # fmt: skip
    """Return the violations of a result, of each run and of all runs together.

    Args:
        runs: number of runs announced before the first one.
        reference: points below whose convergence the runs may not be.
    """
    violations = [
        Violation(violation.rule, violation.text, f"result_{number}")
        for number, events in enumerate(logs)
        for violation in check_run(events, task, optimizer)
        if violation.rule != "not converged"
    ]
    violations += [Violation(rule, text) for rule, text in _check_together(logs, runs)]
    if reference is not None and not violations:
        epochs = [epochs_of(events) for events in logs]
        batch = int(value_of(logs[0], "global_batch_size", 0))
        checked = reference.check(batch, epochs)
        if not checked.passed:
            violations.append(Violation("convergence", checked.sentence))
    return violations


def epochs_of(events: Sequence[Event]) -> float:
    """Return epochs to the target, at the last evaluation; infinite for a failed run."""
    stop = next(iter(found(events, "run_stop")), None)
    if stop is None or stop.metadata.get("status") != "success":
        return math.inf
    scores = [event for event in found(events, "eval_accuracy") if event.line <= stop.line]
    return round(float(scores[-1].metadata.get("epoch_num", math.inf)), 3) if scores else math.inf


def seconds_of(events: Sequence[Event]) -> float:
    """Return the seconds from ``run_start`` to ``run_stop``; infinite for a failed run."""
    start, stop = found(events, "run_start"), found(events, "run_stop")
    if not start or not stop or stop[0].metadata.get("status") != "success":
        return math.inf
    return (stop[0].time_ms - start[0].time_ms) / 1e3


@dataclass(frozen=True)
class _Run:
    events: Sequence[Event]
    task: Task
    optimizer: str

    def all(self, key: str) -> list[Event]:
        return found(self.events, key)

    def line(self, key: str) -> float:
        """Line number of the first event with a key; infinite if there is none."""
        return next((event.line for event in self.events if event.key == key), math.inf)

    @property
    def qualities(self) -> list[Event]:
        return self.all("eval_accuracy")


def _check_together(logs: Sequence[Sequence[Event]], runs: int) -> Iterator[tuple[str, str]]:
    if len(logs) > runs:
        yield (
            "best of several",
            f"{len(logs)} runs, but {runs} were announced: choosing among them is forbidden; "
            "the median window of consecutive runs counts",
        )
    if len(logs) < runs:
        yield "runs missing", f"{len(logs)} runs, but {runs} were announced"
    seeds = [value_of(events, "seed") for events in logs]
    for seed in sorted({seed for seed in seeds if seeds.count(seed) > 1}, key=str):
        yield "seed repeated", f"{seeds.count(seed)} runs have the seed {seed}"
    failed = sum(epochs_of(events) == math.inf for events in logs)
    if failed > 1:
        yield "not converged", f"{failed} of {len(logs)} runs failed; at most one may"
    for key in ("global_batch_size", "opt_base_learning_rate", "techniques"):
        values = {str(value_of(events, key)) for events in logs}
        if len(values) > 1:
            yield "mixed settings", f"runs of one result differ in {key}: {', '.join(values)}"


def _data_first(run: _Run) -> Iterator[str]:
    began = run.line("run_start")
    touched = run.all("data_touched")
    early = [str(event.value) for event in touched if event.line < began and event.value]
    if early:
        more = f" and {len(early) - 1} more" * (len(early) > 1)
        yield f"{early[0]}{more} was read before run_start: read it after the first yield"
        return
    for key in ("data_touched", "epoch_start", "block_start", "eval_start"):
        if run.line(key) < began:
            yield f"'{key}' comes before run_start: data may be read only after the clock starts"


def _once(run: _Run) -> Iterator[str]:
    for key in _ONCE:
        count = len(run.all(key))
        if count != 1:
            yield f"'{key}' is logged {count} times, not once"


def _clock(run: _Run) -> Iterator[str]:
    for key in ("run_start", "run_stop"):
        count = len(run.all(key))
        if count > 1:
            yield f"{key} is logged {count} times: the clock may not be paused"
    if run.line("run_stop") < run.line("run_start") < math.inf:
        yield "run_stop comes before run_start"


def _unended(run: _Run) -> Iterator[str]:
    if not run.all("run_stop"):
        yield "there is no run_stop: the run crashed or has not ended"


def _resumed(run: _Run) -> Iterator[str]:
    count = len(run.all("init_start"))
    if count > 1:
        yield f"the run was started {count} times: resumed runs do not count"


def _two_clocks(run: _Run) -> Iterator[str]:
    inside = [
        event for event in run.events
        if "monotonic_ms" in event.metadata and event.line >= run.line("run_start")
    ]  # fmt: skip
    if inside:
        offsets = [event.time_ms - float(event.metadata["monotonic_ms"]) for event in inside]
        drift = max(offsets) - min(offsets)
        if drift > _MAX_DRIFT_MS:
            yield f"the wall clock was set by {drift / 1e3:.1f} s during the run"
    times = [event.time_ms for event in run.events]
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        yield "time runs backwards"


def _caches(run: _Run) -> Iterator[str]:
    if not run.all("cache_clear") or run.line("cache_clear") > run.line("run_start"):
        yield "caches were not cleared before run_start"


def _init(run: _Run) -> Iterator[str]:
    start, stop = run.all("init_start"), run.all("init_stop")
    division = str(value_of(run.events, "submission_division", ""))
    if division not in _INIT_MIN:
        yield f"the division is '{division}', not closed or open"
    elif start and stop:
        minutes = (stop[0].time_ms - start[0].time_ms) / 60e3
        if minutes >= _INIT_MIN[division]:
            yield f"initialization took {minutes:.0f} min; the limit is {_INIT_MIN[division]} min"
    if not start or run.line("init_stop") > run.line("run_start"):
        yield "initialization did not end before run_start"


def _seed_late(run: _Run) -> Iterator[str]:
    if run.line("run_start") < run.line("seed") < math.inf:
        yield "the seed was logged after run_start"


def _target(run: _Run) -> Iterator[str]:
    logged = value_of(run.events, "target_quality", run.task.target)
    lowered = logged < run.task.target if run.task.higher else logged > run.task.target
    if lowered:
        yield f"the target was lowered from {run.task.target} to {logged}"


def _claimed(run: _Run) -> Iterator[str]:
    stop = next(iter(run.all("run_stop")), None)
    if stop is None or stop.metadata.get("status") != "success":
        return
    last = run.qualities[-1].value if run.qualities else None
    if last is None or not run.task.reached(float(last)):
        yield f"the status is success, but the last evaluation is {last}"


def _failed(run: _Run) -> Iterator[str]:
    stop = next(iter(run.all("run_stop")), None)
    if stop is not None and stop.metadata.get("status") != "success":
        yield f"the run ended with status {stop.metadata.get('status')}"


def _continued(run: _Run) -> Iterator[str]:
    reached = [n for n, event in enumerate(run.qualities) if run.task.reached(float(event.value))]
    if reached and reached[0] < len(run.qualities) - 1:
        yield "the run continued after the target was reached; it must end with that evaluation"


def _evaluations(run: _Run) -> Iterator[str]:
    batch = int(value_of(run.events, "global_batch_size", run.task.batch) or run.task.batch)
    last = 0.0
    for event in run.qualities:
        at = float(event.metadata.get("samples_count", math.nan))
        if not at - last <= run.task.evaluate_every + batch:
            yield (
                f"no evaluation between {last:.0f} and {at:.0f} samples; one is due every "
                f"{run.task.evaluate_every}"
            )
            return
        last = at


def _evaluated(run: _Run) -> Iterator[str]:
    samples = value_of(run.events, "eval_samples", run.task.eval_samples)
    if samples < run.task.eval_samples:
        yield f"evaluated on {samples} samples; the reference uses {run.task.eval_samples}"
    # Not logged if the model is not called as a module.
    seen = value_of(run.events, "eval_samples_seen", run.task.eval_samples)
    if seen < run.task.eval_samples:
        yield (
            f"{seen} samples reached the model; an evaluation must have {run.task.eval_samples} "
            "(eval_samples)"
        )


def _tested_on_trained(run: _Run) -> Iterator[str]:
    share = float(value_of(run.events, "eval_samples_trained_on", 0.0))
    if share > _MAX_TRAINED_ON:
        yield f"{100 * share:.0f} % of the evaluated samples were trained on: use held-out samples"


def _epoch(run: _Run) -> Iterator[str]:
    samples = value_of(run.events, "train_samples", run.task.train_samples)
    if samples != run.task.train_samples:
        yield f"an epoch has {samples} samples; the task has {run.task.train_samples}"


def _optimizer(run: _Run) -> Iterator[str]:
    name = value_of(run.events, "opt_name", "")
    closed = value_of(run.events, "submission_division") == "closed"
    if closed and run.optimizer and name != run.optimizer:
        yield f"the closed division requires '{run.optimizer}', not '{name}'"


def _model(run: _Run) -> Iterator[str]:
    from slipstream.technique import QualityKind, combination_name, parse, quality_of

    baseline = combination_name(())
    technique = str(value_of(run.events, "techniques", baseline))
    closed = value_of(run.events, "submission_division") == "closed" and technique != baseline
    if closed and quality_of(parse(technique)).kind is QualityKind.NEEDS_TRAINING:
        yield f"'{technique}' changes the training, which the closed division does not allow"


_RULES: dict[str, Callable[[_Run], Iterator[str]]] = {
    "data before the clock": _data_first, "missing or repeated": _once, "clock paused": _clock,
    "crashed": _unended, "resumed": _resumed, "clock set": _two_clocks,
    "caches not cleared": _caches, "init": _init, "seed late": _seed_late,
    "target lowered": _target, "success claimed": _claimed, "not converged": _failed,
    "went on": _continued, "evaluation skipped": _evaluations,
    "evaluation less thorough": _evaluated, "epoch changed": _epoch,
    "trained on the test set": _tested_on_trained,
    "optimizer changed": _optimizer, "model changed": _model,
}  # fmt: skip
