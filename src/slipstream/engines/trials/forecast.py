"""Predict a study's makespan on N devices: run its own loop and policy on a virtual clock."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.engines.trials.cluster_state import ClusterState
from slipstream.engines.trials.schedulers import scheduler_by_name
from slipstream.engines.trials.simulator import Clock, Interval
from slipstream.engines.trials.trialset import Floats, TrialSet, bound_s
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.search import Cost, Outcome, State, Study, Task, Trial, Value
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent

_HOUR_S = 3600.0
# More devices are worth it while doubling them gives at least this share of twice the speed.
_MIN_EFFICIENCY = 0.75
# Trials proposed ahead per device with an asynchronous policy.
_AHEAD = 2
# Another run is between the shortest and the longest of 39 with a probability of 95 %.
_DRAWS = 39
# Fewer recorded trials do not show the variation of times.
_MIN_RECORDED = 5


def empty_state(
    devices: int, max_width: int, restart_s: float, max_pack: int, *, resizable: bool = True
) -> ClusterState:
    """Return a cluster without trials."""
    empty = np.zeros(0)
    trials = TrialSet(empty, np.ones((0, max_width)), empty, empty)
    return ClusterState(
        trials, devices, restart_s=restart_s, max_pack=max_pack, resizable=resizable
    )


def rates_of(cost: Cost, max_width: int) -> Floats:
    """Return speed-ups at width 1, 2, ..., float64 [max_width]."""
    widths = np.arange(1, max_width + 1, dtype=np.float64)
    return np.asarray(widths / (1.0 + cost.gamma * (widths - 1.0)))


class Simulated:
    """An executor of studies that runs the real scheduler in virtual time.

    Args:
        score: returns a trial's value of the objective that decides promotions.
        ahead: maximum number of submitted trials.
    """

    def __init__(
        self, devices: int, scheduler: str = "level", *, score: Callable[[Task], dict[str, Value]],
        costs: Callable[[Task], Cost], ahead: int, max_width: int = 8, max_pack: int = 4,
        restart_s: float = 15.0, record: bool = False,
    ) -> None:  # fmt: skip
        state = empty_state(devices, max_width, restart_s, max_pack)
        self.clock = Clock(state, scheduler_by_name(scheduler), record)
        self._score, self._costs, self._ahead, self._max_width = score, costs, ahead, max_width
        self._tasks: dict[int, tuple[Task, float]] = {}
        self._arrived: list[int] = []
        self.rows: dict[int, int] = {}
        """Trial numbers by row of the clock's state."""
        self._work: dict[int, tuple[str, float, Cost]] = {}

    def capacity(self) -> int:
        return self._ahead - len(self._tasks)

    def submit(self, task: Task) -> None:
        cost = self._costs(task)
        work = cost.seconds * max(task.run.fidelity - task.run.parent, 0.0)
        rates = rates_of(cost, self._max_width)
        row = self.clock.state.add(work, rates, cost.utilisation, cost.memory)
        self._tasks[row] = (task, work)
        self.rows[row] = task.number
        self._work[task.number] = (repr(sorted(task.config.items())), work, cost)
        self._arrived.append(row)

    def poll(self) -> Sequence[Outcome]:
        self.clock.arrive(self._arrived)
        self._arrived = []
        outcomes = []
        for row in self.clock.advance():
            task, work = self._tasks.pop(row)
            outcomes.append(
                Outcome(task.number, State.COMPLETE, self._score(task), None, 0.0,
                        self.clock.now_s, work)
            )  # fmt: skip
        return outcomes

    def close(self) -> None:
        self._tasks.clear()

    def bound_s(self, trials: Iterable[Trial]) -> float:
        """Return T* of `trials`, with each candidate's rungs in sequence; 0.0 without any."""
        chains: dict[str, tuple[float, Cost]] = {}
        for trial in trials:
            if trial.number in self._work:
                key, work, cost = self._work[trial.number]
                chains[key] = (chains.get(key, (0.0, cost))[0] + work, cost)
        if not chains:
            return 0.0
        costs = [cost for _, cost in chains.values()]
        chained = TrialSet(
            np.array([work for work, _ in chains.values()]),
            np.array([rates_of(cost, self._max_width) for cost in costs]),
            np.array([cost.utilisation for cost in costs]),
            np.array([cost.memory for cost in costs]),
        )
        return bound_s(chained, self.clock.state.devices)


@dataclass(frozen=True)
class Forecast:
    """The prediction of a study on N devices.

    Attributes:
        makespan_s: time until the last trial ends; with recorded costs, the median of the draws.
        bound_s: T*, a lower bound on the makespan, whichever trials are promoted.
        device_s: number of devices times the makespan.
        busy: share of `device_s` in which devices had trials.
        restarts: number of resizes of running trials.
        interval_s: shortest and longest makespan of the draws, a 95 % interval; None with declared
            costs.
        recorded: number of trials whose device times were resampled; 0 with declared costs.
    """

    devices: int
    scheduler: str
    trials: int
    makespan_s: float
    bound_s: float
    busy: float
    restarts: int
    intervals: Sequence[Interval] = ()
    rows: Mapping[int, int] | None = None
    interval_s: tuple[float, float] | None = None
    recorded: int = 0

    @property
    def device_s(self) -> float:
        """Paid device seconds."""
        return self.devices * self.makespan_s


def predict(
    study: Study, devices: Sequence[int], *, scheduler: str = "level", max_width: int = 8,
    max_pack: int = 4, restart_s: float = 15.0, record: bool = False,
) -> list[Forecast]:  # fmt: skip
    """Predict how long the study takes on each number of devices.

    The study's own loop, space, seed and rung policy run, with random candidates and promotions.
    Work is declared by the estimator's ``cost``. Without it, the device times of trials in the
    study's store are resampled 39 times. Their scaling is unknown, so each trial then runs on one
    device, in order of submission.

    Raises:
        SlipstreamError: no cost is declared and fewer than 5 trials are recorded, or the study has
            no end.
        InvalidArgumentError: no devices, or a trial does not fit on one.
    """
    scheduler_by_name(scheduler)
    costs, recorded = _costs(study)
    if study.budget.trials is None and not getattr(study.policy, "n", None) and not getattr(
        study.policy, "rounds", None
    ) and not study.policy.synchronous:  # fmt: skip
        raise SlipstreamError(
            "the study has no end, so its duration cannot be predicted",
            remedy="pass budget=Budget(trials=...), or rounds= or n= to its rungs",
        )
    forecasts = []
    for n in devices:
        runs = []
        for cost in costs:
            executor = Simulated(
                n, "fifo" if recorded else scheduler, score=lambda task: _random_score(study, task),
                costs=cost, ahead=10**9 if study.policy.synchronous else _AHEAD * n,
                max_width=max_width, max_pack=max_pack, restart_s=restart_s, record=record,
            )  # fmt: skip
            runs.append(_run(study, executor, scheduler, recorded))
        runs.sort(key=lambda run: run.makespan_s)
        interval_s = (runs[0].makespan_s, runs[-1].makespan_s) if recorded else None
        bound = min(run.bound_s for run in runs)
        forecasts.append(replace(runs[len(runs) // 2], bound_s=bound, interval_s=interval_s))
    return forecasts


def _run(study: Study, executor: Simulated, scheduler: str, recorded: int) -> Forecast:
    twin = Study(
        study.name, study.space, {study.objectives[0].metric: study.objectives[0].direction},
        estimator=study.estimator, strategy="random", rungs=study.policy,
        seed=study.seed, budget=study.budget,
    )  # fmt: skip
    twin.run(executor)
    clock = executor.clock
    certain = twin.rungs.certain(twin.trials)
    if twin.stopped.startswith("the budget"):
        # Other schedules may spend the budget on more rungs of fewer candidates, at least these.
        new = [trial for trial in twin.trials if trial.parent is None]
        certain = new[: -(-(study.budget.trials or 1) // twin.rungs.rungs)]
    total = clock.state.devices * clock.now_s
    return Forecast(
        clock.state.devices, scheduler, len(twin.trials), clock.now_s, executor.bound_s(certain),
        clock.busy_device_s / total if total else 0.0, clock.state.restarts, clock.intervals,
        executor.rows, recorded=recorded,
    )  # fmt: skip


def _random_score(study: Study, task: Task) -> dict[str, Value]:
    # A candidate has the same score at every rung.
    return {task.only_metric: Value(task.run.seed / 2**31)}


def _costs(study: Study) -> tuple[list[Callable[[Task], Cost]], int]:
    """Return the declared cost function, or one per draw, and the number of recorded trials."""
    if (declared := study.estimator.cost) is not None:
        return [lambda task: declared(task.config)], 0
    trials = study.trials
    if not trials and study.store_path is not None and study.store_path.exists():
        trials = study.load().trials
    times = [_unit_s(trial, trials) for trial in trials if trial.device_s > 0]
    if len(times) < _MIN_RECORDED:
        raise SlipstreamError(
            f"the duration of trials is unknown: no cost is declared, and {len(times)} trials are "
            "recorded",
            where=f"study '{study.name}'",
            remedy="declare @estimator(..., cost=lambda config: Cost(seconds=60)), or run "
            f"{_MIN_RECORDED} trials first",
        )
    rng = np.random.default_rng(study.seed)
    return [_resampled(_perturbed(np.log(times), rng), rng) for _ in range(_DRAWS)], len(times)


def _unit_s(trial: Trial, trials: Sequence[Trial]) -> float:
    """Return a trial's device seconds per unit of added fidelity."""
    parent = 0.0 if trial.parent is None else trials[trial.parent].fidelity
    return trial.device_s / (trial.fidelity - parent)


def _perturbed(logs: Floats, rng: np.random.Generator) -> Floats:
    """Draw mean and deviation of the log times from their posterior, and rescale the times.

    Intervals of resampling alone are too narrow for few skewed times: 80 % coverage with 6
    log-normal ones.
    """
    n, mean, deviation = len(logs), logs.mean(), logs.std(ddof=1)
    scale = np.sqrt((n - 1) / rng.chisquare(n - 1))
    new_mean = mean + deviation * scale / np.sqrt(n) * rng.normal()
    return np.asarray(np.exp(new_mean + (logs - mean) * scale))


def _resampled(times: Floats, rng: np.random.Generator) -> Callable[[Task], Cost]:
    # A candidate has one seed and one time at all of its rungs. With gamma 1, more devices do not
    # speed it up.
    seconds: dict[int, float] = defaultdict(lambda: float(rng.choice(times)))
    return lambda task: Cost(seconds[task.run.seed], gamma=1.0)


def knee(forecasts: Sequence[Forecast]) -> int | None:
    """Return the largest number of devices that is worth it; None if all are."""
    for before, after in itertools.pairwise(forecasts):
        doublings = math.log2(after.devices / before.devices)
        gained = math.log2(max(before.makespan_s / max(after.makespan_s, 1e-12), 1e-12))
        if doublings > 0 and gained / doublings < math.log2(2 * _MIN_EFFICIENCY):
            return before.devices
    return None


def forecast_table(
    forecasts: Sequence[Forecast], price: float | None = None, title: str = ""
) -> Table:
    """Return a table with a row per number of devices.

    Args:
        price: price per device-hour.
    """
    first = forecasts[0]
    fields: list[Field[Forecast]] = [
        Field.number("devices", lambda row: row.devices),
        Field.number("takes", lambda row: format_duration(row.makespan_s * 1e9)),
        Field.number("speed-up", lambda row: f"{first.makespan_s / row.makespan_s:.2f}x"),
        Field.number("T*", lambda row: format_duration(row.bound_s * 1e9)),
        Field.number("over T*", _over),
        Field.number("busy", lambda row: format_percent(row.busy)),
        Field.number("device-hours", lambda row: f"{row.device_s / _HOUR_S:.3g}"),
        Field.number("resized", lambda row: row.restarts, optional=True),
    ]
    if first.recorded:
        fields.insert(2, Field.number("95 % of runs", _interval))
    if price is not None:
        fields.append(Field.number("cost", lambda row: f"{price * row.device_s / _HOUR_S:.2f}"))
    at = knee(forecasts)
    if first.recorded:
        costs = (
            f"device times of {first.recorded} recorded trials, resampled {_DRAWS} times; no cost "
            "is declared, so each trial runs on one device, in order of submission"
        )
    else:
        costs = f"declared costs, scheduler '{first.scheduler}'"
    notes = [
        f"simulated: {first.trials} trials, {costs}",
        "T*: lower bound for any schedule of the trials that run in any case, even if all were "
        "known in advance",
        f"more than {at} devices bring little" if at is not None else "",
    ]
    return Table.of(forecasts, fields, title, notes)


def _over(forecast: Forecast) -> str:
    # With resampled times, T* and the makespan belong to different draws.
    comparable = forecast.bound_s and not forecast.recorded
    return f"{forecast.makespan_s / forecast.bound_s:.2f}x" if comparable else "-"


def _interval(forecast: Forecast) -> str:
    return " to ".join(format_duration(s * 1e9) for s in forecast.interval_s or ())


def to_json(forecasts: Sequence[Forecast], price: float | None) -> list[dict[str, Any]]:
    """Return the forecasts as JSON."""
    return [
        {
            "devices": forecast.devices, "scheduler": forecast.scheduler, "trials": forecast.trials,
            "makespan_s": forecast.makespan_s, "interval_s": forecast.interval_s,
            "bound_s": forecast.bound_s, "busy": forecast.busy,
            "device_hours": forecast.device_s / _HOUR_S, "restarts": forecast.restarts,
            "cost": None if price is None else price * forecast.device_s / _HOUR_S,
            "recorded": forecast.recorded, "provenance": "simulated",
        }
        for forecast in forecasts
    ]  # fmt: skip


def parse_devices(text: str) -> list[int]:
    """Parse ``"1,8,64"``.

    Raises:
        InvalidArgumentError: the text is not a list of positive integers.
    """
    try:
        devices = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidArgumentError(
            "gpus", f"'{text}' is not a list of integers", remedy="pass a list such as 1,8,64"
        ) from None
    if devices[0] < 1:
        raise InvalidArgumentError("gpus", f"{devices[0]} is less than 1 device")
    return devices
