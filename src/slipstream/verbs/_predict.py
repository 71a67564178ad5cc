"""predict: edit the graph as a technique would, simulate it, say how sure that is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream import technique
from slipstream.durations import Durations
from slipstream.graph import PROVENANCES, Graph, replay
from slipstream.measure.records import PredictionRecord
from slipstream.provenance import Provenance, weakest
from slipstream.technique import Context, Quality, QualityKind, Technique

# Half-width, relative to the step, that no prediction here is better than: what re-measuring the
# same unmodified step differs by.
_FLOOR = 0.015
# Micro-benchmarks miss what an operator's surroundings do to it (caches, clock frequency); the
# error of one operator's ratio, as a standard deviation.
_IN_PLACE = 0.06
# The machine's pace differs between the profile and the micro-benchmarks, by this much as a
# standard deviation: what amp's predictions missed by in common on five models.
_PACE = 0.05
_Z90 = 1.645
WORTH_IT = 1.02
"""Below this speed-up a technique is not worth a line of code."""


@dataclass(frozen=True)
class Prediction:
    """What a technique, or a combination, would make of a step.

    Attributes:
        technique: its name in the grammar.
        baseline_ns, step_ns: the step's time as recorded and as predicted.
        ratio: step_ns / baseline_ns; below 1 is cheaper.
        low, high: 90 % interval of `ratio`.
        samples: samples per step before and after; 0 if unknown.
        shares: share of the predicted step by the provenance of its durations.
        why_not: why it does not apply; then nothing else is predicted.
        quality: what it does to the model's numbers.
        edits: what was changed, in words.
        graph: the step as it would be.
    """

    technique: str
    baseline_ns: float
    step_ns: float
    ratio: float
    low: float
    high: float
    samples: tuple[int, int] = (0, 0)
    shares: dict[Provenance, float] = field(default_factory=dict)
    why_not: str | None = None
    quality: Quality | None = None
    edits: tuple[str, ...] = ()
    graph: Graph | None = field(default=None, repr=False, compare=False)

    @property
    def speedup(self) -> float:
        """How many times faster a sample is processed."""
        return 1.0 / self.ratio

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance the prediction rests on."""
        return weakest(self.shares) if self.shares else Provenance.ASSUMED

    @property
    def verdict(self) -> str:
        """In words: does it pay here?"""
        if self.why_not is not None:
            return "does not apply"
        if 1 / self.high >= WORTH_IT:
            return "worth it"
        if self.low > 1:
            return "not worth it here: slower"
        if 1 / self.low < WORTH_IT:
            return "not worth it here"
        return "undecided: prove it"

    def to_record(self, workload: str, env_id: str) -> PredictionRecord:
        """As the ledger keeps it."""
        return PredictionRecord(
            workload=workload,
            technique=self.technique,
            metric="cpu",
            ratio=self.ratio,
            low=self.low,
            high=self.high,
            provenance=str(self.provenance),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            env_id=env_id,
            detail={
                "baseline_ns": self.baseline_ns,
                "step_ns": self.step_ns,
                "shares": {str(key): share for key, share in self.shares.items()},
                "edits": list(self.edits),
            },
        )


def predict(
    graph: Graph,
    techniques: Sequence[str | Technique | Sequence[Technique]],
    *,
    durations: Durations | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Prediction]:
    """What each of `techniques` would make of `graph`, in their order.

    Operators whose durations are not known yet on this machine are micro-benchmarked first, in a
    child process; the user's code is not run.

    Args:
        techniques: alternatives: names in the grammar, techniques, or combinations of them.
        durations: where durations come from; this machine's cache by default.
        widen: (ratio, low, high) -> (low, high): this machine's history of errors, see
            `slipstream.measure.ledger`.

    Raises:
        UsageError: a name or setting that is not in the grammar.
        ChildError: the micro-benchmark died.
    """
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))
    context = Context(durations)
    baseline_ns = replay(graph).step_ns
    combinations = [_combination(one) for one in techniques]
    reasons = [_why_not(graph, combination) for combination in combinations]
    questions = [
        call
        for combination, reason in zip(combinations, reasons, strict=True)
        if reason is None
        for one in combination
        for call in one.questions(graph)
    ]
    durations.measure(questions, say)
    found = []
    for combination, reason in zip(combinations, reasons, strict=True):
        name = technique.combination_name(combination)
        quality = _quality(graph, combination)
        if reason is not None:
            nothing = math.nan
            found.append(
                Prediction(
                    name, baseline_ns, nothing, nothing, nothing, nothing,
                    why_not=reason, quality=quality,
                )
            )  # fmt: skip
            continue
        edited = technique.combine(graph, combination, context)
        found.append(_prediction(name, graph, edited, baseline_ns, quality, widen))
    return found


def _combination(one: str | Technique | Sequence[Technique]) -> tuple[Technique, ...]:
    if isinstance(one, str):
        return technique.parse(one)
    if isinstance(one, Technique):
        return (one,)
    return tuple(one)


def _why_not(graph: Graph, combination: Sequence[Technique]) -> str | None:
    for one in combination:
        reason = one.why_not(graph)
        if reason is not None:
            return reason if len(combination) == 1 else f"{one.name}: {reason}"
    return None


def _quality(graph: Graph, combination: Sequence[Technique]) -> Quality | None:
    """The most consequential of the parts'."""
    order = list(QualityKind)
    parts = [one.quality(graph) for one in combination]
    return max(parts, key=lambda quality: order.index(quality.kind), default=None)


def _prediction(
    name: str,
    before: Graph,
    after: Graph,
    baseline_ns: float,
    quality: Quality | None,
    widen: Callable[[float, float, float], tuple[float, float]] | None,
) -> Prediction:
    step_ns = replay(after).step_ns
    per_sample = before.samples / after.samples if before.samples and after.samples else 1.0
    ratio = step_ns / baseline_ns * per_sample
    half = _Z90 * _relative_error(after, step_ns)
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    if widen is not None:
        low, high = widen(ratio, low, high)
    return Prediction(
        name,
        baseline_ns,
        step_ns,
        ratio,
        low,
        high,
        (before.samples, after.samples),
        _shares(after),
        quality=quality,
        edits=tuple(edit.what for edit in after.edits[len(before.edits) :]),
        graph=after,
    )


def _relative_error(after: Graph, step_ns: float) -> float:
    """Standard deviation of the predicted step, relative to it.

    Errors of one operator signature repeat wherever it occurs, so they add up; those of
    different signatures are independent, so their squares do. What all micro-benchmarks have in
    common (the machine's pace while they ran) moves every changed task alike.
    """
    tasks = after.tasks
    changed = np.flatnonzero(tasks.provenance != PROVENANCES.index(Provenance.MEASURED))
    by_call: dict[str, float] = {}
    for t in changed:
        key = after.calls[tasks.call[t]].key if tasks.call[t] >= 0 else f"task {t}"
        error = float(tasks.duration_ns[t]) * math.hypot(_IN_PLACE, float(tasks.spread[t]))
        by_call[key] = by_call.get(key, 0.0) + error
    variance = sum(error**2 for error in by_call.values())
    variance += (_PACE * float(tasks.duration_ns[changed].sum())) ** 2
    return math.hypot(_FLOOR, math.sqrt(variance) / max(step_ns, 1.0))


def _shares(graph: Graph) -> dict[Provenance, float]:
    tasks = graph.tasks
    total = float(tasks.duration_ns.sum() + tasks.gap_ns.sum())
    measured = PROVENANCES.index(Provenance.MEASURED)
    shares = {Provenance.MEASURED: float(tasks.gap_ns.sum()) / total}
    for code in np.unique(tasks.provenance):
        share = float(tasks.duration_ns[tasks.provenance == code].sum()) / total
        key = PROVENANCES[code]
        shares[key] = share + (shares[key] if code == measured else 0.0)
    return {key: share for key, share in shares.items() if share > 0}
