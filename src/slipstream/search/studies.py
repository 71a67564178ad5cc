"""Studies: the search loop of the package, which stores every trial."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgumentError, SlipstreamError, WorkloadError
from slipstream.provenance import Provenance
from slipstream.search.choosing import choose, strategy_named
from slipstream.search.estimators import Cost, Estimator, TrialRun, as_estimator, call, values_of
from slipstream.search.executors import Executor, Inline, Outcome, Task, reason_of
from slipstream.search.metrics import (
    SCORED,
    Limit,
    State,
    Trial,
    Value,
    best,
    full_trials,
    need_reported,
    order,
    pareto,
    parse_limits,
    parse_objectives,
)
from slipstream.search.rungs import RungPolicy, Slot, Whole
from slipstream.search.space import Candidate, Space
from slipstream.search.store import Store, StoredStudy
from slipstream.search.strategies import Strategy
from slipstream.units import parse_duration_ns

# Maximum number of attempts of a trial whose worker dies.
_MAX_ATTEMPTS = 3
# Number of measured trials from which predictions are corrected, and of the latest ones used.
_MIN_RATIOS, _MAX_RATIOS = 8, 64
# Medians over fewer reported values do not prune.
_MIN_REPORTED = 5
# After this many consecutive proposals without an evaluation, the strategy is exhausted.
_MAX_IDLE = 1000


@dataclass(frozen=True)
class Budget:
    """Budget of a study; None for no limit.

    Attributes:
        trials: number of evaluations over all runs, including failed ones; rejected and cached
            trials do not count.
        seconds: wall-clock time of the current run.
        device_seconds: sum of the device time of trials over all runs.
    """

    trials: int | None = None
    seconds: float | None = None
    device_seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a number of trials, such as ``"200"``, or a duration, such as ``"15min"``.

        Raises:
            InvalidArgumentError: `text` is neither.
        """
        if text.isdigit():
            return cls(trials=int(text))
        return cls(seconds=parse_duration_ns(text, "budget") / 1e9)


Progress = Callable[["Study"], None]
Callback = Callable[["Study", Trial], None]


def _no_estimator(config: Mapping[str, Any]) -> float:
    raise InvalidArgumentError(
        "estimator", "the study has no estimator to run",
        remedy="pass estimator= to study(), or evaluate trials with study.ask and study.tell",
    )  # fmt: skip


class Study:
    """A search over a space: see `study`."""

    def __init__(
        self,
        name: str,
        space: Space | Mapping[str, Any],
        objectives: Mapping[str, str] | str,
        *,
        estimator: Estimator | Callable[..., Any] | None = None,
        constraints: Mapping[str, str] | None = None,
        analytic: Sequence[Estimator] = (),
        strategy: str | Strategy = "auto",
        rungs: RungPolicy | None = None,
        seed: int = 0,
        store: str | Path | None = None,
        budget: Budget | None = None,
        start: Sequence[Mapping[str, Any]] = (),
        warm_start: Iterable[Study | str | Path] = (),
        callbacks: Sequence[Callback] = (),
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.space = space if isinstance(space, Space) else Space(space)
        self.objectives = parse_objectives(objectives)
        self.estimator = as_estimator(_no_estimator if estimator is None else estimator)
        self.analytic = tuple(analytic)
        self.policy = rungs or Whole()
        """Rung policy in its initial state; `rungs` is the copy of the current run."""
        self.units = self._declared()
        self.limits = parse_limits(constraints or {}, self.units)
        need_reported(self.objectives, self.limits, self.units)
        for level in self.policy.levels:
            need_reported(self.objectives, (), level.metrics)
        self.space.check()
        self.start = [self.space.candidate(values) for values in start]
        self.seed, self.budget = seed, budget or Budget()
        self.store_path = None if store is None else Path(store)
        self.why_strategy = ""
        if strategy == "auto":
            strategy, self.why_strategy = choose(self.space, self.objectives, self.budget.trials)
        self.strategy = strategy if isinstance(strategy, Strategy) else strategy_named(strategy)
        self.rungs = copy.deepcopy(self.policy)
        self._warm = list(warm_start)
        self.callbacks = list(callbacks)
        self.context = dict(context or {})
        self._store, self._is_open = Store(None), False
        self.trials: list[Trial] = []
        self.running: dict[int, Trial] = {}
        self.stopped = ""
        """Reason that the last run ended; empty while it runs."""

    def _declared(self) -> dict[str, str] | None:
        """Return units by metric; None if the estimator declares no metrics."""
        if self.estimator.metrics is None:
            return None
        units = dict(self.estimator.metrics)
        for other in (*self.analytic, *self.policy.levels):
            for metric, unit in (other.metrics or {}).items():
                if units.setdefault(metric, unit) != unit:
                    raise InvalidArgumentError(
                        "estimator", f"{other.name} reports {metric} in {unit or 'no unit'}, but "
                        f"{self.estimator.name} in {units[metric] or 'no unit'}",
                        remedy="declare the same unit in both",
                    )  # fmt: skip
        return units

    @property
    def definition(self) -> dict[str, Any]:
        """Settings that must be unchanged to resume a stored study."""
        return {
            "objectives": {o.metric: o.direction for o in self.objectives},
            "constraints": [f"{limit.metric} {limit.text}" for limit in self.limits],
            "seed": self.seed, "strategy": self.strategy.name, "rungs": repr(self.policy),
            **self.context,
        }  # fmt: skip

    # Running

    def run(
        self,
        executor: Executor | None = None,
        *,
        budget: Budget | None = None,
        progress: Progress = lambda study: None,
        target: str | None = None,
    ) -> Study:
        """Run trials until the budget is spent, the policy is done, or nothing new is proposed.

        Args:
            executor: executor of trials; None for `Inline`, and closed at the end.
            budget: budget to use instead of the study's.
            progress: function that is called with the study about four times per second.
            target: ``file.py:function`` that creates this study, stored for ``search resume``.

        Raises:
            StoreError: the file holds another study of this name, is in use, or cannot be written.
        """
        executor = executor or Inline()
        try:
            if self.estimator.function is _no_estimator:
                _no_estimator({})
            self.budget = budget or self.budget
            self._open(target)
            self._loop(executor, progress)
        finally:
            try:
                executor.close()
            finally:
                self.close()
        progress(self)
        return self

    def ask(self) -> Task | None:
        """Begin a trial that the caller evaluates and ends with `tell`.

            while (task := study.ask()) is not None:
                study.tell(task, train(task.config))

        A task's `run` has the fidelity, a seed, `report` and `should_prune`. Trials that an earlier
        process began but did not end are returned first.

        Returns:
            The task; None if the budget is spent, the policy or the strategy is done, or no trial
            can begin before a running one ends.

        Raises:
            StoreError: the file holds another study of this name, is in use, or cannot be written.
        """
        if not self._is_open:
            self._open(None)
        if (task := self._next()) is not None:
            self._open_tasks[task.number] = (task, time.time())
        self._store.flush()
        return task

    def tell(
        self, task: Task | int, values: Any = None, *, state: str = "complete",
        reason: str | None = None,
    ) -> Trial:  # fmt: skip
        """End a trial that `ask` began.

        Args:
            task: task that `ask` returned, or its number.
            values: a number, or a mapping of metrics to numbers or `Value`s, for a complete trial;
                None for others.
            state: complete, pruned or failed.
            reason: reason of the failure.

        Returns:
            The trial, which has failed if a value is missing or not finite.

        Raises:
            InvalidArgumentError: the trial is not running, the state is unknown, or a complete
                trial has no values.
        """
        number = task if isinstance(task, int) else task.number
        if not self._is_open or number not in self._open_tasks:
            raise InvalidArgumentError(
                "task", f"trial {number} is not running", remedy="pass a task from study.ask()"
            )
        if state not in ("complete", "pruned", "failed"):
            raise InvalidArgumentError(
                "state", f"'{state}' cannot end a trial", remedy="complete, pruned or failed"
            )
        if (values is None) == (state == "complete"):
            needs = "needs values" if values is None else "takes no values"
            raise InvalidArgumentError("values", f"a {state} trial {needs}")
        task, began = self._open_tasks.pop(number)
        outcome = Outcome(number, State(state), {}, reason, began, time.time(),
                          time.time() - began, task.run.reports)  # fmt: skip
        try:
            if values is not None:
                outcome.values = values_of(values, task.only_metric)
        except ValueError as error:
            outcome.state, outcome.reason = State.FAILED, reason_of(error)
        self._end(outcome)
        self._store.flush()
        return self.trials[number]

    def stop(self) -> None:
        """Begin no further trial; `run` returns when the running ones end."""
        self.stopped = "stopped by Study.stop"

    def close(self) -> None:
        """Close the file after `ask` and `tell`; `ask` returns unfinished trials again later."""
        self._store.close()
        self._is_open = False

    def _open(self, target: str | None) -> None:
        self.close()
        self._store = Store(self.store_path)
        try:
            self._store.open_study(self.name, self.space, self.definition, target)
            self._begin()
            self._requeued = self._restore(self._store.trials(self.space))
        except BaseException:
            self._store.close()
            raise
        self._is_open = True
        for trial in self._requeued:
            self._register(trial)

    def _begin(self) -> None:
        self.trials, self.running = [], {}
        self._followers: dict[int, list[Trial]] = {}
        self._seen: dict[tuple[bytes, float], Trial] = {}
        self._events = self._begun = 0
        self._device_s = 0.0
        self._idle = 0
        self._exhausted, self.stopped = False, ""
        self._since = time.monotonic()
        self._open_tasks: dict[int, tuple[Task, float]] = {}
        self._ratios: dict[str, deque[float]] = {}
        self._reported: dict[int, list[float]] = {}
        self.rungs = copy.deepcopy(self.policy)
        self.rungs.order = lambda trials: order(trials, self.objectives)
        self.strategy.begin(self.space, self.objectives, self.limits, self.seed)
        for trial in self._warm_trials():
            self.strategy.tell(trial)

    def _warm_trials(self) -> list[Trial]:
        trials: list[Trial] = []
        for source in self._warm:
            other = source if isinstance(source, Study) else StoredStudy(Path(source))
            if other.space.id != self.space.id:
                raise InvalidArgumentError(
                    "warm_start", f"study '{other.name}' has another space",
                    remedy="use the same parameters, ranges, ties and rules",
                )  # fmt: skip
            trials += [
                Trial(-1, trial.candidate, trial.fidelity, state=trial.state, values=trial.values,
                      violation=trial.violation)
                for trial in other.trials
                if trial.state in SCORED and all(o.metric in trial.values for o in self.objectives)
            ]  # fmt: skip
        return trials

    def _restore(self, stored: Sequence[Trial], *, verify: bool = False) -> list[Trial]:
        """Replay stored events in the policy and the strategy; return trials that did not end.

        Raises:
            SlipstreamError: a promotion differs from the stored one; or a proposal does, which is
                checked with `verify` and for strategies that are not stateless.
        """
        events = [(trial.ask_event, False, trial) for trial in stored]
        events += [(trial.tell_event, True, trial) for trial in stored if trial.tell_event >= 0]
        by_number = {trial.number: trial for trial in stored}
        propose = verify or not self.strategy.stateless
        for at, is_tell, trial in sorted(events, key=lambda event: event[0]):
            self._events = at + 1
            if is_tell:
                self._count(trial)
                self.rungs.tell(trial)
                self.strategy.tell(trial)
                continue
            slot = self.rungs.ask()
            parent = by_number.get(trial.parent) if trial.parent is not None else None
            is_new = slot is not None and slot.parent is None
            if slot is None or (slot.fidelity, slot.bracket, slot.rung) != (
                trial.fidelity, trial.bracket, trial.rung
            ) or (not is_new and slot.parent is not parent):  # fmt: skip
                raise self._differs(trial, "another rung")
            if is_new and trial.number >= len(self.start):
                if propose:
                    proposal = self.strategy.propose(trial.number)
                    if proposal is None or proposal.id != trial.candidate.id:
                        raise self._differs(trial, "nothing" if proposal is None else proposal.json)
                else:
                    self.strategy.ask_count += 1
            self.trials.append(trial)
        return [trial for trial in stored if trial.tell_event < 0]

    def _differs(self, trial: Trial, now: str) -> SlipstreamError:
        return SlipstreamError(
            f"trial {trial.number} ran with {trial.candidate.json}; it would now be {now}",
            where=f"study '{self.name}' in {self.store_path}",
            remedy="the strategy, a library or the study's code has changed; start a new study "
            "with warm_start= to learn from these trials",
        )

    def _loop(self, executor: Executor, progress: Progress) -> None:
        shown = time.monotonic()
        while True:
            while executor.capacity() > 0 and (task := self._next()) is not None:
                executor.submit(task)
            if not self.running:
                break
            for outcome in executor.poll():
                if (again := self._end(outcome)) is not None:
                    executor.submit(again)
            if (now := time.monotonic()) - shown > 0.25:
                shown = now
                self._store.flush()
                progress(self)
        self.stopped = self.stopped or (
            "the rung policy is done" if self.rungs.done
            else "the strategy proposes nothing new" if self._exhausted or self._idle > _MAX_IDLE
            else "no trial can begin"
        )  # fmt: skip

    def _next(self) -> Task | None:
        """Return the next trial that needs an evaluation; None if none can begin now."""
        while not self.stopped:
            trial: Trial | None
            if self._requeued:
                trial = self._requeued.pop(0)
            elif (
                self._spent(time.monotonic() - self._since) or self.rungs.done or self._exhausted
                or self._idle > _MAX_IDLE or (slot := self.rungs.ask()) is None
            ):  # fmt: skip
                return None
            elif (trial := self._ask(slot)) is None:
                self._exhausted = True
                return None
            if (task := self._admit(trial)) is not None:
                return task
        return None

    def _spent(self, seconds: float) -> bool:
        budget = self.budget
        for spent, maximum, word in (
            (self._begun, budget.trials, "trials"),
            (seconds, budget.seconds, "time"),
            (self._device_s, budget.device_seconds, "device time"),
        ):
            if maximum is not None and spent >= maximum:
                self.stopped = f"the budget of {word} is spent"
                return True
        return False

    def _ask(self, slot: Slot) -> Trial | None:
        number = len(self.trials)
        candidate: Candidate | None
        if slot.parent is not None:
            candidate = slot.parent.candidate
        elif number < len(self.start):
            candidate = self.start[number]
        else:
            candidate = self.strategy.propose(number)
        if candidate is None:
            return None
        trial = Trial(
            number, candidate, slot.fidelity, slot.bracket, slot.rung,
            slot.parent.number if slot.parent is not None else None, ask_event=self._events,
        )  # fmt: skip
        if slot.parent is not None and self.policy.levels:
            # Values of cheaper levels remain next to those of this level.
            trial.measurements = dict(slot.parent.measurements)
        self._events += 1
        self._register(trial)
        return trial

    def _register(self, trial: Trial) -> None:
        if trial.number == len(self.trials):
            self.trials.append(trial)
        self.running[trial.number] = trial

    def _admit(self, trial: Trial) -> Task | None:
        """Return the trial's task; None if it repeats a trial, fails or is rejected."""
        earlier = self._seen.get((trial.candidate.id, trial.fidelity))
        if earlier is not None and earlier is not trial:
            if earlier.tell_event >= 0:
                self._repeat(trial, earlier)
            else:
                self._followers.setdefault(earlier.number, []).append(trial)
                self._idle += 1
            return None
        self._seen[trial.candidate.id, trial.fidelity] = trial
        try:
            config = trial.candidate.config
            self._predict(trial, config)
            cost = self._cost(trial, config)
        except (Exception, SystemExit) as error:
            trial.state, trial.reason = State.FAILED, reason_of(error)
            self._tell(trial)
            return None
        if trial.violation > 0:
            trial.state = State.REJECTED
            self._tell(trial)
            return None
        trial.attempts += 1
        self._begun += 1
        self._store.put(trial, self.units or {})
        return self._task(trial, config, cost)

    def _task(self, trial: Trial, config: dict[str, Any], cost: Cost | None) -> Task:
        parent = self.trials[trial.parent].fidelity if trial.parent is not None else 0.0
        folder = None
        if self.store_path is not None and not isinstance(self.policy, Whole):
            path = Path(f"{self.store_path}.files", trial.candidate.id.hex())
            path.mkdir(parents=True, exist_ok=True)
            folder = str(path.resolve())
        source = self._estimator(trial)
        medians: list[tuple[int, float]] = []
        if source is self.estimator:
            medians = [
                (step, (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2)
                for step, values in self._reported.items() if len(values) >= _MIN_REPORTED
            ]  # fmt: skip
        run = TrialRun(trial.fidelity, self.trial_seed(trial.candidate), folder, parent,
                  medians=medians, sign=self.objectives[0].sign)  # fmt: skip
        metric = self.objectives[0].metric
        group = (trial.bracket, trial.rung)
        return Task(trial.number, source, config, run, metric, group, cost)

    def _cost(self, trial: Trial, config: dict[str, Any]) -> Cost | None:
        source = self._estimator(trial)
        return None if source.cost is None else source.cost(config)

    def _estimator(self, trial: Trial) -> Estimator:
        levels = self.policy.levels
        return levels[trial.rung] if trial.rung < len(levels) else self.estimator

    def trial_seed(self, candidate: Candidate, purpose: bytes = b"trial") -> int:
        """Return the seed of a candidate's evaluations, below 2 ** 31."""
        text = self.seed.to_bytes(8, "little", signed=True) + purpose + candidate.id
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1

    def _predict(self, trial: Trial, config: dict[str, Any]) -> None:
        for source in self.analytic:
            run = TrialRun(trial.fidelity, self.trial_seed(trial.candidate))
            returned = call(source.function, config, run)
            metric = next(iter(source.metrics or ()), self.objectives[0].metric)
            self._note(trial, values_of(returned, metric), source)
        self._check_limits(trial, predicted=True)

    def _note(self, trial: Trial, values: Mapping[str, Value], source: Estimator) -> None:
        for metric, value in values.items():
            kind = value.provenance or source.provenance
            trial.measurements[metric, kind] = Value(value.value, kind, value.stddev)
            trial.values[metric] = value.value

    def _check_limits(self, trial: Trial, *, predicted: bool = False) -> None:
        """Compare a trial's values with the limits; set its violation and the reason for it."""
        trial.violation, reasons = 0.0, []
        for limit in self.limits:
            if limit.metric not in trial.values:
                continue
            value = trial.values[limit.metric]
            factor = self._correction(limit) if predicted else 1.0
            if amount := limit.violation(factor * value):
                how = "" if factor == 1 else f" (predicted {value:.4g}, corrected by {factor:.3g})"
                reasons.append(f"{limit.metric} {limit.text}: {factor * value:.4g}{how}")
                trial.violation += amount
        if reasons:
            trial.reason = "; ".join(reasons)

    def _correction(self, limit: Limit) -> float:
        """Return the ratio of measured to predicted values; 1.0 with fewer than 8 trials.

        It is the tenth or ninetieth percentile, whichever rejects fewer candidates, because a
        rejected candidate is never measured.
        """
        ratios = sorted(self._ratios.get(limit.metric, ()))
        if len(ratios) < _MIN_RATIOS:
            return 1.0
        tenth = len(ratios) // 10
        return ratios[tenth if limit.op[0] == "<" else -1 - tenth]

    def _learn(self, trial: Trial) -> None:
        """Record a trial's reports, and the ratios of its measured to its predicted values."""
        if trial.state not in (State.COMPLETE, State.INFEASIBLE):
            return
        if len(self.objectives) == 1 and trial.rung >= len(self.policy.levels):
            for step, value in trial.reports.items():
                insort(self._reported.setdefault(step, []), value)
        if not self.analytic:
            return
        for (metric, kind), predicted in trial.measurements.items():
            measured = trial.measurements.get((metric, Provenance.MEASURED))
            if kind is Provenance.MEASURED or measured is None:
                continue
            if measured.value * predicted.value > 0:
                ratios = self._ratios.setdefault(metric, deque(maxlen=_MAX_RATIOS))
                ratios.append(measured.value / predicted.value)

    def _end(self, outcome: Outcome) -> Task | None:
        """Record the outcome of a trial; return its task if it is to run again."""
        trial = self.running[outcome.number]
        trial.started, trial.ended = outcome.started, outcome.ended
        trial.device_s += outcome.device_s
        trial.state, trial.reason = outcome.state, outcome.reason
        if outcome.state is State.LOST and trial.attempts < _MAX_ATTEMPTS:
            trial.state = State.RUNNING
            trial.attempts += 1
            config = trial.candidate.config
            return self._task(trial, config, self._cost(trial, config))
        trial.reports = {s: value for s, value in outcome.reports.items() if math.isfinite(value)}
        if outcome.state is State.COMPLETE:
            source = self._estimator(trial)
            self._note(trial, outcome.values, source)
            required = {objective.metric for objective in self.objectives}
            if source is self.estimator:
                # A cheap level need not report the metrics of limits.
                required |= {limit.metric for limit in self.limits}
            missing = sorted(required - trial.values.keys())
            if missing:
                reported = ", ".join(sorted(trial.values)) or "nothing"
                trial.state = State.FAILED
                trial.reason = f"the estimator did not report {', '.join(missing)}, only {reported}"
            else:
                self._check_limits(trial)
                if trial.violation:
                    trial.state = State.INFEASIBLE
        self._tell(trial)
        for follower in self._followers.pop(trial.number, ()):
            self._repeat(follower, trial)
        return None

    def _repeat(self, trial: Trial, earlier: Trial) -> None:
        """End a trial with the result of an earlier one of its candidate and fidelity."""
        trial.state = State.CACHED if earlier.state in SCORED else earlier.state
        trial.values, trial.measurements = earlier.values, earlier.measurements
        trial.violation = earlier.violation
        trial.reason = f"repeats trial {earlier.number}"
        self._tell(trial)

    def _tell(self, trial: Trial) -> None:
        trial.tell_event = self._events
        self._events += 1
        del self.running[trial.number]
        self._count(trial, begun=False)
        self._store.put(trial, self.units or {})
        self.rungs.tell(trial)
        self.strategy.tell(trial)
        for callback in self.callbacks:
            try:
                callback(self, trial)
            except SlipstreamError:
                raise
            except Exception as error:
                raise WorkloadError(
                    f"a callback failed after trial {trial.number}: {reason_of(error)}",
                    where=f"study '{self.name}'",
                ) from error

    def _count(self, trial: Trial, *, begun: bool = True) -> None:
        self._seen.setdefault((trial.candidate.id, trial.fidelity), trial)
        free = trial.attempts == 0  # Rejected, or a repeat.
        self._idle = self._idle + 1 if free else 0
        self._begun += begun and not free
        self._device_s += trial.device_s
        self._learn(trial)

    # Results

    def load(self) -> Study:
        """Read the trials from the store, without running anything."""
        if self.store_path is not None:
            self.trials = StoredStudy(self.store_path, self.name).trials
        return self

    def replay(self) -> int:
        """Repeat all proposals from the stored events, and compare them with the stored trials.

        Returns:
            The number of trials.

        Raises:
            SlipstreamError: a proposal differs, or the study has no store.
        """
        if self.store_path is None:
            raise SlipstreamError("the study has no store", remedy="create it with store=")
        self.close()
        self._begin()
        self._restore(StoredStudy(self.store_path, self.name).trials, verify=True)
        return len(self.trials)

    def top(self, n: int = 10) -> list[Trial]:
        """Return the `n` best trials at the highest fidelity reached."""
        return best(full_trials(self.trials), self.objectives, n)

    def best(self) -> Trial | None:
        """Return the best trial that violates no limit; None if there is none."""
        return next((trial for trial in self.top(1) if not trial.violation), None)

    def pareto(self) -> list[Trial]:
        """Return the Pareto-optimal trials at the highest fidelity reached."""
        return pareto(full_trials(self.trials), self.objectives)

    def to_optuna(self, storage: str | None = None) -> Any:
        """Export the study to Optuna; see `slipstream.search.optuna_samplers.to_optuna`."""
        from slipstream.search.optuna_samplers import to_optuna

        return to_optuna(self, storage)


def study(
    name: str, space: Space | Mapping[str, Any], objectives: Mapping[str, str] | str,
    **settings: Any,
) -> Study:  # fmt: skip
    """Create a study: a search over a space for objectives.

        study("digits", Space({"lr": Float(1e-4, 1e-1, log=True)}), {"accuracy": "max"},
              estimator=train, store="runs.db").run(budget=Budget(trials=50))

    Args:
        name: name of the study in its store.
        space: parameters to vary.
        objectives: metrics, each with its direction ``min`` or ``max``.
        estimator: function of a candidate's values and, optionally, a `TrialRun`; None if the
            caller evaluates trials between `Study.ask` and `Study.tell`.
        constraints: limits on metrics, such as ``{"memory": "<= 128KB"}``.
        analytic: cheap estimators; a candidate whose predictions violate a limit is rejected
            without an evaluation.
        strategy: name of a strategy, ``"auto"``, or a `Strategy`.
        rungs: policy that promotes trials to higher fidelities; None evaluates each candidate once.
        seed: random seed.
        store: SQLite file; None keeps trials in memory.
        budget: limits on trials and time; None for no limit.
        start: values of the first candidates.
        warm_start: other studies over the same space, or their files, to learn from.
        callbacks: functions called with the study and each trial that ended; they may call
            `Study.stop`.
        context: other settings, as JSON by name, that must be unchanged to resume the study.

    Raises:
        InvalidArgumentError: the space is empty, limits contradict each other, or units differ.
        UnknownNameError: no estimator declares a metric, or the strategy is unknown.
    """
    return Study(name, space, objectives, **settings)
