"""The first look: bound the speed-up of every technique before anything is micro-benchmarked.

Techniques edit the graph with the durations known so far. An operator that was never timed takes
at least the share of its time that the technique declares as a minimum (mostly none), which bounds
the speed-up. A technique that is not worth it even at its bound is not measured, so the time goes
to techniques whose rank it decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import Durations, Ratio, Timing, TimingRequest
from slipstream.graph import PROVENANCES, Call, Graph, replay
from slipstream.graph.page_faults import page_fault_ns, page_fault_tasks
from slipstream.provenance import Provenance
from slipstream.tables import Field, Table
from slipstream.technique import Technique
from slipstream.units import format_percent
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import (
    MEMORY,
    NUMERICS,
    WORTH_IT,
    WORTH_TRAINING,
    Predicted,
    Prediction,
    named,
    recorded_step,
)

_ASSUMED, _MEASURED, _TIMED = (
    PROVENANCES.index(provenance)
    for provenance in (Provenance.ASSUMED, Provenance.MEASURED, Provenance.MICROBENCHMARK)
)
# Share of the peak memory that a technique must save to be worth it for memory alone.
_MEMORY_SHARE = 0.01
_MAX_SHOWN_BOUND = 10.0


@dataclass(frozen=True)
class SpeedupBound:
    """Preliminary speed-up estimate of a technique, before its operators are timed.

    Attributes:
        prediction: final if nothing is `missing`; otherwise operators that are not timed yet keep
            their recorded time.
        missing: calls that are not micro-benchmarked yet.
        share: share of the recorded step's time that these calls account for.
        max_speedup: speed-up if they took their minimum; None if it cannot be determined.
        firm: whether it depends on the recorded step alone, apart from increased page faults.
    """

    prediction: Prediction
    missing: int = 0
    share: float = 0.0
    max_speedup: float | None = None
    firm: bool = False

    @property
    def decided(self) -> bool:
        """Whether no measurement could make it worth its time or memory."""
        if not self.firm or self.max_speedup is None or not isinstance(self.prediction, Predicted):
            return False
        trains = self.prediction.needs_training
        speedup, share = (
            (WORTH_TRAINING, WORTH_TRAINING - 1) if trains else (WORTH_IT, _MEMORY_SHARE)
        )
        return self.max_speedup < speedup and self.prediction.saved <= share

    @property
    def sort_key(self) -> tuple[float, float]:
        """Sort key that puts the largest possible speed-up first."""
        if not self.missing:
            return -self.prediction.speedup, 0.0
        return (-self.max_speedup if self.max_speedup is not None else -1.0), -self.share

    @property
    def gain(self) -> str:
        if not self.missing:
            return f"{self.prediction.speedup:.2f}x"
        if self.max_speedup is None:
            return "unknown yet"
        return f"{format_bound(self.max_speedup)} at most"

    @property
    def state(self) -> str:
        if not self.missing:
            return "known"
        if self.decided:
            return "not worth it here"
        return f"measuring {self.missing} operator{'s' if self.missing > 1 else ''}"


def format_bound(bound: float) -> str:
    """Format the largest possible speed-up; very large bounds are cut off."""
    return f"{bound:.2f}x" if bound <= _MAX_SHOWN_BOUND else f"> {_MAX_SHOWN_BOUND:.0f}x"


_FIELDS: tuple[Field[SpeedupBound], ...] = (
    Field.of("technique", lambda bound: bound.prediction.technique),
    Field.number("speed-up", lambda bound: bound.gain),
    Field.number("unmeasured", lambda bound: format_percent(bound.share) if bound.share else "-"),
    Field.number("memory", lambda bound: MEMORY.cell(bound.prediction)),
    Field.of("numerics", lambda bound: NUMERICS.cell(bound.prediction), optional=True),
    Field.of("state", lambda bound: bound.state),
)


def first_look_table(graph: Graph, bounds: Sequence[SpeedupBound]) -> Table:
    """Return a table with a row per technique that applies, the largest possible gain first."""
    apply = [bound for bound in bounds if isinstance(bound.prediction, Predicted)]
    omitted = len(bounds) - len(apply)
    notes = (
        recorded_step(graph, [bound.prediction for bound in bounds]),
        f"{omitted} techniques do not apply here" if omitted else "",
        "at most: the speed-up if unmeasured operators took no time or, with more threads, were "
        "divided evenly among them",
        "operators are now timed, old and new interleaved; the final table follows",
    )
    title = f"first look at {named(graph)}"
    return Table.of(sorted(apply, key=lambda bound: bound.sort_key), _FIELDS, title, notes)


def first_look(
    graph: Graph,
    techniques: Sequence[Technique],
    durations: Durations,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
) -> list[SpeedupBound]:
    """Bound the speed-up of single techniques without measuring, in their order."""
    base_ns = replay(graph).step_ns
    bounds = []
    predictions = predict(graph, techniques, durations=_AsKnown(durations), widen=widen)
    for part, prediction in zip(techniques, predictions, strict=True):
        if not isinstance(prediction, Predicted) or prediction.graph is None:
            bounds.append(SpeedupBound(prediction))
            continue
        missing = len(durations.missing(part.required_timings(graph)))
        if not missing:
            bounds.append(SpeedupBound(prediction))
            continue
        after = prediction.graph
        kind = after.tasks.provenance.copy()
        if page_fault_ns(after) >= page_fault_ns(graph):
            # Predicted for this heap, so nothing is gained from page faults.
            kind[page_fault_tasks(after)] = _MEASURED
        unknown = (kind == _ASSUMED) & (after.tasks.duration_ns > 0)
        firm = bool(np.isin(kind, (_ASSUMED, _MEASURED)).all())
        max_speedup = None
        # If no task is unmeasured, or other tasks are modelled, the gain does not come from these
        # calls alone.
        if unknown.any() and np.isin(kind, (_ASSUMED, _MEASURED, _TIMED)).all():
            before, samples = prediction.samples
            per_sample = before / samples if before and samples else 1.0
            shortest_ns = _at_least(after, unknown, part.minimum_share(graph))
            max_speedup = prediction.baseline_ns / (shortest_ns * per_sample)
            if firm:
                low = max(prediction.low, 1 / max_speedup)
                prediction = replace(prediction, low=low, high=max(prediction.high, low))
        share = min(float(after.tasks.duration_ns[unknown].sum()) / max(base_ns, 1.0), 1.0)
        bounds.append(SpeedupBound(prediction, missing, share, max_speedup, firm))
    return bounds


class _AsKnown(Durations):
    """Cached durations only; measures nothing."""

    def __init__(self, durations: Durations) -> None:
        self.threads = durations.threads
        self._inner = durations

    def lookup(self, call: Call | TimingRequest) -> Timing | None:
        return self._inner.lookup(call)

    def ratio(self, old: Call, new: Call) -> Ratio | None:
        """Return the cached ratio, or None if either call is unmeasured."""
        return None if self._inner.missing([old, new]) else self._inner.ratio(old, new)

    def measure(
        self,
        calls: Iterable[Call | TimingRequest],
        report: Callable[[str], None] = lambda line: None,
        until: float = math.inf,
        *,
        roughly: bool = False,
    ) -> None:
        """Load the cached durations of `calls` in one query."""
        self._inner.missing(calls)


def _at_least(after: Graph, unknown: NDArray[np.bool_], share: float) -> float:
    """Return the step's time if `unknown` tasks took this share of their time, in ns."""
    durations = after.tasks.duration_ns * np.where(unknown, share, 1.0)
    return max(replay(replace(after, tasks=replace(after.tasks, duration_ns=durations))).step_ns, 1)
