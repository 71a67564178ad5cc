"""`slipstream search`: a study in a user's file: run, inspected, continued and replayed."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from slipstream.cli.search import app
from slipstream.errors import SlipstreamError, StoreError, UsageError, WorkloadError

RUNNER = CliRunner()
STUDY = """
import slipstream as ss
from slipstream.search import Cost, Float, Halving, Int, estimator

@estimator({"error": "%", "weights": ""}, cost=lambda c: Cost(c["width"] / 16, 0.1, 0.5))
def train(config, run):
    error = (100 * config["lr"] - 1) ** 2 + 9 / config["width"] / run.fidelity
    return {"error": error, "weights": 74 * config["width"]}

def study():
    space = ss.Space({"lr": Float(1e-4, 1e-1, log=True), "width": Int(8, 256, log=True)})
    return ss.study("digits", space, {"error": "min", "weights": "min"}, estimator=train,
                    constraints={"weights": "<= 9000"}, strategy="random", rungs=Halving(1, 9))

def broken():
    return 3
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # One name per test: a module loaded from another folder is a different study.
    Path("digits.py").write_text(STUDY, encoding="utf-8")


def search(*arguments: str) -> Result:
    return RUNNER.invoke(app, list(arguments), catch_exceptions=False)


def test_a_study_from_start_to_end() -> None:
    made = search("run", "digits.py:study", "--workers", "1", "--json")
    payload = json.loads(made.stdout)
    assert payload["trials"]["complete"] + payload["trials"].get("infeasible", 0) == 13
    assert payload["stopped"] == "the rung policy is done"
    assert "complete" in search("status", "digits.db").stdout
    best = json.loads(search("top", "digits.db", "--json").stdout)["best"][0]
    assert best["values"]["weights"] <= 9000
    front = search("pareto", "digits.db", "--svg", "front.svg")
    assert "lr=" in front.stdout
    assert "<circle" in Path("front.svg").read_text(encoding="utf-8")
    again = json.loads(search("resume", "digits.db", "--workers", "0", "--json").stdout)
    assert again["trials"] == payload["trials"]
    replayed = json.loads(search("replay", "digits.db", "--json").stdout)
    assert replayed == {"study": "digits", "proposals": 13, "differ": 0}


def test_more_devices_are_predicted_and_drawn() -> None:
    payload = json.loads(search("predict", "digits.py:study", "--gpus", "1,8", "--json").stdout)
    assert [row["devices"] for row in payload] == [1, 8]
    assert payload[0]["makespan_s"] > payload[1]["makespan_s"] >= payload[1]["bound_s"]
    search("timeline", "digits.py:study", "--gpus", "4", "-o", "t.json")
    assert json.loads(Path("t.json").read_text("utf-8"))["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["run", "digits.py"], UsageError, "does not name a study"),
        (["run", "digits.py:broken"], UsageError, "is an int"),
        (["run", "digits.py:studdy"], WorkloadError, "'studdy' is not defined"),
        (["run", "nowhere.py:study"], WorkloadError, "does not exist"),
        (["run", "digits.py:study", "--scheduler", "level"], UsageError, "needs Ray"),
        (["status", "nowhere.db"], StoreError, "no such database"),
        (["predict", "digits.py:study", "--gpus", "0"], UsageError, "less than 1 device"),
        (["predict", "digits.py:study", "--gpus", "many"], UsageError, "not a list"),
        (["predict", "digits.py:study", "--scheduler", "levl"], SlipstreamError, "levl"),
    ],
)
def test_errors_are_reported(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search(*arguments)


def test_the_package_loads_nothing_heavy() -> None:
    program = "import sys, slipstream.search, slipstream.cli.search; print('torch' in sys.modules, "
    program += "'optuna' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False"] * 3


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE trial SET state = 'x'",
        "UPDATE trial SET device_s = 'x'",
        'UPDATE trial SET config = \'{"lr": "x"}\'',
        "UPDATE trial SET told = 0, asked = 5",
        "UPDATE measurement SET value = 'x'",
        "UPDATE measurement SET provenance = 'x'",
        "DELETE FROM measurement",
        "DELETE FROM metric",
        "UPDATE study SET definition = '[]'",
        "UPDATE study SET definition = '{}'",
        "UPDATE study SET space = 'x'",
        "DROP TABLE trial",
    ],
)
def test_a_damaged_file_is_named(damage: str) -> None:
    search("run", "digits.py:study", "--workers", "0", "--budget", "2")
    connection = sqlite3.connect("digits.db")
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute(damage)
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match=r"damaged|stored candidate|database"):
        search("top", "digits.db")
    for command in ("status", "pareto", "replay", "resume"):
        with contextlib.suppress(StoreError):
            search(command, "digits.db")
