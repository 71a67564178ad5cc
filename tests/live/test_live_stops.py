"""Batch sizes at which the page's bars stop, with their predicted steps."""

from __future__ import annotations

import dataclasses

import pytest

from slipstream.live import stops
from slipstream.live.costs import Costs, LineCost
from slipstream.verbs.batch.model import BatchModel, model_of
from slipstream.verbs.batch.samples import BatchSample, Facts

MS, MB = 1e6, 1_000_000


@pytest.fixture(scope="module")
def model() -> BatchModel:
    """10 ms plus half a millisecond per sample."""
    found = [
        BatchSample(b, (10 + b / 2) * MS, 0.005, (50 + b) * MB, 60 * MB, (100 + b) * MB)
        for b in (16, 40, 96)
    ]
    return model_of("train.py", Facts(16, 1, True, "cpu", "cpu", 0), found, limit_bytes=1 << 30)


def recorded(step_ms: float, faults_ms: float) -> Costs:
    """Return a step of 16 samples, which takes 18 ms by its lines."""
    nothing = {field.name: 0 for field in dataclasses.fields(LineCost)}
    return Costs(step_ms * MS, 66 * MB, 16, (), LineCost(**nothing), page_faults_ns=faults_ms * MS)  # type: ignore[arg-type]


def test_the_recorded_size_has_its_recorded_time(model: BatchModel) -> None:
    for step_ms, faults_ms in ((18.0, 0.0), (21.6, 0.0), (23.6, 2.0), (16.2, 0.0)):
        stop = stops.stop_at(model, 16, stops.Pace.of(recorded(step_ms, faults_ms), model))
        assert stop is not None
        assert stop["step_ns"][0] == pytest.approx(step_ms * MS, rel=1e-3)


def test_other_sizes_are_predicted_at_the_current_pace_or_their_own(model: BatchModel) -> None:
    at_ease = stops.stop_at(model, 32, stops.Pace())
    busy = stops.stop_at(model, 32, stops.Pace.of(recorded(21.6, 0.0), model))
    assert at_ease is not None
    assert busy is not None
    estimate, low, high = at_ease["step_ns"]
    assert busy["step_ns"] == pytest.approx([1.2 * estimate, low, 1.2 * high], rel=1e-3)
    faulting = stops.stop_at(model, 32, stops.Pace.of(recorded(20.0, 2.0), model))
    assert faulting is not None
    assert faulting["step_ns"] == pytest.approx(
        [estimate + 4 * MS, low + 2 * MS, high + 6 * MS], rel=1e-3
    )


def test_without_a_recording_only_the_lines_count(model: BatchModel) -> None:
    assert stops.Pace.of(None, model) == stops.Pace()
    assert stops.Pace.of(recorded(0.0, 0.0), model).pace == 1.0
