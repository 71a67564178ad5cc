"""`slipstream serve` and `slipstream mlperf` as a person runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream import runtimes
from slipstream.cli._main import _command
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.verbs.goals import parse_goals
from slipstream.verbs.results import Predicted
from slipstream.verbs.serving import foresee

SOURCE = """\
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3), torch.randn(8, 4)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "served.py").write_text(SOURCE)
    return f"{tmp_path / 'served.py'}:make"


def test_every_scenario_of_a_workload_is_told_and_labelled(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(["mlperf", "serve", model, "--time", "0.3s", "--bound", "1s", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["scenario"] for one in told["runs"]] == [
        "single-stream", "multi-stream", "server", "offline",
    ]  # fmt: skip
    assert all(one["label"].startswith("not an MLPerf result") for one in told["runs"])
    assert all(one["value"] > 0 for one in told["runs"])
    server = told["runs"][2]
    assert server["predicted_ns"]["p99"] > server["predicted_ns"]["p50"] > 0


def test_the_server_answers_and_ends_with_ctrl_c(model: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "serve", model, "--port", "0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr and process.stderr.read()
    address = json.loads("".join(lines))["address"]
    with runtimes.load(address) as remote:
        (given,) = remote.run([np.zeros((5, 4), np.float32)])
    assert given.shape == (5, 3)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "1 requests answered" in said


def test_a_percentile_needs_a_rate_and_is_met_by_the_queue() -> None:
    with pytest.raises(UsageError, match="p99"):
        parse_goals(["p99<20ms"])
    with pytest.raises(InvalidArgumentError, match="-40/s"):
        parse_goals(["p99<20ms"], "-40/s")
    (goal,) = parse_goals(["p99<20ms"], "40/s")
    assert goal.met(2e6, 0)
    assert not goal.met(19e6, 0), "a query by itself keeps it, and one that waits does not"


def test_what_is_foreseen_tells_a_server_that_falls_behind() -> None:
    prediction = Predicted("lowbit:w8a8", 30e6, 15e6, 0.5, 0.4, 0.6)
    slow, fast = foresee([prediction], 40.0, (0.99, 100e6))
    assert (slow.keeps_up, fast.keeps_up) == (False, True)
    assert slow.to_json()["p99_ns"] is None
    assert fast.peak is not None
    assert fast.peak > 40.0 > (slow.peak or 0.0)
