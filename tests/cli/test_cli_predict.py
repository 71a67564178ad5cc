"""``slipstream predict``: a prediction from a recording, stored to be scored later."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest


@pytest.fixture
def however_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not refuse noisy timings, and run commands as forks."""
    monkeypatch.setattr("slipstream.verbs.predicting._MAX_ERROR", math.inf)


@pytest.fixture
def predicted(recorded: Any, however_busy: None) -> Any:
    """Return ``predict --json`` of the shared recording; only the first call benchmarks."""
    run = recorded.shell("predict", recorded.path.name, "--technique", "amp:bf16", "--json")
    assert run.returncode == 0, run.stderr
    return run


def test_a_prediction_has_an_interval_and_its_provenance(predicted: Any) -> None:
    (found,) = json.loads(predicted.stdout)
    low, high = found["speedup_interval"]
    assert found["technique"] == "amp:bf16"
    assert low < found["speedup"] < high
    assert "ratio" not in found
    assert sum(found["provenance"].values()) == pytest.approx(1)
    assert set(found["provenance"]) <= {"measured", "microbenchmark", "assumed"}
    assert found["numerics"] == "rounding"
    assert found["reason"] is None


@pytest.mark.usefixtures("predicted")
def test_benchmarked_operators_are_not_benchmarked_again(recorded: Any) -> None:
    again = recorded.shell("predict", recorded.path.name, "-t", "amp:bf16")
    assert again.returncode == 0
    assert "measuring" not in again.stderr


@pytest.mark.usefixtures("predicted")
def test_alternatives_are_compared_and_an_inapplicable_one_gives_its_reason(recorded: Any) -> None:
    run = recorded.shell("predict", recorded.path.name, "-t", "amp:bf16", "-t", "amp:fp16")
    assert run.returncode == 0
    assert "amp:bf16" in run.stdout
    assert re.search(r"\bnot\b.*\bfp16\b", run.stdout)


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        ((), "technique", "slipstream advise"),
        (("-t", "amq"), "'amq'", " amp?"),
        (("-t", "amp:bf17"), "'bf17'", "bf16"),
        (("-t", "amp:dtipe=bf16"), "'dtipe'", " dtype?"),
        (("-t", "amp+amp:bf16"), "amp", ""),
        (("-t", ""), "technique", "amp:bf16"),
        (("-t", "amp", "--set", "width=3"), "'--set width=3'", ""),
        (("-t", "amp", "--set", "width"), "'--set width'", ""),
    ],
)
def test_a_malformed_request_is_a_usage_error_with_a_remedy(
    recorded: Any, arguments: tuple[str, ...], message: str, remedy: str
) -> None:
    error = recorded.shell.refused(2, "predict", recorded.path.name, *arguments)
    assert message in error.what
    assert remedy in error.remedy


def test_a_missing_recording_is_reported(slipstream: Any) -> None:
    error = slipstream.refused(1, "predict", "gone.slipgraph", "-t", "amp")
    assert "'gone.slipgraph'" in error.what
    assert "slipstream profile" in error.remedy


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign"])
def test_a_damaged_recording_is_reported(slipstream: Any, recorded: Any, damage: str) -> None:
    whole = recorded.path.read_bytes()
    content = {"empty": b"", "cut": whole[: len(whole) // 2], "foreign": b"PK\x03\x04 not ours"}
    (slipstream.folder / "bad.slipgraph").write_bytes(content[damage])
    error = slipstream.refused(1, "predict", "bad.slipgraph", "-t", "amp")
    assert "bad.slipgraph" in error.what + error.where
    assert "--debug" not in error.remedy, "reserved for our own defects"


@pytest.mark.parametrize("kind", ["newer", "foreign", "text", "folder"])
def test_an_unusable_store_is_reported(slipstream: Any, recorded: Any, kind: str) -> None:
    shutil.copy(recorded.path, slipstream.folder / "tiny.slipgraph")
    store = slipstream.folder / "mine.db"
    _make_store(store, kind)
    error = slipstream.refused(1, "predict", "tiny.slipgraph", "-t", "amp", "--store", "mine.db")
    assert "mine.db" in error.what + error.where
    assert error.remedy
    assert "--debug" not in error.remedy, "reserved for our own defects"


def _make_store(store: Path, kind: str) -> None:
    if kind == "text":
        store.write_text("these are my notes, not a database, whatever the name says\n" * 30)
    elif kind == "folder":
        store.mkdir()
    else:
        with sqlite3.connect(store) as connection:
            connection.execute("CREATE TABLE mine (x)")
            if kind == "newer":
                connection.execute(f"PRAGMA application_id={0x536C6970}")
                connection.execute("PRAGMA user_version=9999")
        connection.close()


def test_an_unrecorded_statistic_reports_how_to_record_it(recorded: Any) -> None:
    run = recorded.shell("predict", recorded.path.name, "-t", "compile", "--json")
    assert run.returncode == 0, run.stderr
    (found,) = json.loads(run.stdout)
    assert "slipstream advise WORKLOAD --record regions" in found["reason"]


@pytest.mark.full
def test_a_technique_option_records_what_it_needs(slipstream: Any) -> None:
    run = slipstream("predict", "train.py:make_workload", "-t", "compile", "--steps", 3, "--json")
    assert run.returncode == 0, run.stderr
    (found,) = json.loads(run.stdout)
    assert found["reason"] is None
    assert "compiled regions" in found["edits"][0]
    assert found["speedup"] > 0


@pytest.mark.parametrize(
    ("after", "shown"),
    [(999_900, "0 %"), (1_000_100, "0 %"), (900_000, "-10 %"), (1_100_000, "+10 %")],
)
def test_persistent_memory_has_one_form(after: int, shown: str) -> None:
    from slipstream.verbs.results import MEMORY

    found = str(MEMORY.cell(cast("Any", SimpleNamespace(memory=(1_000_000, after)))))
    assert found.partition(", ")[2] == shown


@pytest.mark.usefixtures("predicted")
def test_past_measurements_are_shown_below_the_prediction(recorded: Any, tmp_path: Path) -> None:
    from slipstream.graph import load
    from slipstream.measure.environment import capture
    from slipstream.measure.records import (
        UNCHANGED,
        ArmRecord,
        Claim,
        Experiment,
        ExperimentSettings,
        Verdict,
    )
    from slipstream.measure.store import Store

    meta = load(recorded.path).meta
    claim = Claim(
        "cpu", "amp:bf16", UNCHANGED, "median", 0.6, 0.575, 0.617, 0.95, Verdict.FASTER, 0.01,
        60, carries=True,
    )  # fmt: skip
    proved = Experiment(
        str(meta["workload"]), "2026-01-03T00:00:00Z", capture(torch=False),
        ExperimentSettings(UNCHANGED), (ArmRecord(UNCHANGED), ArmRecord("amp:bf16")), {},
    )  # fmt: skip
    with Store(tmp_path / "proofs.db") as store:
        store.save(proved, [claim])
    arguments = "predict", recorded.path.name, "-t", "amp:bf16", "--store", tmp_path / "proofs.db"
    output = " ".join(recorded.shell(*arguments).stdout.split())
    for fragment in ("1.67x [1.62, 1.74]", "2026-01-03", "cpu", "95.0 %", "faster"):
        assert fragment in output
    (found,) = json.loads(recorded.shell(*arguments, "--json").stdout)
    assert found["measured"]["speedup"] == 1 / 0.6


@pytest.mark.parametrize(("spread", "wide"), [(0.5, True), (0.01, False)])
def test_intervals_widened_by_page_faults_report_it(
    recorded: Any, spread: float, wide: bool
) -> None:
    from slipstream.graph import Editor, load
    from slipstream.graph.page_faults import PAGE_FAULTS, page_fault_tasks
    from slipstream.provenance import Provenance
    from slipstream.techniques.allocator import Allocator
    from slipstream.verbs.results import Predicted, wide_by_page_faults

    graph = load(recorded.path)
    edit = Editor(graph, "")
    for task in page_fault_tasks(graph):
        edit.set_duration(task, 0.0, Provenance.MEASURED)  # the page faults of this machine
    edit.insert(len(graph) - 1, PAGE_FAULTS, 1e6, Provenance.MEASURED, spread=spread)
    faulting = edit.apply("")
    # A fifth of a step of 5 ms are page faults; launches differ by half of them, or hardly.
    found = [
        Predicted("amp:bf16", 5e6, 5e6, 1.0, 0.8, 1.25),
        Predicted(
            "amp+allocator",
            5e6,
            5e6,
            1.0,
            0.8,
            1.25,
            graph=Allocator().predict(faulting, cast(Any, None)),
        ),
    ]
    sentence = wide_by_page_faults(faulting, found)
    assert ("10.0 %" in sentence) is wide
    assert ("`allocator`" in sentence) is wide
    assert wide_by_page_faults(faulting, found[1:]) == "", "they would be gone"
    narrow = Predicted("amp:bf16", 5e6, 5e6, 1.0, 0.95, 1.05)
    assert wide_by_page_faults(faulting, [narrow]) == ""
