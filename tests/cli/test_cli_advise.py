"""``slipstream advise``: every technique on paper, ranked, with one line on what to do next."""

from __future__ import annotations

import json
from typing import Any

from slipstream import technique


def test_every_installed_technique_is_judged(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name, "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)["predictions"]
    assert {one["technique"].partition(":")[0] for one in found} == set(technique.registry())
    singles = {one["technique"] for one in found if "+" not in one["technique"]}
    assert len(singles) >= len(technique.registry())
    ratios = [one["ratio"] for one in found if one["why_not"] is None]
    assert ratios == sorted(ratios)


def test_the_table_ends_with_what_to_do(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name)
    assert run.returncode == 0, run.stderr
    assert "next: slipstream prove WORKLOAD" in run.stdout or "keep the step" in run.stdout


def test_a_goal_that_cannot_be_met_is_said(recorded: Any) -> None:
    run = recorded.shell("advise", recorded.path.name, "--goal", "latency<1ns", "--no-combinations")
    assert run.returncode == 0, run.stderr
    assert "nothing here is predicted to reach it" in run.stdout


def test_a_goal_that_is_none_is_refused_before_anything_runs(recorded: Any) -> None:
    run = recorded.shell("advise", "no_such_file.py", "--goal", "memory")
    assert run.returncode == 2
    assert "memory<8GiB" in run.stderr


def test_what_cannot_be_proved_on_a_script_is_said(slipstream: Any) -> None:
    (slipstream.folder / "script.py").write_text(
        "from train import make_workload\n"
        "model, (inputs, targets), loss, optimizer = make_workload()\n"
        "for _ in range(500):\n"
        "    optimizer.zero_grad()\n"
        "    loss(model(inputs), targets).backward()\n"
        "    optimizer.step()\n"
    )
    run = slipstream("advise", "script.py", "--steps", 2, "--no-combinations")
    assert run.returncode == 0, run.stderr
    said = " ".join(run.stdout.split())
    assert "prove needs a function for accumulation:4: a script runs its own loop" in said
