"""The first look: what can be said of every technique before anything is micro-benchmarked.

Techniques edit the graph with what is known by now. What would become of an operator that nobody
has timed yet is not guessed: it is bounded. It cannot take less than no time, or than what the
technique knows to be its least, and so no technique gains more than if all of these took that.
A technique that would not be worth it even then is not measured at all: the time goes to those
whose rank it decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import Answer, Durations, Question, Ratio
from slipstream.graph import PROVENANCES, Call, Graph, replay
from slipstream.graph.page_faults import page_fault_ns, page_fault_tasks
from slipstream.provenance import Provenance
from slipstream.tables import Field, Table
from slipstream.technique import Technique
from slipstream.units import format_percent
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import (
    MEMORY,
    NUMBERS,
    WORTH_IT,
    WORTH_TRAINING,
    Predicted,
    Prediction,
    named,
    recorded_step,
)

_ASSUMED, _MEASURED, _TIMED = (
    PROVENANCES.index(one)
    for one in (Provenance.ASSUMED, Provenance.MEASURED, Provenance.MICROBENCHMARK)
)
# What a technique must save of the peak to be of use for that alone.
_MEMORY_SHARE = 0.01
_LARGEST_BOUND = 10.0


@dataclass(frozen=True)
class Outlook:
    """What is known of a technique before its operators are measured.

    Attributes:
        prediction: final when nothing is `missing`; else operators that are not known keep their
            time.
        missing: calls that are yet to be micro-benchmarked.
        share: of the recorded step's time that these calls stand for.
        most: speed-up if they took the least they can, mostly nothing; None where that cannot
            be told.
        firm: whether `most` rests on nothing but the recorded step, page faults aside that grew.
    """

    prediction: Prediction
    missing: int = 0
    share: float = 0.0
    most: float | None = None
    firm: bool = False

    @property
    def decided(self) -> bool:
        """Whether measuring could not change that it is not worth it, in time or memory."""
        if not self.firm or self.most is None or not isinstance(self.prediction, Predicted):
            return False
        anew = self.prediction.trains_anew
        least, share = (WORTH_TRAINING, WORTH_TRAINING - 1) if anew else (WORTH_IT, _MEMORY_SHARE)
        return self.most < least and self.prediction.saved <= share

    @property
    def promise(self) -> tuple[float, float]:
        """What outlooks are shown by, the largest possible gain first."""
        if not self.missing:
            return -self.prediction.speedup, 0.0
        return (-self.most if self.most is not None else -1.0), -self.share

    @property
    def gain(self) -> str:
        """The speed-up, or how much it can be."""
        if not self.missing:
            return f"{self.prediction.speedup:.2f}x"
        if self.most is None:
            return "not known yet"
        return f"{format_bound(self.most)} at most"

    @property
    def state(self) -> str:
        """What happens with it next."""
        if not self.missing:
            return "known"
        if self.decided:
            return "not worth it here"
        return f"measuring {self.missing} operator{'s' if self.missing > 1 else ''}"


def format_bound(most: float) -> str:
    """The largest possible speed-up; those that say little are cut off."""
    return f"{most:.2f}x" if most <= _LARGEST_BOUND else f"> {_LARGEST_BOUND:.0f}x"


_FIELDS: tuple[Field[Outlook], ...] = (
    Field.of("technique", lambda one: one.prediction.technique),
    Field.number("speed-up", lambda one: one.gain),
    Field.number("of the step", lambda one: format_percent(one.share) if one.share else "-"),
    Field.number("memory", lambda one: MEMORY.cell(one.prediction)),
    Field.of("numbers", lambda one: NUMBERS.cell(one.prediction), optional=True),
    Field.of("state", lambda one: one.state),
)


def first_look_table(graph: Graph, outlooks: Sequence[Outlook]) -> Table:
    """One row for each technique that applies, the largest possible gain first."""
    apply = [one for one in outlooks if isinstance(one.prediction, Predicted)]
    left = len(outlooks) - len(apply)
    notes = (
        recorded_step(graph, [one.prediction for one in outlooks]),
        f"{left} techniques do not apply here" if left else "",
        "at most: if operators that were not measured yet cost nothing; with more threads, if they "
        "share all of it evenly",
        "operators are measured now, old and new in turns; the final table follows",
    )
    title = f"first look at {named(graph)}"
    return Table.of(sorted(apply, key=lambda one: one.promise), _FIELDS, title, notes)


def first_look(
    graph: Graph,
    techniques: Sequence[Technique],
    durations: Durations,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
) -> list[Outlook]:
    """What is known of single techniques without measuring, in their order."""
    base_ns = replay(graph).step_ns
    outlooks = []
    predictions = predict(graph, techniques, durations=_AsKnown(durations), widen=widen)
    for one, prediction in zip(techniques, predictions, strict=True):
        if not isinstance(prediction, Predicted) or prediction.graph is None:
            outlooks.append(Outlook(prediction))
            continue
        missing = len(durations.missing(one.required_timings(graph)))
        if not missing:
            outlooks.append(Outlook(prediction))
            continue
        after = prediction.graph
        kind = after.tasks.provenance.copy()
        if page_fault_ns(after) >= page_fault_ns(graph):
            # Fitted to memory as they are: none of what is gained is theirs.
            kind[page_fault_tasks(after)] = _MEASURED
        unknown = (kind == _ASSUMED) & (after.tasks.duration_ns > 0)
        firm = bool(np.isin(kind, (_ASSUMED, _MEASURED)).all())
        most = None
        # Where no task waits for an answer, or some follow from a model of their own, the gain
        # is made in another way than by these calls.
        if unknown.any() and np.isin(kind, (_ASSUMED, _MEASURED, _TIMED)).all():
            before, samples = prediction.samples
            per_sample = before / samples if before and samples else 1.0
            shortest_ns = _at_least(after, unknown, one.minimum_share(graph))
            most = prediction.baseline_ns / (shortest_ns * per_sample)
            if firm:
                low = max(prediction.low, 1 / most)
                prediction = replace(prediction, low=low, high=max(prediction.high, low))
        share = min(float(after.tasks.duration_ns[unknown].sum()) / max(base_ns, 1.0), 1.0)
        outlooks.append(Outlook(prediction, missing, share, most, firm))
    return outlooks


class _AsKnown(Durations):
    """Answers from what is known, and measures nothing."""

    def __init__(self, known: Durations) -> None:
        self.threads = known.threads
        self._inner = known

    def lookup(self, call: Call | Question) -> Answer | None:
        """As it is known by now."""
        return self._inner.lookup(call)

    def ratio(self, old: Call, new: Call) -> Ratio | None:
        """As it is known by now; not estimated for calls that are yet to be measured."""
        return None if self._inner.missing([old, new]) else self._inner.ratio(old, new)

    def measure(
        self,
        calls: Iterable[Call | Question],
        say: Callable[[str], None] = lambda line: None,
        until: float = math.inf,
        *,
        roughly: bool = False,
    ) -> None:
        """Nothing; what is known of them is read at once."""
        self._inner.missing(calls)


def _at_least(after: Graph, unknown: NDArray[np.bool_], share: float) -> float:
    """Length of the step in which the tasks `unknown` take this share of their time, in ns."""
    durations = after.tasks.duration_ns * np.where(unknown, share, 1.0)
    return max(replay(replace(after, tasks=replace(after.tasks, duration_ns=durations))).step_ns, 1)
