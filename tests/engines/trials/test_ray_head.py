"""A study whose Ray head dies ends with an error, a complete file and no running process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.engines.trials.ray_executor import RayExecutor
from slipstream.errors import SlipstreamError
from slipstream.ranks.netlab import Netlab, why_no_netlab
from slipstream.search import Budget, Float, Space, State, StoredStudy, Study, study

SPACE = Space({"x": Float(0.0, 1.0)})
TRIALS = 2000
# A head requires a token if the user's folder has one.
OPEN = {**os.environ, "RAY_AUTH_MODE": "disabled"}


def slowly(config: dict[str, Any]) -> float:
    time.sleep(0.05)
    return float(config["x"])


def made(store: Path) -> Study:
    return study("s", SPACE, "y", estimator=slowly, strategy="random", store=store)


DRIVER = """
import sys
from pathlib import Path
import psutil
sys.path.insert(0, {here!r})
from test_ray_head import TRIALS, made
from slipstream.engines.trials.ray_executor import RayExecutor
from slipstream.errors import SlipstreamError
from slipstream.search import Budget

executor = RayExecutor(2, address=sys.argv[3] if sys.argv[3:] else None)
processes = psutil.Process().children(recursive=True)
print(*(process.pid for process in processes), flush=True)

def kill(study):
    ended = sum(trial.tell_event >= 0 for trial in study.trials)
    if sys.argv[3:]:
        print(ended, flush=True)
    elif ended >= 4:
        for process in processes:
            if process.is_running() and process.name() == sys.argv[2]:
                process.kill()

try:
    made(Path(sys.argv[1])).run(executor, budget=Budget(trials=TRIALS), progress=kill)
except SlipstreamError as error:
    print(error.what)
"""


@pytest.mark.full
@pytest.mark.parametrize("killed", ["gcs_server", "raylet"])
def test_dead_head_ends_the_study_with_an_error(
    killed: str, tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    require("ray", find_spec("ray") is not None, "Ray is not installed")
    path = tmp_path / "s.db"
    program = DRIVER.format(here=str(Path(__file__).parent))
    driver = subprocess.run(
        [sys.executable, "-c", program, str(path), killed],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert driver.returncode == 0, driver.stderr
    pids, message = driver.stdout.splitlines()[0], driver.stdout.splitlines()[-1]
    assert "Ray's head died" in message
    running = [int(pid) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert not running, "Ray left processes running"
    _need_whole(path)


def _need_whole(path: Path) -> None:
    """Check that the file has all ended trials, and that the study continues from it."""
    stored = StoredStudy(path).trials
    ended = [trial for trial in stored if trial.tell_event >= 0]
    assert 4 <= len(ended) < TRIALS
    assert {trial.state for trial in ended} == {State.COMPLETE}
    resumed = made(path).run(budget=Budget(trials=len(stored) + 5))
    assert [trial.candidate.id for trial in resumed.trials[: len(stored)]] == [
        trial.candidate.id for trial in stored
    ]
    assert {trial.state for trial in resumed.trials} == {State.COMPLETE}


def _ray_on(lab: Netlab, host: int, folder: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Start a Ray node on a host of the lab, which ends with this process, and wait for it."""
    node = subprocess.Popen(
        [*lab.prefix(host), "setpriv", "--pdeathsig", "KILL",
         str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats",
         f"--node-ip-address={lab.address(host)}", "--object-store-memory=80000000", *settings],
        env=OPEN, stdout=folder.joinpath(f"{host}.log").open("wb"), stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60.0
    while b"Ray runtime started" not in folder.joinpath(f"{host}.log").read_bytes():
        assert time.monotonic() < until
        assert node.poll() is None
        time.sleep(0.1)
    return node


@pytest.mark.full
@pytest.mark.parametrize("failure", ["process", "machine"])
def test_dead_head_on_another_machine_ends_the_study(
    failure: str, tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    require("ray", find_spec("ray") is not None, "Ray is not installed")
    why = why_no_netlab()
    require("netlab", why is None, str(why))
    path, program = tmp_path / "s.db", DRIVER.format(here=str(Path(__file__).parent))
    # For Ray's sockets, whose paths must be short.
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as sockets,
        Netlab(2, 1e8) as lab,
    ):
        address = f"{lab.address(0)}:6379"
        nodes = [
            _ray_on(lab, 0, tmp_path, "--head", "--port=6379", "--num-cpus=0",
                    "--include-dashboard=false", f"--temp-dir={sockets}"),
            _ray_on(lab, 1, tmp_path, f"--address={address}", "--num-cpus=2"),
        ]  # fmt: skip
        driver = subprocess.Popen(
            [*lab.prefix(1), sys.executable, "-c", program, str(path), "", address],
            env=OPEN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.strip().isdecimal() and int(line) >= 4:
                break
        began = time.monotonic()
        if failure == "process":
            for child in psutil.Process(nodes[0].pid).children(recursive=True):
                if child.name() == "gcs_server":
                    child.kill()
        else:
            lab.unplug(0)
        text = ""
        for line in driver.stdout:
            text += line
            if "Ray's head died" in line:
                break
        assert "Ray's head died" in text
        assert time.monotonic() - began < 30.0, "reported before Ray itself gives up"
        driver.kill()
        driver.wait()
        for node in nodes:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    _need_whole(path)


def test_unreachable_address_is_reported_quickly(
    require: Callable[[str, bool, str], None],
) -> None:
    require("ray", find_spec("ray") is not None, "Ray is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(SlipstreamError) as caught:
            RayExecutor(2, address=address)
    assert caught.value.where == address
    assert time.monotonic() - began < 30.0
