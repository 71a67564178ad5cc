"""Simulations of techniques and combinations for a report.

A page without a server cannot simulate, so the settings of its switches are simulated when it is
written: first single techniques, then combinations of those that apply, the most promising first,
up to a number and a time limit. The page marks all others as not simulated.
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

_MAX_COMBINATIONS = 96
_MAX_PARTS = 4
# Combinations that are simulated together, between checks of the time limit.
_CHUNK = 4
_MAX_SECONDS = 30.0
# On more tasks, simulating all techniques takes minutes; only requested ones are simulated.
_MAX_TASKS = 50_000


@dataclass(frozen=True)
class WhatIfs:
    """Simulated techniques of a report.

    Attributes:
        state: ``ready``, or ``skipped`` or ``failed`` with the `reason`.
        predictions: those that apply, fastest first.
        refused: those that do not apply, with the reason.
        ranked: names shown in the ranking; others are only used by the switchboard.
        front: names that are Pareto-optimal in time, memory and numerics.
        best: the first choice.
        failed: techniques whose simulation failed, with the error.
        combinations: numbers of simulated and possible combinations of up to four parts.
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
    """Simulate `techniques` (by default all installed ones) and combinations.

    Errors of a technique are part of the result.

    Raises:
        UsageError: a technique spec is invalid.
    """
    named = [technique.parse(text) for text in techniques]
    if not len(graph):
        return WhatIfs("skipped", "the graph has no tasks")
    if not techniques and len(graph) > _MAX_TASKS:
        reason = (
            f"simulating every technique on {len(graph)} tasks takes minutes; "
            "name some: slipstream report RUN --technique amp:bf16"
        )
        return WhatIfs("skipped", reason)
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))

    def simulate(combinations: Sequence[Combination]) -> list[Prediction]:
        return predict(graph, combinations, durations=durations, widen=widen, report=report)

    failed: list[tuple[str, str]] = []
    front: frozenset[str] = frozenset()
    best = None
    if named:
        predictions, failed = _one_by_one(simulate, named)
    else:
        try:
            advice = advise(graph, durations=durations, widen=widen, report=report)
            predictions, front = list(advice.predictions), advice.front
            best = advice.best.technique if advice.best is not None else None
        except Exception:
            # A defect of one technique must not hide the others.
            predictions, failed = _one_by_one(simulate, [(kind,) for kind in single_techniques()])
    applying = {p.techniques: p for p in predictions if p.why_not is None}
    refused = tuple(p for p in predictions if p.why_not is not None)
    ranked = tuple(p.technique for p in sorted(applying.values(), key=lambda p: p.ratio))
    if not predictions and failed:
        return WhatIfs("failed", failed[0][1], failed=tuple(failed))
    candidates = _combinations([p for p in applying.values() if len(p.techniques) == 1])
    new = [candidate for candidate in candidates if candidate not in applying]
    more, tried = _within_time(simulate, new, report)
    joined = len(candidates) - len(new)
    everything = sorted([*applying.values(), *more], key=lambda p: p.ratio)
    return WhatIfs(
        predictions=tuple(everything),
        refused=refused,
        ranked=ranked,
        front=front,
        best=best,
        failed=tuple(failed),
        combinations=(tried + joined, len(candidates)),
    )


def _one_by_one(
    simulate: Callable[[Sequence[Combination]], list[Prediction]],
    combinations: Sequence[Combination],
) -> tuple[list[Prediction], list[tuple[str, str]]]:
    """Return predictions, simulated together if possible, and the errors of the others."""
    try:
        return simulate(combinations), []
    except Exception:
        predictions: list[Prediction] = []
        failed: list[tuple[str, str]] = []
        for combination in combinations:
            name = technique.combination_name(combination)
            try:
                predictions += simulate([combination])
            except SlipstreamError as error:
                failed.append((name, error.what))
            except Exception as error:
                failed.append((name, f"{type(error).__name__}: {error}"))
        return predictions, failed


def _combinations(singles: Sequence[Prediction]) -> list[Combination]:
    """Return combinations of up to four techniques, the most promising of each size first."""
    parts = [p for p in singles if math.isfinite(p.ratio) and p.ratio > 0]
    candidates: dict[Combination, None] = {}
    for size in range(2, _MAX_PARTS + 1):
        groups = sorted(
            itertools.combinations(parts, size),
            # Another batch size comes last, since its new shapes take long to time.
            key=lambda group: (
                any(p.samples[0] != p.samples[1] for p in group),
                math.prod(_promise(p) for p in group),
            ),
        )
        for group in groups:
            try:
                combination = technique.combination(t for p in group for t in p.techniques)
            except UsageError:
                continue
            candidates[combination] = None
    return list(candidates)


def _promise(p: Prediction) -> float:
    """Return the smaller of the ratios of time and memory."""
    before, after = p.memory
    return min(p.ratio, after / before if before and after else 1.0)


def _within_time(
    simulate: Callable[[Sequence[Combination]], list[Prediction]],
    combinations: Sequence[Combination],
    report: Report,
) -> tuple[list[Prediction], int]:
    """Return predictions within the limits of number and time, and how many were tried."""
    begin = time.monotonic()
    predictions: list[Prediction] = []
    combinations = combinations[:_MAX_COMBINATIONS]
    for at in range(0, len(combinations), _CHUNK):
        if time.monotonic() - begin > _MAX_SECONDS:
            return predictions, at
        chunk = combinations[at : at + _CHUNK]
        report(f"trying combinations {at + 1} to {at + len(chunk)} of {len(combinations)}")
        simulated, _ = _one_by_one(simulate, chunk)
        predictions += [p for p in simulated if p.why_not is None]
    return predictions, len(combinations)
