"""Trials on Ray: persistent actors, placed by the scheduler that predictions simulate.

Ray runs with its usage report and dashboard off, and listens on the loopback interface unless an
address is given. Without a scheduler every trial takes one slot; with one, a trial is given the
number of slots that the scheduler decides (its `Run` has the width), and trials that it packs share
one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engines.trials.forecast import empty_state, rates_of
from slipstream.engines.trials.schedulers import Scheduler, scheduler_named
from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.provenance import Provenance
from slipstream.search import Cost, Outcome, State, Task, Value
from slipstream.search.executors import run_task_here

_UNKNOWN = Cost(1.0)
# One call of Ray's costs half a millisecond; results that are there are fetched together.
_WAIT_S = 0.5


def ray_module() -> Any:
    """Ray, silent.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("this executor", "Ray", "trials") from None
    return ray


@dataclass
class _Running:
    task: Task
    row: int
    actor: Any
    since: float
    devices: tuple[int, ...]


class RayExecutor:
    """Actors of Ray, one a running trial, kept for the next one.

    Args:
        slots: devices, as the scheduler counts them: CPU cores here.
        scheduler: a name or one of `slipstream.engines.trials.schedulers`.
        address: of a running cluster; None starts one here, on the loopback interface.
        ahead: trials taken beyond those that run; for synchronous policies the whole rung.

    Raises:
        MissingExtraError: Ray is not installed.
        SlipstreamError: it cannot be started or reached.
    """

    def __init__(
        self, slots: int = 2, *, scheduler: str | Scheduler = "fifo", address: str | None = None,
        ahead: int | None = None, max_width: int = 8, max_pack: int = 4,
    ) -> None:  # fmt: skip
        if slots < 1:
            raise InvalidArgumentError("slots", f"{slots} slots run nothing")
        self._ray = ray_module()
        self._own = not self._ray.is_initialized()
        if self._own:
            self._start(slots, address)
        chosen = scheduler if isinstance(scheduler, Scheduler) else scheduler_named(scheduler)
        self._scheduler = chosen
        # A task runs to its rung's end on what it was given; its next rung may get something else.
        self._state = empty_state(slots, max_width, 0.0, max_pack, resizable=False)
        self._max_width = max_width
        self._ahead = 2 * slots if ahead is None else ahead
        self._actor_kind = self._ray.remote(num_cpus=0, max_restarts=0)(_Actor)
        self._idle: list[Any] = []
        self._tasks: dict[int, Task] = {}
        self._running: dict[Any, _Running] = {}
        self.intervals: list[tuple[int, tuple[int, ...], float, float]] = []
        """What ran where: trial, slots, start and end in seconds since the epoch."""

    def _start(self, slots: int, address: str | None) -> None:
        import logging

        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            settings |= {
                "num_cpus": slots, "include_dashboard": False, "_node_ip_address": "127.0.0.1",
                "object_store_memory": 100 * 2**20,
            }  # fmt: skip
        else:
            settings["address"] = address
        try:
            self._ray.init(**settings)
        except (ConnectionError, RuntimeError, OSError, ValueError) as error:
            raise SlipstreamError(
                f"Ray cannot be started: {error}" if address is None else f"no Ray there: {error}",
                where=address, remedy="ray status tells; without an address one is started here",
            ) from error  # fmt: skip

    def capacity(self) -> int:
        return self._ahead - len(self._tasks)

    def submit(self, task: Task) -> None:
        cost = task.cost or _UNKNOWN
        work = cost.seconds * max(task.run.fidelity - task.run.parent, 0.0)
        rates = rates_of(cost, self._max_width)
        row = self._state.add(max(work, 1e-6), rates, cost.utilisation, cost.memory)
        self._tasks[row] = task
        self._state.here[row] = True

    def poll(self) -> Sequence[Outcome]:
        self._place()
        if not self._running:
            return []
        waits = list(self._running)
        done, _ = self._ray.wait(waits, num_returns=1, timeout=_WAIT_S)
        if not done:
            return []
        done, _ = self._ray.wait(waits, num_returns=len(waits), timeout=0)
        return [self._collect(reference) for reference in done]

    def _place(self) -> None:
        """Start what the scheduler has given devices."""
        self._scheduler.decide(self._state)
        started = {one.row for one in self._running.values()}
        for row in self._state.running.tolist():
            if row in started:
                continue
            task, devices = self._tasks[row], tuple(self._state.on[row])
            actor = self._idle.pop() if self._idle else self._actor_kind.remote()
            reference = actor.run.remote(
                task.estimator.target(), task.config, {**vars(task.run), "width": len(devices)},
                task.only_metric,
            )  # fmt: skip
            self._state.begun[row] = True
            self._running[reference] = _Running(task, row, actor, time.time(), devices)

    def _collect(self, reference: Any) -> Outcome:
        one = self._running.pop(reference)
        now = time.time()
        self.intervals.append((one.task.number, one.devices, one.since, now))
        self._state.leave(one.row)
        del self._tasks[one.row]
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:
            reason = "its worker process died"
            return Outcome(one.task.number, State.LOST, {}, reason, one.since, now, now - one.since)
        except self._ray.exceptions.RayError as error:
            reason = f"Ray: {str(error).splitlines()[0]}"
            return Outcome(one.task.number, State.LOST, {}, reason, one.since, now, now - one.since)
        self._idle.append(one.actor)
        values = {
            metric: Value(value, Provenance(kind) if kind else None, stddev)
            for metric, (value, kind, stddev) in answer.get("values", {}).items()
        }
        state = State.FAILED if "reason" in answer else State.COMPLETE
        return Outcome(
            one.task.number, state, values, answer.get("reason"), one.since, now,
            answer["took_s"] * len(one.devices),
        )  # fmt: skip

    def close(self) -> None:
        for one in self._running.values():
            self._ray.kill(one.actor)
        for actor in self._idle:
            self._ray.kill(actor)
        self._running, self._idle = {}, []
        if self._own:
            self._ray.shutdown()


class _Actor:
    """A worker process of Ray's, which evaluates one candidate after another."""

    def run(
        self, target: str, config: dict[str, Any], run: dict[str, Any], only_metric: str
    ) -> dict[str, Any]:
        return run_task_here(target, config, run, only_metric)
