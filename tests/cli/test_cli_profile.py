"""``slipstream profile``: the recording, its output, and the files it leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.graph import load
from slipstream.verbs.profiling import summary

_SCRIPT = """\
import json, os, subprocess, sys, torch
from train import make_workload
model, (inputs, targets), loss, optimizer = make_workload()
print("a line on standard output"); print("one on standard error", file=sys.stderr)
with open("log.txt", "w") as log: log.write("started")
os.remove("notes.txt")
os.makedirs("checkpoints")
for own_session in (False, True):
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=own_session
    )
for epoch in range(100):
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()
    torch.save(model.state_dict(), "checkpoint.pt")
    torch.save(model.state_dict(), f"checkpoints/{epoch}.pt")
"""


def test_standard_output_is_only_json(recorded: Any) -> None:
    found = json.loads(recorded.run.stdout)
    assert found["step_ns"] > 0
    assert found["samples"] == 4
    assert found["meta"]["workload"] == "train.py:make_workload(batch_size=4)"
    assert {row["provenance"] for row in found["operators"]} == {"measured"}
    assert abs(sum(row["ns"] for row in found["operators"])) <= found["step_ns"]


def test_progress_and_the_next_command_are_on_standard_error(recorded: Any) -> None:
    assert re.search(r"^profil\w+ train\.py:make_workload\b", recorded.run.stderr, re.MULTILINE)
    assert "next: slipstream advise tiny.slipgraph" in recorded.run.stderr


def test_a_negligible_cost_of_the_profiler_is_not_reported(recorded: Any) -> None:
    graph = load(recorded.path)

    def notes(cost_ns: float) -> str:
        meta = {**graph.meta, "profiler_ns_per_event": cost_ns}
        return "\n".join(summary(replace(graph, meta=meta)).notes)

    assert re.search(r"\b380 ns per event\b.*\bprofiler\b", notes(380.2))
    assert "profiler" not in notes(0.2)


@pytest.mark.parametrize(
    ("per_batch", "files"),
    [(4.0, "4 files"), (1.0, "1 file"), (0.004, "files, one per 250 batches")],
)
def test_files_that_few_batches_open_are_reported_by_batches(
    recorded: Any, per_batch: float, files: str
) -> None:
    graph = load(recorded.path)
    reads = {"waiting_ns": 5e3, "per_batch": per_batch, "workers": 0}
    notes = summary(replace(graph, meta={**graph.meta, "reads": reads})).notes
    assert any(f"for {files}, in the step's process" in note for note in notes)


def test_a_busy_machine_is_reported_with_a_remedy(recorded: Any) -> None:
    graph = load(recorded.path)

    def notes(**facts: Any) -> str:
        return "\n".join(summary(replace(graph, meta={**graph.meta, **facts})).notes)

    assert "busy" not in notes(contended=False, threads=2)
    assert re.search(r"\bmachine\b.*\bbusy\b", notes(contended=True, threads=1))
    assert "--threads 1" not in notes(contended=True, threads=1)
    assert "--threads 1" in notes(contended=True, threads=2)


def test_code_that_changed_since_is_reported(recorded: Any) -> None:
    code = recorded.shell.folder / "train.py"
    assert "has changed" not in recorded.shell("explain", recorded.path).stderr
    before = code.read_text()
    code.write_text(before + "# another line")
    try:
        run = recorded.shell("explain", recorded.path, "--json")
    finally:
        code.write_text(before)
    assert run.returncode == 0
    assert json.loads(run.stdout)
    (warning,) = (line for line in run.stderr.splitlines() if "changed" in line)
    assert re.search(r"^train\.py\b.*\b20\d\d-.*\bprofile\b.*\bagain$", warning)


def test_the_recording_can_be_read_back(recorded: Any) -> None:
    graph = load(recorded.path)
    graph.check()
    assert graph.samples == 4


def test_only_the_recording_is_left(recorded: Any) -> None:
    left = {path.name for path in recorded.shell.folder.iterdir()}
    assert left - {".slipstream"} == {"train.py", "tiny.slipgraph"}
    assert recorded.shell.left_over() == []


def test_a_profiled_script_leaves_no_side_effects(
    slipstream: Any, snapshot: Callable[[Path], dict[str, object]]
) -> None:
    folder = slipstream.folder
    (folder / "script.py").write_text(_SCRIPT)
    for name in ("log.txt", "notes.txt", "checkpoint.pt"):
        (folder / name).write_text(f"the user's own {name}")
    before = snapshot(folder)
    run = slipstream("profile", "script.py", "--steps", 3)
    assert run.returncode == 0, run.stderr
    assert (folder / "run.slipgraph").stat().st_size > 0
    (folder / "run.slipgraph").unlink()
    assert snapshot(folder) == before
    # A table for people, without the output of the script.
    assert "script.py: " in run.stdout
    assert re.search(r"\bstep\b.*\b4 samples\b", run.stdout)
    assert "standard" not in run.stdout + run.stderr
    # Processes that the script started have ended, which the fixture checks.


def test_statistics_are_recorded_on_request_and_explained(slipstream: Any) -> None:
    run = slipstream(
        "profile", "train.py:make_workload", "--steps", 2, "--record", "ids,grads",
        "--record", "sparsity,spectra", "-o", "run.slipgraph",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "explain run.slipgraph --statistics" in run.stderr
    shown = slipstream("explain", "run.slipgraph", "--statistics", "--top", 1)
    assert shown.returncode == 0, shown.stderr
    for text in ("noise scale", "singular values", "exact zeros", "no embedding", "omitted"):
        assert text in shown.stdout
    found = json.loads(slipstream("explain", "run.slipgraph", "--statistics", "--json").stdout)
    graph = load(slipstream.folder / "run.slipgraph")
    assert found["recorded"] == ["grads", "ids", "sparsity", "spectra"]
    assert len(found["grads"]) == len(graph.statistics.grads) > 1


def test_explain_reports_how_to_record_statistics(recorded: Any) -> None:
    run = recorded.shell("explain", recorded.path.name, "--statistics")
    assert run.returncode == 1
    assert "--record ids,spectra,grads,sparsity" in run.stderr
