"""``slipstream control``: plans, runs, traces, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli._main import _command
from slipstream.engines.controller import plan_program
from slipstream.errors import SlipstreamError
from slipstream.graph import load

EXAMPLE = Path(__file__).parents[2] / "examples/control_stages.py"
SCRIPT = f"{EXAMPLE}:make_program"


def test_plan_shows_nodes_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(["control", "plan", SCRIPT, "--compute", "5ms", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    names = [node[0] for node in plan["nodes"]]
    assert names == ["hidden", "move", "loss_and_update", "move", "update"]
    assert plan["messages"] == 4
    assert plan["prediction"]["launch_ns"] > 15e6


def test_run_and_trace(
    forked_children: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for engine, mean in (("local", float), ("sim", type(None))):
        assert _command(["control", "run", SCRIPT, "--engine", engine, "--json"]) == 0
        run = json.loads(capsys.readouterr().out)
        assert run["messages"] == 4
        assert {type(output[3]) for output in run["outputs"]} == {mean}
    output = tmp_path / "launch.slipgraph"
    assert _command(["control", "trace", SCRIPT, "-o", str(output)]) == 0
    assert load(output).lanes == ("host 0", "host 1")


GAP = """
import torch
from slipstream.engines.controller import compiled

@compiled
def same(x):
    return x

def program(pool):
    part = pool.slice(2)
    part.binding = (0, 1), (2, 1)
    with pool.program("p") as made:
        same(made.input("x", torch.ones(1), part))
    return made
"""


def test_plan_lists_hosts_that_are_not_consecutive(tmp_path: Path) -> None:
    script = tmp_path / "gap.py"
    script.write_text(GAP, encoding="utf-8")
    assert plan_program(f"{script}:program", 3, 1, 0.0).nodes[0][2] == "0, 2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", str(EXAMPLE)), "does not name a function"),
        (("plan", f"{EXAMPLE}:missing"), "'missing' is not defined"),
        (("plan", f"{EXAMPLE}:hidden"), "TypeError: hidden() missing"),
        (("plan", SCRIPT, "--hosts", "1", "--compute", "fast"), "--compute"),
        (("run", SCRIPT, "--engine", "mesos"), "unknown engine 'mesos'"),
        (("trace", SCRIPT, "-o", "launch.txt"), "does not end in .slipgraph"),
        (("trace", SCRIPT, "-o", "launch.slipgraph", "--engine", "sim"), "recorded no times"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SlipstreamError) as raised:
        _command(["control", *arguments])
    assert words in str(raised.value)
