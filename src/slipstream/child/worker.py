"""The child's side: answer the parent's calls until the pipe is closed."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from slipstream.child.descendants import descendants, end
from slipstream.child.pipe import Channel, Message
from slipstream.child.report import describe_error, revive
from slipstream.errors import ChildDiedError, ChildError, InvalidArgumentError, WorkloadError

_channel: Channel | None = None


def channel() -> Channel:
    """Return the pipe to the parent, for a function that runs in a child.

    Raises:
        ChildError: this process is not a child.
    """
    if _channel is None:
        raise ChildError("this code runs outside a slipstream worker process")
    return _channel


def call_in_fork(called: str, arguments: Message) -> Any:
    """Run ``called(**arguments)`` in a fork of this process, and return its result.

    For a child that imported much and runs several functions in isolation from each other.
    Messages of the fork are passed on to the parent.

    Raises:
        SlipstreamError: the function raised it, as for `Child.call`.
        ChildError: the fork died.
    """
    global _channel
    function = resolve(called)
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_fd)
            _channel = Channel(os.open(os.devnull, os.O_RDONLY), write_fd)
            try:
                _answer({"result": function(**arguments)}, called)
            except BaseException as error:
                _channel.send({"error": describe_error(error)})
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(write_fd)
    from_fork = Channel(read_fd, os.open(os.devnull, os.O_WRONLY))
    answer: Message | None = None
    try:
        while answer is None or not ("result" in answer or "error" in answer):
            if (answer := from_fork.receive()) is not None and "say" in answer:
                channel().send(answer)
    except EOFError:
        answer = None
    finally:
        from_fork.close()
        # It may hang at exit, in threads that the user's code left running.
        if answer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if answer is None:
        code = os.waitstatus_to_exitcode(status)
        how = f"died of signal {signal.Signals(-code).name}" if code < 0 else "exited"
        raise ChildDiedError(f"a process for {called.rpartition(':')[2]} {how} before it was done")
    if "error" in answer:
        raise revive(answer["error"])
    return answer["result"]


def exit_with(result: Any) -> NoReturn:
    """Answer the call and exit, so that the script's own code does not continue.

    Exits on exceptions too: the handler that torch's ``DataLoader`` sets for the exit of its
    workers raises here when they are killed, and the script could catch it.
    """
    try:
        channel().send({"result": result})
        end_descendants()
    finally:
        os._exit(0)


def end_descendants() -> None:
    """Kill this process's descendants, before a child exits."""
    end(descendants(os.getpid()))


def main(arguments: list[str]) -> None:
    """``python -m slipstream.child READ_FD WRITE_FD PARENT MEMORY_LIMIT_BYTES``, 0 for none."""
    import faulthandler

    read_fd, write_fd, parent, memory_limit_bytes = map(int, arguments)
    if parent:
        _die_with_parent(parent)
    # Output before a crash must reach the log.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # On this signal a hanging child writes its stack to the log for the parent.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    if memory_limit_bytes:
        _limit_memory(memory_limit_bytes)
    serve(read_fd, write_fd)
    # Skip the user's atexit handlers and destructors, which may write or hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(read_fd: int, write_fd: int) -> None:
    """Answer calls until the parent closes the pipe."""
    global _channel
    _channel = Channel(read_fd, write_fd)
    while True:
        try:
            message = _channel.receive()
        except EOFError:
            return
        if message is None or "call" not in message:
            continue  # for a function that has failed meanwhile
        try:
            answer = {"result": resolve(message["call"])(**message["arguments"])}
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            answer = {"error": describe_error(error)}
        try:
            _answer(answer, message["call"])
        except BrokenPipeError:
            return


def _answer(answer: Message, function: str) -> None:
    try:
        channel().send(answer)
    except (TypeError, ValueError) as error:
        # Raised before the first byte is sent.
        wrong = WorkloadError(f"{function} returned something that is not JSON: {error}")
        channel().send({"error": describe_error(wrong)})


def resolve(name: str) -> Callable[..., Any]:
    """Return the function ``module:function``.

    Raises:
        InvalidArgumentError: the module has no such function.
    """
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] | None = getattr(importlib.import_module(module), attribute, None)
    if not callable(function):
        raise InvalidArgumentError("function", f"'{name}' is not module:function")
    return function


def _limit_memory(limit_bytes: int) -> None:
    import resource

    # RLIMIT_DATA counts private writable memory, but unlike RLIMIT_AS not address space that is
    # only reserved (CUDA, mapped files).
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _die_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before prctl
