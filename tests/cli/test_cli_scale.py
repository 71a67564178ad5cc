"""``predict --cluster``, ``advise --cluster`` and ``scale curve``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

_CLUSTER = "workers=8,link=10mbit,latency=50us,device=v100"


def test_a_distributed_step_is_predicted_with_its_bounds_and_a_timeline(
    recorded: Any, tmp_path: Path
) -> None:
    run = recorded.shell(
        "predict", recorded.path.name, "--cluster", _CLUSTER, "-t", "ddp:4", "-t", "ddp:8",
        "--timeline", tmp_path / "step.json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert re.search(r"\bcommunication\b.*\bcost\b.*\bwalls\b", run.stdout)
    assert "accurate to 25 %" in run.stdout
    assert "AWS" in run.stdout
    for name in ("step-1.json", "step-2.json"):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert any(event["name"] == "all_reduce of gradients" for event in events)


def test_advice_on_a_cluster_includes_compression(recorded: Any) -> None:
    run = recorded.shell(
        "advise", recorded.path.name, "--cluster", _CLUSTER, "--workers", "4", "--json"
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["in_words"][0].startswith("should I compress?")
    assert found["compress"]["needed_ratio"] >= 1
    assert {p["technique"] for p in found["predictions"]} >= {"ddp:4", "fsdp:4", "priority_sync:4"}


def test_a_curve_is_printed_and_drawn(recorded: Any, tmp_path: Path) -> None:
    run = recorded.shell(
        "scale", "curve", recorded.path.name, "--cluster", _CLUSTER, "--svg", tmp_path / "curve.svg"
    )
    assert run.returncode == 0, run.stderr
    assert "efficiency" in run.stdout
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "-t", "ddp:64", "--cluster", _CLUSTER), r"\b64\b.*\b8 devices\b"),
        (("predict", "-t", "ddp:4", "--cluster", "nowhere"), "'nowhere'"),
        (("predict", "-t", "ddp:4", "--cluster", "workers=4,link=0gbit"), "link"),
        (("predict", "-t", "ddp:4", "--cluster-set", "hosts=2"), "--cluster-set"),
        (
            ("predict", "-t", "ddp:4", "--cluster", "ethernet-1g", "--cluster-set", "x"),
            r"--cluster-set x\b",
        ),
        (("advise", "--cluster", _CLUSTER, "--workers", "1"), r"\b1\b.*\b2\b"),
        (("advise", "--cluster", _CLUSTER, "--workers", "9"), r"\b9\b.*\b8 devices\b"),
        (("scale", "curve", "--cluster", _CLUSTER, "--workers", "two"), "two"),
        (("scale", "curve", "--cluster", _CLUSTER, "--workers", "0"), r"\b0\b.*\b2\b"),
        (("scale", "curve", "--cluster", _CLUSTER, "-t", "amp:bf16"), "amp"),
        (("scale", "curve", "--cluster", _CLUSTER, "--global-batch", "7"), r"\b7\b"),
    ],
)
def test_errors_are_one_line(recorded: Any, arguments: Any, message: str) -> None:
    verb = 2 if arguments[0] == "scale" else 1
    words = *arguments[:verb], recorded.path.name, *arguments[verb:]
    assert re.search(message, recorded.shell.refused(2, *words).what)
