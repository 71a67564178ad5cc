"""The gate: colours from readings, and unreadable sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.measure import gate


def test_a_reading_names_a_reason_for_every_colour_but_green():
    reading = gate.Gate().read()
    assert (reading.level is gate.Level.GREEN) == (not reading.reasons)
    assert set(reading.values) | set(reading.unreadable) == set(gate._LIMITS)


@pytest.mark.parametrize(
    ("pressure", "level"),
    [(0.0, gate.Level.GREEN), (20.0, gate.Level.AMBER), (99.0, gate.Level.RED)],
)
def test_pressure_alone_sets_the_colour_without_other_readings(monkeypatch, pressure, level):
    monkeypatch.setattr(gate, "_LIMITS", {"pressure_percent": gate._LIMITS["pressure_percent"]})
    monkeypatch.setattr(gate, "_pressure", lambda: pressure)
    reading = gate.Gate().read()
    assert reading.level is level
    if level is not gate.Level.GREEN:
        assert f"{pressure:.0f} %" in reading.reasons[0]


def test_one_red_outweighs_any_number_of_ambers(monkeypatch):
    monkeypatch.setattr(gate, "_pressure", lambda: 99.0)
    monkeypatch.setattr(gate, "_heat", lambda: 93.0)
    assert gate.Gate().read().level is gate.Level.RED


def test_without_proc_its_readings_are_unreadable(monkeypatch, tmp_path):
    class MovedPath(type(Path())):
        def __new__(cls, *parts):
            moved = [str(part).lstrip("/") for part in parts]
            return Path(tmp_path, "nothing", *moved)

    monkeypatch.setattr(gate, "Path", MovedPath)
    reading = gate.Gate().read()
    for name in ("pressure_percent", "steal_percent", "throttled_percent", "heat_percent"):
        assert name in reading.unreadable
        assert name not in reading.values


def test_counters_are_rates_since_the_previous_reading(monkeypatch):
    counts = iter([100.0, 100.0, 400.0])
    monkeypatch.setattr(gate, "_preemptions", lambda: {"preemptions": next(counts)})
    clock = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr(gate.time, "monotonic", lambda: next(clock))
    machine = gate.Gate()
    assert machine.read().values["preemptions_per_s"] == 0.0
    assert machine.read().values["preemptions_per_s"] == 150.0


def test_more_time_detects_smaller_differences(monkeypatch, clock):
    monkeypatch.setattr(gate, "_probe", lambda: clock.work(1e5))
    monkeypatch.setattr(gate.time, "monotonic", lambda: clock.wall_ns / 1e9)
    short = gate.detectable_change(5, probe_s=2.0)
    long = gate.detectable_change(500, probe_s=2.0)
    # A hundred times the time is a tenth of the width; the probe itself is noisy.
    assert long.blocks == pytest.approx(100 * short.blocks, rel=0.05)
    assert short.cpu / 20 < long.cpu < short.cpu / 5
    assert long.wall == pytest.approx(long.cpu, rel=0.01)


def test_the_probe_of_the_detectable_difference_takes_time():
    found = gate.detectable_change(5, probe_s=0.2)
    assert found.blocks >= 8
    assert found.cpu >= 0
    assert found.wall >= 0


@pytest.mark.parametrize(
    ("per_s", "level"),
    [(49.0, gate.Level.GREEN), (50.0, gate.Level.AMBER), (249.0, gate.Level.AMBER),
     (250.0, gate.Level.RED)],
)  # fmt: skip
def test_a_process_that_loses_its_core_often_is_disturbed(monkeypatch, per_s, level):
    monkeypatch.setattr(gate, "_LIMITS", {"preemptions_per_s": gate._LIMITS["preemptions_per_s"]})
    counts = iter([0.0, per_s])
    monkeypatch.setattr(gate, "_preemptions", lambda: {"preemptions": next(counts)})
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(gate.time, "monotonic", lambda: next(clock))
    assert gate.Gate().read().level is level


@pytest.mark.parametrize(
    ("pressure", "load", "expected"),
    [(20.0, 9.0, ""), (80.0, 0.0, "80 %"), (None, 9.0, "9.0 per core"), (None, 0.5, "")],
)
def test_a_busy_machine_is_reported_immediately(monkeypatch, pressure, load, expected):
    monkeypatch.setattr(gate, "_pressure", lambda: pressure)
    monkeypatch.setattr(gate.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(gate.os, "cpu_count", lambda: 1)
    assert expected in gate.busy_in_words()
    assert bool(gate.busy_in_words()) == bool(expected)
