"""What-ifs of a report: every technique, and as many combinations as a page can carry.

A page without a server cannot simulate, so what its switches may be set to is simulated when it
is written: single techniques first, then combinations of those that apply, the most promising
first, until there are enough of them or the time is up. The page says so of all others.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import SlipstreamError, UsageError
from slipstream.graph import Graph
from slipstream.verbs.advising import advise, single_techniques
from slipstream.verbs.combining import Combination
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Prediction

Widen = Callable[[float, float, float], tuple[float, float]]
Report = Callable[[str], None]

_MOST_COMBINATIONS = 96
_MOST_PARTS = 4
# Combinations that are simulated together; the clock is looked at in between.
_CHUNK = 4
_MOST_SECONDS = 30.0
# Simulating every technique on more tasks than this takes minutes: then only what is asked for.
_MOST_TASKS = 50_000


@dataclass(frozen=True)
class WhatIfs:
    """What was simulated for a report.

    Attributes:
        state: ``ready``; ``skipped`` or ``failed`` with the `reason`.
        predictions: by name, those that apply; the cheapest sample first.
        refused: what does not apply, with its reason.
        ranked: names shown in the ranking; others only answer the switchboard.
        front: names that nothing else beats in time, memory and numbers at once.
        best: the one to try first.
        failed: techniques whose simulation itself went wrong, and how.
        combinations: how many were simulated, of how many there are of up to four parts.
    """

    state: str = "ready"
    reason: str = ""
    predictions: tuple[Prediction, ...] = ()
    refused: tuple[Prediction, ...] = ()
    ranked: tuple[str, ...] = ()
    front: frozenset[str] = frozenset()
    best: str | None = None
    failed: tuple[tuple[str, str], ...] = ()
    combinations: tuple[int, int] = (0, 0)


def what_ifs(
    graph: Graph,
    techniques: Sequence[str] = (),
    *,
    durations: Durations | None = None,
    widen: Widen | None = None,
    report: Report = lambda line: None,
) -> WhatIfs:
    """Simulate `techniques` (all that are installed when none is named) and combinations.

    What goes wrong in a technique is part of the answer, not the end of it.

    Raises:
        UsageError: a name or setting that is not in the grammar.
    """
    named = [technique.parse(text) for text in techniques]
    if not len(graph):
        return WhatIfs("skipped", "the graph has no tasks")
    if not techniques and len(graph) > _MOST_TASKS:
        reason = (
            f"simulating every technique on {len(graph)} tasks takes minutes; "
            "name the ones you want: slipstream report RUN --technique amp:bf16"
        )
        return WhatIfs("skipped", reason)
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))

    def ask(combinations: Sequence[Combination]) -> list[Prediction]:
        return predict(graph, combinations, durations=durations, widen=widen, report=report)

    failed: list[tuple[str, str]] = []
    front: frozenset[str] = frozenset()
    best = None
    if named:
        asked, failed = _one_by_one(ask, named)
    else:
        try:
            advice = advise(graph, durations=durations, widen=widen, report=report)
            asked, front = list(advice.predictions), advice.front
            best = advice.best.technique if advice.best is not None else None
        except Exception:
            # One technique's defect must not hide the others.
            asked, failed = _one_by_one(ask, [(one,) for one in single_techniques()])
    applying = {p.techniques: p for p in asked if p.why_not is None}
    refused = tuple(p for p in asked if p.why_not is not None)
    ranked = tuple(p.technique for p in sorted(applying.values(), key=lambda p: p.ratio))
    if not asked and failed:
        return WhatIfs("failed", failed[0][1], failed=tuple(failed))
    wanted = _combinations([p for p in applying.values() if len(p.techniques) == 1])
    more, known = _within_time(ask, [one for one in wanted if one not in applying], report)
    joined = sum(one in applying for one in wanted)
    everything = sorted([*applying.values(), *more], key=lambda p: p.ratio)
    return WhatIfs(
        predictions=tuple(everything),
        refused=refused,
        ranked=ranked,
        front=front,
        best=best,
        failed=tuple(failed),
        combinations=(known + joined, len(wanted)),
    )


def _one_by_one(
    ask: Callable[[Sequence[Combination]], list[Prediction]], combinations: Sequence[Combination]
) -> tuple[list[Prediction], list[tuple[str, str]]]:
    """Predictions, in one go if possible, and what went wrong with the others."""
    try:
        return ask(combinations), []
    except Exception:
        predictions: list[Prediction] = []
        failed: list[tuple[str, str]] = []
        for one in combinations:
            name = technique.combination_name(one)
            try:
                predictions += ask([one])
            except SlipstreamError as error:
                failed.append((name, error.what))
            except Exception as error:
                failed.append((name, f"{type(error).__name__}: {error}"))
        return predictions, failed


def _combinations(singles: Sequence[Prediction]) -> list[Combination]:
    """Combinations of up to four singles, the most promising of each size first."""
    parts = [p for p in singles if math.isfinite(p.ratio) and p.ratio > 0]
    wanted: dict[Combination, None] = {}
    for size in range(2, _MOST_PARTS + 1):
        groups = sorted(
            itertools.combinations(parts, size),
            # Another batch has other shapes, which take long to be timed: those come last.
            key=lambda group: (
                any(p.samples[0] != p.samples[1] for p in group),
                math.prod(_promise(p) for p in group),
            ),
        )
        for group in groups:
            try:
                wanted[technique.combination(part for p in group for part in p.techniques)] = None
            except UsageError:
                # They cannot stand together.
                continue
    return list(wanted)


def _promise(p: Prediction) -> float:
    """Below one for what saves time or memory, whichever it saves more of."""
    before, after = p.memory
    return min(p.ratio, after / before if before and after else 1.0)


def _within_time(
    ask: Callable[[Sequence[Combination]], list[Prediction]],
    combinations: Sequence[Combination],
    report: Report,
) -> tuple[list[Prediction], int]:
    """Predictions of as many as there is room and time for, and how many were looked at."""
    begin = time.monotonic()
    predictions: list[Prediction] = []
    combinations = combinations[:_MOST_COMBINATIONS]
    for at in range(0, len(combinations), _CHUNK):
        if time.monotonic() - begin > _MOST_SECONDS:
            return predictions, at
        chunk = combinations[at : at + _CHUNK]
        report(f"trying combinations {at + 1} to {at + len(chunk)} of {len(combinations)}")
        asked, _ = _one_by_one(ask, chunk)
        predictions += [p for p in asked if p.why_not is None]
    return predictions, len(combinations)
