"""`slipstream results` as a user runs it, in a new process where that matters."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from slipstream.cli.results import app
from slipstream.errors import MeasurementError, StoreError, UnknownNameError
from slipstream.measure.claims import claims
from slipstream.measure.environment import from_facts
from slipstream.measure.records import (
    AFTERWARDS,
    ArmRecord,
    Event,
    Experiment,
    ExperimentSettings,
    Phase,
    PredictionRecord,
    Series,
)
from slipstream.measure.store import Store
from slipstream.verbs.proving.ranks import SENT, STEP


def _experiment(ratio: float = 0.8, revision: str = "a" * 40, threads: int = 1) -> Experiment:
    rng = np.random.default_rng(1)
    blocks = np.arange(40, dtype=np.int32)
    shared = rng.lognormal(16, 0.1, 40)
    place = from_facts({"torch.threads": threads, "git.revision": revision})
    prediction = PredictionRecord(
        "m.py:step", "amp:bf16", "wall", 0.75, 0.7, 0.9, "simulated", "2026-01-01", place.env_id
    )
    return Experiment(
        title="amp on m.py",
        created="2026-01-02T03:04:05Z",
        environment=place,
        settings=ExperimentSettings("base"),
        arms=(ArmRecord("base"), ArmRecord("amp")),
        series={
            ("base", "wall", Phase.MEASURE): Series(shared, blocks),
            ("amp", "wall", Phase.MEASURE): Series(
                ratio * shared * rng.lognormal(0, 0.01, 40), blocks
            ),
        },
        predictions={"amp": prediction},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.db"


@pytest.fixture
def first(path: Path) -> str:
    return _saved(path, _experiment())


def _saved(path: Path, experiment: Experiment) -> str:
    with Store(path) as store:
        return store.save(experiment, claims(experiment))


def _run(*arguments: object) -> str:
    """Return stdout; our errors are raised, which `slipstream` turns into messages."""
    done = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def _json(*arguments: object) -> object:
    return json.loads(_run(*arguments, "--json"))


def test_ls(path: Path, first: str) -> None:
    text = _run("ls", "--store", path)
    assert first in text
    assert "amp faster" in text
    (row,) = _json("ls", "--store", path)  # type: ignore[misc]
    assert row["experiment_id"] == first
    assert row["status"] == "complete"


def test_a_failed_run_is_not_listed_as_complete(path: Path) -> None:
    failed = Event(25, "failed", {"arm": "base", "what": "no memory left"})
    made = replace(_experiment(), events=(failed, Event(25, "stop", {"reason": "failed"})))
    _saved(path, made)
    (row,) = _json("ls", "--store", path)  # type: ignore[misc]
    assert (row["status"], row["verdicts"]) == ("failed", "amp inconclusive")
    shown = " ".join(_run("show", "last", "--store", path).split())
    assert re.search(r"\bbaseline failed\b.*\bblock 25\b.*\bno memory left\b", shown)


def test_ls_of_an_empty_store(path: Path) -> None:
    Store(path).close()
    text = " ".join(_run("ls", "--store", path).split())
    assert re.search(rf"^No experiments\b.*{re.escape(path.name)}", text)
    assert _json("ls", "--store", path) == []


def test_no_store_yet(path: Path) -> None:
    with pytest.raises(StoreError, match=r"\bno results store\b"):
        _run("ls", "--store", path)


def test_the_store_is_found_by_the_environment(
    path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_STORE", str(path))
    assert first in _run("ls")


def test_show_has_prediction_and_measurement_on_one_line(path: Path, first: str) -> None:
    line = next(
        line for line in _run("show", first, "--store", path).splitlines() if "amp: wall" in line
    )
    assert "1.333x [1.111, 1.429]" in line
    assert "faster" in line
    payload = _json("show", "last", "--store", path)
    assert payload["rows"][0]["predicted_speedup"] == 1 / 0.75  # type: ignore[index]


def test_show_in_other_forms(path: Path, first: str, tmp_path: Path) -> None:
    assert "| amp: wall |" in _run("show", first, "--markdown", "--store", path)
    page = tmp_path / "r.html"
    _run("show", first, "--html", page, "--store", path)
    assert page.read_text().startswith("<!doctype html>")


def test_show_verify_recomputes(path: Path, first: str) -> None:
    _run("show", first, "--verify", "--store", path)
    made = _experiment()
    with Store(path) as store:
        other = store.save(made, ())
    with pytest.raises(StoreError, match=other):
        _run("show", other, "--verify", "--store", path)


def test_an_interrupted_experiment_is_shown_with_its_samples(path: Path) -> None:
    made = _experiment()
    code = (
        "import sys; from slipstream.measure.store import Store\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_results import _experiment\n"
        "store = Store(sys.argv[1]); made = _experiment(); recording = store.begin(made)\n"
        "for b in range(30):\n"
        "    recording.append(b, {k: s.values[b] for k, s in made.series.items()})\n"
        "import os; os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code, path, Path(__file__).parent], check=False)
    text = _run("show", "last", "--store", path)
    assert re.search(r"\binterrupted\b.*\b60 samples\b", text)
    assert "amp: wall" in text
    assert "interrupted" in _run("ls", "--store", path)
    assert made.title in text


def test_a_run_of_ranks_is_shown_with_all_its_tables(path: Path) -> None:
    made, name = _experiment(), "ddp:2+topk:0.01"
    blocks = np.arange(40, dtype=np.int32)
    record = {
        "arm": name, "layers_s": {"model.a": 0.02}, "line_bytes_per_s": 12.5e6, "sharing": 1,
        "order": ["model.a"], "how": "", "steps": 4, "step_s": 0.1,
        "link": {"sent": [0.0, 12.5e6], "received": [6.25e6, 6.25e6]}, "drawn": {},
    }  # fmt: skip
    both = replace(
        made,
        arms=(ArmRecord("base"), ArmRecord(name)),
        series={
            ("base", "wall", Phase.MEASURE): made.series["base", "wall", Phase.MEASURE],
            (name, "wall", Phase.MEASURE): made.series["amp", "wall", Phase.MEASURE],
            (name, STEP, Phase.MEASURE): Series(np.full(40, 2e8), blocks),
            (name, SENT, Phase.MEASURE): Series(np.full(40, 1e6), blocks),
        },
        events=(*made.events, Event(40, AFTERWARDS, record)),
        predictions={},
    )
    with Store(path) as store:
        store.save(both, claims(both))
    text = _run("show", "last", "--store", path)
    for title in ("200 ms", "exposed communication", "20.0 ms", "use of the link", "50 Mbit/s"):
        assert title in text
    markdown = _run("show", "last", "--markdown", "--store", path)
    assert "exposed communication" in markdown
    payload = json.loads(_run("show", "last", "--json", "--store", path))
    assert (payload["ranks"][0]["ranks"], payload["ranks"][0]["step_ns"]) == (2, 2e8)
    assert payload["exposed"][0]["layers"][0]["measured_ns"] == pytest.approx(2e7)
    with Store(path) as store:
        store.save(made, claims(made))
    assert "ranks" not in json.loads(_run("show", "last", "--json", "--store", path))


def test_an_unknown_id_is_named(path: Path, first: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown experiment 'zz'"):
        _run("show", "zz", "--store", path)


def test_compare_refuses_and_names_the_fields_unless_asked(path: Path, first: str) -> None:
    second = _saved(path, _experiment(threads=8))
    with pytest.raises(MeasurementError, match=r"torch\.threads"):
        _run("compare", first, second, "--store", path)
    text = " ".join(_run("compare", first, second, "--unpaired", "--store", path).split())
    assert re.search(r"\bunpaired\b.*\bdiffers\b.*\btorch\.threads\b", text)
    payload = _json("compare", first, second, "--unpaired", "--store", path)
    assert {row["verdict"] for row in payload["rows"]} == {"unpaired"}  # type: ignore[index]


def test_export(path: Path, first: str, tmp_path: Path) -> None:
    file = tmp_path / "r.csv"
    assert _json("export", first, "-o", file, "--store", path) == {
        "file": str(file), "format": "csv", "samples": 80,
    }  # fmt: skip
    with file.open(newline="") as opened:
        assert len(list(csv.DictReader(opened))) == 80
    lines = tmp_path / "all"
    _run("export", "all", "--to", "jsonl", "-o", lines, "--store", path)
    assert json.loads(lines.read_text())["experiment"] == first


def test_regress_finds_the_change_and_fails(path: Path, first: str) -> None:
    assert re.search(r"\bNo regression\b.*\b1 experiment", _run("regress", "--store", path))
    _saved(path, _experiment(ratio=0.95, revision="b" * 40))
    done = CliRunner().invoke(app, ["regress", "--store", str(path), "--json"])
    assert done.exit_code == 1
    (step,) = json.loads(done.stdout)
    assert step["worse"]
    assert step["revisions"] == ["a" * 10, "b" * 10]
    assert step["differing"] == []
    text = _run("regress", "--store", path)
    assert "worse" in text
    assert _json("regress", "--title", "other", "--store", path) == []


def test_help_explains_without_numpy() -> None:
    code = (
        "import sys\n"
        "from slipstream.cli.results import app\n"
        "from slipstream.cli import doctor\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'sqlite3'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb in ("ls", "show", "compare", "export", "regress"):
        assert verb in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
