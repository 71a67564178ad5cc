"""Results of the verbs on techniques, with their table, JSON and ledger record."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from slipstream.graph import Graph
from slipstream.graph.origin import evaluation_note, long_steps_note, loop_note
from slipstream.graph.page_faults import page_fault_error_ns, page_fault_tasks
from slipstream.measure.measured import Measured
from slipstream.measure.records import PredictionRecord
from slipstream.measure.render import format_change
from slipstream.provenance import Provenance, weakest
from slipstream.tables import Column, Drawing, Field, Table
from slipstream.technique import Quality, QualityKind, Technique
from slipstream.units import (
    format_bytes,
    format_duration,
    format_percent,
    format_reach,
    format_speedup,
    inverse_interval,
)
from slipstream.verbs.request import recorded_request
from slipstream.verbs.sharing import Shared

WORTH_IT = 1.02
"""Minimum speed-up at which a technique is worth a line of code."""
WORTH_TRAINING = 1.05
"""Minimum speed-up at which a changed model is worth its training."""
PARETO_NOTE = "* Pareto-optimal in time, memory and numerics"
"""Explanation of a star next to a name."""
# An interval is wide if its ends are further apart than this factor.
_WIDE = 1.25
_Z90 = 1.645


class PredictionVerdict(StrEnum):
    """Whether a technique is worth using, judged by its predicted speed-up."""

    WORTH_IT = "worth-it"
    NOT_WORTH_IT = "not-worth-it"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not-applicable"
    NOT_PREDICTABLE = "not-predictable"

    @property
    def text(self) -> str:
        """The verdict as reports and tables show it."""
        return _VERDICT_TEXTS[self]


_VERDICT_TEXTS = {
    PredictionVerdict.WORTH_IT: "worth it",
    PredictionVerdict.NOT_WORTH_IT: "not worth it here",
    PredictionVerdict.SLOWER: "not worth it here: slower",
    PredictionVerdict.INCONCLUSIVE: "inconclusive: run prove",
    PredictionVerdict.NOT_APPLICABLE: "does not apply",
    PredictionVerdict.NOT_PREDICTABLE: "cannot be predicted here",
}


@dataclass(frozen=True, repr=False)
class Predicted:
    """Prediction of a step with a technique or combination applied.

    Attributes:
        technique: technique spec.
        baseline_ns, step_ns: the step's time as recorded and as predicted.
        ratio: step_ns / baseline_ns, per sample; below 1 is faster.
        low, high: 90 % interval of `ratio`.
        samples: samples per step before and after; 0 if unknown.
        shares: share of the predicted step by the provenance of its durations.
        quality: effect on the model's numerics.
        edits: descriptions of the changes.
        notes: advice before choosing it, such as a cheaper alternative, by technique.
        memory: peak bytes of the step before and after; 0 if not recorded or not predicted.
        metric: the clock that shows it: ``cpu``, or ``wall`` if work moves to other cores or to a
            device.
        graph: the edited step.
        shared: communication, cost and bottlenecks of a step on several workers.
        techniques: parts of the combination; empty for edits that no technique makes.
        why_not: always None; see `Refused`.
    """

    technique: str
    baseline_ns: float
    step_ns: float
    ratio: float
    low: float
    high: float
    samples: tuple[int, int] = (0, 0)
    shares: Mapping[Provenance, float] = field(default_factory=dict)
    quality: Quality | None = None
    edits: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    memory: tuple[int, int] = (0, 0)
    metric: str = "cpu"
    graph: Graph | None = field(default=None, compare=False)
    shared: Shared | None = None
    techniques: tuple[Technique, ...] = field(default=(), compare=False)
    why_not: ClassVar[None] = None

    def __repr__(self) -> str:
        return (
            f"<Prediction {self.technique}: {self.gain}, {format_duration(self.step_ns)} per "
            f"step, {self.verdict.text}>"
        )

    def _repr_html_(self) -> str:
        return Table.of(
            [self], [*DRAWN, RESTS_ON], notes=[*self.edits, *self.notes.values()]
        ).to_html()

    @property
    def speedup(self) -> float:
        """Speed-up per sample; above 1 is faster."""
        return 1.0 / self.ratio

    @property
    def speedup_interval(self) -> tuple[float, float]:
        _, low, high = inverse_interval(self.ratio, self.low, self.high)
        return low, high

    @property
    def gain(self) -> str:
        """The speed-up with its interval, as text."""
        return format_speedup((self.speedup, *self.speedup_interval))

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance among the step's durations."""
        return weakest(self.shares) if self.shares else Provenance.ASSUMED

    @property
    def verdict(self) -> PredictionVerdict:
        """Whether it is worth using here."""
        if 1 / self.high >= WORTH_IT:
            return PredictionVerdict.WORTH_IT
        if self.low > 1:
            return PredictionVerdict.SLOWER
        if 1 / self.low < WORTH_IT:
            return PredictionVerdict.NOT_WORTH_IT
        return PredictionVerdict.INCONCLUSIVE

    @property
    def needs_training(self) -> bool:
        """Whether it changes the model, or may, so that it has to be trained."""
        return self.quality is None or self.quality.kind is QualityKind.NEEDS_TRAINING

    @property
    def saved(self) -> float:
        """Share of the step's peak memory that it saves; 0 if unknown."""
        before, after = self.memory
        return 1 - after / before if before and after else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload; times in nanoseconds, sizes in bytes."""
        return _to_json(self)

    def to_record(self, workload: str, env_id: str) -> PredictionRecord:
        return PredictionRecord(
            workload=workload,
            technique=self.technique,
            metric=self.metric,
            ratio=self.ratio,
            low=self.low,
            high=self.high,
            provenance=str(self.provenance),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            env_id=env_id,
            detail={
                "baseline_ns": self.baseline_ns,
                "step_ns": self.step_ns,
                "peak_bytes": list(self.memory),
                "shares": {str(key): share for key, share in self.shares.items()},
                "edits": list(self.edits),
                "notes": dict(self.notes),
                **({} if self.shared is None else self.shared.to_detail()),
                **({} if self.graph is None else {"threads": self.graph.meta.get("threads")}),
                **({} if self.graph is None else {"request": recorded_request(self.graph)}),
            },
        )


@dataclass(frozen=True, repr=False)
class Refused:
    """A technique or combination that is not predicted, with the reason.

    Attributes:
        technique: technique spec.
        baseline_ns: the step's time as recorded.
        why_not: the reason, as text.
        quality: its effect on the model's numerics.
        peak_bytes: of the step as recorded; 0 if not recorded.
        busy: whether it may apply but cannot be predicted: the cores were too busy, or there was
            no time to measure.
        techniques: parts of the combination; empty for edits that no technique makes.

    Numeric attributes of a `Predicted` are NaN, for code that reads either.
    """

    technique: str
    baseline_ns: float
    why_not: str
    quality: Quality | None = None
    peak_bytes: int = 0
    busy: bool = False
    techniques: tuple[Technique, ...] = field(default=(), compare=False)
    step_ns: ClassVar[float] = math.nan
    ratio: ClassVar[float] = math.nan
    low: ClassVar[float] = math.nan
    high: ClassVar[float] = math.nan
    speedup: ClassVar[float] = math.nan
    speedup_interval: ClassVar[tuple[float, float]] = (math.nan, math.nan)
    samples: ClassVar[tuple[int, int]] = (0, 0)
    shares: ClassVar[Mapping[Provenance, float]] = {}
    edits: ClassVar[tuple[str, ...]] = ()
    notes: ClassVar[Mapping[str, str]] = {}
    metric: ClassVar[str] = "cpu"
    graph: ClassVar[Graph | None] = None
    shared: ClassVar[Shared | None] = None
    provenance: ClassVar[Provenance] = Provenance.ASSUMED

    def __repr__(self) -> str:
        return f"<Prediction {self.in_words}>"

    def _repr_html_(self) -> str:
        columns = [Column("technique"), Column("does not apply")]
        return Table(columns, [(self.technique, self.why_not)]).to_html()

    @property
    def memory(self) -> tuple[int, int]:
        return self.peak_bytes, 0

    @property
    def verdict(self) -> PredictionVerdict:
        """The kind of refusal."""
        return PredictionVerdict.NOT_PREDICTABLE if self.busy else PredictionVerdict.NOT_APPLICABLE

    @property
    def in_words(self) -> str:
        return f"{self.technique} {self.verdict.text}: {self.why_not}"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload; numbers that are not predicted are NaN."""
        return _to_json(self)


Prediction = Predicted | Refused
"""Result of `predict` for a technique: its predicted effect, or why there is none."""


def applying(predictions: Iterable[Prediction]) -> list[Predicted]:
    return [p for p in predictions if isinstance(p, Predicted)]


def refused(predictions: Iterable[Prediction]) -> list[Refused]:
    return [p for p in predictions if isinstance(p, Refused)]


def _to_json(p: Prediction) -> dict[str, Any]:
    return {
        "technique": p.technique,
        "metric": p.metric,
        "baseline_ns": p.baseline_ns,
        "step_ns": p.step_ns,
        "speedup": p.speedup,
        "speedup_interval": list(p.speedup_interval),
        "confidence_level": 0.9,
        "samples_per_step": list(p.samples),
        "peak_bytes": list(p.memory),
        "provenance": {str(key): share for key, share in p.shares.items()},
        "numerics": p.quality.kind.value if p.quality else None,
        "numerics_basis": p.quality.basis if p.quality else None,
        "advice": p.quality.advice if p.quality else None,
        "reason": p.why_not,
        "verdict": p.verdict,
        "verdict_text": p.verdict.text,
        "edits": list(p.edits),
        "notes": dict(p.notes),
        "shared": None if p.shared is None else p.shared.to_json(p.step_ns),
    }


def _reach(p: Prediction) -> str:
    return format_reach(p.speedup, *p.speedup_interval)


def _drawn_reach(p: Prediction) -> Drawing:
    low, high = p.speedup_interval
    return Drawing.interval(low, p.speedup, high, (min(low, 0.9), max(high, 1.1)), _reach(p))


def _memory_change(p: Prediction) -> str:
    before, after = p.memory
    if not before or not after:
        return "-"
    percent = round(100 * (after / before - 1))
    return f"{format_bytes(after)}, " + (f"{percent:+d} %" if percent else "0 %")


TECHNIQUE: Field[Prediction] = Field.of("technique", lambda p: p.technique)
SPEEDUP: Field[Prediction] = Field.number("speed-up", lambda p: f"{p.speedup:.2f}x")
INTERVAL: Field[Prediction] = Field.number("90 % interval", _reach)
MEMORY: Field[Prediction] = Field.number("memory", _memory_change)
STEP: Field[Prediction] = Field.number("step", lambda p: format_duration(p.step_ns), optional=True)
NUMERICS: Field[Prediction] = Field.of(
    "numerics", lambda p: p.quality.kind.value if p.quality else "-", optional=True
)
RESTS_ON: Field[Prediction] = Field.of(
    "rests on",
    lambda p: ", ".join(f"{format_percent(share)} {name}" for name, share in p.shares.items()),
    optional=True,
)
VERDICT: Field[Prediction] = Field.of("verdict", lambda p: p.verdict.text)
DRAWN: tuple[Field[Prediction], ...] = (
    TECHNIQUE, SPEEDUP, Field.of("", _drawn_reach), INTERVAL,
    Field.of(
        "step", lambda p: f"{format_duration(p.baseline_ns)} to {format_duration(p.step_ns)}"
    ),
    Field.of(
        "memory", lambda p: " to ".join(map(format_bytes, p.memory)) if all(p.memory) else "-"
    ),
    NUMERICS, VERDICT,
)  # fmt: skip
"""Fields of predictions for outputs that can draw an interval."""


def starred(names: Collection[str]) -> Field[Prediction]:
    """Return a field of the technique, starred if its name is among `names`."""
    return Field.of("technique", lambda p: p.technique + " *" * (p.technique in names))


def prediction_table(
    graph: Graph,
    predictions: Sequence[Prediction],
    *notes: str,
    marked: Collection[str] = (),
    reasons: Sequence[str] | None = None,
) -> Table:
    """Return a table with a row per technique: speed-up, interval, memory, time and verdict."""
    apply = applying(predictions)
    lines = [
        recorded_step(graph, predictions), evaluation_note(graph), long_steps_note(graph), *notes,
        wide_by_page_faults(graph, predictions), loop_note(graph),
    ]  # fmt: skip
    if graph.meta.get("contended"):
        lines.append("the machine was busy while the step was recorded; minima were taken")
    if graph.meta.get("unaligned_share"):
        share = format_percent(graph.meta["unaligned_share"])
        lines.append(f"the steps differ in {share} of their operators; one of them was recorded")
    lines += [p.in_words for p in refused(predictions)] if reasons is None else reasons
    advice: dict[str, str] = {}
    for p in sorted(apply, key=lambda p: len(p.techniques)):
        if p.quality and p.quality.advice:
            # The part alone speaks for combinations with it.
            advice.setdefault(p.quality.advice, p.technique)
    lines += [f"{name}: {text}" for text, name in advice.items()]
    lines += noted(p.notes for p in apply)
    fields = (starred(marked), SPEEDUP, INTERVAL, MEMORY, STEP, NUMERICS, RESTS_ON, VERDICT)
    return Table.of(apply, fields, f"predicted for {named(graph)}", lines)


def noted(notes_by_technique: Iterable[Mapping[str, str]]) -> list[str]:
    """Return a line per technique with a note, however many combinations it is in."""
    notes: dict[str, str] = {}
    for technique_notes in notes_by_technique:
        notes = {**technique_notes, **notes}
    return [f"{name}: {note}" for name, note in notes.items()]


def named(graph: Graph) -> str:
    return str(graph.meta.get("workload", "this step"))


def recorded_step(graph: Graph, predictions: Sequence[Prediction]) -> str:
    step_ns = predictions[0].baseline_ns if predictions else 0.0
    peak = max((p.memory[0] for p in predictions), default=0)
    threads = graph.meta.get("threads")
    return (
        f"baseline: {format_duration(step_ns)} per step"
        + (f", {graph.samples} sample{'s' * (graph.samples > 1)}" if graph.samples else "")
        + (f", {format_bytes(peak)} peak tensor memory" if peak else ", memory not recorded")
        + (f" ({reason})" if not peak and (reason := graph.meta.get("memory_reason")) else "")
        + (f" ({threads} thread{'s' * (threads != 1)}, without contention)" if threads else "")
    )


def wide_by_page_faults(graph: Graph, predictions: Sequence[Prediction]) -> str:
    """Explain wide intervals, with a remedy, if page faults are their main cause."""
    wide = [
        p
        for p in applying(predictions)
        if p.low * _WIDE < p.high and (p.graph is None or page_fault_tasks(p.graph))
    ]
    if not wide:
        return ""
    share = page_fault_error_ns(graph) / wide[0].baseline_ns
    # Squares of independent errors add up: more than half of the narrowest interval's variance.
    half_width = min(math.log(p.high / p.low) for p in wide) / 2
    if 2 * (_Z90 * share) ** 2 < half_width**2:
        return ""
    return (
        f"intervals are wide because page faults differ by {format_percent(share)} of this step "
        "between launches; apply `allocator` first, alone or as "
        "--technique TECHNIQUE+allocator: it keeps the pages and is predicted closely"
    )


def measured_note(name: str, measured: Measured) -> str:
    """Describe a measurement of a technique, for the notes of a prediction."""
    claim = measured.claim
    return (
        f"{name}: measured {format_change(claim, 2)} on {measured.created[:10]} ({claim.metric} "
        f"time, {format_percent(claim.level)} interval; {claim.verdict})"
    )
