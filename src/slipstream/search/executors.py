"""Where trials run: in this process, or in worker processes. Both answer with the same outcomes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.child import Child, channel, is_user_file, ready
from slipstream.errors import ChildError, InvalidArgumentError, SlipstreamError
from slipstream.provenance import Provenance
from slipstream.search.estimators import (
    Cost,
    Estimator,
    Pruned,
    Resized,
    TrialRun,
    call,
    load_target,
    values_of,
)
from slipstream.search.metrics import State, Value

# What importing a user's file, with torch and data, may take a worker.
_LOADING_S = 30.0


@dataclass(frozen=True)
class Task:
    """A trial as an executor has it.

    Attributes:
        group: bracket and rung: tasks of one group are wanted together.
        cost: what it is expected to take a unit of fidelity; None where nobody knows.
    """

    number: int
    estimator: Estimator
    config: dict[str, Any]
    run: TrialRun
    only_metric: str
    group: tuple[int, int] = (0, 0)
    cost: Cost | None = None


@dataclass
class Outcome:
    """End of a task: COMPLETE with values, PRUNED, FAILED with a reason, or LOST.

    The reason of one that is COMPLETE says what was odd about it.
    """

    number: int
    state: State
    values: dict[str, Value] = field(default_factory=dict)
    reason: str | None = None
    started: float = 0.0
    ended: float = 0.0
    device_s: float = 0.0
    reports: dict[int, float] = field(default_factory=dict)


class Executor(Protocol):
    """Runs tasks; the study's loop asks for room, submits, polls."""

    def capacity(self) -> int:
        """How many more tasks it takes now."""

    def submit(self, task: Task) -> None:
        """Run it, sooner or later."""

    def poll(self) -> Sequence[Outcome]:
        """What ended since; waits for one where tasks run."""

    def close(self) -> None:
        """End what still runs."""


def evaluate(task: Task) -> Outcome:
    """Run a task here and now; what it raises is its reason to have failed."""
    began = time.time()
    clock = time.perf_counter()
    state, values, reason = State.COMPLETE, {}, None
    try:
        returned = call(task.estimator.function, task.config, task.run)
        values = values_of(returned, task.only_metric)
    except Pruned:
        state = State.PRUNED
    except (Exception, SystemExit) as error:
        state, reason = State.FAILED, reason_of(error)
    elapsed = time.perf_counter() - clock
    return Outcome(
        task.number, state, values, reason, began, began + elapsed, elapsed, task.run.reports
    )


def reason_of(error: BaseException) -> str:
    """Return why a trial failed, with the line of the user's code that raised it."""
    if isinstance(error, SlipstreamError):
        return " ".join(str(error).split())
    where, traceback = "", error.__traceback__
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            code = traceback.tb_frame.f_code
            where = f" ({os.path.basename(code.co_filename)}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else error.code}){where}"
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"


class Inline:
    """One trial at a time, in this process: bit-identical studies, no cost for short trials."""

    def __init__(self) -> None:
        self._waiting: deque[Task] = deque()

    def capacity(self) -> int:
        return 1 - len(self._waiting)

    def submit(self, task: Task) -> None:
        self._waiting.append(task)

    def poll(self) -> Sequence[Outcome]:
        return [evaluate(self._waiting.popleft())] if self._waiting else []

    def close(self) -> None:
        self._waiting.clear()


@dataclass
class _Worker:
    child: Child
    task: Task | None = None
    since: float = 0.0
    fresh: bool = True

    def late(self, timeout_s: float | None) -> bool:
        """Whether its task takes longer than allowed; its first one may load much first."""
        grace = _LOADING_S if self.fresh else 0.0
        return timeout_s is not None and time.time() - self.since > timeout_s + grace


class Processes:
    """Worker processes of this machine: a crash or a hang costs a trial, not the study.

    Args:
        workers: how many.
        timeout_s: a trial that takes longer is ended and has failed; None: none does.
        memory_limit_bytes: private memory a worker may have.
        threads: intra-op threads of each.
    """

    def __init__(
        self, workers: int = 2, *, timeout_s: float | None = None,
        memory_limit_bytes: int | None = None, threads: int = 1,
    ) -> None:  # fmt: skip
        if workers < 1:
            raise InvalidArgumentError("workers", f"{workers} workers would run nothing")
        self._timeout_s, self._memory = timeout_s, memory_limit_bytes
        self._environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._workers = [_Worker(self._start(at)) for at in range(workers)]

    def _start(self, at: int) -> Child:
        return Child(
            f"trial worker {at}", environment=self._environment, memory_limit_bytes=self._memory
        )

    def capacity(self) -> int:
        return sum(worker.task is None for worker in self._workers)

    def submit(self, task: Task) -> None:
        worker = next(one for one in self._workers if one.task is None)
        worker.task, worker.since = task, time.time()
        worker.child.start_call(
            "slipstream.search.executors:run_task", target=task.estimator.target(),
            config=task.config, run=vars(task.run), only_metric=task.only_metric,
        )  # fmt: skip

    def poll(self) -> Sequence[Outcome]:
        busy = [one for one in self._workers if one.task is not None]
        if not busy:
            return []
        spoke = ready([one.child for one in busy], 0.5)
        outcomes = []
        for at, worker in enumerate(self._workers):
            if worker.task is None:
                continue
            if worker.child in spoke:
                outcomes.append(self._collect(at, worker))
            elif worker.late(self._timeout_s):
                reason = f"took longer than {self._timeout_s:g} s"
                outcomes.append(self._replace(at, worker, State.FAILED, reason))
        return outcomes

    def _collect(self, at: int, worker: _Worker) -> Outcome:
        assert worker.task is not None
        try:
            answer = worker.child.finish_call()
        except ChildError as error:
            return self._replace(at, worker, State.LOST, error.what.splitlines()[0])
        except SlipstreamError as error:
            answer = {"state": State.FAILED, "reason": reason_of(error)}
        number, worker.task, worker.fresh = worker.task.number, None, False
        now = time.time()
        device_s = answer.get("elapsed_s", now - worker.since)
        return outcome_of(answer, number, worker.since, now, device_s)

    def _replace(self, at: int, worker: _Worker, state: State, reason: str) -> Outcome:
        """What a worker that died or hangs leaves, and another one in its place."""
        assert worker.task is not None
        worker.child.kill()
        worker.child.close()
        self._workers[at] = _Worker(self._start(at))
        now = time.time()
        return Outcome(worker.task.number, state, {}, reason, worker.since, now, now - worker.since)

    def close(self) -> None:
        for worker in self._workers:
            if worker.task is not None:
                worker.child.kill()
            worker.child.close()


def run_task(
    target: str, config: dict[str, Any], run: dict[str, Any], only_metric: str
) -> dict[str, Any]:
    """In a worker: evaluate one candidate; the answer is JSON."""
    channel()  # nobody else is to run users' functions this way
    return run_task_here(target, config, run, only_metric)


def run_task_here(
    target: str, config: dict[str, Any], run: dict[str, Any], only_metric: str
) -> dict[str, Any]:
    """The same, in a process that somebody else started to run trials: Ray's.

    One that ended to be resized answers without a state.
    """
    thing = load_target(target)
    function = thing.function if isinstance(thing, Estimator) else thing
    task = Task(0, Estimator(function), _tuples(config), TrialRun(**run), only_metric)
    began = time.perf_counter()
    try:
        outcome = evaluate(task)
    except Resized:
        return {"elapsed_s": time.perf_counter() - began, "reports": task.run.reports}
    values = {m: (v.value, v.provenance, v.stddev) for m, v in outcome.values.items()}
    return {
        "state": outcome.state, "reason": outcome.reason, "values": values,
        "reports": outcome.reports, "elapsed_s": outcome.device_s,
    }  # fmt: skip


def outcome_of(
    answer: dict[str, Any], number: int, started: float, ended: float, device_s: float
) -> Outcome:
    """Return the outcome that a worker's answer, perhaps sent as JSON, describes."""
    values = {
        metric: Value(value, Provenance(kind) if kind else None, stddev)
        for metric, (value, kind, stddev) in answer.get("values", {}).items()
    }
    reports = {int(step): value for step, value in answer.get("reports", {}).items()}
    state, reason = State(answer["state"]), answer.get("reason")
    return Outcome(number, state, values, reason, started, ended, device_s, reports)


def _tuples(config: dict[str, Any]) -> dict[str, Any]:
    return {path: tuple(v) if isinstance(v, list) else v for path, v in config.items()}
