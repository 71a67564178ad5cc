"""``slipstream netlab``: it runs commands on its hosts, and removes everything at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.netlab import app
from slipstream.cluster import ClusterError
from slipstream.ranks import why_no_netlab

# Only a limit for hanging commands.
LIMIT_S = 600.0
COMMAND = str(Path(sys.executable).parent / "slipstream")
# With a separate /run, so that other labs on this machine are not visible.
ALONE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /run && exec "$0" "$@"', COMMAND)


@pytest.fixture
def lab_here(require: Callable[[str, bool, str], None]) -> None:
    """This test needs root, for network namespaces."""
    require("netlab", why_no_netlab() is None, why_no_netlab() or "")


@pytest.mark.usefixtures("lab_here")
def test_bytes_of_every_host_are_counted() -> None:
    done = subprocess.run(
        [COMMAND, "netlab", "run", "--hosts", "2", "--rate", "100mbit", "--json", "--",
         "sh", "-c", "exit $RANK"],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["host"], row["exit_code"]) for row in rows] == [(0, 0), (1, 1)]
    assert all(row["sent_bytes"] >= 0 for row in rows)


@pytest.mark.usefixtures("lab_here")
def test_ctrl_c_ends_hosts_and_commands() -> None:
    running = subprocess.Popen(
        [COMMAND, "netlab", "run", "--hosts", "2", "--", "sh", "-c", "echo $$; exec sleep 3600"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        commands = [int(running.stdout.readline()) for _ in range(2)]
        hosts = _children(running.pid)
        assert len(hosts) >= 3
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=LIMIT_S)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert not _left([*commands, *hosts])


@pytest.mark.usefixtures("lab_here")
def test_a_lab_stays_up_until_it_is_removed() -> None:
    keeping = subprocess.Popen(
        [*ALONE, "netlab", "up", "--hosts", "2", "--rate", "10mbit"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    enter = ["nsenter", "--target", str(keeping.pid), "--mount"]

    def also(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*enter, *words], capture_output=True, text=True, check=False, timeout=LIMIT_S
        )

    try:
        assert keeping.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("up"):
            lines.append(keeping.stdout.readline())
            assert lines[-1], keeping.stderr
        hosts = _children(keeping.pid)
        prefix = re.findall(r"(nsenter .*) COMMAND", lines[1])[0].split()
        seen = also(*prefix, "ip", "-brief", "address", "show", "eth0")
        assert "10.77.0.2" in seen.stdout
        second = also(COMMAND, "netlab", "up")
        assert second.returncode == 1
        assert re.search(r"\bup\b", second.stderr)
        assert "netlab down" in second.stderr
        down = also(COMMAND, "netlab", "down")
        assert down.stdout == "down\n", down.stderr
        keeping.communicate(timeout=LIMIT_S)
    finally:
        keeping.kill()
        keeping.wait()
    assert not _left(hosts)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "--hosts", "0", "--", "true"], "hosts"),
        (["run", "--rate", "fast", "--", "true"], "rate"),
        (["run", "--rate", "0mbit", "--", "true"], "rate|bytes_per_s"),
        (["up", "--hosts", "1000"], "hosts"),
    ],
)
def test_impossible_labs_are_reported(arguments: list[str], named: str) -> None:
    error = CliRunner().invoke(app, arguments).exception
    assert error is not None
    assert re.search(named, str(error))


def test_without_root_there_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for arguments in (["run", "--", "true"], ["up"]):
        error: Any = CliRunner().invoke(app, arguments).exception
        assert isinstance(error, ClusterError)
        assert "needs root" in error.what


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _left(pids: list[int]) -> list[int]:
    """Return processes that the kernel has not ended within a limit for busy machines."""
    until = time.monotonic() + LIMIT_S
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
