"""The job queue of a session, with cancellation by kind of job.

    queue = Queue(warm_server())
    queue.submit(Kind.ANALYSING, record)       # in the thread of its kind
    queue.call(Kind.EDITING, "package.module:function", argument=1)    # in its worker process
    queue.cancel(Kind.ANALYSING)                                # kills its processes

Jobs of one kind run sequentially, and kinds run concurrently: timing another device takes up to a
minute, which must not delay a what-if or an edit.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.child import Child, end_group, start_with
from slipstream.child.fork_server import ForkServer, can_fork
from slipstream.errors import ChildError

# Long, because simulating every technique may run many micro-benchmarks.
WORKER_TIMEOUT_S = 600.0
_END_S = 30.0
_IMPORTED = (
    "torch",
    # Imported by the first step of an optimizer.
    "torch._dynamo",
    "torch.profiler",
    "slipstream.live.work",
)


class Kind(StrEnum):
    """Kind of job, with the name of its worker process in errors."""

    ANALYSING = "analysing"
    SIMULATING = "simulating"
    MEASURING = "measuring a device"
    EDITING = "editing"


class Job:
    """A queued, running or finished job.

    Attributes:
        result: return value or exception of the work.
    """

    def __init__(self, work: Callable[[], Any], start: Callable[..., Any]) -> None:
        self.result: Future[Any] = Future()
        self._cancelled = threading.Event()
        self._work, self._start = work, start
        self._lock = threading.Lock()
        self._processes: list[Any] = []

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """Start a process of the work, which `cancel` kills; arguments as for `subprocess.Popen`.

        Raises:
            CancelledError: the job is cancelled.
        """
        if self._cancelled.is_set():
            raise CancelledError
        process = self._start(command, **options)
        with self._lock:
            self._processes = [process for process in self._processes if process.returncode is None]
            self._processes.append(process)
        if self._cancelled.is_set():
            self.cancel()
        return process

    def cancel(self) -> None:
        """Kill the processes of the job, and prevent it from starting more."""
        self._cancelled.set()
        self.result.cancel()
        with self._lock:
            running = [process for process in self._processes if process.returncode is None]
        for process in running:
            end_group(process.pid)

    def run(self) -> None:
        """Run the work in the current thread."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            with start_with(self.start):
                self.result.set_result(self._work())
        except BaseException as error:
            self.result.set_exception(error)


class Queue:
    """The jobs of one session, and their worker processes. Thread-safe.

    Args:
        server: server to fork processes from; None to start new interpreters.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._lanes: dict[Kind, _Lane] = {}
        self._closed = False

    def submit(self, kind: Kind, work: Callable[[], Any]) -> Job:
        """Queue `work` after the earlier jobs of its kind."""
        job = Job(work, self._start)
        lane = self._lane(kind)
        if lane is None:
            job.cancel()
        else:
            lane.put(job)
        return job

    def call(
        self, kind: Kind, function: str, *, about: Path | None = None, **arguments: Any
    ) -> Any:
        """Call ``module:function(**arguments)`` in the worker process of `kind`.

        Args:
            about: the recording that the process has loaded; another one gets a new process, so
                that memory does not grow.

        Raises:
            SlipstreamError: raised by the function.
            ChildError: the process died, or the session has ended.
        """
        lane = self._lane(kind)
        if lane is not None:
            job = self.submit(kind, lambda: lane.call(about, function, arguments))
            with contextlib.suppress(CancelledError):
                return job.result.result()
        raise ChildError("the session has ended")

    def cancel(self, kind: Kind) -> None:
        """Cancel the queued and running jobs of a kind."""
        with self._lock:
            lane = self._lanes.get(kind)
        if lane is not None:
            lane.cancel()

    def close(self) -> None:
        """Cancel all jobs, present and future, and kill the worker processes."""
        with self._lock:
            self._closed, lanes = True, list(self._lanes.values())
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.join()

    def _lane(self, kind: Kind) -> _Lane | None:
        with self._lock:
            if not self._closed and kind not in self._lanes:
                self._lanes[kind] = _Lane(kind, self._start)
            return None if self._closed else self._lanes[kind]

    def _start(self, command: Sequence[str], **options: Any) -> Any:
        return (self._server.start if self._server else subprocess.Popen)(command, **options)


class _Lane:
    """The jobs of one kind, the thread they run in, and their worker process."""

    def __init__(self, kind: Kind, start: Callable[..., Any]) -> None:
        self._kind, self._start = kind, start
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._ended = False
        self._worker: tuple[Path | None, Child] | None = None
        self._thread = threading.Thread(target=self._run, name=f"slipstream-{kind}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        with self._changed:
            self._waiting.append(job)
            if self._ended:
                job.cancel()
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            jobs = [*self._waiting, *filter(None, [self._running])]
            self._waiting.clear()
        for job in jobs:
            job.cancel()

    def call(self, about: Path | None, function: str, arguments: Mapping[str, Any]) -> Any:
        """Call a function in the worker process, from the lane's thread."""
        if self._worker is None or self._worker[0] != about:
            self._stop_worker()
            # Not started by the job, since it outlives it.
            with start_with(self._start):
                self._worker = about, Child(str(self._kind))
            if self._ended:
                self._worker[1].kill()
        return self._worker[1].call(function, timeout_s=WORKER_TIMEOUT_S, **arguments)

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self.cancel()
        # A call may be in progress.
        if (worker := self._worker) is not None:
            worker[1].kill()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    break
                self._running = self._waiting.popleft()
            self._running.run()
            with self._changed:
                self._running = None
        self._stop_worker()

    def _stop_worker(self) -> None:
        if self._worker is not None:
            (_, child), self._worker = self._worker, None
            child.kill()
            child.close()


def warm_server(environment: Mapping[str, str] | None = None) -> ForkServer | None:
    """Return a fork server with preloaded imports; None if this platform cannot fork.

    Args:
        environment: additional environment variables.
    """
    return ForkServer(_IMPORTED, environment) if can_fork() else None
