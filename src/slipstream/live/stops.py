"""Batch sizes that the page's bars stop at, and what is predicted of a step at each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.live.costs import Costs
from slipstream.verbs.batch.model import BatchModel

# Sizes that a bar stops at, from an eighth to eight times the batch.
_STOPS, _REACH = 48, 8
# Page faults of another launch, in times of what was seen.
_FAULTS_VARY = 0.5, 1.5


@dataclass(frozen=True)
class Pace:
    """What the step as it was recorded has that the lines of other batch sizes know nothing of.

    Attributes:
        pace: times as long as the lines say, without page faults. They are drawn through the minima
            of many turns; while something else runs on the machine, a recording takes longer.
        faults_ns: of page faults, a sample: they grow with what a step allocates and frees.
    """

    pace: float = 1.0
    faults_ns: float = 0.0

    @classmethod
    def of(cls, costs: Costs | None, model: BatchModel) -> Pace:
        """Of the recorded step."""
        if costs is None or not costs.samples:
            return cls()
        try:
            lines_ns = model.time(costs.samples).estimate
        except SlipstreamError:
            lines_ns = 0.0
        own_ns = costs.step_ns - costs.page_faults_ns
        pace = own_ns / lines_ns if lines_ns > 0 and own_ns > 0 else 1.0
        return cls(pace, costs.page_faults_ns / costs.samples)


def stops(model: BatchModel, now: Pace) -> list[dict[str, Any]]:
    """What is predicted at sizes from small to as many as fit."""
    if model.why_not is not None:
        sizes = {one.samples for one in model.measured if not math.isnan(one.step_ns)}
    else:
        largest = max(min(model.max_batch(), model.samples * _REACH), model.samples)
        smallest = max(model.samples // _REACH, model.quantum)
        sizes = {model.samples, largest}
        for one in range(_STOPS):
            size = smallest * (largest / smallest) ** (one / (_STOPS - 1))
            sizes.add(max(round(size / model.quantum), 1) * model.quantum)
    every = (stop_at(model, size, now) for size in sorted(sizes))
    return [stop for stop in every if stop is not None]


def stop_at(model: BatchModel, samples: int, now: Pace) -> dict[str, Any] | None:
    """What is predicted of a size, at the pace of now or the lines' own, and with page faults."""
    faults_ns = now.faults_ns * samples
    low, high = _FAULTS_VARY
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
            one.samples == samples and not math.isnan(one.step_ns) for one in model.measured
        ),
    }
