"""``slipstream prove``: both sides measured in one run, with the prediction next to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

# Both arms run this at the same time, in the same folder.
_SCRIPT = """\
import itertools, os, torch
from train import make_workload
model, (inputs, targets), loss, optimizer = make_workload()
os.remove("old.txt")
os.makedirs("checkpoints", exist_ok=True)
for step in itertools.count():
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()
    if step % 50 == 0:
        torch.save(model.state_dict(), "checkpoint.pt")
        torch.save(model.state_dict(), "checkpoints/last.pt")
"""


def test_a_script_is_measured_and_its_files_are_restored(
    slipstream: Any, snapshot: Callable[[Path], dict[str, object]]
) -> None:
    folder = slipstream.folder
    (folder / "script.py").write_text(_SCRIPT)
    (folder / "old.txt").write_text("to be removed by every arm")
    (folder / "checkpoint.pt").write_text("a model that took a week")
    before = snapshot(folder)
    run = slipstream(
        "prove", "script.py", "-t", "amp:bf16", "--budget", "2s", "--steps", 3, "--json"
    )
    assert run.returncode == 0, run.stderr
    payload = json.loads(run.stdout)
    (tensors,) = payload["tensors"]
    # Of a step of 4 KB, where a tensor that only the script holds is a few percent.
    assert abs(tensors["error"]) < 0.1, "measured and predicted memory cover the same tensors"
    (quality,) = payload["numerics"]
    assert (quality["arm"], quality["measure"]) == ("amp:bf16", "training loss")
    assert len(quality["losses_candidate"][0]) == quality["steps"] >= 2
    assert snapshot(folder) == before
    listed = slipstream.briefly("results", "ls", "--json")
    assert "script.py" in listed.stdout, "the measurement is stored"


_SHORT = """\
import torch
from train import make_workload
model, (inputs, targets), loss, optimizer = make_workload()
for step in range({steps}):
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()
"""


def _prove_short(slipstream: Any, steps: int, budget: str) -> Any:
    (slipstream.folder / "short.py").write_text(_SHORT.format(steps=steps))
    return slipstream(
        "prove", "short.py", "-t", "fused_optimizer", "--budget", budget, "--target", "1e-6",
        "--steps", 3, "--no-quality", "--json",
    )  # fmt: skip


def test_a_script_that_ends_before_the_budget_is_judged_by_its_steps(slipstream: Any) -> None:
    run = _prove_short(slipstream, 600, "60s")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["status"] == "ended early"
    notes = " ".join(result["notes"])
    assert re.search(r"\bshort\.py\b.*\bended\b.*\b600\b", notes)
    assert re.search(r"\binterval\b.*\blonger\b", notes)
    assert "TypeError" not in run.stdout, "a script that has ended is not driven further"


def test_a_short_script_is_repeated_until_the_budget_is_spent(slipstream: Any) -> None:
    run = _prove_short(slipstream, 36, "2s")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["status"] == "complete"
    assert [row["blocks"] > 36 for row in result["rows"] if row["predicted"]] == [True]


def test_the_shown_prediction_is_the_one_that_is_proved(slipstream: Any) -> None:
    chosen = ("train.py:make_workload", "-t", "fused_optimizer", "--steps", 3, "--json")
    train = slipstream.folder / "train.py"
    train.write_text(train.read_text().replace("SGD", "Adam"))
    (shown,) = json.loads(slipstream("predict", *chosen).stdout)

    def proved() -> tuple[dict[str, Any], str]:
        run = slipstream("prove", *chosen, "--budget", "1s", "--no-quality")
        assert run.returncode == 0, run.stderr
        rows = json.loads(run.stdout)["rows"]
        (row,) = (entry for entry in rows if entry["predicted"] is not None)
        return row, run.stderr

    row, text = proved()
    assert row["predicted_speedup"] == shown["speedup"]
    assert row["predicted_speedup_interval"] == shown["speedup_interval"]
    low, high = shown["speedup_interval"]
    assert row["inside"] in (None, low <= row["speedup"] <= high)
    assert "importing torch" not in text, "it is not recorded again"
    # A different program has a different prediction.
    train.write_text(train.read_text() + "\n")
    row, text = proved()
    assert row["predicted_speedup"] != shown["speedup"]
    assert "importing torch" in text


def test_without_a_quality_check_no_gain_is_backed(slipstream: Any) -> None:
    run = slipstream(
        "prove", "train.py:make_workload", "-t", "amp:bf16", "--no-quality", "--budget", "1s",
        "--steps", 3,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert re.search(r"\bnumerics of amp:bf16 were not checked\b", " ".join(run.stdout.split()))
    shown = slipstream.briefly("results", "show", "last", "--json")
    payload = json.loads(shown.stdout)
    assert payload["numerics"][0]["status"] == "not checked"
    assert not [claim for claim in payload["claims"] if claim["verdict"] == "faster"]


def test_a_technique_already_in_use_is_reported_before_measuring(
    slipstream: Any,
) -> None:
    (slipstream.folder / "fused.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.Adam(model.parameters(), fused=True)\n"
        "while True:\n    optimizer.zero_grad()\n"
        "    model(torch.ones(4, 8)).sum().backward()\n    optimizer.step()\n"
    )
    run = slipstream(
        "prove", "fused.py", "-t", "fused_optimizer", "--no-quality", "--budget", "1s",
        "--launches", 1, "--steps", 3,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "fused_optimizer:fused is measured although it does not seem to apply" in run.stderr
    assert "the optimizer is fused already" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        ((), "technique", "--technique amp:bf16"),
        (("-t", "amp", "--budget", "soon"), "--budget: 'soon'", "60s"),
        (("-t", "amp", "--budget", "0s"), "--budget", "60s"),
        (("-t", "amp", "--target", "2"), "--target: 2 ", "0.02"),
        (("-t", "amp", "--quality-budget", "0s"), "--quality-budget", "--no-quality"),
        (("-t", "amp", "--timeout", "-1s"), "--timeout", "60s"),
        (("-t", "ddp:workers=2"), " 2 ranks", "--cluster here.toml"),
        (("-t", "topk:0.1", "--cluster", "workers=2,link=1gbit"), "topk", "ddp:workers=2"),
    ],
)
def test_invalid_requests_are_reported_before_anything_runs(
    slipstream: Any, arguments: tuple[str, ...], message: str, remedy: str
) -> None:
    error = slipstream.refused(2, "prove", "train.py:make_workload", *arguments)
    assert message in error.what
    assert remedy in error.remedy
    assert "importing" not in error.before


def test_changes_of_the_loop_need_a_place_in_it(slipstream: Any) -> None:
    # Its optimizer is created elsewhere.
    (slipstream.folder / "script.py").write_text(_SCRIPT)
    error = slipstream.refused(1, "prove", "script.py", "-t", "amp:bf16", "-t", "accumulation:4")
    assert re.search(r"\baccumulation\b.*\boptimizer\b", error.what, re.DOTALL)
    assert "slipstream apply script.py --technique accumulation:4" in " ".join(error.remedy.split())


_OWN_OPTIMIZER = """\
import torch
from train import make_workload
model, (inputs, targets), loss_of, _ = make_workload()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(100_000):
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
"""


def test_the_loop_of_a_script_is_measured_as_it_would_be_edited(slipstream: Any) -> None:
    script = slipstream.folder / "script.py"
    script.write_text(_OWN_OPTIMIZER)
    before = script.read_bytes()
    run = slipstream(
        "prove", "script.py", "-t", "accumulation:4", "--budget", "2s", "--steps", 3, "--json"
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    (quality,) = found["numerics"]
    assert quality["arm"] == "accumulation:4"
    assert all(loss > 0 for losses in quality["losses_candidate"] for loss in losses)
    assert re.search(r"\baccumulation:4\b.*\b16 samples\b.*\b4\b", run.stdout)
    assert script.read_bytes() == before


def test_ranks_are_shown_with_their_predictions(slipstream: Any) -> None:
    # Without the tools of a network lab, ranks communicate through the loopback interface.
    slipstream.environment["PATH"] = str(slipstream.folder)
    arguments = (
        "prove", "train.py:make_workload", "--cluster", "workers=2,link=1gbit,latency=50us",
        "-t", "ddp:workers=2", "-t", "ddp:workers=2+cast:bf16",
        "-t", "ddp:workers=2+accumulation:3", "--budget", "2s", "--steps", 3,
        "--quality-budget", "0.1s", "--svg", "link.svg",
    )  # fmt: skip
    run = slipstream(*arguments, "--json")
    assert run.returncode == 0, run.stderr
    payload = json.loads(run.stdout)
    plain, cast, several = payload["ranks"]
    assert (plain["technique"], cast["technique"]) == ("ddp:2", "ddp:2+cast:bf16")
    assert (plain["against"], cast["against"]) == (None, "ddp:2")
    assert plain["speedup"] is None
    low, high = cast["speedup_interval"]
    assert low <= cast["speedup"] <= high
    for row in (plain, cast, several):
        assert row["ranks"] == 2
        assert row["step_ns"] > 0
        assert row["predicted_step_ns"] > 0
        assert row["sent_bytes"] > row["predicted_sent_bytes"] > 0
        assert row["replicas"] == "equal to the bit"
        assert row["loss_after"] >= 2
        assert row["loss"] > 0
    assert cast["predicted_sent_bytes"] == plain["predicted_sent_bytes"] / 2
    assert several["technique"] == "accumulation:3+ddp:2"
    assert several["predicted_sent_bytes"] == plain["predicted_sent_bytes"]
    assert [row["technique"] for row in payload["exposed"]] == [
        row["technique"] for row in payload["ranks"]
    ]
    for side in payload["exposed"]:
        assert 0 < side["measured_ns"] < side["step_ns"]
        assert side["predicted_ns"] > 0
        for which in ("measured_ns", "predicted_ns"):
            assert sum(layer[which] for layer in side["layers"]) == pytest.approx(side[which])
        # The same names from a recorded step and from the ranks.
        assert all(layer["measured_ns"] and layer["predicted_ns"] for layer in side["layers"])
        assert side["link"]["line_bytes_per_s"] is None
    assert "afterwards" not in json.dumps(payload["warnings"])
    drawn = ElementTree.parse(slipstream.folder / "link.svg").getroot()
    assert "ddp:2+cast:bf16" in "".join(drawn.itertext())
    shown = slipstream.briefly("results", "show", "last", "--json")
    assert re.search(r"\b2 ranks\b.*\bmemory\b", shown.stdout)
    assert not slipstream.processes()
    assert not slipstream.left_over()
