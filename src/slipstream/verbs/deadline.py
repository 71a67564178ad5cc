"""Choose what to micro-benchmark before a deadline: the calls that matter most come first.

A few dozen calls account for nine tenths of a step. These are timed with care, most of the rest
roughly, and the last fiftieth of the step not at all: its timing would hardly change a rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.durations import Durations, TimingRequest
from slipstream.durations.roofline import probes
from slipstream.durations.work import work
from slipstream.graph import Graph
from slipstream.provenance import Provenance
from slipstream.verbs.results import Predicted, Prediction, Refused
from slipstream.verbs.speedup_bounds import SpeedupBound

# Shares of the recorded step: calls timed roughly or not at all, and calls not timed.
_ROUGH_SHARE, _SKIPPED_SHARE = 0.2, 0.02
# Largest share of a shown prediction that may be assumed because time ran out.
_MAX_ASSUMED_SHARE = 0.05
MORE_TIME = "--time-limit 5min"
_MORE_TIME = f"{MORE_TIME}, or the same command again, measures more"
# Reserved for finishing the current batch and combinations, ranking and printing, and for
# measurements on two threads, which take twice as long.
_FINISH_S, _FINISH_SHARE = 7.0, 0.12
# Reserved for printing the measurement of the first choice.
_PRINTING_S = 1.0
# Target duration of the measurement of the first choice, after both sides started, and the
# shortest one that is worth starting.
CHECK_S, MIN_CHECK_S = 10.0, 3.0
# Largest share of the time after the recording that is reserved for it.
_CHECK_SHARE = 0.5
# Largest share of the analysis time for the page faults of other launches.
FOR_LAUNCHES = 0.3


@dataclass(frozen=True)
class Schedule:
    """Deadlines of the parts of an `advise`, as times of `time.monotonic`.

    Attributes:
        analysis: end of timing operators and predicting.
        check: end of measuring the first choice.
        starting_s: estimated time to start both sides, in seconds.
    """

    analysis: float
    check: float
    starting_s: float

    @property
    def without_check(self) -> float:
        """End of timing operators and predicting if nothing is worth measuring."""
        return max(self.analysis, self.check + _PRINTING_S - _FINISH_S)

    @classmethod
    def of(cls, began: float, recorded: float, limit_s: float, *, check: bool) -> Schedule:
        """Split `limit_s` seconds; at least half of them remain after the recording.

        Args:
            began, recorded: start of the command and end of its recording, by `time.monotonic`.
            check: whether to reserve time to measure the first choice, if it suffices.
        """
        end = max(began + limit_s, recorded + limit_s / 2)
        analysis = end - min(_FINISH_S, _FINISH_SHARE * limit_s)
        # Recording starts the program once, and takes about as long again for its steps.
        starting_s = recorded - began
        reserved_s = min(starting_s + CHECK_S, _CHECK_SHARE * (end - recorded))
        if not check or reserved_s < starting_s + MIN_CHECK_S:
            reserved_s = 0.0
        return cls(analysis - reserved_s, end - _PRINTING_S, starting_s)


def measure_in_time(
    graph: Graph,
    bounds: Iterable[SpeedupBound],
    durations: Durations,
    until: float,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Micro-benchmark the calls that these techniques require, as far as time permits.

    A call's weight is the time the step spends in it, recorded or edited by a technique; calls of
    neither step, which only a technique's own model needs, weigh most. The machine's limits, from
    which unmeasured calls are estimated, come first, then techniques with the fewest calls.

    Args:
        until: time of `time.monotonic` after which no further batch starts.

    Returns:
        the number of operators that were not measured.
    """
    recorded = _time_by_call(graph)
    careful, hardly = _lightest(recorded, _ROUGH_SHARE), _lightest(recorded, _SKIPPED_SHARE)
    heavy, light = [], []
    for bound in bounds:
        after = bound.prediction.graph if isinstance(bound.prediction, Predicted) else None
        edited = _time_by_call(after) if after is not None else {}
        parts = bound.prediction.techniques if bound.missing else ()
        questions = [
            TimingRequest.of(call) for part in parts for call in part.required_timings(graph)
        ]
        # An unmeasured call may be in the edited step with a time of zero.
        weights = [
            max(recorded.get(call.call.key, 0.0), edited.get(call.call.key, 0.0)) or math.inf
            for call in questions
        ]
        weighed = [questions[i] for i in sorted(range(len(questions)), key=lambda i: -weights[i])]
        weights.sort(reverse=True)
        carefully, measured = (
            sum(weight >= limit for weight in weights) for limit in (careful, hardly)
        )
        heavy.append(weighed[:carefully])
        light.append(weighed[carefully:measured])
    costs = (work(call) for call in graph.calls)
    dtypes = frozenset(cost.dtype for cost in costs if cost is not None and cost.flops)
    first = [*map(TimingRequest.of, probes(dtypes)), *itertools.chain(*sorted(heavy, key=len))]
    then = [*itertools.chain(*sorted(light, key=len))]
    durations.measure(first, report, until)
    durations.measure(then, report, until, roughly=True)
    return len(durations.missing([*first, *then]))


def _lightest(times_ns: Mapping[str, float], share: float) -> float:
    """Return the least time of the calls that make up all but `share` of the step, in ns."""
    ordered = np.sort(np.fromiter(times_ns.values(), float, len(times_ns)))
    lighter = ordered.cumsum() <= share * ordered.sum()
    return float(ordered[~lighter].min(initial=math.inf))


def refuse_if_assumed(graph: Graph, p: Prediction, durations: Durations) -> Prediction:
    """Return `p`, or a refusal if too much of it is assumed because time ran out."""
    if not isinstance(p, Predicted) or p.shares.get(Provenance.ASSUMED, 0.0) <= _MAX_ASSUMED_SHARE:
        return p
    missing = len(
        durations.missing(call for part in p.techniques for call in part.required_timings(graph))
    )
    if not missing:
        return p
    reason = f"there was no time to measure {missing:,} operator{'s' * (missing > 1)}; {_MORE_TIME}"
    return Refused(
        p.technique, p.baseline_ns, reason, p.quality, p.memory[0], True, p.techniques
    )  # fmt: skip


def relies_on_guesses(p: Prediction, parts: Iterable[Predicted]) -> bool:
    """Whether a combination relies on unmeasured operators more than its parts do."""
    theirs = max((part.shares.get(Provenance.ASSUMED, 0.0) for part in parts), default=0.0)
    return p.shares.get(Provenance.ASSUMED, 0.0) > theirs + _MAX_ASSUMED_SHARE


def unmeasured_note(count: int) -> str:
    """Return a note on operators that were not measured; empty if `count` is 0."""
    if not count:
        return ""
    measured = "operators were not measured" if count > 1 else "operator was not measured"
    return f"for lack of time, {count:,} {measured} and intervals are wider: {_MORE_TIME}"


def _time_by_call(graph: Graph) -> dict[str, float]:
    tasks = graph.tasks
    calling = tasks.call >= 0
    task_times = np.bincount(tasks.call[calling], tasks.duration_ns[calling], len(graph.calls))
    times_ns: dict[str, float] = {}
    for call, time_ns in zip(graph.calls, task_times.tolist(), strict=True):
        times_ns[call.key] = times_ns.get(call.key, 0.0) + time_ns
    return times_ns
