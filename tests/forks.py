"""Child processes as forks of this one, where torch is already imported.

For tests of what they answer. That a `Child` is a fresh interpreter, and what becomes of commands
and children under signals, is for tests/test_child.py and tests/cli/test_cli_interrupt.py.
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psutil
import pytest

_FIRST_FREE_FD = 3


class Fork:
    """Replacement for `subprocess.Popen` in `Child`, without a new interpreter."""

    def __init__(
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
    ) -> None:
        assert (stdin, stdout, start_new_session) == (subprocess.DEVNULL, stderr, True)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_child(command, stdout, pass_fds, env, cwd)

    def poll(self) -> int | None:
        """Return the exit code if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode


def _become_child(
    command: Sequence[str],
    log: int,
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    folder: Path | None,
) -> NoReturn:
    code = 70
    try:
        os.setsid()
        begin_anew(log, log, environment, folder or Path())
        # An inherited pipe of another child would hide that its other end is closed.
        edges = [_FIRST_FREE_FD - 1, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
        for before, after in itertools.pairwise(edges):
            os.closerange(before + 1, after)
        from slipstream.child import worker

        *rest, limit = command[3:]
        worker.main([*rest, str(_more_than_here(int(limit)))])
        code = 0
    finally:
        os._exit(code)


def _more_than_here(limit_bytes: int) -> int:
    """Return a limit of private memory, 0 for none, plus what all tests have used so far."""
    return limit_bytes and limit_bytes + psutil.Process().memory_info().data


def begin_anew(output: int, errors: int, environment: Mapping[str, str], folder: Path) -> None:
    """Set up, in a fork, the state of a new process as seen by commands and children."""
    import torch

    from slipstream.child import process
    from slipstream.errors import SlipstreamWarning

    for fd, target in enumerate((os.open(os.devnull, os.O_RDONLY), output, errors)):
        os.dup2(target, fd)
    # A descriptor replaced in a fork of a fork must not close the shared one.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Here our warnings are errors.
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", SlipstreamWarning)
    # OpenMP's threads do not survive a fork: using more than one would wait forever.
    torch.set_num_threads(1)
    torch.set_num_threads = lambda count: None  # type: ignore[assignment]
    process._living.clear()
    _forget_users_modules()


def _forget_users_modules() -> None:
    """Remove modules that tests imported from their folders, which a new process would not have."""
    prefixes = (sys.prefix, sys.base_prefix, *(path for path in sys.path if path))
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is not None and not path.startswith(prefixes):
            del sys.modules[name]


def import_what_steps_need() -> None:
    """Import once, here, what every process would import."""
    for module in ("torch._dynamo", "slipstream.verbs.profiling", "slipstream.verbs.proving.sides"):
        importlib.import_module(module)


def start_children_as_forks(patch: pytest.MonkeyPatch) -> None:
    """Make every `Child` from now on a fork of this process."""
    import_what_steps_need()
    started = SimpleNamespace(
        Popen=Fork, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    patch.setattr("slipstream.child.process.subprocess", started)
