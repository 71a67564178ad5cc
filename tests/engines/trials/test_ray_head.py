"""A study whose Ray loses its head ends with a named error; its file is whole, nothing runs on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.search import Budget, Float, Reading, Space, State, Study, study

SPACE = Space({"x": Float(0.0, 1.0)})
TRIALS = 2000


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

executor = RayExecutor(2)
processes = psutil.Process().children(recursive=True)
print(*(one.pid for one in processes), flush=True)

def kill(study):
    if sum(one.told >= 0 for one in study.trials) >= 4:
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
    stored = Reading(path).trials
    ended = [one for one in stored if one.told >= 0]
    assert 4 <= len(ended) < TRIALS
    assert {one.state for one in ended} == {State.COMPLETE}
    cut = made(path).run(budget=Budget(trials=len(stored) + 5))
    assert [one.candidate.id for one in cut.trials[: len(stored)]] == [
        one.candidate.id for one in stored
    ]
    assert {one.state for one in cut.trials} == {State.COMPLETE}
