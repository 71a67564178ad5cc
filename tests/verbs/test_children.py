"""How a child leaves: at once, whatever the user's code has set up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from slipstream.child import Channel, worker


def test_the_script_does_not_go_on_when_its_own_handler_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the one does that torch's DataLoader sets for the end of its workers."""
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
            worker.leave({"tasks": 3})
        except RuntimeError:
            status = 7  # what the script would catch, and go on from
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
