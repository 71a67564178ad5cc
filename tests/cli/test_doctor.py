"""`slipstream doctor` tries what it reports."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from environments import switch_library_off
from slipstream.cli.doctor import command
from slipstream.measure.store import Store
from slipstream.verbs import doctor

_app = typer.Typer()
_app.command()(command)


def _run(*arguments: object) -> Result:
    done = CliRunner().invoke(_app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_the_report_has_every_section(tmp_path: Path) -> None:
    done = _run("--store", tmp_path / "r.db")
    assert done.exit_code == 0
    for title in ("This machine", "Software", "Extras", "What can be measured here", "store"):
        assert title in done.stdout
    rows = json.loads(_run("--store", tmp_path / "r.db", "--json").stdout)
    names = {row["name"] for row in rows}
    assert {
        "processor", "instruction sets", "timer", "torch", "compiled library", "dev",
        "hardware counters", "energy", "clock frequency", "network namespace", "slow links", "GPU",
        "qemu", "chromium", "peak memory", "results",
    } <= names  # fmt: skip
    assert all(row["found"] for row in rows)
    # A failed check gives its reason and, if there is one, a remedy.
    assert all(row["unlocks"] or row["remedy"] for row in rows if row["ok"] is False)


def test_checking_creates_no_store(tmp_path: Path) -> None:
    check = doctor.check_store(tmp_path / "a" / "r.db")
    assert check.ok
    assert re.search(r"\bcreated\b.*\bfirst measurement\b", check.found)
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_counted(tmp_path: Path) -> None:
    Store(tmp_path / "r.db").close()
    assert "0 experiments" in doctor.check_store(tmp_path / "r.db").found


def test_an_unusable_store_fails_the_whole(tmp_path: Path) -> None:
    (tmp_path / "r.db").write_text("no database " * 100)
    done = _run("--store", tmp_path / "r.db")
    assert done.exit_code == 1
    assert "not a database" in done.stdout


def test_programs_are_run_and_not_only_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    by_name = {check.name: check for check in doctor.run_checks("measuring")}
    assert by_name["qemu"].ok is False
    assert by_name["qemu"].remedy == "install qemu-system-arm"
    broken = tmp_path / "qemu-system-arm"
    broken.write_text("#!/bin/false\n")
    broken.chmod(0o755)
    by_name = {check.name: check for check in doctor.run_checks("measuring")}
    assert by_name["qemu"].ok is False
    assert "qemu-system-arm" in by_name["qemu"].found


def test_a_working_program_reports_its_version() -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    by_name = {check.name: check for check in doctor.run_checks("measuring")}
    assert by_name["git"].ok
    assert by_name["git"].found.startswith("git version")


def test_counters_are_opened_and_closed() -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    by_name = {check.name: check for check in doctor.run_checks("measuring")}
    for name in ("hardware counters", "software counters"):
        check = by_name[name]
        assert check.ok or "perf_event_open" in check.found
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


def test_extras_name_what_is_missing_and_how_to_get_it() -> None:
    required = ['numpy>=1; extra == "both"', 'no-such-package; extra == "both"', "torch"]
    check = doctor.check_extra("both", required)
    assert not check.ok
    assert check.found.startswith("numpy ")
    assert check.found.endswith("missing: no-such-package")
    assert check.remedy == "pip install 'slipstream[both]'"
    assert doctor.check_extra("other", required).ok


def test_energy_is_never_guessed() -> None:
    by_name = {check.name: check for check in doctor.run_checks("measuring")}
    assert by_name["energy"].ok == any(Path("/sys/class/powercap").glob("*/energy_uj"))


def test_a_missing_compiled_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    switch_library_off(monkeypatch)
    by_name = {check.name: check for check in doctor.run_checks("software")}
    assert by_name["compiled library"].ok is False
    assert "SLIPSTREAM_NATIVE" in by_name["compiled library"].found


def test_pressure_is_reported_in_words(tmp_path: Path) -> None:
    path = tmp_path / "cpu"
    path.write_text("some avg10=98.54 avg60=74.41 total=11990\nfull avg10=0.00\n")
    busy = doctor.pressure(path)
    assert busy.found.startswith("tasks waited for a CPU 99 %")
    assert re.search(r"\bbusy\b.*\bwide intervals$", busy.found)
    path.write_text("some avg10=2.00 avg60=74.41\n")
    assert "busy" not in doctor.pressure(path).found
    path.write_text("")
    assert doctor.pressure(path).ok is False
