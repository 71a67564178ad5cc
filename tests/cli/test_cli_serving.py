"""`slipstream serve` and `slipstream mlperf` as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream import runtimes
from slipstream.cli._main import _command
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.mlperf import serving
from slipstream.mlperf.serving.threads import ThreadCosts, thread_costs
from slipstream.runtimes import OverloadedError
from slipstream.verbs.goals import met_note, parse_goals
from slipstream.verbs.results import Predicted
from slipstream.verbs.serving import predict_serving, serving_table

SOURCE = """\
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3), torch.randn(8, 4)
"""


# Hangs from its second call on: the first is made during loading.
HANGING = """\
import pathlib, time, torch

class Hanging(torch.nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            pathlib.Path(__file__).with_name("begun").touch()
            time.sleep(60)
        return x

def make():
    return Hanging(), torch.randn(8, 4)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "served.py").write_text(SOURCE)
    return f"{tmp_path / 'served.py'}:make"


def test_every_scenario_of_a_workload_is_shown_and_labelled(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        _command(["mlperf", "serve", model, "--time", "0.3s", "--latency-bound", "1s", "--json"])
        == 0
    )
    payload = json.loads(capsys.readouterr().out)
    assert [result["scenario"] for result in payload["runs"]] == [
        "single-stream", "multi-stream", "server", "offline",
    ]  # fmt: skip
    assert all(result["label"].startswith("not an MLPerf result") for result in payload["runs"])
    assert all(result["value"] > 0 for result in payload["runs"])
    server = payload["runs"][2]
    predicted = server["predicted_ns"] or {}
    if predicted.get("p99") is None:  # other programs disturbed the calibration
        assert any(note.startswith("server: ") for note in payload["notes"])
    else:
        assert predicted["p99"] > predicted["p50"] > 0


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_failed_audit_is_an_exit_code(
    passed: bool | None, code: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def benchmark(session: serving.Session, *_: object, **__: object) -> serving.ServingResult:
        audit = serving.Audit("COLD", "single-stream", passed, "")
        return serving.ServingResult(session.about, "", (), None, (audit,))

    monkeypatch.setattr(serving, "benchmark", benchmark)
    assert _command(["mlperf", "serve", model, "--audit", "COLD", "--json"]) == code


@contextlib.contextmanager
def served(model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`slipstream serve`, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "serve", model, "--port", "0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr and process.stderr.read()
        yield process, json.loads("".join(lines))["address"]
    finally:
        process.kill()
        process.communicate()


def test_the_server_answers_and_ends_with_ctrl_c(model: str) -> None:
    with served(model) as (process, address):
        with runtimes.load(address) as remote:
            (output,) = remote.run([np.zeros((5, 4), np.float32)])
        assert output.shape == (5, 3)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "1 requests answered" in stderr


def test_the_server_ends_with_ctrl_c_while_a_call_hangs(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    with served(f"{tmp_path / 'hanging.py'}:make") as (process, address):
        with runtimes.load(address) as remote, ThreadPoolExecutor(1) as pool:
            refused = pool.submit(remote.run, [np.zeros((5, 4), np.float32)])
            while not (tmp_path / "begun").exists():
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGINT)
            with pytest.raises(OverloadedError):
                refused.result(20)
        # Without an interrupt, the call ends after a minute.
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert "0 requests answered" in stderr


def test_a_percentile_needs_a_rate_and_is_met_by_the_queue() -> None:
    with pytest.raises(UsageError, match="p99"):
        parse_goals(["p99<20ms"])
    with pytest.raises(InvalidArgumentError, match="-40/s"):
        parse_goals(["p99<20ms"], "-40/s")
    (goal,) = parse_goals(["p99<20ms"], "40/s")
    assert goal.met(2e6, 0)
    assert not goal.met(19e6, 0), "a single query meets it, and one that waits does not"


def test_threads_of_a_server_and_goals_are_part_of_a_prediction() -> None:
    costs = ThreadCosts(0.2e6, 0.5e6, known=True)
    prediction = Predicted("inference_mode", 2e6, 1e6, 0.5, 0.4, 0.6)
    alone = predict_serving([prediction], 10.0, (0.50, 2e6))
    slow, fast = predict_serving([prediction], 10.0, (0.50, 2e6), costs)
    for bare, served in zip(alone, (slow, fast), strict=True):
        added = served.load.percentile_ns(0.5) - bare.load.percentile_ns(0.5)
        assert added == pytest.approx(0.7e6, rel=0.01)
    assert (slow.met, fast.met) == (False, True)
    table = serving_table([slow, fast], (0.50, 2e6), costs)
    assert [row[-1] for row in table.rows] == ["no", "yes"]
    assert "500 µs" in table.notes[-1]
    (goal,) = parse_goals(["p50<2ms"], "10/s")
    goal = replace(goal, costs=costs)
    assert met_note(goal, [prediction]).endswith("met: inference_mode; not met: as recorded")


def test_thread_costs_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs = thread_costs()
    assert costs.known
    assert costs.delay_ns > 0
    assert thread_costs() == costs
    (file,) = tmp_path.rglob("threads-*.json")
    file.write_text("[]")
    assert thread_costs().known


def test_a_prediction_detects_a_server_that_falls_behind() -> None:
    prediction = Predicted("lowbit:w8a8", 30e6, 15e6, 0.5, 0.4, 0.6)
    slow, fast = predict_serving([prediction], 40.0, (0.99, 100e6))
    assert (slow.keeps_up, fast.keeps_up) == (False, True)
    assert slow.to_json()["p99_ns"] is None
    assert fast.peak is not None
    assert fast.peak > 40.0 > (slow.peak or 0.0)
