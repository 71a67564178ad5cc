"""Trials on Ray: persistent actors, placed by the scheduler that predictions simulate.

Ray runs with its usage report and dashboard off, and listens on the loopback interface unless an
address is given. Without a scheduler every trial takes one slot; with one, a trial is given the
number of slots that the scheduler decides (its `Run` has the width), and trials that it packs share
one.

Trials are packed by the memory they say they need. Where those of a device hold more than it has,
the one furthest beyond what it said is stopped and begins again on a device of its own; the others
go on.

A trial keeps its slots to the end of its rung, unless the executor is told what a resize costs:
then the scheduler may give it others while it runs, and it goes on there from its checkpoint.
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
from slipstream.engines.trials.schedulers import Scheduler, scheduler_named
from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.search import Cost, Outcome, State, Task
from slipstream.search.estimators import RESIZE
from slipstream.search.executors import outcome_of, run_task_here
from slipstream.units import format_bytes

_UNKNOWN = Cost(1.0)
# One call of Ray's costs half a millisecond; results that are there are fetched together.
_WAIT_S = 0.5
# How often trials that share a device are looked at, and Ray's head.
_LOOK_S, _LOOK_AT_HEAD_S = 0.05, 1.0
# A head that did not answer so often in a row is dead; a network may be gone for a moment.
_MISSED = 3
# Ray gives its node half a minute; on a busy machine the second time is faster.
_STARTS = 3
# How long processes of a Ray that was started here may take to end.
_ENDING_S = 5.0


def ray_module() -> Any:
    """Ray, silent.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    # Ray's own niceness of 15 would let anything else on the machine slow trials tenfold.
    os.environ.setdefault("RAY_worker_niceness", "0")
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
    resizing: bool = False

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
        restart_s: what a resize costs a trial. Given, trials are resized while they run, at the
            next `Run.checkpointed` that they call; None: they keep their slots to their rung's end.

    Raises:
        MissingExtraError: Ray is not installed.
        SlipstreamError: it cannot be started or reached.
    """

    def __init__(
        self, slots: int = 2, *, scheduler: str | Scheduler = "fifo", address: str | None = None,
        ahead: int | None = None, max_width: int = 8, max_pack: int = 4,
        device_bytes: int | None = None, restart_s: float | None = None,
    ) -> None:  # fmt: skip
        if slots < 1:
            raise InvalidArgumentError("slots", f"{slots} slots run nothing")
        self._device_bytes = device_bytes or psutil.virtual_memory().total // slots
        self._local = address is None
        self._ray = ray_module()
        self._own = not self._ray.is_initialized()
        self._processes: list[psutil.Process] = []
        if self._own:
            self._start(slots, address)
        self._head = _Head(self._ray)
        chosen = scheduler if isinstance(scheduler, Scheduler) else scheduler_named(scheduler)
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
        """By row of a trial that was resized: when it began, and the slot-seconds it took."""
        self._reports: dict[int, dict[int, float]] = {}
        """By row of a trial that was resized: what it reported before."""
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
            _give_token()
        else:
            _need_answer(address)
            settings["address"] = address
        before = set(psutil.Process().children())
        for left in reversed(range(_STARTS)):
            try:
                self._ray.init(**settings)
                self._processes = _descendants(before)
                return
            except Exception as error:  # Ray raises that itself where a node is late
                _end(_descendants(before))
                if not left or address is not None:
                    what = "Ray cannot be started" if address is None else "no Ray there"
                    raise SlipstreamError(
                        f"{what}: {error}", where=address,
                        remedy="ray status tells; without an address one is started here",
                    ) from error  # fmt: skip

    def capacity(self) -> int:
        return self._ahead - len(self._tasks)

    def submit(self, task: Task) -> None:
        cost = task.cost or _UNKNOWN
        if self._resizable and task.run.folder is None:
            raise InvalidArgumentError(
                "restart_s", "a trial that is resized goes on from its checkpoint, and this study "
                "gives it no folder for one", remedy="a study with store= and rungs=",
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
        done, _ = self._ray.wait(waits, num_returns=1, timeout=_LOOK_S if watched else _WAIT_S)
        if not done:
            return []
        done, _ = self._ray.wait(waits, num_returns=len(waits), timeout=0)
        return [outcome for reference in done if (outcome := self._collect(reference))]

    def _place(self) -> None:
        """Start what the scheduler has given devices; ask who is to have others to end."""
        now = time.monotonic()
        self._state.elapse(now - self._now_s)
        self._now_s = now
        if self._changed:
            self._scheduler.decide(self._state)
            self._changed = False
        held: set[int] = set()
        for one in self._running.values():
            one.resizing |= self._resize(one)
            held.update(one.devices if one.resizing else ())
        started = {one.row for one in self._running.values()}
        for row in self._state.running.tolist():
            task, devices = self._tasks[row], tuple(self._state.on[row])
            if row in started or held.intersection(devices):
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

    def _resize(self, one: _Running) -> bool:
        """Ask a trial to end at its next checkpoint, where it is to have other devices."""
        if one.task.run.folder is None or tuple(self._state.on[one.row]) == one.devices:
            return False
        Path(one.task.run.folder, RESIZE).touch()
        return True

    def _check_memory(self) -> list[Outcome]:
        """Stop what overfills a shared device; what a whole one cannot hold has failed."""
        now = time.monotonic()
        if not self._local or now - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now
        members: dict[int, list[Any]] = {}
        for reference, one in self._running.items():
            device = int(self._state.packed_on[one.row])
            if device >= 0 and not one.resizing:
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
        self._leave(one.row)
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

    def _leave(self, row: int) -> None:
        self._state.leave(row)
        del self._tasks[row]
        self._changed = True

    def _collect(self, reference: Any) -> Outcome | None:
        """What a trial ended with; None where it ended to be resized."""
        one = self._running.pop(reference)
        now, number = time.time(), one.task.number
        self.intervals.append((number, one.devices, one.since, now))
        began, spent_s = self._before.pop(one.row, (one.since, 0.0))
        self._reports.pop(one.row, None)
        width = len(one.devices)
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            died = isinstance(error, self._ray.exceptions.RayActorError)
            reason = "its worker process died" if died else f"Ray: {str(error).splitlines()[0]}"
            self._leave(one.row)
            spent_s += (now - one.since) * width
            return Outcome(number, State.LOST, {}, reason, began, now, spent_s)
        self._idle.append(one.worker)
        spent_s += answer["elapsed_s"] * width
        if "state" not in answer:
            self._before[one.row] = (began, spent_s)
            self._reports[one.row] = answer["reports"]
            return None
        self._leave(one.row)
        outcome = outcome_of(answer, number, began, now, spent_s)
        outcome.reason = outcome.reason or self._moved.pop(number, None)
        return outcome

    def close(self) -> None:
        if self._head.lives():
            for worker in (*(one.worker for one in self._running.values()), *self._idle):
                self._ray.kill(worker.actor)
        self._running, self._idle = {}, []
        if self._own:
            # A head whose machine is gone answers nothing: Ray waits minutes for it, and crashes
            # where a process ends before it has given up. Who waits for a result does not.
            ending = threading.Thread(target=self._ray.shutdown)
            ending.start()
            ending.join(None if self._head.lives() else _ENDING_S)
            # A dead head leaves some of the others.
            _end(psutil.wait_procs(self._processes, timeout=_ENDING_S)[1])


def _give_token() -> None:
    """Keep Ray from writing a token for its processes into the home folder, if none is there."""
    chosen = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not chosen and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _need_answer(address: str) -> None:
    """Look whether anything answers there; Ray itself tries for minutes, and says nothing.

    Raises:
        SlipstreamError: nothing does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ENDING_S).close()
    except (OSError, OverflowError) as error:
        raise SlipstreamError(
            f"no Ray there: {error}", where=address,
            remedy="ray status on that machine tells; without an address one is started here",
        ) from error  # fmt: skip


def _descendants(before: set[psutil.Process]) -> list[psutil.Process]:
    """Processes that have begun below this one, but for children that were there."""
    children = set(psutil.Process().children()) - before
    return [one for child in children for one in (child, *child.children(recursive=True))]


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_ENDING_S)


class _Head:
    """The processes without which Ray starts no worker; what waits for one would wait forever.

    After a minute without its head Ray ends the driver's process, too, without an exception.
    """

    def __init__(self, ray: Any) -> None:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._address, self._looked_s = (host, int(port)), time.monotonic()
        self._node, self._missed = _raylet(), 0

    def lives(self) -> bool:
        """Whether the head answers, and this machine's node process runs."""
        try:
            with socket.create_connection(self._address, timeout=_LOOK_AT_HEAD_S):
                return self._node is None or self._node.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.NoSuchProcess):
            return False

    def check(self) -> None:
        """Look at it, where that is due.

        Raises:
            SlipstreamError: it is dead.
        """
        now = time.monotonic()
        if now - self._looked_s < _LOOK_AT_HEAD_S:
            return
        self._looked_s = now
        self._missed = 0 if self.lives() else self._missed + 1
        if self._missed >= _MISSED:
            raise SlipstreamError(
                "Ray's head died: no worker can be started any more",
                where=":".join(map(str, self._address)),
                remedy="start Ray anew where it was not started here; what has ended is in the "
                "study's file, and slipstream search resume goes on from it",
            )  # fmt: skip


def _raylet() -> psutil.Process | None:
    """This process's own node of Ray, if it started one."""
    nodes = (one for one in psutil.Process().children() if one.name() == "raylet")
    return next((one for one in nodes if one.status() != psutil.STATUS_ZOMBIE), None)


class _Actor:
    """A worker process of Ray's, which evaluates one candidate after another."""

    def begun(self) -> tuple[int, int]:
        """Its process, and how many bytes that has before its first candidate."""
        return os.getpid(), psutil.Process().memory_info().rss

    def run(
        self, target: str, config: dict[str, Any], run: dict[str, Any], only_metric: str
    ) -> dict[str, Any]:
        return run_task_here(target, config, run, only_metric)
