"""What a study would take on so many devices: its own loop and policy, on a virtual clock."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.engines.trials.cluster_state import ClusterState
from slipstream.engines.trials.schedulers import scheduler_named
from slipstream.engines.trials.simulator import Clock, Interval
from slipstream.engines.trials.trialset import Floats, TrialSet, bound_s
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.search import Cost, Outcome, State, Study, Task, Value
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent

_HOUR_S = 3600.0
# More devices are worth it while twice as many bring at least this share of twice the speed.
_WORTH = 0.75
# Whoever has no synchronous policy proposes so many trials a device ahead.
_AHEAD = 2


def empty_state(
    devices: int, max_width: int, restart_s: float, max_pack: int, *, resizable: bool = True
) -> ClusterState:
    """A cluster without trials yet."""
    none = np.zeros(0)
    trials = TrialSet(none, np.ones((0, max_width)), none, none)
    return ClusterState(
        trials, devices, restart_s=restart_s, max_pack=max_pack, resizable=resizable
    )


def rates_of(cost: Cost, max_width: int) -> Floats:
    """Times as fast at width 1, 2, ..., float64 [max_width]."""
    widths = np.arange(1, max_width + 1, dtype=np.float64)
    return np.asarray(widths / (1.0 + cost.gamma * (widths - 1.0)))


class Simulated:
    """An executor of studies whose trials take virtual time: the scheduler is the real one.

    Args:
        score: what a trial reports of the one objective that decides promotions.
        ahead: trials it takes beyond those that end first.
    """

    def __init__(
        self, devices: int, scheduler: str = "level", *, score: Callable[[Task], dict[str, Value]],
        costs: Callable[[Task], Cost], ahead: int, max_width: int = 8, max_pack: int = 4,
        restart_s: float = 15.0, record: bool = False,
    ) -> None:  # fmt: skip
        state = empty_state(devices, max_width, restart_s, max_pack)
        self.clock = Clock(state, scheduler_named(scheduler), record)
        self._score, self._costs, self._ahead, self._max_width = score, costs, ahead, max_width
        self._tasks: dict[int, tuple[Task, float]] = {}
        self._arrived: list[int] = []
        self.rows: dict[int, int] = {}
        """Trial numbers by row of the clock's state."""
        self.chains: dict[str, tuple[float, Cost]] = {}
        """By candidate: its work over all rungs, and its cost."""

    def capacity(self) -> int:
        return self._ahead - len(self._tasks)

    def submit(self, task: Task) -> None:
        cost = self._costs(task)
        work = cost.seconds * max(task.run.fidelity - task.run.parent, 0.0)
        rates = rates_of(cost, self._max_width)
        row = self.clock.state.add(work, rates, cost.utilisation, cost.memory)
        self._tasks[row] = (task, work)
        self.rows[row] = task.number
        key = repr(sorted(task.config.items()))
        before = self.chains.get(key, (0.0, cost))[0]
        self.chains[key] = (before + work, cost)
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

    def bound_s(self) -> float:
        """T* over candidates, each with the work of all its rungs: below any schedule's end."""
        work = np.array([work for work, _ in self.chains.values()])
        costs = [cost for _, cost in self.chains.values()]
        trials = TrialSet(
            work, np.array([rates_of(one, self._max_width) for one in costs]),
            np.array([one.utilisation for one in costs]), np.array([one.memory for one in costs]),
        )  # fmt: skip
        return bound_s(trials, self.clock.state.devices)


@dataclass(frozen=True)
class Forecast:
    """A study on so many devices, predicted.

    Attributes:
        makespan_s: until the last trial ends.
        bound_s: T*, which no schedule of these trials is below.
        device_s: devices rented, times the makespan.
        busy: share of it in which a device had a trial.
        restarts: trials that were given other devices while they ran.
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

    @property
    def device_s(self) -> float:
        """Seconds of devices that are paid."""
        return self.devices * self.makespan_s


def predict(
    study: Study, devices: Sequence[int], *, scheduler: str = "level", max_width: int = 8,
    max_pack: int = 4, restart_s: float = 15.0, record: bool = False,
) -> list[Forecast]:  # fmt: skip
    """How long the study takes on each number of devices, without one.

    The study's loop, space, seed and rung policy run as they are; candidates are random, who is
    promoted is drawn by lot, and work is what the estimator's ``cost`` declares, or what the trials
    in the study's store took.

    Raises:
        SlipstreamError: nobody knows what a trial takes, or the study has no end.
        InvalidArgumentError: no device, or a trial that fits on none.
    """
    costs = _costs(study)
    if study.budget.trials is None and not getattr(study.rungs, "n", None) and not getattr(
        study.rungs, "rounds", None
    ) and not study.rungs.synchronous:  # fmt: skip
        raise SlipstreamError(
            "the study has no end that a prediction could find",
            remedy="give it budget=Budget(trials=...), or rounds= or n= to its rungs",
        )
    forecasts = []
    for n in devices:
        ahead = 10**9 if study.rungs.synchronous else _AHEAD * n
        executor = Simulated(
            n, scheduler, score=lambda task: _by_lot(study, task), costs=costs, ahead=ahead,
            max_width=max_width, max_pack=max_pack, restart_s=restart_s, record=record,
        )  # fmt: skip
        twin = Study(
            study.name, study.space, {study.objectives[0].metric: study.objectives[0].direction},
            estimator=study.estimator, strategy="random", rungs=copy.deepcopy(study.rungs),
            seed=study.seed, budget=study.budget,
        )  # fmt: skip
        twin.run(executor)
        clock = executor.clock
        total = n * clock.now_s
        forecasts.append(
            Forecast(
                n,
                scheduler,
                len(twin.trials),
                clock.now_s,
                executor.bound_s(),
                clock.busy_device_s / total if total else 0.0,
                clock.state.restarts,
                clock.intervals,
                executor.rows,
            )
        )
    return forecasts


def _by_lot(study: Study, task: Task) -> dict[str, Value]:
    # The same candidate has the same luck at every rung.
    return {task.only_metric: Value(task.run.seed / 2**31)}


def _costs(study: Study) -> Callable[[Task], Cost]:
    if study.estimator.cost is not None:
        declared = study.estimator.cost
        return lambda task: declared(task.config)
    trials = study.trials
    if not trials and study.store_path is not None and study.store_path.exists():
        trials = study.load().trials
    took = [one.device_s / one.fidelity for one in trials if one.state is State.COMPLETE]
    if not took:
        raise SlipstreamError(
            "nobody knows what a trial takes",
            where=f"study '{study.name}'",
            remedy="declare it, @estimator(..., cost=lambda config: Cost(seconds=60)), or run some "
            "trials first",
        )
    middle = Cost(statistics.median(took))
    return lambda task: middle


def knee(forecasts: Sequence[Forecast]) -> int | None:
    """The most devices that are still worth it; None where every number is."""
    for before, after in itertools.pairwise(forecasts):
        doublings = math.log2(after.devices / before.devices)
        gained = math.log2(max(before.makespan_s / max(after.makespan_s, 1e-12), 1e-12))
        if doublings > 0 and gained / doublings < math.log2(2 * _WORTH):
            return before.devices
    return None


def forecast_table(
    forecasts: Sequence[Forecast], price: float | None = None, title: str = ""
) -> Table:
    """A row a number of devices.

    Args:
        price: of a device and hour.
    """
    first = forecasts[0]
    fields: list[Field[Forecast]] = [
        Field.number("devices", lambda one: one.devices),
        Field.number("takes", lambda one: format_duration(one.makespan_s * 1e9)),
        Field.number("speed-up", lambda one: f"{first.makespan_s / one.makespan_s:.2f}x"),
        Field.number("T*", lambda one: format_duration(one.bound_s * 1e9)),
        Field.number("over T*", lambda one: f"{one.makespan_s / one.bound_s:.2f}x"),
        Field.number("busy", lambda one: format_percent(one.busy)),
        Field.number("device-hours", lambda one: f"{one.device_s / _HOUR_S:.3g}"),
        Field.number("resized", lambda one: one.restarts, optional=True),
    ]
    if price is not None:
        fields.append(Field.number("cost", lambda one: f"{price * one.device_s / _HOUR_S:.2f}"))
    at = knee(forecasts)
    notes = [
        f"simulated: {first.trials} trials under the scheduler '{first.scheduler}'; T* is below "
        "what any schedule of these trials takes, were they all known at once",
        f"beyond {at} devices, more of them bring little" if at is not None else "",
    ]
    return Table.of(forecasts, fields, title, notes)


def to_json(forecasts: Sequence[Forecast], price: float | None) -> list[dict[str, Any]]:
    """For programs."""
    return [
        {
            "devices": one.devices, "scheduler": one.scheduler, "trials": one.trials,
            "makespan_s": one.makespan_s, "bound_s": one.bound_s, "busy": one.busy,
            "device_hours": one.device_s / _HOUR_S, "restarts": one.restarts,
            "cost": None if price is None else price * one.device_s / _HOUR_S,
            "provenance": "simulated",
        }
        for one in forecasts
    ]  # fmt: skip


def parse_devices(text: str) -> list[int]:
    """``"1,8,64"``.

    Raises:
        InvalidArgumentError: no numbers of devices.
    """
    try:
        devices = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidArgumentError(
            "gpus", f"'{text}' is no list of numbers", remedy="1,8,64"
        ) from None
    if devices[0] < 1:
        raise InvalidArgumentError("gpus", f"{devices[0]} devices run nothing", remedy="1,8,64")
    return devices
