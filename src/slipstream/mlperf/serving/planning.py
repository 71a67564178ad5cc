"""From a wish ("all scenarios, a few seconds each") to runs that are valid the first time.

LoadGen makes every query before the clock starts, from hints of how fast the system is. Too
hopeful a hint costs gigabytes, one too modest ends the run before its time. So the hints are
measured here, and mended from the run itself where they were wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.errors import InvalidArgumentError
from slipstream.mlperf.serving import queueing
from slipstream.mlperf.serving.rules import (
    OFFICIAL_DURATION_S,
    OFFICIAL_OFFLINE_SAMPLES,
    SCENARIOS,
    Scenario,
    Test,
    percentile_for,
)
from slipstream.mlperf.serving.session import MAX_DISTURBANCE, Run, Session
from slipstream.mlperf.serving.statistics import fewest_queries
from slipstream.units import format_duration

_MOST_MADE = 400_000
# Queries made beforehand, over those that the measured time would need.
_HEADROOM = 1.6
# How much longer than asked a run may take so that its percentile can be told.
_STRETCH = 3.0
# A rate that nobody named: this share of what the queue simulation allows.
_SAFE_RATE = 0.7
_SLOWER = 0.5
# On a machine with neighbours half the rate may miss the bound, too: one stall of theirs is enough.
_ATTEMPTS = 4
# A bound that nobody named: this, or ten times a query by itself where that is longer.
_BOUND_NS = 15e6


@dataclass(frozen=True)
class Wishes:
    """What a person asks of a benchmark under load.

    Attributes:
        seconds: that each run shall take; None for the rules' durations.
        bound_ns: of the server's percentile; None: 15 ms, or ten times a query by itself.
        percentile: of the server's latency.
        rate: queries a second of the server; None: what the queue simulation allows, with a margin.
    """

    seconds: float | None = 2.0
    bound_ns: float | None = None
    percentile: float = 0.99
    rate: float | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("seconds", self.seconds), ("bound", self.bound_ns), ("rate", self.rate),
        ):  # fmt: skip
            if value is not None and not value > 0:
                raise InvalidArgumentError(name, f"{value:g} is not above zero")

    @property
    def duration_s(self) -> float:
        """Of each run."""
        return OFFICIAL_DURATION_S if self.seconds is None else self.seconds


def bound_of(session: Session, wishes: Wishes) -> float:
    """Nanoseconds that the server's percentile may take."""
    return wishes.bound_ns or max(_BOUND_NS, 10 * session.curve().median_ns(1))


def plan(session: Session, scenario: Scenario, wishes: Wishes) -> Test:
    """The run of `scenario` that comes nearest to the rules in the time there is."""
    curve, seconds = session.curve(), wishes.duration_s
    if scenario.name == "offline":
        rate = _HEADROOM * curve.capacity(session.policy, session.workers)
        least = OFFICIAL_OFFLINE_SAMPLES if wishes.seconds is None else 1
        return _bounded(Test("offline", min_duration_s=seconds, min_queries=least, rate=rate))
    if scenario.name == "server":
        bound = bound_of(session, wishes)
        rate = wishes.rate or _SAFE_RATE * queueing.peak(
            session.served(), bound, wishes.percentile, session.policy, workers=session.workers
        )
        rate = rate or 0.1 * curve.capacity(session.policy, session.workers)
        test = Test("server", min_duration_s=seconds, rate=rate, bound_ns=bound)
        return supported(test, wishes.percentile, 1e9 / rate, wishes)
    each = curve.median_ns(1)
    if scenario.name == "multi-stream":
        each = curve.median_ns(8)
    test = Test(scenario.name, min_duration_s=seconds, expected_ns=each / _HEADROOM)
    return supported(test, scenario.percentile or 0.9, each, wishes)


def supported(test: Test, percentile: float, each_ns: float, wishes: Wishes) -> Test:
    """`test` with a percentile that its queries can support, and as many as that takes."""
    rules = SCENARIOS[test.scenario]
    if wishes.seconds is None:
        return _bounded(replace(test, percentile=percentile, min_queries=rules.queries))
    percentile = percentile_for(percentile, _STRETCH * wishes.seconds * 1e9 / each_ns)
    needed = min(rules.queries, fewest_queries(percentile))
    return _bounded(replace(test, percentile=percentile, min_queries=needed))


def _bounded(test: Test) -> Test:
    """`test`, shorter where LoadGen would make more queries beforehand than memory is meant for.

    The rules' durations stay as they are: a session refuses what does not fit (`Session.run`).
    """
    if test.min_duration_s >= OFFICIAL_DURATION_S or test.queries_made <= _MOST_MADE:
        return test
    return replace(test, min_duration_s=test.min_duration_s * _MOST_MADE / test.queries_made)


def measured(
    session: Session, scenario: Scenario, wishes: Wishes, folder: Path | None = None
) -> Run:
    """Run `scenario` for performance, again if the hints were wrong.

    A server's rate that the user named is kept, whether or not its bound is met.
    """
    test: Test | None = plan(session, scenario, wishes)
    attempts = 0
    while test is not None:
        attempts += 1
        predicted = foreseen(session, test) if scenario.name == "server" else None
        run = replace(session.run(test, folder), attempts=attempts, predicted=predicted)
        test = _mended(run, wishes) if attempts < _ATTEMPTS else None
    return run


def _mended(run: Run, wishes: Wishes) -> Test | None:
    """The same run with hints from what it showed; None where they were right."""
    if run.valid or run.refused:
        return None
    test, values = run.test, run.values
    if test.scenario == "server":
        if wishes.rate is not None:
            return None
        rate = _SLOWER * min(test.rate, run.value or test.rate)
        return supported(replace(test, rate=rate), wishes.percentile, 1e9 / rate, wishes)
    if values.get("result_min_duration_met") and values.get("result_min_queries_met"):
        return None
    if test.scenario == "offline":
        return _bounded(replace(test, rate=_HEADROOM * (run.value or test.rate)))
    expected = min(run.latencies_ns["mean"], test.expected_ns) / _HEADROOM
    return _bounded(replace(test, expected_ns=expected))


def accuracy(session: Session, scenario: Scenario, folder: Path | None = None) -> Run:
    """Every sample once, its answer held against its label; queries arrive as `scenario` has it."""
    capacity = session.curve().capacity(session.policy, session.workers)
    test = Test(scenario.name, "accuracy", rate=capacity / 2, min_duration_s=0.0)
    return session.run(test, folder)


def foreseen(session: Session, test: Test) -> queueing.Load | None:
    """Simulate the queue of a server run, from the service curve alone.

    Returns:
        None if calls differed so much while the curve was measured that it predicts nothing.
    """
    curve, policy = session.served(), session.policy
    if curve.disturbance > MAX_DISTURBANCE:
        session.report("server: not predicted, other programs disturbed the calibration")
        return None
    load = queueing.simulate(curve, test.rate, policy, workers=session.workers)
    p99 = format_duration(load.percentile_ns(0.99)) if load.keeps_up else "grows without end"
    session.report(f"server at {test.rate:,.1f}/s: predicted p99 {p99}")
    return load
