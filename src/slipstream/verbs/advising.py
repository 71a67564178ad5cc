"""advise: predict every technique and the combinations that help, and recommend the best.

Combinations grow from techniques that help alone, by beam search: each is an edit of one graph, so
a hundred take seconds. The result is the Pareto front over time per sample, memory and numerics.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import WorkloadError
from slipstream.graph import Graph, need_graph
from slipstream.graph.layers import module_layers
from slipstream.tables import Table
from slipstream.technique import QualityKind, Technique
from slipstream.units import format_percent
from slipstream.verbs.checking import Check
from slipstream.verbs.combining import Combination, joined, search_combinations
from slipstream.verbs.deadline import (
    MORE_TIME,
    measure_in_time,
    refuse_if_assumed,
    relies_on_guesses,
    unmeasured_note,
)
from slipstream.verbs.goals import Goal
from slipstream.verbs.predicting import Folded, predict
from slipstream.verbs.request import command_for, request_of
from slipstream.verbs.results import (
    DRAWN,
    PARETO_NOTE,
    WORTH_IT,
    WORTH_TRAINING,
    Predicted,
    Prediction,
    PredictionVerdict,
    Refused,
    applying,
    prediction_table,
    refused,
    starred,
)
from slipstream.verbs.speedup_bounds import SpeedupBound, first_look, format_bound
from slipstream.workload import Workload
from slipstream.workload.recipe import names_function

# Minimum share of time or memory that a part of a combination saves alone.
_USEFUL = 0.01
# Maximum step time of a part that saves memory, relative to the baseline.
_MAX_RATIO = 2.0
# Minimum improvement of a combination over a smaller one.
_WORTH_A_PART = 0.01
# Minimum share of the time in layers that architecture search could narrow to mention it.
_MOSTLY = 0.5
_BEAM = 6
_MAX_PARTS = 3
# Time limits of measuring further operators for combinations, without and with a deadline.
_MAX_MEASURING_S, _MAX_MEASURING_BEFORE_DEADLINE_S = 12.0, 6.0
# Share of the remaining time that is reserved for combinations.
_SHARE_FOR_COMBINATIONS = 0.25
# Techniques with at most this many operators are timed first, in this share of the time.
_FEW, _SHARE_FOR_FEW = 8, 0.4
# Combinations that are predicted between two checks of the deadline.
_BATCH = 8
_RISK = {kind: number for number, kind in enumerate(QualityKind)}


@dataclass(frozen=True)
class Advice:
    """Recommended techniques for a step.

    Attributes:
        predictions: techniques and combinations that apply, the lowest time per sample first; then
            refusals with their reasons.
        front: names of the Pareto-optimal ones in time per sample, memory and numerics.
        best: the first choice: the fastest that meets the goals; None if nothing is worth it or
            the goals cannot be met.
        second: the first choice without `best`.
        goals: the requested goals.
        needed: goals that the unmodified step does not meet.
        unmet: needed goals that nothing meets; all of them if no step meets all goals.
        seen, combinations: number of predicted combinations, and of all combinations of the
            techniques that help alone; 0 if combinations were not requested.
        estimated: number of operators of single techniques that there was no time to measure.
        not_timed: maximum speed-up of each technique that there was no time for; None if it has no
            bound.
        check: measurement of the first choice next to the baseline.
    """

    predictions: tuple[Prediction, ...]
    front: frozenset[str]
    best: Predicted | None
    goals: tuple[Goal, ...] = ()
    needed: tuple[Goal, ...] = ()
    unmet: tuple[Goal, ...] = ()
    seen: int = 0
    combinations: int = 0
    estimated: int = 0
    second: Predicted | None = None
    not_timed: Mapping[str, float | None] = field(default_factory=dict)
    check: Check | None = None

    def _repr_html_(self) -> str:
        notes = [PARETO_NOTE if applying(self.predictions) else ""]
        notes += [f"first choice: {self.best.technique}" if self.best else ""]
        notes += [p.in_words for p in refused(self.predictions)]
        fields = (starred(self.front), *DRAWN[1:])
        return Table.of(applying(self.predictions), fields, notes=notes).to_html()

    def to_json(self) -> dict[str, Any]:
        return {
            "predictions": [p.to_json() for p in self.predictions],
            "pareto_front": sorted(self.front),
            "best": self.best.technique if self.best is not None else None,
            "combinations": {"seen": self.seen, "all": self.combinations},
            "estimated": self.estimated,
            "not_timed": [
                {"technique": name, "speedup_at_most": bound}
                for name, bound in self.not_timed.items()
            ],
            "check": self.check and self.check.to_json(),
            "goals": [
                {
                    "goal": str(goal),
                    "holds_as_it_is": goal not in self.needed,
                    "can_be_met": goal not in self.unmet,
                }
                for goal in self.goals
            ],
        }

    def table(
        self,
        graph: Graph,
        workload: Workload | None,
        past: str = "",
        *,
        everything: bool = True,
        time_limit: str = "",
    ) -> Table:
        """Return a table of all predictions, with the first choice and further advice as notes.

        Args:
            workload: what was recorded; None if its file is not there.
            past: a sentence on how past predictions on this machine turned out.
            everything: whether to list techniques that do not apply, with their reasons.
            time_limit: of the advice, as the user wrote it.
        """
        by_hand = [] if workload is None else self._by_hand(workload)
        without_edit = [] if workload is None else self._without_edit(workload)
        lines = (
            past,
            PARETO_NOTE if self.front else "",
            *map(self._about, self.goals),
            f"prove needs a function for {', '.join(by_hand)}: the edit has no place in the "
            "script's loop; `slipstream apply` shows the lines to write"
            if by_hand
            else "",
            "edit by hand, `slipstream apply` shows the lines and why: " + ", ".join(without_edit)
            if without_edit
            else "",
            self._why_not_the_largest(),
            unmeasured_note(self.estimated),
            f"{self.seen:,} of {self.combinations:,} combinations of useful techniques predicted"
            if self.combinations
            else "",
            "" if workload is None else _narrower(graph),
            self._next(graph, by_hand),
        )
        table = prediction_table(
            graph, self.predictions, *lines, marked=self.front,
            reasons=None if everything else self._short_reasons(),
        )  # fmt: skip
        return replace(table, lead=self._lead(time_limit))

    def _lead(self, time_limit: str) -> list[str]:
        """Describe the first choice, and techniques that were not timed but could be better."""
        if self.check is not None:
            lines = [self.check.sentence]
        elif self.best is not None:
            lines = [f"first choice {self.best.technique}: predicted {self.best.gain}"]
        elif self.unmet:
            lines = [
                "nothing here reaches the limits: use a smaller model or batch, or more memory"
            ]
        else:
            lines = ["nothing here is worth the trouble: keep the step unchanged"]
        if promising := self._promising():
            if self.best is None and not self.unmet:
                lines = ["nothing timed so far is worth the trouble"]
            bounds = ", ".join(
                f"{name} ({'no bound' if bound is None else f'up to {format_bound(bound)}'})"
                for name, bound in promising.items()
            )
            limit = f" in {time_limit}" if time_limit else ""
            lines.append(f"not timed{limit}, could be better: {bounds}; {MORE_TIME} times them")
        return lines

    def _promising(self) -> dict[str, float | None]:
        """Return the techniques not timed that might beat the first choice, largest bound first."""
        threshold = self.best.speedup if self.best is not None else WORTH_IT
        promising = {
            name: bound
            for name, bound in self.not_timed.items()
            if bound is None or bound > threshold
        }
        return dict(sorted(promising.items(), key=lambda item: -(item[1] or 0.0)))

    def _short_reasons(self) -> list[str]:
        """Count what does not apply; name what cannot be predicted on a busy machine."""
        reasons = [p for p in refused(self.predictions) if p.technique not in self.not_timed]
        lines = [p.in_words for p in reasons if p.busy]
        if count := len(self.not_timed) - len(self._promising()):
            lines.append(
                f"{count} more {'were' if count > 1 else 'was'} not timed, and cannot be better"
            )
        if count := sum(not p.busy for p in reasons):
            lines.append(
                f"{count} technique{'s do' if count > 1 else ' does'} not apply here: --all lists "
                f"{'them with their reasons' if count > 1 else 'it with its reason'}"
            )
        return lines

    def _about(self, goal: Goal) -> str:
        if goal.limit is None:
            return "cost: no price is known here, so it is proportional to the time per sample"
        if goal not in self.needed:
            return f"{goal}: met by the baseline"
        if goal in self.unmet:
            return f"{goal}: nothing here is predicted to meet it"
        return f"{goal}: predicted to be met with {self.best.technique}" if self.best else ""

    def _by_hand(self, script: Workload) -> list[str]:
        """Return techniques whose edit has no place in the script, so `prove` cannot run them."""
        return [
            p.technique
            for p in applying(self.predictions)
            if technique.not_in_script(p.techniques, script) is not None
        ]

    def _without_edit(self, workload: Workload) -> list[str]:
        """Return the techniques that `apply` has no edit of the file for."""
        parts = [p.techniques[0] for p in applying(self.predictions) if len(p.techniques) == 1]
        names = []
        for part in parts:
            change = None
            # A recording may be older than what its file holds now.
            with contextlib.suppress(WorkloadError):
                change = part.code(workload)
            if change is None or not (change.diff or change.already):
                names.append(str(part))
        return names

    def _next(self, graph: Graph, by_hand: Collection[str]) -> str:
        """Return the command to run next; empty if nothing is worth it."""
        following = self.best
        if self.check is not None and self.check.worth_it is False:
            following = self.second
        if following is None:
            return ""
        verb = "apply" if following.technique in by_hand else "prove"
        return f"next: {command_for(verb, graph, following.technique)}"

    def _why_not_the_largest(self) -> str:
        """Explain why larger gains are not the first choice; empty if there are none."""
        best = self.best
        if best is None:
            return ""
        faster = [
            p
            for p in applying(self.predictions)
            if p.technique in self.front and p.ratio < best.ratio
        ]
        reasons = []
        if any(not goal.met_by(p) for p in faster for goal in self.goals):
            reasons.append("meets the goal")
        if not best.needs_training and any(p.needs_training for p in faster):
            reasons.append("needs no training")
        if best.verdict is PredictionVerdict.WORTH_IT and any(
            p.verdict is not best.verdict for p in faster
        ):
            reasons.append("is certain")
        if not reasons:
            return ""
        return f"{best.technique} is first: the largest gain that {' and '.join(reasons)}"


def _narrower(graph: Graph) -> str:
    """Mention architecture search if layers that can be narrower take most of the step."""
    request = request_of(graph)
    tasks = [task for layer in module_layers(graph) for task in layer.tasks]
    share = graph.tasks.duration_ns[tasks].sum() / max(1, graph.tasks.duration_ns.sum())
    if share < _MOSTLY or request is None or not names_function(request.target):
        return ""
    return (
        f"{share:.0%} of the time is in convolutions and linear layers; `slipstream nas space "
        f"{request.target}` lists those that could be narrower, for a model that is trained again"
    )


def advise(
    graph: Graph,
    *,
    goals: Sequence[Goal] = (),
    combinations: bool = True,
    durations: Durations | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    report: Callable[[str], None] = lambda line: None,
    show: Callable[[Sequence[SpeedupBound]], None] = lambda bounds: None,
    settle: Callable[[Graph], Graph] = lambda graph: graph,
    until: float = math.inf,
    threads: int = 0,
) -> Advice:
    """Predict every installed technique and useful combinations of them.

    Args:
        goals: limits that the first choice must keep.
        combinations: whether to predict combinations.
        durations, widen, report: as for `slipstream.verbs.predicting.predict`.
        show: called with the preliminary bounds of all techniques before any of their operators is
            micro-benchmarked; not called if all operators are cached.
        settle: called after that, and with a deadline after techniques with few operators are
            timed; returns the graph with data that takes too long to record earlier.
        until: deadline by `time.monotonic`, kept within a second or two: the operators that matter
            most are measured first, the others estimated, and the most promising combinations are
            predicted while time remains.
        threads: the number of threads that the user chose, so that no other is a candidate; 0 for
            no choice.

    Raises:
        SlipstreamError: an installed technique cannot be loaded.
        InvalidArgumentError: `graph` is not a graph.
    """
    need_graph(graph)
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))
    search = _Search(graph, durations, widen, report, until)
    report("a first look, before anything is measured")
    began = time.monotonic()
    offered = single_techniques()
    fixed = [part for part in offered if threads and part.name == "threads"]
    bounds = first_look(graph, [part for part in offered if part not in fixed], durations, widen)
    first_look_s = time.monotonic() - began
    if any(bound.missing for bound in bounds):
        show(bounds)
    # Techniques that are not worth it even at their bound are not measured.
    undecided = [bound for bound in bounds if not bound.decided]
    decided = [
        _worth_training(bound.prediction, bound.max_speedup) for bound in bounds if bound.decided
    ]
    size = 0
    with durations.measuring():
        if search.has_deadline:
            # A few operators decide about some of the largest gains.
            quick = [bound for bound in undecided if bound.missing <= _FEW]
            search.measure(quick, _SHARE_FOR_FEW * (until - time.monotonic()))
        search.graph = settle(graph)
        if search.has_deadline:
            # Simulating the techniques again takes as long as the first look.
            share = 1 - _SHARE_FOR_COMBINATIONS * combinations
            seconds = (until - time.monotonic()) * share - first_look_s
            search.unmeasured = search.measure(undecided, seconds)
        singles, not_timed = search.predict_singles(undecided)
        singles = [*map(_worth_training, singles), *decided]
        search.found = {p.techniques: p for p in applying(singles)}
        if combinations:
            size = search.combine()
    ranked = sorted(search.found.values(), key=lambda p: p.ratio)
    front = frozenset(p.technique for p in ranked if not _beaten(p, ranked))
    # Techniques are always shown, combinations only if they are on the Pareto front.
    ranked = [p for p in ranked if p.technique in front or len(p.techniques) == 1]
    step_ns = singles[0].baseline_ns if singles else 0.0
    peak_bytes = max((p.memory[0] for p in singles), default=0)
    needed = tuple(goal for goal in goals if not goal.met(step_ns, peak_bytes))
    meeting = [p for p in ranked if all(goal.met_by(p) for goal in goals)]
    leading = [p for p in meeting if p.technique in front]
    best = _best(leading, needed=bool(needed))
    second = _best([p for p in leading if p is not best], needed=bool(needed))
    # If each goal can be met, but no step meets all of them, all are unmet.
    unmet = tuple(goal for goal in needed if not any(goal.met_by(p) for p in ranked))
    why = f"--threads {threads} fixes the number of threads"
    not_offered = [Refused(str(part), step_ns, why, techniques=(part,)) for part in fixed]
    return Advice(
        (*ranked, *refused(singles), *not_offered), front, best, tuple(goals), needed,
        unmet if unmet or meeting else needed, min(len(search.tried), size), size,
        search.unmeasured, second, not_timed,
    )  # fmt: skip


@dataclass
class _Search:
    """Predictions of one `advise`.

    Attributes:
        found: predictions of techniques and combinations that apply.
        tried: combinations that were predicted, whether or not they apply.
        unmeasured: operators of single techniques that were not measured before the deadline.
    """

    graph: Graph
    durations: Durations
    widen: Callable[[float, float, float], tuple[float, float]] | None
    report: Callable[[str], None]
    until: float
    found: dict[Combination, Predicted] = field(default_factory=dict)
    tried: set[Combination] = field(default_factory=set)
    unmeasured: int = 0
    _folded: Folded = field(default_factory=dict)
    _measure_until: float = math.inf

    @property
    def has_deadline(self) -> bool:
        return self.until < math.inf

    def measure(self, bounds: Sequence[SpeedupBound], seconds: float) -> int:
        """Measure operators for this long; return how many are left."""
        deadline = time.monotonic() + seconds
        return measure_in_time(self.graph, bounds, self.durations, deadline, self.report)

    def predict(
        self, combinations: Sequence[Combination], measuring_s: float = math.inf
    ) -> list[Prediction]:
        return predict(
            self.graph, combinations, durations=self.durations, widen=self.widen,
            measuring_s=measuring_s, folded=self._folded, report=self.report,
        )  # fmt: skip

    def predict_singles(
        self, bounds: Sequence[SpeedupBound]
    ) -> tuple[list[Prediction], dict[str, float | None]]:
        """Predict techniques; also return the bounds of those that there was no time for."""
        techniques = [bound.prediction.techniques for bound in bounds]
        singles = self.predict(techniques, 0.0 if self.has_deadline else math.inf)
        if not self.unmeasured:
            return singles, {}
        checked = [refuse_if_assumed(self.graph, p, self.durations) for p in singles]
        not_timed = {
            bound.prediction.technique: bound.max_speedup
            for bound, before, after in zip(bounds, singles, checked, strict=True)
            if after is not before
        }
        return checked, not_timed

    def predict_batches(self, combinations: Sequence[Combination]) -> list[Prediction]:
        """Predict combinations while time remains."""
        size = _BATCH if self.has_deadline else max(len(combinations), 1)
        predictions: list[Prediction] = []
        for begin in range(0, len(combinations), size):
            now = time.monotonic()
            if now >= self.until:
                break
            batch = combinations[begin : begin + size]
            # While single techniques lack measurements, combinations get none.
            seconds = min(self._measure_until - now, (self.until - now) / 4)
            predictions += self.predict(batch, 0.0 if self.unmeasured else seconds)
            self.tried.update(batch)
        if not self.has_deadline:
            return predictions
        return [
            p
            for p in predictions
            if not relies_on_guesses(p, (self.found[part,] for part in p.techniques))
        ]

    def combine(self) -> int:
        """Add combinations that are better than their parts; return how many there are in all."""
        seconds = _MAX_MEASURING_BEFORE_DEADLINE_S if self.has_deadline else _MAX_MEASURING_S
        self._measure_until = time.monotonic() + seconds
        parts = [combination for combination, p in self.found.items() if _saves(p)]
        self.tried.update(parts)
        self._grow(parts)
        predictions, size = search_combinations(
            parts, self.found, frozenset(self.tried), self.predict_batches, self.report,
            self.until - time.monotonic(),
        )  # fmt: skip
        self._add(predictions.values())
        return size

    def _grow(self, parts: Sequence[Combination]) -> None:
        """Join useful parts, a beam at a time, as long as the result is better."""
        ratios = {part: self.found[part,].ratio for (part,) in parts}

        def expected_ratio(combination: Combination) -> float:
            return math.prod(ratios[part] for part in combination)

        beam = list(parts)
        for size in range(2, _MAX_PARTS + 1):
            candidates = {
                joint: None
                for combination in beam
                for part in parts
                if (joint := joined(combination, part)) is not None and joint not in self.found
            }
            if not candidates:
                break
            self.report(f"trying {len(candidates)} combinations of {size} techniques")
            better = self._add(self.predict_batches(sorted(candidates, key=expected_ratio)))
            by_time = sorted(better, key=lambda p: p.ratio)[:_BEAM]
            by_memory = sorted(better, key=lambda p: p.memory[1])[:_BEAM]
            beam = list({p.techniques: None for p in (*by_time, *by_memory)})

    def _add(self, predictions: Iterable[Prediction]) -> list[Predicted]:
        """Add combinations that are better in something than each combination they contain."""

        def adds(p: Predicted) -> bool:
            parts = set(p.techniques)
            return all(_better(p, q) for c, q in self.found.items() if set(c) < parts)

        better = [p for p in applying(predictions) if adds(p)]
        self.found.update({p.techniques: p for p in better})
        return better


def single_techniques() -> list[Technique]:
    """Return every technique for one machine, with the settings worth trying."""
    kinds = technique.registry().values()
    return [part for k in kinds if not k.traits.is_distributed for part in technique.variants(k)]


def _saves(p: Predicted) -> bool:
    before, after = p.memory
    saves_memory = after < before * (1 - _USEFUL) and p.ratio < _MAX_RATIO
    return saves_memory or p.ratio < 1 - _USEFUL


def _better(p: Predicted, q: Predicted) -> bool:
    """Whether `p` saves enough time or memory over `q` to be worth another part."""
    return any(a < b * (1 - _WORTH_A_PART) for a, b in zip(_costs(p), _costs(q), strict=True))


def _beaten(p: Predicted, others: Iterable[Predicted]) -> bool:
    """Whether another prediction or the baseline is about as good in everything.

    Among predictions that are about equal, the one with the fewest parts is not beaten.
    """
    if p.ratio >= 1 and p.memory[1] >= p.memory[0]:
        return True
    for q in others:
        if q is p or _risk(q) > _risk(p) or _better(p, q):
            continue
        more_parts = len(q.techniques) - len(p.techniques)
        if _better(q, p) or (more_parts, _risk(q), q.ratio) < (0, _risk(p), p.ratio):
            return True
    return False


def _costs(p: Predicted) -> tuple[float, float]:
    return p.ratio, float(p.memory[1])


def _worth_training(p: Prediction, bound: float | None = None) -> Prediction:
    """Return `p`, or a refusal if it needs training and gains too little for that.

    Args:
        bound: the maximum speed-up, if nothing was measured.
    """
    if not isinstance(p, Predicted) or not p.needs_training:
        return p
    if p.speedup >= WORTH_TRAINING or p.saved > WORTH_TRAINING - 1:
        return p
    speedup = f"{p.speedup:.2f}x" if bound is None else f"at most {bound:.2f}x"
    reason = (
        f"predicted {speedup} and {format_percent(-p.saved, signed=True)} memory are too little "
        "for a model that has to be trained again"
    )
    return Refused(
        p.technique, p.baseline_ns, reason, p.quality, p.memory[0], techniques=p.techniques
    )


def _risk(p: Predicted) -> int:
    return _RISK[p.quality.kind] if p.quality is not None else max(_RISK.values())


def _best(candidates: Sequence[Predicted], *, needed: bool) -> Predicted | None:
    """Return the fastest that is worth it, preferably without training.

    A technique that keeps a limit (`needed`) is chosen even if it makes the step slower.
    """
    # An inconclusive prediction without an expected gain is not a choice.
    useful = [p for p in candidates if p.speedup >= WORTH_IT or p.saved > _USEFUL]
    for verdict in (PredictionVerdict.WORTH_IT, PredictionVerdict.INCONCLUSIVE):
        for p in _without_training(useful) or useful:
            if p.verdict is verdict:
                return p
    return (_without_training(candidates) or candidates)[0] if needed and candidates else None


def _without_training(candidates: Sequence[Predicted]) -> list[Predicted]:
    return [p for p in candidates if _risk(p) < _RISK[QualityKind.NEEDS_TRAINING]]
