"""Plan LoadGen runs so that they are valid at the first attempt.

LoadGen creates all queries before the clock starts, from hints about the system's speed. A hint
that is too high costs gigabytes; one that is too low ends the run early. So hints are measured, and
corrected from the run if they were wrong.
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
from slipstream.mlperf.serving.session import MAX_DISTURBANCE, LoadTestRun, Session
from slipstream.mlperf.serving.statistics import min_queries
from slipstream.units import format_duration

_MAX_QUERIES_MADE = 400_000
# Queries created, over those that the measured time needs.
_HEADROOM = 1.6
# Factor by which a run may be extended to support its percentile.
_STRETCH = 3.0
# Default rate, as a share of the simulated peak.
_SAFE_RATE = 0.7
_SLOWER = 0.5
# On a shared machine, one stall can make half the rate miss the bound, too.
_ATTEMPTS = 4
# Default bound; ten times a single query if that is longer.
_BOUND_NS = 15e6


@dataclass(frozen=True)
class LoadTestConfig:
    """Duration, latency bound, percentile and rate of a load test.

    Attributes:
        seconds: duration of each run; None for the rules' durations.
        bound_ns: bound of the server's percentile; None for 15 ms or ten times a single query,
            whichever is longer.
        percentile: percentile of the server's latency, 0 to 1.
        rate: queries/s of the server; None for a share of the simulated peak.
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
        """Duration of each run."""
        return OFFICIAL_DURATION_S if self.seconds is None else self.seconds


def bound_of(session: Session, config: LoadTestConfig) -> float:
    """Return the bound of the server's percentile in ns."""
    return config.bound_ns or max(_BOUND_NS, 10 * session.curve().median_ns(1))


def plan(session: Session, scenario: Scenario, config: LoadTestConfig) -> Test:
    """Plan the run of `scenario` that is closest to the rules in the given time."""
    curve, seconds = session.curve(), config.duration_s
    if scenario.name == "offline":
        rate = _HEADROOM * curve.capacity(session.policy, session.workers)
        samples = OFFICIAL_OFFLINE_SAMPLES if config.seconds is None else 1
        return _bounded(Test("offline", min_duration_s=seconds, min_queries=samples, rate=rate))
    if scenario.name == "server":
        bound = bound_of(session, config)
        rate = config.rate or _SAFE_RATE * queueing.peak(
            session.served(), bound, config.percentile, session.policy, workers=session.workers
        )
        rate = rate or 0.1 * curve.capacity(session.policy, session.workers)
        test = Test("server", min_duration_s=seconds, rate=rate, bound_ns=bound)
        return supported(test, config.percentile, 1e9 / rate, config)
    query_ns = curve.median_ns(8 if scenario.name == "multi-stream" else 1)
    test = Test(scenario.name, min_duration_s=seconds, expected_ns=query_ns / _HEADROOM)
    return supported(test, scenario.percentile or 0.9, query_ns, config)


def supported(test: Test, percentile: float, query_ns: float, config: LoadTestConfig) -> Test:
    """Return `test` with a percentile that its duration can support, and enough queries for it."""
    rules = SCENARIOS[test.scenario]
    if config.seconds is None:
        return _bounded(replace(test, percentile=percentile, min_queries=rules.queries))
    percentile = percentile_for(percentile, _STRETCH * config.seconds * 1e9 / query_ns)
    needed = min(rules.queries, min_queries(percentile))
    return _bounded(replace(test, percentile=percentile, min_queries=needed))


def _bounded(test: Test) -> Test:
    """Shorten `test` if LoadGen would create too many queries for memory.

    Official durations are not shortened: a session refuses those that do not fit (`Session.run`).
    """
    if test.min_duration_s >= OFFICIAL_DURATION_S or test.queries_made <= _MAX_QUERIES_MADE:
        return test
    return replace(test, min_duration_s=test.min_duration_s * _MAX_QUERIES_MADE / test.queries_made)


def run_scenario(
    session: Session, scenario: Scenario, config: LoadTestConfig, folder: Path | None = None
) -> LoadTestRun:
    """Run `scenario` for performance, and repeat it if the hints were wrong.

    A server's rate that the user chose is not changed, even if the bound is missed.
    """
    test: Test | None = plan(session, scenario, config)
    attempts = 0
    while test is not None:
        attempts += 1
        predicted = predict_load(session, test) if scenario.name == "server" else None
        run = replace(session.run(test, folder), attempts=attempts, predicted=predicted)
        test = _corrected(run, config) if attempts < _ATTEMPTS else None
    return run


def _corrected(run: LoadTestRun, config: LoadTestConfig) -> Test | None:
    """Return the test with hints corrected from its run; None if they were right."""
    if run.valid or run.refused:
        return None
    test, values = run.test, run.values
    if test.scenario == "server":
        if config.rate is not None:
            return None
        rate = _SLOWER * min(test.rate, run.value or test.rate)
        return supported(replace(test, rate=rate), config.percentile, 1e9 / rate, config)
    if values.get("result_min_duration_met") and values.get("result_min_queries_met"):
        return None
    if test.scenario == "offline":
        return _bounded(replace(test, rate=_HEADROOM * (run.value or test.rate)))
    expected = min(run.latencies_ns["mean"], test.expected_ns) / _HEADROOM
    return _bounded(replace(test, expected_ns=expected))


def accuracy(session: Session, scenario: Scenario, folder: Path | None = None) -> LoadTestRun:
    """Run `scenario` for accuracy, with every sample once."""
    capacity = session.curve().capacity(session.policy, session.workers)
    test = Test(scenario.name, "accuracy", rate=capacity / 2, min_duration_s=0.0)
    return session.run(test, folder)


def predict_load(session: Session, test: Test) -> queueing.Load | None:
    """Simulate the queue of a server run from the service curve.

    Returns:
        None if other programs disturbed the curve's measurement too much.
    """
    curve, policy = session.served(), session.policy
    if curve.disturbance > MAX_DISTURBANCE:
        session.report("server: not predicted, other programs disturbed the calibration")
        return None
    load = queueing.simulate(curve, test.rate, policy, workers=session.workers)
    p99 = format_duration(load.percentile_ns(0.99)) if load.keeps_up else "grows without limit"
    session.report(f"server at {test.rate:,.1f}/s: predicted p99 {p99}")
    return load
