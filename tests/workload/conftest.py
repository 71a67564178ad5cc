"""Run workloads like a child process, in a fork of this one, where torch is imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

_LIMIT_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """The outcome: a result, or the parts of an error."""

    result: Any
    error: dict[str, Any] | None
    exit_code: int

    @property
    def what(self) -> str:
        """The error; fails if there was none."""
        assert self.error is not None, f"it worked: {self.result}"
        return str(self.error["what"])


Fork = Callable[[Callable[[], Any]], Outcome]


@pytest.fixture
def fork(tmp_path_factory: pytest.TempPathFactory) -> Fork:
    """Call a function in a fork, which ends right afterwards, and return its outcome."""
    import torch  # noqa: F401 - once, for all forks

    from slipstream.child import Channel

    output = tmp_path_factory.mktemp("output") / "log"

    def call(function: Callable[[], Any]) -> Outcome:
        to_parent, from_child = os.pipe()
        to_child, from_parent = os.pipe()
        pid = os.fork()
        if pid == 0:
            _answer(function, Channel(to_child, from_child), output)
        os.close(from_child)
        os.close(to_child)
        channel = Channel(to_parent, from_parent)
        try:
            message = channel.receive(_LIMIT_S)
        except EOFError:
            message = {"error": {"what": "it said nothing"}}
        finally:
            if "message" not in locals() or message is None:
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            channel.close()
        assert message is not None, f"no answer within {_LIMIT_S:g} s"
        code = os.waitstatus_to_exitcode(status)
        return Outcome(message.get("result"), message.get("error"), code)

    return call


def _answer(function: Callable[[], Any], channel: Any, output: Path) -> NoReturn:
    import torch

    from slipstream.child import describe_error, worker

    try:
        # A fork after threads were used must not use threads.
        torch.set_num_threads(1)
        log = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for fd in (1, 2):
            os.dup2(log, fd)
        import sys

        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        worker._channel = channel
        channel.send({"result": function()})
    except BaseException as error:
        channel.send({"error": describe_error(error)})
    finally:
        os._exit(0)


@pytest.fixture
def drive_forked(fork: Fork, tmp_path: Path) -> Callable[..., Outcome]:
    """``drive_forked(text, program)``: drive a script of this text, or ``FUNCTION`` in it."""

    def run(
        text: str,
        program: Callable[[Any], Any],
        *,
        function: str = "",
        name: str = "train.py",
        techniques: tuple[Any, ...] = (),
        arguments: dict[str, Any] | None = None,
        script_arguments: tuple[str, ...] = (),
        repeats: bool = False,
    ) -> Outcome:
        from slipstream.workload import Workload, drive, file_backups

        folder = tmp_path / "user"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        target = f"{folder / name}:{function}" if function else str(folder / name)
        workload = Workload(target, arguments or {}, script_arguments, techniques)

        def leave(result: Any) -> NoReturn:
            from slipstream.child import channel

            channel().send({"result": result})
            os._exit(0)

        with file_backups() as keep_in:
            return fork(lambda: drive(workload, program, leave, keep_in=keep_in, repeats=repeats))

    return run
