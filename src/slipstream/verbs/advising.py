"""advise: every technique and the combinations that help, and which of them are worth having.

A combination grows from techniques that help on their own, a beam at a time: all of it is edits
of one graph, so that a hundred of them cost seconds. What remains is the Pareto front over time
per sample, memory and what happens to the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream import technique
from slipstream.durations import Durations
from slipstream.graph import Graph, need_graph
from slipstream.tables import Table
from slipstream.technique import QualityKind, Technique
from slipstream.units import format_percent
from slipstream.verbs.checking import Check
from slipstream.verbs.combining import Combination, joined, search_combinations
from slipstream.verbs.deadline import (
    MORE_TIME,
    as_far_as_known,
    estimated_in_words,
    is_guessed,
    measure_in_time,
)
from slipstream.verbs.goals import Goal
from slipstream.verbs.outlooks import SpeedupBound, first_look, format_bound
from slipstream.verbs.predicting import Folded, predict
from slipstream.verbs.request import command_for
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
from slipstream.workload import Workload

# A part of a combination must save this share of time or memory on its own.
_USEFUL = 0.01
# And take no longer than so many steps: memory at a higher price is bought alone if at all.
_DEAREST = 2.0
# A larger combination must be better than a smaller one by this share to be worth its trouble.
_WORTH_A_PART = 0.01
_BEAM = 6
_MOST_PARTS = 3
# What combinations ask beyond the single techniques is measured for so long, the rest estimated;
# before a deadline for less.
_LONGEST_MEASURING_S, _MEASURING_IN_TIME_S = 12.0, 6.0
# Of the time that is left for single techniques and combinations together.
_FOR_COMBINATIONS = 0.25
# Techniques that need at most this many operators are timed first, in this share of the time.
_FEW, _FOR_FEW = 8, 0.4
# Combinations that are predicted between two looks at the clock.
_AT_ONCE = 8
_RISK = {kind: number for number, kind in enumerate(QualityKind)}


@dataclass(frozen=True)
class Advice:
    """What might be done with a step.

    Attributes:
        predictions: of single techniques and combinations that apply, the cheapest sample first;
            then what does not apply, with the reason.
        front: names of those that nothing else beats in time per sample, memory and quality
            at once.
        best: the first choice: of those that meet the goals the cheapest, or None when none is
            worth it or the goals cannot be met.
        second: the first choice without `best`.
        goals: all that were asked for.
        needed: goals that the step does not meet unmodified.
        unmet: of these, those that nothing meets; all of them when no step meets all.
        seen, combinations: combinations that were predicted, and how many there are of the
            techniques that help alone; 0 where they were not looked for.
        estimated: operators that single techniques asked for and there was no time to measure.
        not_timed: by technique that there was no time for: the speed-up that it can reach at most,
            None if that has no bound.
        check: the first choice, measured next to the baseline.
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
        """As results are printed."""
        return {
            "predictions": [p.to_json() for p in self.predictions],
            "pareto_front": sorted(self.front),
            "best": self.best.technique if self.best is not None else None,
            "combinations": {"seen": self.seen, "all": self.combinations},
            "estimated": self.estimated,
            "not_timed": [
                {"technique": name, "speedup_at_most": most}
                for name, most in self.not_timed.items()
            ],
            "check": self.check and self.check.to_json(),
            "goals": [
                {
                    "goal": str(one),
                    "holds_as_it_is": one not in self.needed,
                    "can_be_met": one not in self.unmet,
                }
                for one in self.goals
            ],
        }

    def table(
        self,
        graph: Graph,
        script: Workload | None,
        past: str = "",
        *,
        everything: bool = True,
        time_limit: str = "",
    ) -> Table:
        """All predictions for the recorded step, and what to do with them.

        Args:
            script: the plain script to be measured next; None for a function.
            past: how predictions on this machine turned out before, in a sentence.
            everything: whether to list what does not apply, with the reasons.
            time_limit: that the advice was to be given in, as the user wrote it.
        """
        by_hand = [] if script is None else self._by_hand(script)
        lines = (
            past,
            PARETO_NOTE if self.front else "",
            *map(self._about, self.goals),
            f"prove needs a function for {', '.join(by_hand)}: the edit finds no place in the "
            "script's loop, and `slipstream apply` shows the lines to write"
            if by_hand
            else "",
            self._why_not_the_largest(),
            estimated_in_words(self.estimated),
            f"{self.seen:,} of {self.combinations:,} combinations of what helps were predicted"
            if self.combinations
            else "",
            self._next(graph, by_hand),
        )
        table = prediction_table(
            graph, self.predictions, *lines, marked=self.front,
            reasons=None if everything else self._short_reasons(),
        )  # fmt: skip
        return replace(table, lead=self._lead(time_limit))

    def _lead(self, time_limit: str) -> list[str]:
        """The first choice as predicted and measured, and what might be better and is unknown."""
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
            bounds = ", ".join(
                f"{name} ({'no bound' if most is None else f'up to {format_bound(most)}'})"
                for name, most in promising.items()
            )
            limit = f" in {time_limit}" if time_limit else ""
            lines.append(f"not timed{limit}, could be better: {bounds}; {MORE_TIME} times them")
        return lines

    def _promising(self) -> dict[str, float | None]:
        """Return the techniques not timed that might beat the first choice, largest bound first."""
        least = self.best.speedup if self.best is not None else WORTH_IT
        promising = {
            name: most for name, most in self.not_timed.items() if most is None or most > least
        }
        return dict(sorted(promising.items(), key=lambda item: -(item[1] or 0.0)))

    def _short_reasons(self) -> list[str]:
        """Count what does not apply; name what cannot be predicted on a busy machine."""
        others = [p for p in refused(self.predictions) if p.technique not in self.not_timed]
        lines = [p.in_words for p in others if p.busy]
        if behind := len(self.not_timed) - len(self._promising()):
            lines.append(
                f"{behind} more {'were' if behind > 1 else 'was'} not timed, and cannot be better"
            )
        if count := sum(not p.busy for p in others):
            lines.append(
                f"{count} technique{'s do' if count > 1 else ' does'} not apply here: --all lists "
                f"{'them with their reasons' if count > 1 else 'it with its reason'}"
            )
        return lines

    def _about(self, goal: Goal) -> str:
        """Whether the goal holds already, with which technique, or not at all."""
        if goal.limit is None:
            return "cost: no price is known here, so it goes with the time per sample"
        if goal not in self.needed:
            return f"{goal}: holds as it is"
        if goal in self.unmet:
            return f"{goal}: nothing here is predicted to reach it"
        return f"{goal}: predicted to hold with {self.best.technique}" if self.best else ""

    def _by_hand(self, script: Workload) -> list[str]:
        """What changes a script's loop and finds no place in it, so that `prove` cannot run it."""
        return [
            p.technique
            for p in applying(self.predictions)
            if technique.not_in_script(p.techniques, script) is not None
        ]

    def _next(self, graph: Graph, by_hand: Collection[str]) -> str:
        """The command to run next; empty if nothing is worth it."""
        following = self.best
        if self.check is not None and self.check.worth_it is False:
            following = self.second
        if following is None:
            return ""
        verb = "apply" if following.technique in by_hand else "prove"
        return f"next: {command_for(verb, graph, following.technique)}"

    def _why_not_the_largest(self) -> str:
        """What the best has and those that gain more lack; empty where none gains more."""
        best = self.best
        if best is None:
            return ""
        above = [
            p
            for p in applying(self.predictions)
            if p.technique in self.front and p.ratio < best.ratio
        ]
        reasons = []
        if any(not goal.met_by(p) for p in above for goal in self.goals):
            reasons.append("reaches the goal")
        if not best.trains_anew and any(p.trains_anew for p in above):
            reasons.append("needs no other training")
        if best.verdict is PredictionVerdict.WORTH_IT and any(
            p.verdict is not best.verdict for p in above
        ):
            reasons.append("is certain")
        if not reasons:
            return ""
        return f"{best.technique} is first: the largest gain that {' and '.join(reasons)}"


def advise(
    graph: Graph,
    *,
    goals: Sequence[Goal] = (),
    combinations: bool = True,
    durations: Durations | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    report: Callable[[str], None] = lambda line: None,
    show: Callable[[Sequence[SpeedupBound]], None] = lambda outlooks: None,
    settle: Callable[[Graph], Graph] = lambda graph: graph,
    until: float = math.inf,
) -> Advice:
    """Predict every installed technique and the useful combinations of them.

    Args:
        goals: limits that the best must keep.
        combinations: whether to look for them.
        durations, widen, report: as `slipstream.verbs.predicting.predict` takes them.
        show: called with what is known of each technique at once, before the first of their
            operators is micro-benchmarked; not called when all of them were before.
        settle: called after that, before a deadline once techniques that need few operators are
            timed; returns the graph with what takes too long to record before.
        until: of `time.monotonic`, by when it is to be done, within a second or two: operators that
            most of the step hangs on are measured first, what is left is estimated, and
            combinations are tried as long as there is time, the most promising first.

    Raises:
        SlipstreamError: an installed technique cannot be loaded.
        InvalidArgumentError: `graph` is a path, or anything else that is no graph.
    """
    need_graph(graph)
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))
    folded: Folded = {}
    tried: set[Combination] = set()
    in_time = until < math.inf
    seen = size = estimated = 0

    def ask(combinations: Sequence[Combination], measuring_s: float = math.inf) -> list[Prediction]:
        return predict(
            graph, combinations, durations=durations, widen=widen, measuring_s=measuring_s,
            folded=folded, report=report,
        )  # fmt: skip

    def try_together(combinations: Sequence[Combination]) -> list[Prediction]:
        """As many as there is time for."""
        at_once = _AT_ONCE if in_time else max(len(combinations), 1)
        told: list[Prediction] = []
        for begin in range(0, len(combinations), at_once):
            now = time.monotonic()
            if now >= until:
                break
            some = combinations[begin : begin + at_once]
            # What the single techniques left is more telling than what comes on top of it.
            measuring_s = 0.0 if estimated else min(measured - now, (until - now) / 4)
            told += ask(some, measuring_s)
            tried.update(some)
        if not in_time:
            return told
        return [p for p in told if not is_guessed(p, (known[part,] for part in p.techniques))]

    report("a first look, before anything is measured")
    began = time.monotonic()
    looked = first_look(graph, single_techniques(), durations, widen)
    looked_s = time.monotonic() - began
    if any(one.missing for one in looked):
        show(looked)
    # What cannot be worth it whatever its operators take is not measured.
    undecided = [one for one in looked if not one.decided]
    decided = [_worth_training(one.prediction, one.most) for one in looked if one.decided]
    with durations.measuring():
        if in_time:
            # A few operators decide about some of the largest gains.
            quick = [look for look in undecided if look.missing <= _FEW]
            now = time.monotonic()
            measure_in_time(graph, quick, durations, now + _FOR_FEW * (until - now), report)
        graph = settle(graph)
        if in_time:
            # Simulating them again takes as long as the first look.
            left_s = (until - time.monotonic()) * (1 - _FOR_COMBINATIONS * combinations) - looked_s
            enough = time.monotonic() + left_s
            estimated = measure_in_time(graph, undecided, durations, enough, report)
        singles = ask(
            [one.prediction.techniques for one in undecided], 0.0 if in_time else math.inf
        )
        not_timed: dict[str, float | None] = {}
        if estimated:
            shown = [as_far_as_known(graph, p, durations) for p in singles]
            not_timed = {
                look.prediction.technique: look.most
                for look, before, after in zip(undecided, singles, shown, strict=True)
                if after is not before
            }
            singles = shown
        singles = [*map(_worth_training, singles), *decided]
        known = {p.techniques: p for p in applying(singles)}
        if combinations:
            longest_s = _MEASURING_IN_TIME_S if in_time else _LONGEST_MEASURING_S
            measured = time.monotonic() + longest_s
            parts = [one for one, p in known.items() if _saves(p)]
            tried.update(parts)
            _grow(known, try_together, report)
            more, size = search_combinations(
                parts, known, frozenset(tried), try_together, report, until - time.monotonic()
            )
            seen = min(len(tried), size)
            known.update({p.techniques: p for p in applying(more.values()) if _adds(p, known)})
    ranked = sorted(known.values(), key=lambda p: p.ratio)
    front = frozenset(p.technique for p in ranked if not _beaten(p, ranked))
    # A technique is always shown, a combination only when nothing beats it.
    ranked = [p for p in ranked if p.technique in front or len(p.techniques) == 1]
    step_ns = singles[0].baseline_ns if singles else 0.0
    peak_bytes = max((p.memory[0] for p in singles), default=0)
    needed = tuple(goal for goal in goals if not goal.met(step_ns, peak_bytes))
    meeting = [p for p in ranked if all(goal.met_by(p) for goal in goals)]
    leading = [p for p in meeting if p.technique in front]
    best = _best(leading, needed=bool(needed))
    second = _best([p for p in leading if p is not best], needed=bool(needed))
    # Where each can be met, but no step meets them all, they all stand.
    unmet = tuple(goal for goal in needed if not any(goal.met_by(p) for p in ranked))
    return Advice(
        (*ranked, *refused(singles)), front, best, tuple(goals), needed,
        unmet if unmet or meeting else needed, seen, size, estimated, second, not_timed,
    )  # fmt: skip


def single_techniques() -> list[Technique]:
    """Every technique of one machine with the settings worth trying."""
    kinds = technique.registry().values()
    return [one for k in kinds if not k.traits.is_distributed for one in technique.variants(k)]


def _grow(
    known: dict[Combination, Predicted],
    ask: Callable[[Sequence[Combination]], list[Prediction]],
    report: Callable[[str], None],
) -> None:
    """Add combinations to `known`: useful parts, joined as long as the joint is better."""
    parts = [one for one, p in known.items() if _saves(p)]
    alone = {one: known[one,].ratio for (one,) in parts}

    def promise(joint: Combination) -> float:
        """What it would gain if gains multiplied, the largest first."""
        return math.prod(alone[one] for one in joint)

    beam = list(parts)
    for size in range(2, _MOST_PARTS + 1):
        wanted = {
            joint: None
            for one in beam
            for part in parts
            if (joint := joined(one, part)) is not None and joint not in known
        }
        if not wanted:
            break
        report(f"trying {len(wanted)} combinations of {size} techniques")
        better = [p for p in applying(ask(sorted(wanted, key=promise))) if _adds(p, known)]
        known.update({p.techniques: p for p in better})
        by_time = sorted(better, key=lambda p: p.ratio)[:_BEAM]
        by_memory = sorted(better, key=lambda p: p.memory[1])[:_BEAM]
        beam = list({p.techniques: None for p in (*by_time, *by_memory)})


def _saves(p: Predicted) -> bool:
    before, after = p.memory
    sparing = after < before * (1 - _USEFUL) and p.ratio < _DEAREST
    return sparing or p.ratio < 1 - _USEFUL


def _adds(p: Predicted, known: dict[Combination, Predicted]) -> bool:
    """Whether the combination is better in something than each combination it contains."""
    parts = set(p.techniques)
    inside = [q for one, q in known.items() if set(one) < parts]
    return all(_better(p, q) for q in inside)


def _better(p: Predicted, q: Predicted) -> bool:
    """Whether `p` saves time or memory against `q` that is worth another part."""
    return any(a < b * (1 - _WORTH_A_PART) for a, b in zip(_costs(p), _costs(q), strict=True))


def _beaten(p: Predicted, others: Iterable[Predicted]) -> bool:
    """Whether another one, or the step as it is, is about as good in everything.

    And better in something; where two are about equal, the one of fewer parts stays.
    """
    if p.ratio >= 1 and p.memory[1] >= p.memory[0]:
        return True
    for q in others:
        if q is p or _risk(q) > _risk(p) or _better(p, q):
            continue
        simpler = len(q.techniques) - len(p.techniques)
        if _better(q, p) or (simpler, _risk(q), q.ratio) < (0, _risk(p), p.ratio):
            return True
    return False


def _costs(p: Predicted) -> tuple[float, float]:
    return p.ratio, float(p.memory[1])


def _worth_training(p: Prediction, most: float | None = None) -> Prediction:
    """`p`, or its refusal where it is another model to train and gains too little for that.

    Args:
        most: the speed-up it is below, where nothing was measured for more.
    """
    if not isinstance(p, Predicted) or not p.trains_anew:
        return p
    if p.speedup >= WORTH_TRAINING or p.saved > WORTH_TRAINING - 1:
        return p
    speedup = f"{p.speedup:.2f}x" if most is None else f"at most {most:.2f}x"
    reason = (
        f"{speedup} and {format_percent(-p.saved, signed=True)} memory are predicted: too "
        "little for a model that has to be trained anew"
    )
    return Refused(
        p.technique, p.baseline_ns, reason, p.quality, p.memory[0], techniques=p.techniques
    )


def _risk(p: Predicted) -> int:
    return _RISK[p.quality.kind] if p.quality is not None else max(_RISK.values())


def _best(candidates: Sequence[Predicted], *, needed: bool) -> Predicted | None:
    """The cheapest that is worth it and, if there is such a one, needs no training anew.

    A limit that only a technique makes hold (`needed`) is reason enough for it, at some cost too.
    """
    # What is undecided and predicted neither to gain nor to save anything is no choice.
    useful = [p for p in candidates if p.speedup >= WORTH_IT or p.saved > _USEFUL]
    for verdict in (PredictionVerdict.WORTH_IT, PredictionVerdict.INCONCLUSIVE):
        for p in _safe(useful) or useful:
            if p.verdict is verdict:
                return p
    return (_safe(candidates) or candidates)[0] if needed and candidates else None


def _safe(candidates: Sequence[Predicted]) -> list[Predicted]:
    """Return those that need no training from scratch."""
    return [p for p in candidates if _risk(p) < _RISK[QualityKind.NEEDS_TRAINING]]
