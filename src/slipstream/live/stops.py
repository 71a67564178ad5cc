"""Batch sizes that the page's bars snap to, with a prediction for each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.live.costs import Costs
from slipstream.verbs.batch.model import BatchModel

# Number of sizes, from an eighth to eight times the batch.
_STOPS, _REACH = 48, 8
# Range of page-fault time in another launch, relative to the recorded one.
_FAULTS_RANGE = 0.5, 1.5


@dataclass(frozen=True)
class Pace:
    """Corrections from the batch model to the recorded step.

    Attributes:
        pace: recorded time without page faults, relative to the model. The model is fitted to
            minima over many repetitions; a recording on a busy machine takes longer.
        faults_ns: page-fault time per sample, since faults grow with allocations.
    """

    pace: float = 1.0
    faults_ns: float = 0.0

    @classmethod
    def of(cls, costs: Costs | None, model: BatchModel) -> Pace:
        """Compute the corrections from the recorded step; no correction without `costs`."""
        if costs is None or not costs.samples:
            return cls()
        try:
            model_ns = model.time(costs.samples).estimate
        except SlipstreamError:
            model_ns = 0.0
        own_ns = costs.step_ns - costs.page_faults_ns
        pace = own_ns / model_ns if model_ns > 0 and own_ns > 0 else 1.0
        return cls(pace, costs.page_faults_ns / costs.samples)


def stops(model: BatchModel, now: Pace) -> list[dict[str, Any]]:
    """Return predictions at batch sizes from small to the largest that fits."""
    if model.why_not is not None:
        sizes = {point.samples for point in model.measured if not math.isnan(point.step_ns)}
    else:
        largest = max(min(model.max_batch(), model.samples * _REACH), model.samples)
        smallest = max(model.samples // _REACH, model.quantum)
        sizes = {model.samples, largest}
        for index in range(_STOPS):
            size = smallest * (largest / smallest) ** (index / (_STOPS - 1))
            sizes.add(max(round(size / model.quantum), 1) * model.quantum)
    candidates = (stop_at(model, size, now) for size in sorted(sizes))
    return [stop for stop in candidates if stop is not None]


def stop_at(model: BatchModel, samples: int, now: Pace) -> dict[str, Any] | None:
    """Return the prediction at a batch size, with page faults; None outside the model's range."""
    faults_ns = now.faults_ns * samples
    low, high = _FAULTS_RANGE
    try:
        step = model.time(samples)
    except SlipstreamError:
        return None
    try:
        peak = model.memory(samples).estimate
    except SlipstreamError:
        peak = 0.0
    return {
        "samples": samples,
        "step_ns": [
            now.pace * step.estimate + faults_ns,
            min(now.pace, 1.0) * step.low + low * faults_ns,
            max(now.pace, 1.0) * step.high + high * faults_ns,
        ],
        "peak_bytes": peak,
        "measured": any(
            point.samples == samples and not math.isnan(point.step_ns) for point in model.measured
        ),
    }
