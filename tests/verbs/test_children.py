"""Tests of how a child exits, whatever handlers the user's code has set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from slipstream.child import Channel, worker


def test_a_handler_that_raises_does_not_resume_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's DataLoader installs such a handler for the death of its workers."""
    to_us, from_it = os.pipe()
    to_it, from_us = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            monkeypatch.setattr(worker, "_channel", Channel(to_it, from_it))
            signal.signal(signal.SIGCHLD, _raising)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            ended = worker.end_descendants
            monkeypatch.setattr(worker, "end_descendants", lambda: (ended(), time.sleep(30)))
            worker.exit_with({"tasks": 3})
        except RuntimeError:
            status = 7  # the script would catch it and continue
        finally:
            os._exit(status)
    os.close(from_it)
    os.close(to_it)
    end = Channel(to_us, from_us)
    try:
        assert end.receive(60) == {"result": {"tasks": 3}}
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        end.close()


def _raising(*arguments: Any) -> None:
    raise RuntimeError("DataLoader worker is killed by signal: Killed.")
