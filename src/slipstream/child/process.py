"""The parent's side of a child process: start, call, wait and kill."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from textwrap import indent
from typing import Any

from slipstream.child.descendants import descendants, end, end_group, is_suspended
from slipstream.child.pipe import TICK_S, Channel, Message
from slipstream.child.report import LESS_MEMORY, is_user_file, revive
from slipstream.errors import ChildDiedError, ChildError
from slipstream.files import mark_in_use, remove_leftovers, temporary_path

_LOG = "child"
_GRACE_S = 2.0
# Maximum time for a child to read a message, and for the system to end a killed process.
_MAX_SEND_S, _MAX_END_S = 300.0, 30.0
# Maximum suspension of a process before it is killed, since other processes may wait for it.
_MAX_SUSPENSION_S = 10.0
_LOG_TAIL_LINES = 15

_starter: ContextVar[Callable[..., Any] | None] = ContextVar("starter", default=None)


@contextlib.contextmanager
def start_with(start: Callable[..., Any]) -> Iterator[None]:
    """Start every `Child` of this thread with `start` until the block ends.

    `start` has the signature of `subprocess.Popen`. A result that is not a child of this process
    needs a method ``ended()`` that returns whether it has exited, without waiting for it.
    """
    token = _starter.set(start)
    try:
        yield
    finally:
        _starter.reset(token)


class Child:
    """A fresh Python process that answers calls one at a time.

    Args:
        name: name of the process in errors.
        environment: added to this process's variables.
        directory: working directory; this process's by default.
        memory_limit_bytes: limit of private memory, above which allocations fail.
        prefix: words before the command that replace themselves by it, such as ``nsenter``.
    """

    def __init__(
        self,
        name: str = "worker",
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        memory_limit_bytes: int | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._owner = os.getpid()
        self._stopped = False
        remove_leftovers(_LOG)
        # The finalizer exists before the log, since Ctrl-C may come between any two lines.
        self.log_path = temporary_path(_LOG, ".log")
        opened: list[int] = []
        self._remove_log = weakref.finalize(self, _remove, self.log_path, self._owner, opened)
        log_fd = os.open(self.log_path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        opened.append(log_fd)
        mark_in_use(log_fd)
        to_child_read, to_child_write = os.pipe()
        to_us_read, to_us_write = os.pipe()
        # PR_SET_PDEATHSIG kills a child when the *thread* that started it ends, so it is only used
        # in the main thread; children of other threads are killed at exit.
        in_main_thread = threading.current_thread() is threading.main_thread()
        parent = self._owner if in_main_thread else 0
        numbers = (to_child_read, to_us_write, parent, memory_limit_bytes or 0)
        command = [*prefix, sys.executable, "-m", "slipstream.child", *map(str, numbers)]
        try:
            self._process = (_starter.get() or subprocess.Popen)(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(to_child_read, to_us_write),
                env={**os.environ, **(environment or {})},
                cwd=directory,
                # Ctrl-C goes to this process only, which then kills the child and its descendants.
                start_new_session=True,
            )
            self._channel = Channel(to_us_read, to_child_write)
            _living.add(self)
        except BaseException as error:
            # A process that did start exits when it finds its pipe closed.
            os.close(to_us_read)
            os.close(to_child_write)
            self._remove_log()
            if not isinstance(error, OSError):
                # A starter set by `start_with` may raise other errors.
                raise
            raise ChildError(
                f"{name} could not be started: {error.strerror or error}",
                where=error.filename and os.fsdecode(error.filename),
            ) from error
        finally:
            for fd in (to_child_read, to_us_write):
                os.close(fd)

    @property
    def pid(self) -> int:
        """Process id, which is also its process group."""
        return self._process.pid

    def call(
        self,
        function: str,
        *,
        timeout_s: float | None = None,
        until: float = math.inf,
        on_message: Callable[[Message], None] | None = None,
        **arguments: Any,
    ) -> Any:
        """Run ``module:function(**arguments)`` in the child and return its (JSON) result.

        Args:
            function: an importable ``module:function``; it runs in the child's main thread.
            timeout_s: maximum time without a message, after which the child is killed.
            until: time of `time.monotonic` at which the child is killed.
            on_message: called with each message that the function sends through `channel()`.

        Raises:
            SlipstreamError: the function raised it; other exceptions arrive as `WorkloadError` with
                file and line of the user's code.
            ChildError: the process died, or was killed after `timeout_s` or at `until`.
        """
        self.start_call(function, **arguments)
        return self.finish_call(timeout_s=timeout_s, until=until, on_message=on_message)

    def start_call(self, function: str, **arguments: Any) -> None:
        """Start a call; `send` and `receive` work while it runs, `finish_call` gives its result."""
        self.send({"call": function, "arguments": arguments})

    def send(self, message: Message) -> None:
        """Send `message` to the function that is running in the child.

        Raises:
            ChildError: the process died, or hangs where it does not read (it is then killed).
        """
        try:
            self._channel.send(message, alive=lambda: not self._has_ended(), timeout_s=_MAX_SEND_S)
        except TimeoutError:
            raise self._hang("did not read what it was sent", _MAX_SEND_S) from None
        except OSError:
            raise self._death() from None

    def receive(self, *, timeout_s: float | None = None) -> Message:
        """Return the child's next message, ``{"result": ...}`` at the end of the call.

        Raises:
            SlipstreamError: the called function raised.
            ChildError: the process died, or `timeout_s` passed (it is then killed).
        """
        try:
            message = self._await_message(timeout_s)
        except (EOFError, OSError):
            raise self._death() from None
        if message is None:
            raise self._hang("did not answer", timeout_s or 0.0)
        if "error" in message:
            raise revive(message["error"])
        return message

    def _hang(self, what: str, timeout_s: float) -> ChildError:
        where = self._where_it_hangs()
        # It may wait for its own child processes, such as a loader's workers.
        count = len(descendants(self._process.pid))
        waiting = f"; {count} process{'es' * (count != 1)} that it started still ran"
        self.kill()
        return ChildError(
            f"{self.name} {what} within {timeout_s:g} s and was stopped{waiting if count else ''}",
            where=where,
            remedy="check for an endless loop, a deadlock or a server that waits for requests; if "
            "it is only slow, as validation or sampling between steps may be, raise --timeout",
        )

    def _await_message(self, timeout_s: float | None) -> Message | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ran = time.monotonic()
        while True:
            remaining = TICK_S if deadline is None else deadline - time.monotonic()
            # Checked before waiting: messages sent before the exit are in the pipe by then.
            ended = self._has_ended()
            message = self._channel.receive(0.0 if ended else max(0.0, min(remaining, TICK_S)))
            if message is not None or remaining <= 0:
                return message
            if ended:
                # A process that it forked may hold the pipe open, so that no end of file arrives.
                raise EOFError
            if not is_suspended(self._process.pid):
                ran = time.monotonic()
            elif time.monotonic() - ran > _MAX_SUSPENSION_S:
                self.kill()
                raise ChildError(
                    f"{self.name} was suspended (SIGSTOP) for {_MAX_SUSPENSION_S:g} s and "
                    "was killed",
                    remedy="run it again; kill -CONT resumes a process that was suspended",
                )

    def finish_call(
        self,
        *,
        timeout_s: float | None = None,
        until: float = math.inf,
        on_message: Callable[[Message], None] | None = None,
    ) -> Any:
        """Wait for the running call's result; see `call`."""
        silent_s = math.inf if timeout_s is None else timeout_s
        while True:
            wait_s = min(silent_s, until - time.monotonic())
            message = self.receive(timeout_s=None if wait_s == math.inf else wait_s)
            if "result" in message:
                return message["result"]
            if on_message is not None:
                on_message(message)

    def log_tail(self) -> str:
        """Return the last lines that the child printed."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def kill(self) -> None:
        """Kill the child and its descendants."""
        self._stopped = True
        # Once it was waited for, its id may belong to another process.
        if self._process.returncode is None:
            # Some may have moved to another session, which killing the group does not reach.
            started = [] if self._has_ended() else descendants(self._process.pid)
            end_group(self._process.pid)
            # A process that is stuck in a system call only ends when the call returns.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MAX_END_S)
            end(started)

    def close(self) -> None:
        """Let the child exit, kill it if it does not, and remove its log."""
        _living.discard(self)
        self._channel.close()
        try:
            self._await_end()
        finally:
            self.kill()
            self._remove_log()

    def _has_ended(self) -> bool:
        """Whether the process has exited; does not wait for it, which `kill` does."""
        if self._process.returncode is not None:
            return True
        if hasattr(self._process, "ended"):
            return bool(self._process.ended())
        if not hasattr(os, "waitid"):  # macOS
            return self._process.poll() is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def _await_end(self) -> bool:
        deadline = time.monotonic() + _GRACE_S
        pause_s = 0.001
        while not (ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return ended

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            # After an error or Ctrl-C do not wait for the child.
            self.kill()
        self.close()

    def _where_it_hangs(self) -> str | None:
        """Return file and line of the child's main thread, from its fault handler."""
        if self._has_ended():
            return None
        before = self.log_path.stat().st_size
        os.kill(self._process.pid, signal.SIGUSR1)
        answer, deadline = b"", time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            with self.log_path.open("rb") as log:
                log.seek(before)
                previous, answer = answer, log.read()
            # The handler writes frame by frame; it is done when no more output arrives.
            if answer and answer == previous:
                break
        for line in answer.decode(errors="replace").splitlines():
            path, separator, rest = line.strip().removeprefix('File "').partition('", line ')
            if separator and is_user_file(path):
                return f"{path}:{rest.split()[0]}"
        return None

    def _death(self) -> ChildError:
        stopped = self._stopped
        ended = self._await_end()
        self.kill()
        code = self._process.returncode or 0
        tail = self.log_tail()
        remedy: str | None
        if stopped:
            return ChildError(f"{self.name} was stopped and cannot be called again")
        kind = ChildDiedError if ended else ChildError
        if not ended:
            what = f"{self.name} closed its pipe and kept running without answering"
            remedy = "check whether the script closes files that it did not open"
        elif code == -signal.SIGKILL:
            what = f"{self.name} was killed by the system, most likely out of memory"
            remedy = LESS_MEMORY
        elif code < 0:
            what = f"{self.name} died of signal {signal.Signals(-code).name}"
            remedy = "run the script on its own; a crash in native code shows there too"
        else:
            what = f"{self.name} exited with code {code} before it was done"
            remedy = "check whether the script calls sys.exit or os._exit"
        if tail:
            what += "; its last output was:\n" + indent(tail, "    ")
        return kind(what, remedy=remedy)


def wait_any(children: Sequence[Child], timeout_s: float) -> list[Child]:
    """Wait for the first message or exit; return all `children` with a message or exited.

    Args:
        timeout_s: maximum wait, after which the list is empty.
    """
    with_message = [child for child in children if child._channel.has_message]
    if with_message:
        return with_message
    readable = select.select([child._channel for child in children], [], [], timeout_s)[0]
    # A process that a child forked may hold its pipe open after the child's exit.
    return [child for child in children if child._channel in readable] or [
        child for child in children if child._has_ended()
    ]


def _remove(log: Path, owner: int, opened: Sequence[int]) -> None:
    # A fork of this process inherits the finalizer, while this process keeps writing.
    if os.getpid() == owner:
        log.unlink(missing_ok=True)
        for fd in opened:
            os.close(fd)


_living: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for child in list(_living):
        # A fork of this process inherits the set, but must not kill our children.
        if child._owner == os.getpid():
            child.kill()
            child._remove_log()
