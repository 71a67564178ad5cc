"""A warm process that children are forked from, with torch imported but no user code.

A fresh interpreter takes seconds to import torch; a fork takes milliseconds, and is as clean, since
no user code ever ran in the original. A supervisor between the server and each fork waits for the
fork, reports its exit status, and kills it if the client exits::

    client ── socket: command, folder, pipes ─▶ server ─ fork ─▶ supervisor ─ fork ─▶ child
    client ◀── pipes of the child ───────────────────────────────────────────────────────┘
    client ◀── exit status ──────────────────────────────── supervisor
    client ── waited for, or client exited ───────────────▶ supervisor

`ForkServer.start` has the signature of `subprocess.Popen`, so that `started_by` accepts it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slipstream.errors import ChildError

_MAX_START_S = 120.0
_MAX_REQUEST = 1 << 20
_FIRST_FREE_FD = 3


def can_fork() -> bool:
    """Whether a process that imported torch can be forked; macOS's libraries do not allow it."""
    return sys.platform == "linux"


class ForkServer:
    """The warm process. Thread-safe.

    Args:
        modules: names of the modules to import.
        environment: added to this process's variables, such as the number of threads of libraries
            that read it on import.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._modules = tuple(modules)
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def warm_up(self) -> None:
        """Start importing if it has not started; returns immediately."""
        with self._lock:
            self._ensure()

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        cwd: Path | None,
        start_new_session: bool,
    ) -> Fork:
        """Return a fork that behaves like ``python -m slipstream.child ...``.

        Raises:
            ChildError: the server cannot be started, or does not answer.
        """
        status_read, status_write = os.pipe()
        control_read, control_write = os.pipe()
        request = {
            "limit": command[-1],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(env),
        }
        passed = [*pass_fds, stdout, status_write, control_read]
        try:
            with self._lock:
                pid = self._ask(json.dumps(request).encode(), passed)
        except BaseException:
            os.close(status_read)
            os.close(control_write)
            raise
        finally:
            os.close(status_write)
            os.close(control_read)
        return Fork(pid, status_read, control_write)

    def close(self) -> None:
        """Kill the server. Running forks are killed by the processes that started them."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes, fds: Sequence[int]) -> int:
        # The server may have been killed; try a new one.
        for _ in range(2):
            connection = self._ensure()
            try:
                connection.settimeout(_MAX_START_S)
                socket.send_fds(connection, [len(request).to_bytes(4, "little")], fds)
                connection.sendall(request)
                answer = connection.recv(8)
                if len(answer) == 8:
                    return int.from_bytes(answer, "little")
            except OSError:
                pass
            self._end()
        raise ChildError(
            "the fork server does not answer",
            remedy="is there enough memory? start again with --threads 1",
        )

    def _ensure(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._socket is not None:
            return self._socket
        self._end()
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **self._environment},
                # Ctrl-C goes to this process only.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ChildError(f"the fork server cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
        self._socket = ours
        return ours

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Fork:
    """A forked process with the interface of `subprocess.Popen`; not a child of this process."""

    def __init__(self, pid: int, status: int, control: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status, self._control = status, control
        self._code: int | None = None
        # A canceled job's process is killed from another thread.
        self._lock = threading.Lock()

    def ended(self) -> bool:
        """Whether the process has exited; its id is not reused before `wait`."""
        with self._lock:
            return self._exited(0.0)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with self._lock:
            if self._exited(0.0):
                self._collect()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        with self._lock:
            if not self._exited(timeout):
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self._collect()
        assert self.returncode is not None
        return self.returncode

    def _exited(self, timeout: float | None) -> bool:
        if self._code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                return False
            status = os.read(self._status, 16)
            # A supervisor that was killed writes nothing.
            self._code = int(status) if status else -signal.SIGKILL
        return True

    def _collect(self) -> None:
        if self.returncode is None:
            self.returncode = self._code
            os.close(self._status)
            os.close(self._control)


# The code below runs in the server and its forks.


def main(number: int, modules: Sequence[str]) -> None:
    """Import `modules`, then fork for every request on the socket with descriptor `number`."""
    for name in modules:
        importlib.import_module(name)
    import gc

    # The garbage collector skips frozen objects; it would copy their pages in every fork.
    gc.collect()
    gc.freeze()
    # The system reaps supervisors.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = socket.socket(fileno=number)
    while True:
        length, fds, _, _ = socket.recv_fds(connection, 4, 16)
        if not length:
            return
        request = b""
        while len(request) < int.from_bytes(length, "little"):
            more = connection.recv(_MAX_REQUEST)
            if not more:
                return
            request += more
        pid_read, pid_write = os.pipe()
        if os.fork() == 0:
            connection.close()
            os.close(pid_read)
            _supervise(json.loads(request), list(fds), pid_write)
        os.close(pid_write)
        pid = os.read(pid_read, 8)
        os.close(pid_read)
        for fd in fds:
            os.close(fd)
        connection.sendall(pid)


def _supervise(request: dict[str, Any], fds: list[int], pid_pipe: int) -> NoReturn:
    """Start the child, report its id and exit status, and kill it if the client exits."""
    try:
        *_, status, control = fds
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # In a separate session, so that killing the server's group does not kill the supervisor.
        os.setsid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become_child(request, fds[:3])
        os.write(pid_pipe, pid.to_bytes(8, "little"))
        for fd in (pid_pipe, *fds[:3]):
            os.close(fd)
        ended = _await_end(pid, wake_read, control)
        if ended is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            with contextlib.suppress(BrokenPipeError):
                os.write(status, str(ended).encode())
                os.close(status)
            # The process id must not be reused before the client has read the exit status.
            os.read(control, 1)
            os.waitpid(pid, 0)
    finally:
        os._exit(0)


def _await_end(pid: int, wake: int, control: int) -> int | None:
    """Return the exit status of `pid`, or None if the client has exited."""
    while True:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if state is not None:
            killed = state.si_code != os.CLD_EXITED
            return -state.si_status if killed else state.si_status
        ready = select.select([wake, control], [], [])[0]
        if wake in ready:
            os.read(wake, 64)
        if control in ready:
            return None


def _become_child(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Set up the fork like a new process, and run the worker."""
    code = 70
    try:
        os.setsid()
        read_fd, write_fd, log = fds
        for fd, target in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(target, fd)
        edges = [_FIRST_FREE_FD - 1, *sorted((read_fd, write_fd)), os.sysconf("SC_OPEN_MAX")]
        for before, after in itertools.pairwise(edges):
            os.closerange(before + 1, after)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        # As `python -m` sets it.
        sys.path[0] = request["folder"]
        sys.argv = ["slipstream"]
        import random

        random.seed(time.time_ns())
        from slipstream.child import worker

        worker.main([str(read_fd), str(write_fd), "0", request["limit"]])
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
