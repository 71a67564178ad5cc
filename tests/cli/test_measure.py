"""`slipstream measure` as a user runs it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from slipstream.cli.measure import app
from slipstream.errors import InvalidArgumentError, MeasurementError, UsageError
from slipstream.measure.records import Verdict
from slipstream.measure.store import Store

PYTHON = shlex.quote(sys.executable)
# How certain the result is, and which of these it is, depends on the machine: see tests/measure.
VERDICTS = {str(verdict) for verdict in Verdict}


def measure(*words):
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def test_two_commands_are_compared_and_stored(tmp_path):
    store = tmp_path / "r.db"
    done = measure(
        "ab", "--base-cmd", "sleep 0.01", "--head-cmd", "sleep 0.3",
        "--budget", "3s", "--store", str(store), "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)
    head = next(row for row in found["rows"] if row["arm"] == "head" and row["carries"])
    assert head["metric"] == "wall"
    assert head["verdict"] in VERDICTS
    assert head["speedup"] < 1
    with Store(store) as opened:
        stored = opened.load("last")
    assert stored.title == "base vs head"
    assert ("head", "peak_memory") in {(arm, metric) for arm, metric, _ in stored.series}


def test_the_table_names_the_verdict_and_the_clock(tmp_path):
    done = measure("ab", "--base-cmd", "true", "--head-cmd", "sleep 0.03", "--budget", "1s",
                   "--no-save")  # fmt: skip
    assert any(verdict in done.stdout for verdict in VERDICTS)
    assert "wall" in done.stdout


def test_two_revisions_run_the_same_command(tmp_path, monkeypatch):
    def git(*words):
        settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *settings, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for seconds in ("0.01", "0.3"):
        (tmp_path / "work.sh").write_text(f"sleep {seconds}\n")
        git("add", "work.sh")
        git("commit", "-q", "-m", seconds)
    monkeypatch.chdir(tmp_path)
    done = measure(
        "ab", "--base", "HEAD~1", "--head", "HEAD", "--budget", "3s", "--no-save", "--json",
        "--", "sh", "work.sh",
    )  # fmt: skip
    row = next(row for row in json.loads(done.stdout)["rows"] if row["carries"])
    assert (row["arm"], row["baseline"]) == ("HEAD", "HEAD~1")
    assert row["speedup"] < 1


@pytest.mark.parametrize(
    "words",
    [
        ["ab"],
        ["ab", "--base-cmd", "true"],
        ["ab", "--base", "main", "--head", "HEAD"],
        ["ab", "--base", "main", "--head", "main", "--", "true"],
        ["ab", "--base-cmd", "true", "--head-cmd", "true", "--base", "main"],
        ["gate", "--seconds", "0"],
    ],
)
def test_an_incomplete_request_is_a_usage_error_with_an_example(words):
    with pytest.raises(UsageError):
        measure(*words)


def test_a_missing_or_failing_command_is_named():
    with pytest.raises(InvalidArgumentError, match=r"'no-such-program'.*\bnot found\b"):
        measure("ab", "--base-cmd", "true", "--head-cmd", "no-such-program", "--no-save")
    with pytest.raises(MeasurementError, match=r"'head' failed\b.*\bstatus 1\b"):
        measure("ab", "--base-cmd", "true", "--head-cmd", "false", "--no-save")
    with pytest.raises(InvalidArgumentError, match="budget"):
        measure("ab", "--base-cmd", "true", "--head-cmd", "true", "--budget", "0s", "--no-save")


def test_the_gate_shows_a_colour_and_its_checks():
    found = json.loads(measure("gate", "--seconds", "30", "--json").stdout)
    assert found["level"] in ("green", "amber", "red")
    assert found["seconds"] == 30
    assert 0 < found["detectable"]["cpu"] < 1
    assert "this machine is" in measure("gate").stdout


def test_help_explains_without_torch_or_numpy():
    code = (
        "import sys; from slipstream.cli.measure import app\n"
        "try: app(['ab', '--help'], standalone_mode=False)\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--base-cmd" in done.stdout
    assert "interleaved" in done.stdout
