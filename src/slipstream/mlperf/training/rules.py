"""Are these logs of a result that counts? Each rule has a name and a message of its own.

`check_run` looks at one log, `check_set` at all runs of a result. What the official package can be
told in its own YAML is told by `official_rules`, so that both can be held against each other.

Source: mlcommons/training_policies; mlcommons/logging, compliance checker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.mlperf.training.log import Event, found, value_of
from slipstream.mlperf.training.rcp import Reference
from slipstream.mlperf.training.tasks import Task

_INIT_MIN = {"closed": 30, "open": 240}
# Wall and monotonic clock may part by that much within a run.
_CLOCKS_MS = 2_000.0
# Data repeats itself: in the suite, up to 0.1 % of the evaluated inputs are also trained on.
_MAX_TRAINED_ON = 0.05
_ONCE = (
    "submission_benchmark", "submission_org", "submission_division", "submission_platform", "seed",
    "global_batch_size", "train_samples", "eval_samples", "target_quality", "init_stop",
)  # fmt: skip


@dataclass(frozen=True)
class Violation:
    """A rule that was broken.

    Attributes:
        rule: its name.
        text: what was found.
        where: the log, by number; empty for the whole set.
    """

    rule: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" + (f" ({self.where})" if self.where else "")


def check_run(events: Sequence[Event], task: Task, optimizer: str = "") -> list[Violation]:
    """What is wrong with one run.

    Args:
        optimizer: of the reference; the closed division may have no other.
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
    """What is wrong with a result: with its runs, and with them together.

    Args:
        runs: how many were announced before the first began.
        reference: whose convergence may not be beaten.
    """
    wrong = [
        Violation(one.rule, one.text, f"result_{number}")
        for number, events in enumerate(logs)
        for one in check_run(events, task, optimizer)
        if one.rule != "not converged"
    ]
    wrong += [Violation(rule, text) for rule, text in _together(logs, runs)]
    if reference is not None and not wrong:
        epochs = [epochs_of(events) for events in logs]
        batch = int(value_of(logs[0], "global_batch_size", 0))
        checked = reference.check(batch, epochs)
        if not checked.passed:
            wrong.append(Violation("convergence", checked.sentence))
    return wrong


def epochs_of(events: Sequence[Event]) -> float:
    """Epochs to the target: of the last evaluation before the end; infinite of a failed run."""
    stop = next(iter(found(events, "run_stop")), None)
    if stop is None or stop.metadata.get("status") != "success":
        return math.inf
    last = [one for one in found(events, "eval_accuracy") if one.line <= stop.line]
    return round(float(last[-1].metadata.get("epoch_num", math.inf)), 3) if last else math.inf


def seconds_of(events: Sequence[Event]) -> float:
    """From ``run_start`` to ``run_stop``; infinite of a run that failed."""
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
        """Where the first of a key is; infinite where there is none."""
        return next((one.line for one in self.events if one.key == key), math.inf)

    @property
    def qualities(self) -> list[Event]:
        return self.all("eval_accuracy")


def _together(logs: Sequence[Sequence[Event]], runs: int) -> Iterator[tuple[str, str]]:
    if len(logs) > runs:
        yield (
            "best of several",
            f"{len(logs)} runs where {runs} were announced: choosing among them is forbidden; "
            "the median window of runs in a row counts",
        )
    if len(logs) < runs:
        yield "runs missing", f"{len(logs)} runs where {runs} were announced"
    seeds = [value_of(events, "seed") for events in logs]
    for seed in sorted({one for one in seeds if seeds.count(one) > 1}, key=str):
        yield "seed repeated", f"{seeds.count(seed)} runs have the seed {seed}"
    failed = sum(epochs_of(events) == math.inf for events in logs)
    if failed > 1:
        yield "not converged", f"{failed} of {len(logs)} runs failed, and one may"
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
        yield f"{early[0]}{more} was read before run_start: read it behind the first yield"
        return
    for key in ("data_touched", "epoch_start", "block_start", "eval_start"):
        if run.line(key) < began:
            yield f"'{key}' comes before run_start: data may be touched when the clock runs"


def _once(run: _Run) -> Iterator[str]:
    for key in _ONCE:
        count = len(run.all(key))
        if count != 1:
            yield f"'{key}' stands there {count} times, and has to once"


def _clock(run: _Run) -> Iterator[str]:
    for key in ("run_start", "run_stop"):
        count = len(run.all(key))
        if count > 1:
            yield f"{count} times {key}: the clock may not be paused"
    if run.line("run_stop") < run.line("run_start") < math.inf:
        yield "it stopped before it began"


def _unended(run: _Run) -> Iterator[str]:
    if not run.all("run_stop"):
        yield "there is no run_stop: it crashed, or goes on"


def _resumed(run: _Run) -> Iterator[str]:
    count = len(run.all("init_start"))
    if count > 1:
        yield f"it was begun {count} times: a run that is resumed does not count"


def _two_clocks(run: _Run) -> Iterator[str]:
    inside = [
        one for one in run.events
        if "monotonic_ms" in one.metadata and one.line >= run.line("run_start")
    ]  # fmt: skip
    if inside:
        offsets = [one.time_ms - float(one.metadata["monotonic_ms"]) for one in inside]
        apart = max(offsets) - min(offsets)
        if apart > _CLOCKS_MS:
            yield f"the wall's clock was set by {apart / 1e3:.1f} s while it ran"
    times = [one.time_ms for one in run.events]
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        yield "time runs backwards"


def _caches(run: _Run) -> Iterator[str]:
    if not run.all("cache_clear") or run.line("cache_clear") > run.line("run_start"):
        yield "caches were not cleared before it began: what was prepared before does not count"


def _init(run: _Run) -> Iterator[str]:
    start, stop = run.all("init_start"), run.all("init_stop")
    division = str(value_of(run.events, "submission_division", ""))
    if division not in _INIT_MIN:
        yield f"the division '{division}' is neither closed nor open"
    elif start and stop:
        minutes = (stop[0].time_ms - start[0].time_ms) / 60e3
        if minutes >= _INIT_MIN[division]:
            yield f"building took {minutes:.0f} min, and at most {_INIT_MIN[division]} are allowed"
    if not start or run.line("init_stop") > run.line("run_start"):
        yield "building did not end before the clock began"


def _seed_late(run: _Run) -> Iterator[str]:
    if run.line("run_start") < run.line("seed") < math.inf:
        yield "it was logged when the run had begun"


def _target(run: _Run) -> Iterator[str]:
    logged = value_of(run.events, "target_quality", run.task.target)
    worse = logged < run.task.target if run.task.higher else logged > run.task.target
    if worse:
        yield f"{logged} in place of {run.task.target}: the target was lowered"


def _claimed(run: _Run) -> Iterator[str]:
    stop = next(iter(run.all("run_stop")), None)
    if stop is None or stop.metadata.get("status") != "success":
        return
    last = run.qualities[-1].value if run.qualities else None
    if last is None or not run.task.reached(float(last)):
        yield f"it says success, and its last evaluation says {last}"


def _failed(run: _Run) -> Iterator[str]:
    stop = next(iter(run.all("run_stop")), None)
    if stop is not None and stop.metadata.get("status") != "success":
        yield f"it ended as {stop.metadata.get('status')}"


def _went_on(run: _Run) -> Iterator[str]:
    reached = [n for n, one in enumerate(run.qualities) if run.task.reached(float(one.value))]
    if reached and reached[0] < len(run.qualities) - 1:
        yield "it went on once the target was reached: the last evaluation is what counts"


def _evaluations(run: _Run) -> Iterator[str]:
    batch = int(value_of(run.events, "global_batch_size", run.task.batch) or run.task.batch)
    last = 0.0
    for one in run.qualities:
        at = float(one.metadata.get("samples_count", math.nan))
        if not at - last <= run.task.evaluate_every + batch:
            yield (
                f"none between {last:.0f} and {at:.0f} samples, and one is due every "
                f"{run.task.evaluate_every}"
            )
            return
        last = at


def _thorough(run: _Run) -> Iterator[str]:
    samples = value_of(run.events, "eval_samples", run.task.eval_samples)
    if samples < run.task.eval_samples:
        yield f"on {samples} samples, and the reference has {run.task.eval_samples}"
    # The model may be called in another way than as a module: then nothing was seen.
    seen = value_of(run.events, "eval_samples_seen", run.task.eval_samples)
    if seen < run.task.eval_samples:
        yield (
            f"{seen} samples reached the model, and an evaluation has {run.task.eval_samples} "
            "(eval_samples)"
        )


def _tested_on_trained(run: _Run) -> Iterator[str]:
    share = float(value_of(run.events, "eval_samples_trained_on", 0.0))
    if share > _MAX_TRAINED_ON:
        yield (
            f"{100 * share:.0f} % of the evaluated samples were trained on: evaluate samples that "
            "training leaves out"
        )


def _epoch(run: _Run) -> Iterator[str]:
    samples = value_of(run.events, "train_samples", run.task.train_samples)
    if samples != run.task.train_samples:
        yield f"an epoch of {samples} samples, and the task has {run.task.train_samples}"


def _optimizer(run: _Run) -> Iterator[str]:
    name = value_of(run.events, "opt_name", "")
    closed = value_of(run.events, "submission_division") == "closed"
    if closed and run.optimizer and name != run.optimizer:
        yield f"'{name}' in place of '{run.optimizer}', which the closed division keeps"


def _model(run: _Run) -> Iterator[str]:
    technique = str(value_of(run.events, "techniques", "as it is"))
    if value_of(run.events, "submission_division") == "closed" and technique != "as it is":
        from slipstream.technique import QualityKind, parse, quality_of

        if quality_of(parse(technique)).kind is QualityKind.NEEDS_TRAINING:
            yield f"'{technique}' is another training, which the closed division does not have"


_RULES: dict[str, Callable[[_Run], Iterator[str]]] = {
    "data before the clock": _data_first, "missing or repeated": _once, "clock paused": _clock,
    "crashed": _unended, "resumed": _resumed, "clock set": _two_clocks,
    "caches not cleared": _caches, "init": _init, "seed late": _seed_late,
    "target lowered": _target, "success claimed": _claimed, "not converged": _failed,
    "went on": _went_on, "evaluation skipped": _evaluations,
    "evaluation less thorough": _thorough, "epoch changed": _epoch,
    "trained on the test set": _tested_on_trained,
    "optimizer changed": _optimizer, "model changed": _model,
}  # fmt: skip


def official_rules(task: Task, optimizer: str = "") -> str:
    """What the official compliance checker can be told of these rules: a file in its YAML."""
    better = ">=" if task.higher else "<="

    def record(name: str, required: str, checks: Iterable[str] = (), after: str = "") -> str:
        lines = ["- KEY:", f"    NAME: {name}", f"    REQ: {required}"]
        if checks := list(checks):
            lines += ["    CHECK:", *(f'        - "{check}"' for check in checks)]
        return "\n".join([*lines, *([f'    POST: "{after}"'] if after else [])])

    started, gap = "s['run']", "v['metadata']['samples_count'] - s['last']"
    rules = [
        "- BEGIN:\n    CODE: \"s.update({'run': False, 'init': False, 'stopped': False, 'cleared': "
        "False, 'last': 0, 'quality': None, 'batch': 0, 'reached': False})\"",
        record("cache_clear", "AT_LEAST_ONE", [f"not {started}"], "s['cleared'] = True"),
        record("init_start", "EXACTLY_ONE", [f"not {started}"], "s['init'] = True"),
        record("init_stop", "EXACTLY_ONE", ["s['init']", f"not {started}"]),
        record("run_start", "EXACTLY_ONE", [], "s['run'] = True"),
        record("data_touched", "OPTIONAL", [started]),
        record("epoch_start", "AT_LEAST_ONE", [started]),
        record("eval_start", "AT_LEAST_ONE", [started]),
        *(record(key, "EXACTLY_ONE") for key in ("submission_org", "submission_platform")),
        record("submission_benchmark", "EXACTLY_ONE"),
        record("submission_division", "EXACTLY_ONE", ["v['value'] in ['closed', 'open']"]),
        record("seed", "EXACTLY_ONE", [f"not {started}"]),
        record("global_batch_size", "EXACTLY_ONE", [], "s['batch'] = v['value']"),
        record("target_quality", "EXACTLY_ONE", [f"v['value'] {better} {task.target}"]),
        record("train_samples", "EXACTLY_ONE", [f"v['value'] == {task.train_samples}"]),
        record("eval_samples", "EXACTLY_ONE", [f"v['value'] >= {task.eval_samples}"]),
        record(
            "eval_accuracy", "AT_LEAST_ONE",
            [f"{gap} <= {task.evaluate_every} + s['batch']", "not s['reached']"],
            "s['last'] = v['metadata']['samples_count']; s['quality'] = v['value']; "
            f"s['reached'] = v['value'] {better} {task.target}",
        ),
        record(
            "run_stop", "EXACTLY_ONE",
            [started, "v['metadata']['status'] == 'success'", "s['reached']"],
        ),
    ]  # fmt: skip
    if optimizer:
        rules.append(record("opt_name", "EXACTLY_ONE", [f"v['value'] == '{optimizer}'"]))
    return "\n\n".join(rules) + "\n"


def optimizer_of(events: Sequence[Event]) -> Any:
    """What a run was trained with."""
    return value_of(events, "opt_name", "")
