"""``slipstream advise``: all techniques predicted and ranked, with one line on what to do next."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import technique
from slipstream.cli import advise
from slipstream.graph import Graph, load
from slipstream.technique import Quality, QualityKind
from slipstream.verbs.advising import Advice
from slipstream.verbs.goals import Goal, parse_goal
from slipstream.verbs.request import Request, command_for
from slipstream.verbs.results import Predicted

_SCRIPT = """\
from train import make_workload
model, (inputs, targets), loss, optimizer = make_workload()
for _ in range(5000):
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()
"""


def test_every_installed_technique_is_judged(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name, "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)["predictions"]
    # Without a cluster, techniques that distribute a step are omitted.
    alone = {name for name, kind in technique.registry().items() if not kind.traits.is_distributed}
    assert {prediction["technique"].partition(":")[0] for prediction in found} == alone
    singles = {
        prediction["technique"] for prediction in found if "+" not in prediction["technique"]
    }
    assert len(singles) >= len(alone)
    speedups = [row["speedup"] for row in found if row["reason"] is None]
    assert speedups == sorted(speedups, reverse=True)


def test_the_table_begins_with_the_first_choice_and_ends_with_what_to_do(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name)
    assert run.returncode == 0, run.stderr
    again = "next: slipstream prove train.py:make_workload --set batch_size=4 --technique "
    assert again in run.stdout or "is worth the trouble" in run.stdout
    assert re.match(r"first choice .*\bnot measured: a recording\b|nothing ", run.stdout)
    assert re.search(r"\b[0-9]+ techniques do not apply here: --all\b", run.stdout)
    assert "tf32 does not apply" not in run.stdout
    everything = recorded.shell("advise", recorded.path.name, "--all")
    assert "tf32 does not apply" in everything.stdout


def test_the_first_choice_of_a_script_is_measured(slipstream: Any) -> None:
    (slipstream.folder / "script.py").write_text(_SCRIPT)
    arguments = ("script.py", "--steps", 2, "--no-combinations", "--time-limit", "12s", "--json")
    run = slipstream("advise", *arguments)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    check = found["check"]
    assert (check and check["technique"]) == found["best"]
    if check:
        assert (check["reason"] is None) == (check["speedup"] is not None)
    if check and check["speedup"] is not None:
        shown = next(p for p in found["predictions"] if p["technique"] == found["best"])
        low, high = shown["speedup_interval"]
        assert check["predicted_speedup"] == shown["speedup"]
        assert check["inside"] in (None, low <= check["speedup"] <= high)
        stored = json.loads(slipstream.briefly("results", "show", "last", "--json").stdout)
        assert stored["rows"][0]["predicted_speedup"] == shown["speedup"]


def test_without_a_first_choice_the_time_of_its_check_goes_to_other_techniques(
    recorded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deadlines = []

    def rank(graph: Graph, *, until: float, **options: Any) -> Advice:
        deadlines.append(until)
        return Advice((), frozenset(), None, not_timed={"fusion": None})

    monkeypatch.setattr("slipstream.verbs.advising.advise", rank)
    graph = load(recorded.path)
    monkeypatch.setattr(Request, "graph", lambda *arguments, **options: graph)
    advise.command(str(tmp_path / "train.py"), store=tmp_path / "results.db", as_json=True)
    assert len(deadlines) == 2
    assert deadlines[0] < deadlines[1]


def test_recorded_arguments_are_repeated(recorded: Any) -> None:
    graph = load(recorded.path)
    recipe = {
        "target": "my script.py", "arguments": {"n": 2, "size": "a b"}, "threads": 1,
        "script_arguments": ["--epochs", "1"],
    }  # fmt: skip
    named = replace(graph, meta={**graph.meta, "recipe": recipe})
    assert command_for("prove", named, "amp:bf16") == (
        "slipstream prove 'my script.py' --set n=2 --set 'size=a b' --technique amp:bf16 "
        "--threads 1 -- --epochs 1"
    )
    imported = replace(graph, meta={})
    assert command_for("prove", imported, "amp") == "slipstream prove WORKLOAD --technique amp"


def _predicted(name: str, ratio: float, kind: QualityKind, width: float = 0.01) -> Predicted:
    return Predicted(
        name, 1e6, 1e6 * ratio, ratio, ratio - width, ratio + width,
        memory=(2 << 20, 1 << 20), quality=Quality(kind, "made up"),
    )  # fmt: skip


def test_explains_why_the_largest_gain_is_not_chosen() -> None:
    batch = _predicted("batch_size:x2", 0.5, QualityKind.NEEDS_TRAINING)
    vague = _predicted("amp:bf16", 0.6, QualityKind.ROUNDING, width=0.5)
    fused = _predicted("fused_optimizer:fused", 0.8, QualityKind.ROUNDING)

    def why(*found: Predicted, best: Predicted, goals: Sequence[Goal] = ()) -> str:
        front = frozenset(p.technique for p in found)
        return Advice(found, front, best, tuple(goals))._why_not_the_largest()

    assert why(fused, best=fused) == ""
    assert why(batch, best=batch) == ""
    plain, certain = why(batch, fused, best=fused), why(vague, fused, best=fused)
    assert all(text.startswith("fused_optimizer:fused ") for text in (plain, certain))
    assert re.search(r"\btraining\b", plain)
    assert re.search(r"\bcertain\b", certain)
    small = replace(fused, memory=(2 << 20, 1 << 10))
    goal = parse_goal("memory<100KiB")
    assert re.search(r"\bgoal\b.*\bcertain\b", why(vague, small, best=small, goals=[goal]))


def test_reports_a_goal_that_cannot_be_met(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name, "--goal", "latency<1ns", "--no-combinations")
    assert run.returncode == 0, run.stderr
    assert re.search(r"\b1\.00 ns\b.*\bnothing\b", run.stdout)


def test_refuses_an_invalid_goal_before_anything_runs(recorded: Any) -> None:
    run = recorded.shell("advise", "no_such_file.py", "--goal", "memory")
    assert run.returncode == 2
    assert "memory<8GiB" in run.stderr


def test_reports_techniques_that_cannot_be_proved_on_a_script(slipstream: Any) -> None:
    (slipstream.folder / "script.py").write_text(_SCRIPT)
    run = slipstream("advise", "script.py", "--steps", 2, "--no-combinations", "--no-check")
    assert run.returncode == 0, run.stderr
    output = " ".join(run.stdout.split())
    assert re.search(r"\baccumulation:4\b.*\bno\b", output)
    assert "not measured: --no-check" in output or "nothing here" in output
