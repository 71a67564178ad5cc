"""Ctrl-C at any time: one message, exit code 130, no remaining process or file, no changes."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_LIMIT_S = 600.0
_GOODBYE = "interrupted"

# Endless; writes a file once its steps have begun.
_SCRIPT = """\
import itertools, os, torch
from train import make_workload
model, (inputs, targets), loss, optimizer = make_workload()
os.rename("notes.txt", "notes.old")
for step in itertools.count():
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()
    torch.save(model.state_dict(), "checkpoint.pt")
    if step == 5:
        open("reached", "w").close()
"""
# The same as a function that never returns.
_FUNCTION = f"""\
def endless():
{textwrap.indent(_SCRIPT, "    ")}
"""

Snapshot = Callable[[Path], dict[str, object]]


@pytest.fixture
def project(slipstream: Any) -> Path:
    folder: Path = slipstream.folder
    (folder / "script.py").write_text(_SCRIPT)
    (folder / "function.py").write_text(_FUNCTION)
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint.pt").write_text("a model that took a week")
    return folder


def wait_for(condition: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert process.poll() is None, "it ended early: " + str(process.communicate())
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_until(stream: Any, text: str) -> str:
    line = ""
    while text not in line:
        line = stream.readline()
        assert line, f"it ended before it printed '{text}'"
    return line


def interrupted(process: Any, number: signal.Signals = signal.SIGINT) -> None:
    process.send_signal(number)
    _, stderr = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 130
    assert stderr.splitlines()[-1].startswith(_GOODBYE)
    assert "Traceback" not in stderr


def test_in_code_of_a_string(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""\
from slipstream.cli import _main
def interrupt(arguments):
    exec("raise KeyboardInterrupt")
_main._command = interrupt
_main.main()
""")
    command = [sys.executable, "-m", "program"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.split(";")[0]) == (130, _GOODBYE)


def test_while_importing(slipstream: Any, project: Path, snapshot: Snapshot) -> None:
    before = snapshot(project)
    process = slipstream.start("profile", "train.py:make_workload")
    read_until(process.stderr, "importing")
    interrupted(process)
    assert snapshot(project) == before


def test_sigterm_while_a_script_runs_steps(
    slipstream: Any, project: Path, snapshot: Snapshot
) -> None:
    before = snapshot(project)
    process = slipstream.start("profile", "script.py", "--steps", 10**6)
    wait_for((project / "reached").exists, process)
    assert not (project / "notes.txt").exists()
    interrupted(process, signal.SIGTERM)
    assert snapshot(project) == before


def test_while_micro_benchmarking(slipstream: Any, recorded: Any) -> None:
    shutil.copy(recorded.path, slipstream.folder / "tiny.slipgraph")
    slipstream.environment["XDG_CACHE_HOME"] = str(slipstream.folder.parent / "empty cache")
    process = slipstream.start("predict", "tiny.slipgraph", "-t", "amp:bf16")
    read_until(process.stderr, "measuring operators")
    interrupted(process)
    again = slipstream.folder / ".slipstream" / "results.db"
    assert again.exists(), "the store stays usable"


def test_while_proving(slipstream: Any, project: Path, snapshot: Snapshot) -> None:
    before = snapshot(project)
    process = slipstream.start(
        "prove", "script.py", "-t", "threads:1", "--no-quality", "--steps", 3, "--budget", "60s"
    )
    read_until(process.stderr, "setup")
    wait_for((project / "reached").exists, process)
    interrupted(process)
    assert snapshot(project) == before


def test_repeated_ctrl_c_on_a_terminal(slipstream: Any, project: Path, snapshot: Snapshot) -> None:
    """A spinner shows progress; three Ctrl-C in a row do not prevent files from being restored."""
    before = snapshot(project)
    ours, theirs = pty.openpty()
    process = slipstream.start(
        "profile", "script.py", "--steps", 10**6, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown, pressed = "", 0
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.02)[0]:
            try:
                shown += os.read(ours, 1 << 16).decode(errors="replace")
            except OSError:  # the other end is closed and all output is read
                break
        if (project / "reached").exists() and process.poll() is None and pressed < 3:
            process.send_signal(signal.SIGINT)
            pressed += 1
    os.close(ours)
    assert process.wait(_LIMIT_S) == 130
    assert "profiling script.py: " in shown
    # At its end, on the spinner's line or on a separate one.
    assert _GOODBYE in re.split(r"[\r\n]+", shown.rstrip())[-1]
    assert "Traceback" not in shown
    assert snapshot(project) == before


@pytest.mark.parametrize("workload", ["script.py", "function.py:endless"])
def test_sigkill_changes_no_file_of_the_user(
    slipstream: Any, project: Path, snapshot: Snapshot, workload: str
) -> None:
    before = snapshot(project)
    process = slipstream.start("profile", workload, "--steps", 10**6)
    wait_for((project / "reached").exists, process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + _LIMIT_S
    while slipstream.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert snapshot(project) == before
    # Its log and its incomplete graph could not be removed.
    for path in slipstream.temporary.glob("slipstream-*"):
        assert not path.name.startswith("slipstream-kept")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
