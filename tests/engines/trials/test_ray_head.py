"""A study whose Ray loses its head ends with a named error; its file is whole, nothing runs on."""

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
from slipstream.search import Budget, Float, Reading, Space, State, Study, study

SPACE = Space({"x": Float(0.0, 1.0)})
TRIALS = 2000
# A head asks for a token where the user's folder has one.
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
print(*(one.pid for one in processes), flush=True)

def kill(study):
    ended = sum(one.told >= 0 for one in study.trials)
    if sys.argv[3:]:
        print(ended, flush=True)
    elif ended >= 4:
        for one in processes:
            if one.is_running() and one.name() == sys.argv[2]:
                one.kill()

try:
    made(Path(sys.argv[1])).run(executor, budget=Budget(trials=TRIALS), progress=kill)
except SlipstreamError as error:
    print(error.what)
"""


@pytest.mark.full
@pytest.mark.parametrize("killed", ["gcs_server", "raylet"])
def test_a_dead_head_ends_the_study_with_its_name(
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
    pids, said = driver.stdout.splitlines()[0], driver.stdout.splitlines()[-1]
    assert "Ray's head died" in said
    left = [int(pid) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert not left, "nothing that Ray started is left running"
    _need_whole(path)


def _need_whole(path: Path) -> None:
    """All that has ended is in the file, and the study goes on from it."""
    stored = Reading(path).trials
    ended = [one for one in stored if one.told >= 0]
    assert 4 <= len(ended) < TRIALS
    assert {one.state for one in ended} == {State.COMPLETE}
    cut = made(path).run(budget=Budget(trials=len(stored) + 5))
    assert [one.candidate.id for one in cut.trials[: len(stored)]] == [
        one.candidate.id for one in stored
    ]
    assert {one.state for one in cut.trials} == {State.COMPLETE}


def _ray_on(lab: Netlab, host: int, folder: Path, *settings: str) -> subprocess.Popen[bytes]:
    """A node of Ray on a host of the lab, that ends with this process; returns once it runs."""
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
@pytest.mark.parametrize("lost", ["process", "machine"])
def test_the_head_on_another_machine_is_lost(
    lost: str, tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    require("ray", find_spec("ray") is not None, "Ray is not installed")
    why = why_no_netlab()
    require("netlab", why is None, str(why))
    path, program = tmp_path / "s.db", DRIVER.format(here=str(Path(__file__).parent))
    # Ray's sockets lie there, and their names may not be long.
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
        if lost == "process":
            for one in psutil.Process(nodes[0].pid).children(recursive=True):
                if one.name() == "gcs_server":
                    one.kill()
        else:
            lab.unplug(0)
        text = ""
        for line in driver.stdout:
            text += line
            if "Ray's head died" in line:
                break
        assert "Ray's head died" in text
        assert time.monotonic() - began < 30.0, "told before Ray itself has given up"
        driver.kill()
        driver.wait()
        for node in nodes:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    _need_whole(path)


def test_an_address_at_which_nothing_answers_is_named_at_once(
    require: Callable[[str, bool, str], None],
) -> None:
    require("ray", find_spec("ray") is not None, "Ray is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(SlipstreamError) as told:
            RayExecutor(2, address=address)
    assert told.value.where == address
    assert time.monotonic() - began < 30.0
