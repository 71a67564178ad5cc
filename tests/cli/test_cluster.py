"""`slipstream cluster`: its show, cost and simulate commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.cluster import app
from slipstream.cluster import Calibration, Cluster, LinkKind, Regime, star
from slipstream.errors import SlipstreamError

RUNNER = CliRunner()


def test_help_loads_nothing_heavy() -> None:
    check = (
        "import sys, slipstream.cli.cluster, slipstream.cli.netlab; "
        "sys.exit(bool({'torch', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_show_lists_presets_and_the_provenance_of_numbers() -> None:
    listed = json.loads(RUNNER.invoke(app, ["show", "--json"]).stdout)
    assert "tpu-v3-multipod" in {preset["name"] for preset in listed}
    shown = RUNNER.invoke(app, ["show", "h100x8-100gbe", "--set", "hosts=2"]).stdout
    assert "16" in shown
    assert "datasheet" in shown
    payload = json.loads(RUNNER.invoke(app, ["show", "h100x8-100gbe", "--json"]).stdout)
    assert all(link["bytes_per_s"]["source"] for link in payload["links"])


def test_cost_shows_every_algorithm_cheapest_first() -> None:
    arguments = ["cost", "--cluster", "workers=4,link=1gbit", "--all-reduce", "1MB", "--json"]
    payload = json.loads(RUNNER.invoke(app, arguments).stdout)
    times = [row["duration_ns"] for row in payload["costs"]]
    assert times == sorted(times)
    assert payload["costs"][0]["duration_ns"] == pytest.approx(1.5e6 / 125e6 * 1e9)
    mesh = ["cost", "--cluster", "h100x8-100gbe", "--all-gather", "1GiB", "--mesh", "dp=4,tp=8",
            "--group", "tp", "--json"]  # fmt: skip
    payload = json.loads(RUNNER.invoke(app, mesh).stdout)
    assert (payload["ranks"], payload["groups"]) == (8, 4)


def test_simulate_runs_jobs_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    run = RUNNER.invoke(
        app,
        ["simulate", "--cluster", "workers=4,link=1gbit",
         "--job", "devices=0-1,compute=10ms,all_reduce=1MB,iterations=3",
         "--job", "devices=2,3,compute=5ms,all_reduce=1MB,iterations=2,name=other",
         "--perfetto", str(trace), "--json"],
    )  # fmt: skip
    payload = json.loads(run.stdout)
    assert payload["jobs"][0]["iteration_ns"] == pytest.approx([18e6] * 3)
    assert payload["jobs"][1]["name"] == "other"
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_calibration_from_another_machine_is_reported(tmp_path: Path) -> None:
    link = LinkKind.of("measured", 1e9)
    elsewhere = Calibration("2026-01-01", "no machine of ours", "torch, gloo", 0.01, 0.02, 1.0, {})
    path = tmp_path / "there.toml"
    Cluster("there", star(2, link), calibration=elsewhere).save(path)
    run = RUNNER.invoke(app, ["cost", "--cluster", str(path), "--all-reduce", "1MB", "--json"])
    assert json.loads(run.stdout)["costs"]
    assert re.search(r"\bcalibrated\b.*\banother machine\b", run.stderr)


def test_show_reports_messages_that_take_another_path(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    ways = (Regime(0.0, 5e3, 0.5), Regime(2**20, 9e3))
    Cluster("here", star(2, LinkKind.of("memory", 1e9)), regimes=ways).save(path)
    shown = RUNNER.invoke(app, ["show", str(path)]).stdout
    assert re.search(r"\bmessages\b.*\b1\.00 MiB\b", shown)
    assert re.search(r"\b0\.5 times\b", shown)
    payload = json.loads(RUNNER.invoke(app, ["show", str(path), "--json"]).stdout)
    assert [regime["alpha_ns"] for regime in payload["regimes"]] == [5e3, 9e3]


@pytest.mark.parametrize(
    "arguments",
    [
        ["cost", "--cluster", "workers=4,link=1gbit"],
        ["cost", "--cluster", "workers=4,link=1gbit", "--all-reduce", "-1"],
        ["cost", "--cluster", "workers=4,link=1gbit", "--all-reduce", "1MB", "--group", "0-9"],
        ["cost", "--cluster", "workers=4,link=1gbit", "--all-reduce", "1MB", "--group", "x"],
        ["simulate", "--cluster", "workers=4,link=1gbit", "--job", "compute=fast"],
        ["simulate", "--cluster", "workers=4,link=1gbit", "--job", "cmopute=1ms"],
        ["show", "nowhere"],
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str]) -> None:
    assert isinstance(RUNNER.invoke(app, arguments).exception, SlipstreamError)
