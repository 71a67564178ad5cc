"""Run trials on Ray: persistent actors, placed by the same scheduler that predictions simulate.

Ray runs without usage reports and dashboard, and listens on the loopback interface unless an
address is passed. The scheduler sets the number of slots of a trial (its `Run` has the width);
packed trials share one slot.

Trials are packed by their declared memory. If the trials on a device exceed its memory, the one
furthest above its declaration is stopped and restarted on a separate device; the others continue.

A trial keeps its slots until the end of its rung. With `restart_s`, the scheduler may resize it
while it runs; the trial then resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from slipstream.engines.trials.cluster_state import MEMORY
from slipstream.engines.trials.forecast import empty_state, rates_of
from slipstream.engines.trials.schedulers import Scheduler, scheduler_by_name
from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.search import Cost, Outcome, State, Task
from slipstream.search.estimators import RESIZE
from slipstream.search.executors import outcome_of, run_task_here
from slipstream.units import format_bytes

_UNKNOWN = Cost(1.0)
# A call to Ray costs half a millisecond, so available results are fetched together.
_WAIT_S = 0.5
# Intervals of the checks of shared devices, and of Ray's head.
_CHECK_S, _CHECK_HEAD_S = 0.05, 1.0
# Failed checks in a row after which the head counts as dead; networks can fail temporarily.
_MAX_MISSED = 3
# Ray waits 30 s for its node; on a busy machine, another attempt is faster.
_STARTS = 3
# Time that processes of a local Ray get to exit.
_EXIT_S = 5.0


def ray_module() -> Any:
    """Import Ray without usage reports and warnings.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    # With Ray's niceness of 15, other processes could slow trials down tenfold.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("this executor", "Ray", "trials") from None
    return ray


def start_ray(ray: Any, slots: int, address: str | None) -> list[psutil.Process]:
    """Start Ray on the loopback interface, or connect to `address`; return the started processes.

    Raises:
        SlipstreamError: Ray cannot be started or reached.
    """
    import logging

    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        settings |= {
            "num_cpus": slots, "include_dashboard": False, "_node_ip_address": "127.0.0.1",
            "object_store_memory": 100 * 2**20,
        }  # fmt: skip
        _give_token()
    else:
        _need_answer(address)
        settings["address"] = address
    before = set(psutil.Process().children())
    for remaining in reversed(range(_STARTS)):
        try:
            ray.init(**settings)
            return _descendants(before)
        except Exception as error:  # Ray raises a plain Exception if a node is late
            end_processes(_descendants(before))
            if not remaining or address is not None:
                what = "Ray cannot be started" if address is None else "Ray cannot be reached"
                raise SlipstreamError(
                    f"{what}: {error}", where=address,
                    remedy="check `ray status`, or omit the address to start Ray locally",
                ) from error  # fmt: skip
    return []


class _Worker:
    """A Ray worker, with its memory if it is on this machine."""

    def __init__(self, ray: Any, kind: Any) -> None:
        self._ray, self.actor = ray, kind.remote()
        self._begun: Any = self.actor.begun.remote()
        self._process: psutil.Process | None = None
        self._empty_bytes = 0

    def held_bytes(self) -> int:
        """Return the memory allocated since the worker started; 0 while it is unknown."""
        try:
            if self._begun is not None and self._ray.wait([self._begun], timeout=0)[0]:
                pid, self._empty_bytes = self._ray.get(self._begun)
                self._begun, self._process = None, psutil.Process(pid)
            if self._process is None:
                return 0
            used: int = self._process.memory_info().rss - self._empty_bytes
            return max(used, 0)
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
    resizing: bool = False

    def held_bytes(self) -> int:
        """Return the worker's memory allocated since this trial started."""
        return max(self.worker.held_bytes() - self.empty_bytes, 0)


class RayExecutor:
    """Executor with one persistent Ray actor per running trial.

    Args:
        slots: number of devices of the scheduler: CPU cores.
        scheduler: a name or a scheduler of `slipstream.engines.trials.schedulers`.
        address: address of a running cluster; None to start one on the loopback interface.
        ahead: maximum number of submitted trials; the whole rung for synchronous policies.
        device_bytes: memory of a device; None for an equal share of this machine's. It is checked
            only if Ray was started here, since processes on other machines are not visible.
        restart_s: cost of resizing a trial. If set, running trials are resized at their next
            `Run.checkpointed`; None to keep their slots until the end of their rung.

    Raises:
        MissingExtraError: Ray is not installed.
        SlipstreamError: Ray cannot be started or reached.
    """

    def __init__(
        self, slots: int = 2, *, scheduler: str | Scheduler = "fifo", address: str | None = None,
        ahead: int | None = None, max_width: int = 8, max_pack: int = 4,
        device_bytes: int | None = None, restart_s: float | None = None,
    ) -> None:  # fmt: skip
        if slots < 1:
            raise InvalidArgumentError("slots", f"{slots} is less than 1")
        self._device_bytes = device_bytes or psutil.virtual_memory().total // slots
        self._local = address is None
        self._ray = ray_module()
        self._own = not self._ray.is_initialized()
        self._processes: list[psutil.Process] = []
        if self._own:
            self._processes = start_ray(self._ray, slots, address)
        self._head = _Head(self._ray)
        chosen = scheduler if isinstance(scheduler, Scheduler) else scheduler_by_name(scheduler)
        self._scheduler = chosen
        self._resizable = restart_s is not None
        self._state = empty_state(
            slots, max_width, restart_s or 0.0, max_pack, resizable=self._resizable
        )
        self._changed, self._now_s = False, time.monotonic()
        self._max_width = max_width
        self._ahead = 2 * slots if ahead is None else ahead
        self._actor_kind = self._ray.remote(num_cpus=0, max_restarts=0)(_Actor)
        self._idle: list[_Worker] = []
        self._tasks: dict[int, Task] = {}
        self._running: dict[Any, _Running] = {}
        self._before: dict[int, tuple[float, float]] = {}
        """Start time and slot-seconds of resized trials, by row."""
        self._reports: dict[int, dict[int, float]] = {}
        """Earlier reports of resized trials, by row."""
        self.intervals: list[tuple[int, tuple[int, ...], float, float]] = []
        """Placements: trial, slots, start and end in seconds since the epoch."""
        self._checked_s = 0.0
        self._moved: dict[int, str] = {}
        """Reason why a trial was moved to a separate device, by trial."""

    def capacity(self) -> int:
        return self._ahead - len(self._tasks)

    def submit(self, task: Task) -> None:
        cost = task.cost or _UNKNOWN
        if self._resizable and task.run.folder is None:
            raise InvalidArgumentError(
                "restart_s", "resized trials resume from checkpoints, but this study has no "
                "folders for them", remedy="pass store= and rungs= to the study",
            )  # fmt: skip
        self._submit(task, cost.utilisation, cost.memory)

    def _submit(self, task: Task, utilisation: float, memory: float) -> None:
        cost = task.cost or _UNKNOWN
        work = cost.seconds * max(task.run.fidelity - task.run.parent, 0.0)
        rates = rates_of(cost, self._max_width)
        row = self._state.add(max(work, 1e-6), rates, utilisation, memory)
        self._tasks[row] = task
        self._state.here[row] = True
        self._changed = True

    def poll(self) -> Sequence[Outcome]:
        self._head.check()
        self._place()
        if failed := self._check_memory():
            return failed
        if not self._running:
            return []
        waits = list(self._running)
        watched = self._local and bool((self._state.count > 0).any())
        done, _ = self._ray.wait(waits, num_returns=1, timeout=_CHECK_S if watched else _WAIT_S)
        if not done:
            return []
        done, _ = self._ray.wait(waits, num_returns=len(waits), timeout=0)
        return [outcome for reference in done if (outcome := self._collect(reference))]

    def _place(self) -> None:
        """Start trials that the scheduler has placed, and ask resized ones to stop."""
        now = time.monotonic()
        self._state.elapse(now - self._now_s)
        self._now_s = now
        if self._changed:
            self._scheduler.decide(self._state)
            self._changed = False
        blocked: set[int] = set()
        for running in self._running.values():
            running.resizing |= self._resize(running)
            blocked.update(running.devices if running.resizing else ())
        started = {running.row for running in self._running.values()}
        for row in self._state.running.tolist():
            task, devices = self._tasks[row], tuple(self._state.on[row])
            if row in started or blocked.intersection(devices):
                continue
            if task.run.folder is not None:
                Path(task.run.folder, RESIZE).unlink(missing_ok=True)
            worker = self._idle.pop() if self._idle else _Worker(self._ray, self._actor_kind)
            reference = worker.actor.run.remote(
                task.estimator.target(), task.config,
                {**vars(task.run), "width": len(devices), "reports": self._reports.get(row, {})},
                task.only_metric,
            )  # fmt: skip
            self._state.begun[row] = True
            self._running[reference] = _Running(
                task, row, worker, time.time(), devices, worker.held_bytes()
            )

    def _resize(self, running: _Running) -> bool:
        """Ask a trial to stop at its next checkpoint if its devices have changed."""
        folder = running.task.run.folder
        if folder is None or tuple(self._state.on[running.row]) == running.devices:
            return False
        Path(folder, RESIZE).touch()
        return True

    def _check_memory(self) -> list[Outcome]:
        """Stop a trial of each shared device that exceeds its memory; return failed trials."""
        now = time.monotonic()
        if not self._local or now - self._checked_s < _CHECK_S:
            return []
        self._checked_s = now
        members: dict[int, list[Any]] = {}
        for reference, running in self._running.items():
            device = int(self._state.packed_on[running.row])
            if device >= 0 and not running.resizing:
                members.setdefault(device, []).append(reference)
        failed = []
        for references in members.values():
            trials = [self._running[reference] for reference in references]
            used = [trial.held_bytes() / self._device_bytes for trial in trials]
            if sum(used) <= 1:
                continue
            declared = [self._state.trials.memory[trial.row] for trial in trials]
            at = max(range(len(used)), key=lambda i: used[i] - declared[i])
            failed += self._move(references[at], used[at], declared[at], alone=len(used) == 1)
        return failed

    def _move(self, reference: Any, used: float, declared: float, *, alone: bool) -> list[Outcome]:
        """Stop a trial and restart it on a separate device, or fail it if it already has one."""
        trial = self._running.pop(reference)
        self._ray.kill(trial.worker.actor)
        now, device, number = time.time(), format_bytes(self._device_bytes), trial.task.number
        self.intervals.append((number, trial.devices, trial.since, now))
        self._leave(trial.row)
        if alone and number in self._moved:
            reason = f"the trial alone needs more than a device's memory ({device})"
            elapsed_s = now - trial.since
            return [Outcome(number, State.FAILED, {}, reason, trial.since, now, elapsed_s)]
        self._moved[number] = (
            f"the trial used {used:.2f} of a device's memory ({device}) but declared "
            f"{declared:.2f}: stopped and restarted on a separate device"
        )
        self._submit(trial.task, 1.0, MEMORY)
        return []

    def _leave(self, row: int) -> None:
        self._state.leave(row)
        del self._tasks[row]
        self._changed = True

    def _collect(self, reference: Any) -> Outcome | None:
        """Return a trial's outcome; None if it stopped to be resized."""
        trial = self._running.pop(reference)
        now, number = time.time(), trial.task.number
        self.intervals.append((number, trial.devices, trial.since, now))
        began, spent_s = self._before.pop(trial.row, (trial.since, 0.0))
        self._reports.pop(trial.row, None)
        width = len(trial.devices)
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            died = isinstance(error, self._ray.exceptions.RayActorError)
            reason = "its worker process died" if died else f"Ray: {str(error).splitlines()[0]}"
            self._leave(trial.row)
            spent_s += (now - trial.since) * width
            return Outcome(number, State.LOST, {}, reason, began, now, spent_s)
        self._idle.append(trial.worker)
        spent_s += answer["elapsed_s"] * width
        if "state" not in answer:
            self._before[trial.row] = (began, spent_s)
            self._reports[trial.row] = answer["reports"]
            return None
        self._leave(trial.row)
        outcome = outcome_of(answer, number, began, now, spent_s)
        outcome.reason = outcome.reason or self._moved.pop(number, None)
        return outcome

    def close(self) -> None:
        if self._head.lives():
            for worker in (*(running.worker for running in self._running.values()), *self._idle):
                self._ray.kill(worker.actor)
        self._running, self._idle = {}, []
        if self._own:
            # Ray waits minutes for a head whose machine is gone, and crashes if the process exits
            # earlier. A thread keeps the caller from waiting.
            ending = threading.Thread(target=self._ray.shutdown)
            ending.start()
            ending.join(None if self._head.lives() else _EXIT_S)
            # A dead head leaves some of its processes running.
            end_processes(psutil.wait_procs(self._processes, timeout=_EXIT_S)[1])


def _give_token() -> None:
    """Set a token, so that Ray does not write one into the home folder."""
    chosen = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not chosen and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _need_answer(address: str) -> None:
    """Raise a `SlipstreamError` if nothing answers; Ray itself would retry silently for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_EXIT_S).close()
    except (OSError, OverflowError) as error:
        raise SlipstreamError(
            f"Ray cannot be reached: {error}", where=address,
            remedy="check `ray status` there, or omit the address to start Ray locally",
        ) from error  # fmt: skip


def _descendants(before: set[psutil.Process]) -> list[psutil.Process]:
    """Return descendants of this process that were started after `before` was taken."""
    children = set(psutil.Process().children()) - before
    return [found for child in children for found in (child, *child.children(recursive=True))]


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait for their end."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_EXIT_S)


class _Head:
    """Ray's head and node process, without which waiting for a worker never ends.

    After a minute without its head, Ray ends the driver's process without an exception.
    """

    def __init__(self, ray: Any) -> None:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._address, self._checked_s = (host, int(port)), time.monotonic()
        self._node, self._missed = _raylet(), 0

    def lives(self) -> bool:
        """Whether the head answers and this machine's node process runs."""
        try:
            with socket.create_connection(self._address, timeout=_CHECK_HEAD_S):
                return self._node is None or self._node.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.NoSuchProcess):
            return False

    def check(self) -> None:
        """Raise a `SlipstreamError` if the head is dead; checks at most once per interval."""
        now = time.monotonic()
        if now - self._checked_s < _CHECK_HEAD_S:
            return
        self._checked_s = now
        self._missed = 0 if self.lives() else self._missed + 1
        if self._missed >= _MAX_MISSED:
            raise SlipstreamError(
                "Ray's head died, so no worker can be started",
                where=":".join(map(str, self._address)),
                remedy="restart Ray if you started it yourself; finished trials are in the study's "
                "file, from which slipstream search resume continues",
            )  # fmt: skip


def _raylet() -> psutil.Process | None:
    """Return the Ray node that this process started, if any."""
    nodes = (child for child in psutil.Process().children() if child.name() == "raylet")
    return next((node for node in nodes if node.status() != psutil.STATUS_ZOMBIE), None)


class _Actor:
    """A Ray worker that evaluates candidates sequentially."""

    def begun(self) -> tuple[int, int]:
        """Return the process id and its memory in bytes before the first candidate."""
        return os.getpid(), psutil.Process().memory_info().rss

    def run(
        self, target: str, config: dict[str, Any], run: dict[str, Any], only_metric: str
    ) -> dict[str, Any]:
        return run_task_here(target, config, run, only_metric)
