"""Trials on Ray: persistent actors, placed by the scheduler that predictions simulate.

Ray runs with its usage report and dashboard off, and listens on the loopback interface unless an
address is given. Without a scheduler every trial takes one slot; with one, a trial is given the
number of slots that the scheduler decides (its `Run` has the width), and trials that it packs share
one.

Trials are packed by the memory they say they need. Where those of a device hold more than it has,
the one furthest beyond what it said is stopped and begins again on a device of its own; the others
go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from slipstream.engines.trials.cluster_state import MEMORY
from slipstream.engines.trials.forecast import empty_state, rates_of
from slipstream.engines.trials.schedulers import Scheduler, scheduler_named
from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.provenance import Provenance
from slipstream.search import Cost, Outcome, State, Task, Value
from slipstream.search.executors import run_task_here
from slipstream.units import format_bytes

_UNKNOWN = Cost(1.0)
# One call of Ray's costs half a millisecond; results that are there are fetched together.
_WAIT_S = 0.5
# How often trials that share a device are looked at.
_LOOK_S = 0.05


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


class _Worker:
    """A worker process of Ray's, that can be looked at if it is on this machine."""

    def __init__(self, ray: Any, kind: Any) -> None:
        self._ray, self.actor = ray, kind.remote()
        self._begun: Any = self.actor.begun.remote()
        self._process: psutil.Process | None = None
        self._empty_bytes = 0

    def held_bytes(self) -> int:
        """What it has in memory beyond what it began with; 0 where nobody can see it yet."""
        try:
            if self._begun is not None and self._ray.wait([self._begun], timeout=0)[0]:
                pid, self._empty_bytes = self._ray.get(self._begun)
                self._begun, self._process = None, psutil.Process(pid)
            if self._process is None:
                return 0
            held: int = self._process.memory_info().rss - self._empty_bytes
            return max(held, 0)
        except (psutil.Error, self._ray.exceptions.RayError):
            return 0


@dataclass
class _Running:
    task: Task
    row: int
    worker: _Worker
    since: float
    devices: tuple[int, ...]
    empty_bytes: int

    def held_bytes(self) -> int:
        """What its worker holds beyond what it held before this trial."""
        return max(self.worker.held_bytes() - self.empty_bytes, 0)


class RayExecutor:
    """Actors of Ray, one a running trial, kept for the next one.

    Args:
        slots: devices, as the scheduler counts them: CPU cores here.
        scheduler: a name or one of `slipstream.engines.trials.schedulers`.
        address: of a running cluster; None starts one here, on the loopback interface.
        ahead: trials taken beyond those that run; for synchronous policies the whole rung.
        device_bytes: memory of a device; None: this machine's, shared equally by the slots. It is
            watched where Ray was started here: the processes of other machines are not seen.

    Raises:
        MissingExtraError: Ray is not installed.
        SlipstreamError: it cannot be started or reached.
    """

    def __init__(
        self, slots: int = 2, *, scheduler: str | Scheduler = "fifo", address: str | None = None,
        ahead: int | None = None, max_width: int = 8, max_pack: int = 4,
        device_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if slots < 1:
            raise InvalidArgumentError("slots", f"{slots} slots run nothing")
        self._device_bytes = device_bytes or psutil.virtual_memory().total // slots
        self._local = address is None
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
        self._idle: list[_Worker] = []
        self._tasks: dict[int, Task] = {}
        self._running: dict[Any, _Running] = {}
        self.intervals: list[tuple[int, tuple[int, ...], float, float]] = []
        """What ran where: trial, slots, start and end in seconds since the epoch."""
        self._looked_s = 0.0
        self._moved: dict[int, str] = {}
        """By trial: why it has a device of its own."""

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
        self._submit(task, cost.utilisation, cost.memory)

    def _submit(self, task: Task, utilisation: float, memory: float) -> None:
        cost = task.cost or _UNKNOWN
        work = cost.seconds * max(task.run.fidelity - task.run.parent, 0.0)
        rates = rates_of(cost, self._max_width)
        row = self._state.add(max(work, 1e-6), rates, utilisation, memory)
        self._tasks[row] = task
        self._state.here[row] = True

    def poll(self) -> Sequence[Outcome]:
        self._place()
        if failed := self._check_memory():
            return failed
        if not self._running:
            return []
        waits = list(self._running)
        watched = self._local and bool((self._state.count > 0).any())
        done, _ = self._ray.wait(waits, num_returns=1, timeout=_LOOK_S if watched else _WAIT_S)
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
            worker = self._idle.pop() if self._idle else _Worker(self._ray, self._actor_kind)
            reference = worker.actor.run.remote(
                task.estimator.target(), task.config, {**vars(task.run), "width": len(devices)},
                task.only_metric,
            )  # fmt: skip
            self._state.begun[row] = True
            self._running[reference] = _Running(
                task, row, worker, time.time(), devices, worker.held_bytes()
            )

    def _check_memory(self) -> list[Outcome]:
        """Stop what overfills a shared device; what a whole one cannot hold has failed."""
        now = time.monotonic()
        if not self._local or now - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now
        members: dict[int, list[Any]] = {}
        for reference, one in self._running.items():
            device = int(self._state.packed_on[one.row])
            if device >= 0:
                members.setdefault(device, []).append(reference)
        failed = []
        for references in members.values():
            held = [self._running[one].held_bytes() / self._device_bytes for one in references]
            if sum(held) <= 1:
                continue
            declared = [self._state.trials.memory[self._running[one].row] for one in references]
            at = max(range(len(held)), key=lambda i: held[i] - declared[i])
            failed += self._move(references[at], held[at], declared[at], alone=len(held) == 1)
        return failed

    def _move(self, reference: Any, held: float, declared: float, *, alone: bool) -> list[Outcome]:
        """Stop a trial and let it begin again on a device of its own, or fail where it has one."""
        one = self._running.pop(reference)
        self._ray.kill(one.worker.actor)
        now, device = time.time(), format_bytes(self._device_bytes)
        self.intervals.append((one.task.number, one.devices, one.since, now))
        self._state.leave(one.row)
        del self._tasks[one.row]
        if alone and one.task.number in self._moved:
            reason = f"it holds more than a device's memory ({device}), with none beside it"
            took = now - one.since
            return [Outcome(one.task.number, State.FAILED, {}, reason, one.since, now, took)]
        self._moved[one.task.number] = (
            f"it held {held:.2f} of a device's memory ({device}) and had declared {declared:.2f}: "
            "stopped, and begun again on a device of its own"
        )
        self._submit(one.task, 1.0, MEMORY)
        return []

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
        self._idle.append(one.worker)
        values = {
            metric: Value(value, Provenance(kind) if kind else None, stddev)
            for metric, (value, kind, stddev) in answer.get("values", {}).items()
        }
        state = State.FAILED if "reason" in answer else State.COMPLETE
        reason = answer.get("reason") or self._moved.pop(one.task.number, None)
        return Outcome(
            one.task.number, state, values, reason, one.since, now,
            answer["took_s"] * len(one.devices),
        )  # fmt: skip

    def close(self) -> None:
        for one in self._running.values():
            self._ray.kill(one.worker.actor)
        for worker in self._idle:
            self._ray.kill(worker.actor)
        self._running, self._idle = {}, []
        if self._own:
            self._ray.shutdown()


class _Actor:
    """A worker process of Ray's, which evaluates one candidate after another."""

    def begun(self) -> tuple[int, int]:
        """Its process, and how many bytes that has before its first candidate."""
        return os.getpid(), psutil.Process().memory_info().rss

    def run(
        self, target: str, config: dict[str, Any], run: dict[str, Any], only_metric: str
    ) -> dict[str, Any]:
        return run_task_here(target, config, run, only_metric)
