"""Executors of trials: in this process, or in worker processes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.child import Child, channel, is_user_file, wait_any
from slipstream.errors import ChildError, InvalidArgumentError, SlipstreamError
from slipstream.provenance import Provenance
from slipstream.search.estimators import (
    Cost,
    Estimator,
    Resized,
    TrialPruned,
    TrialRun,
    call,
    load_target,
    values_of,
)
from slipstream.search.metrics import State, Value

# Extra time for a worker's first task, which imports the user's file, torch and data.
_IMPORT_S = 30.0


@dataclass(frozen=True)
class Task:
    """A trial to evaluate.

    Attributes:
        group: bracket and rung; tasks of one group should finish together.
        cost: expected cost per unit of fidelity; None if the estimator declares none.
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

    A COMPLETE outcome may have a reason too: a warning about the evaluation.
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
    """Runner of tasks. The study's loop checks the capacity, submits tasks and polls."""

    def capacity(self) -> int:
        """Return the number of tasks that can be submitted now."""

    def submit(self, task: Task) -> None:
        """Queue a task."""

    def poll(self) -> Sequence[Outcome]:
        """Return the outcomes since the last call; may wait if tasks are running."""

    def close(self) -> None:
        """Stop all running tasks and release resources."""


def evaluate(task: Task) -> Outcome:
    """Run a task in this process; an exception becomes the reason of a FAILED outcome."""
    began = time.time()
    clock = time.perf_counter()
    state, values, reason = State.COMPLETE, {}, None
    try:
        returned = call(task.estimator.function, task.config, task.run)
        values = values_of(returned, task.only_metric)
    except TrialPruned:
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
        return f"the estimator called sys.exit({'' if error.code is None else error.code}){where}"
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"


class Inline:
    """Executor of one trial at a time in this process: deterministic, without overhead."""

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
        """Whether the task has exceeded the timeout; the first one has extra time for imports."""
        grace = _IMPORT_S if self.fresh else 0.0
        return timeout_s is not None and time.time() - self.since > timeout_s + grace


class Processes:
    """Worker processes on this machine: a crash or a hang ends a trial, not the study.

    Args:
        workers: number of processes.
        timeout_s: a trial that takes longer is killed and FAILED; None for no limit.
        memory_limit_bytes: maximum private memory of a worker.
        threads: intra-op threads per worker.
    """

    def __init__(
        self, workers: int = 2, *, timeout_s: float | None = None,
        memory_limit_bytes: int | None = None, threads: int = 1,
    ) -> None:  # fmt: skip
        if workers < 1:
            raise InvalidArgumentError("workers", f"{workers} is not positive; pass at least 1")
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
        worker = next(worker for worker in self._workers if worker.task is None)
        worker.task, worker.since = task, time.time()
        worker.child.start_call(
            "slipstream.search.executors:run_task", target=task.estimator.target(),
            config=task.config, run=vars(task.run), only_metric=task.only_metric,
        )  # fmt: skip

    def poll(self) -> Sequence[Outcome]:
        busy = [worker.child for worker in self._workers if worker.task is not None]
        if not busy:
            return []
        answered = wait_any(busy, 0.5)
        outcomes = []
        for at, worker in enumerate(self._workers):
            if worker.task is None:
                continue
            if worker.child in answered:
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
        """Replace a worker that died or hangs, and return the outcome of its task."""
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
    """Evaluate one candidate in a worker; return the outcome as JSON."""
    channel()  # fails outside a worker
    return run_task_here(target, config, run, only_metric)


def run_task_here(
    target: str, config: dict[str, Any], run: dict[str, Any], only_metric: str
) -> dict[str, Any]:
    """Evaluate one candidate in a process of another framework, such as Ray.

    The result has no state if the evaluation ended to be resized.
    """
    loaded = load_target(target)
    function = loaded.function if isinstance(loaded, Estimator) else loaded
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
    """Convert the result of `run_task`, possibly sent as JSON, to an outcome."""
    values = {
        metric: Value(value, Provenance(kind) if kind else None, stddev)
        for metric, (value, kind, stddev) in answer.get("values", {}).items()
    }
    reports = {int(step): value for step, value in answer.get("reports", {}).items()}
    state, reason = State(answer["state"]), answer.get("reason")
    return Outcome(number, state, values, reason, started, ended, device_s, reports)


def _tuples(config: dict[str, Any]) -> dict[str, Any]:
    return {path: tuple(v) if isinstance(v, list) else v for path, v in config.items()}
