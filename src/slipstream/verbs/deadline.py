"""What is micro-benchmarked before a deadline: what most of the step hangs on comes first.

A few dozen of a step's calls make up nine tenths of it. These are timed with care, what makes up
the rest only roughly, and its last fiftieth not at all: whatever that took, it would hardly change
a rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.durations import Durations, Question
from slipstream.durations.roofline import probes
from slipstream.durations.work import work
from slipstream.graph import Graph
from slipstream.provenance import Provenance
from slipstream.verbs.outlooks import Outlook
from slipstream.verbs.results import Predicted, Prediction, Refused

# Of the recorded step: what calls timed roughly, and those not timed, make up together.
_ROUGHLY, _HARDLY = 0.2, 0.02
# Of the predicted step: what may be assumed, for want of time, in a prediction that is shown.
_MOST_ASSUMED = 0.05
MORE_TIME = "--time-limit 5min"
_MORE_TIME = f"{MORE_TIME}, or asking again, measures more"
# To end the batch and the combinations under way, to rank all, and to print it; and for what is
# measured on two threads, which takes twice its seconds.
_ENDING_S, _ENDING = 7.0, 0.12
# To print what the first choice was measured at.
_PRINTING_S = 1.0
# The first choice is measured for about so long, after both sides were started; for less if there
# is little time, but not for less than the second number.
CHECK_S, _SHORTEST_CHECK_S = 10.0, 3.0
# Of the time after the recording, the largest share that is reserved for that.
_FOR_CHECK = 0.5
# Of the time that is left for the analysis, the largest share for page faults of other launches.
FOR_LAUNCHES = 0.3


@dataclass(frozen=True)
class Schedule:
    """When the parts of an `advise` are to be done, of `time.monotonic`.

    Attributes:
        analysis: timing operators and predicting.
        check: measuring the first choice; None if there is too little time for that.
        starting_s: an estimate of what starting both sides takes, in seconds.
    """

    analysis: float
    check: float | None
    starting_s: float

    @classmethod
    def of(cls, began: float, recorded: float, limit_s: float, *, check: bool) -> Schedule:
        """Share out `limit_s` seconds; half of them at least remain after the recording.

        Args:
            began, recorded: of `time.monotonic`: the command, and the end of its recording.
            check: whether the first choice is to be measured.
        """
        end = max(began + limit_s, recorded + limit_s / 2)
        analysis = end - min(_ENDING_S, _ENDING * limit_s)
        # A recording starts the program once, and takes as long again for its steps.
        starting_s = recorded - began
        reserved_s = min(starting_s + CHECK_S, _FOR_CHECK * (end - recorded))
        if not check or reserved_s < starting_s + _SHORTEST_CHECK_S:
            return cls(analysis, None, starting_s)
        return cls(analysis - reserved_s, end - _PRINTING_S, starting_s)


def measure_in_time(
    graph: Graph,
    outlooks: Iterable[Outlook],
    durations: Durations,
    until: float,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Micro-benchmark what these techniques ask, as far as there is time.

    A call weighs as much as the step spends in it, recorded or edited by a technique. One that is
    in no step, which a technique's own model rests on, weighs most. Techniques that ask least come
    first, so that most of them are known; and before all the machine's limits, by which the rest
    is estimated.

    Args:
        until: of `time.monotonic`, when no further batch is begun.

    Returns:
        how many operators there was no time for.
    """
    recorded = _time_by_call(graph)
    careful, hardly = _lightest(recorded, _ROUGHLY), _lightest(recorded, _HARDLY)
    heavy, light = [], []
    for one in outlooks:
        after = one.prediction.graph if isinstance(one.prediction, Predicted) else None
        edited = _time_by_call(after) if after is not None else {}
        parts = one.prediction.techniques if one.missing else ()
        asked = [Question.of(call) for part in parts for call in part.questions(graph)]
        # What nothing is known of yet may have been put in with no time at all.
        weights = [
            max(recorded.get(call.call.key, 0.0), edited.get(call.call.key, 0.0)) or math.inf
            for call in asked
        ]
        weighed = [asked[i] for i in sorted(range(len(asked)), key=lambda i: -weights[i])]
        weights.sort(reverse=True)
        most, all_but_hardly = (
            sum(weight >= least for weight in weights) for least in (careful, hardly)
        )
        heavy.append(weighed[:most])
        light.append(weighed[most:all_but_hardly])
    done = (work(call) for call in graph.calls)
    dtypes = frozenset(one.dtype for one in done if one is not None and one.flops)
    first = [*map(Question.of, probes(dtypes)), *itertools.chain(*sorted(heavy, key=len))]
    then = [*itertools.chain(*sorted(light, key=len))]
    durations.measure(first, say, until)
    durations.measure(then, say, until, roughly=True)
    return len(durations.missing([*first, *then]))


def _lightest(lasts: Mapping[str, float], share: float) -> float:
    """How long those calls take at least that take all but this share of the step, in ns."""
    ordered = np.sort(np.fromiter(lasts.values(), float, len(lasts)))
    lighter = ordered.cumsum() <= share * ordered.sum()
    return float(ordered[~lighter].min(initial=math.inf))


def as_far_as_known(graph: Graph, p: Prediction, durations: Durations) -> Prediction:
    """`p`, or that there was no time for it where too much of it would be an assumption."""
    if not isinstance(p, Predicted) or p.shares.get(Provenance.ASSUMED, 0.0) <= _MOST_ASSUMED:
        return p
    left = len(durations.missing(call for part in p.techniques for call in part.questions(graph)))
    if not left:
        return p
    reason = f"there was no time to measure {left:,} operator{'s' * (left > 1)}; {_MORE_TIME}"
    return Refused(
        p.technique, p.baseline_ns, reason, p.quality, p.memory[0], True, p.techniques
    )  # fmt: skip


def is_guessed(p: Prediction, parts: Iterable[Predicted]) -> bool:
    """Whether a combination rests on assumptions, for want of time, that its parts do not."""
    theirs = max((part.shares.get(Provenance.ASSUMED, 0.0) for part in parts), default=0.0)
    return p.shares.get(Provenance.ASSUMED, 0.0) > theirs + _MOST_ASSUMED


def estimated_in_words(count: int) -> str:
    """What there was no time for; empty where there was."""
    if not count:
        return ""
    were = "operators were" if count > 1 else "operator was"
    return (
        f"{count:,} {were} estimated, for want of time, and intervals are as wide as that: "
        f"{_MORE_TIME}"
    )


def _time_by_call(graph: Graph) -> dict[str, float]:
    """How long the step spends in each call, in ns."""
    tasks = graph.tasks
    calling = tasks.call >= 0
    times = np.bincount(tasks.call[calling], tasks.duration_ns[calling], len(graph.calls))
    lasts: dict[str, float] = {}
    for call, time_ns in zip(graph.calls, times.tolist(), strict=True):
        lasts[call.key] = lasts.get(call.key, 0.0) + time_ns
    return lasts
