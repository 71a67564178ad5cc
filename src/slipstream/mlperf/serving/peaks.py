"""Find the highest rate at which a server meets its latency bound, in a few runs.

LoadGen's own search doubles the rate until it fails and then bisects, with a full run per step.
This search starts at the peak of the queue simulation. Every run corrects the simulation: service
times are scaled until it gives the measured percentile; the next rate is the corrected peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from slipstream.mlperf.serving import planning, queueing
from slipstream.mlperf.serving.queueing import ServiceCurve
from slipstream.mlperf.serving.rules import NOT_A_RESULT, Test
from slipstream.mlperf.serving.session import LoadTestRun, Session
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_MAX_RUNS = 12
# Scout runs before the first one that counts: how many, how much shorter, and their percentile,
# which is more robust.
_SCOUTS, _SHORTER, _SCOUT_PERCENTILE = 2, 4, 0.90
# Factor by which the rate changes while the bracket is open on one side.
_STEP = 1.15
_SCALES = (0.25, 8.0)
_SCALE_STEPS = 9
_MAX_SIMULATED_QUERIES = 8_000


@dataclass(frozen=True)
class Peak:
    """The result of the search.

    Attributes:
        rate: highest rate of a valid run in queries/s; 0 without a valid run.
        above: lowest rate that exceeded the bound; infinite without one.
        predicted: peak rate of the queue simulation before any run.
        runs: runs in the order in which they were made.
    """

    rate: float
    above: float
    predicted: float
    bound_ns: float
    percentile: float
    runs: tuple[LoadTestRun, ...]

    def table(self) -> Table:
        """Return a table with a row per run and the peak in the title."""
        fields: tuple[Field[LoadTestRun], ...] = (
            Field.number("rate", lambda run: f"{run.test.rate:,.1f}/s"),
            Field.of("valid", lambda run: "yes" if run.valid else "no"),
            Field.number("p50", lambda run: format_duration(run.latencies_ns["p50"])),
            Field.number("p99", lambda run: format_duration(run.latencies_ns["p99"])),
            Field.number("queries", lambda run: f"{run.queries:,}"),
        )
        limit = f"p{100 * self.percentile:g} < {format_duration(self.bound_ns)}"
        title = f"peak: {self.rate:,.1f} queries/s within {limit}"
        notes = [
            f"predicted before the first run: {self.predicted:,.1f} queries/s",
            f"lowest rate that exceeded the bound: {self.above:,.1f} queries/s"
            if math.isfinite(self.above)
            else "no tested rate exceeded the bound",
            f"{NOT_A_RESULT}: a search",
        ]
        return Table.of(self.runs, fields, title, notes)

    def to_json(self) -> dict[str, object]:
        """Return the result as JSON."""
        return {
            "peak": self.rate, "above": self.above, "predicted": self.predicted,
            "bound_ns": self.bound_ns, "percentile": self.percentile, "label": NOT_A_RESULT,
            "runs": [run.to_json() for run in self.runs],
        }  # fmt: skip


def find_peak(session: Session, config: planning.LoadTestConfig, width: float = 0.03) -> Peak:
    """Find the highest rate within the bound, to a bracket of relative `width`."""
    curve, bound = session.served(), planning.bound_of(session, config)
    predicted = _peak(session, curve, bound, config.percentile)
    low, high = 0.0, math.inf
    runs: list[LoadTestRun] = []
    rate = predicted or 0.5 * curve.capacity(session.policy, session.workers)
    for _ in range(_SCOUTS):
        test = _test(rate, bound, config)
        scout = replace(
            test, min_duration_s=test.min_duration_s / _SHORTER,
            min_queries=max(1, test.min_queries // _SHORTER), percentile=_SCOUT_PERCENTILE,
        )  # fmt: skip
        curve = _corrected(session, curve, session.run(scout))
        rate = _peak(session, curve, bound, config.percentile) or rate / 2
    while len(runs) < _MAX_RUNS and not high / max(low, 1e-9) <= 1 + width:
        run = session.run(_test(rate, bound, config))
        runs.append(run)
        if run.valid:
            low = max(low, rate)
        else:
            high = min(high, rate)
        curve = _corrected(session, curve, run)
        met = _peak(session, curve, bound, config.percentile)
        rate = _within(met, low, high, width)
    return Peak(low, high, predicted, bound, config.percentile, tuple(runs))


def _test(rate: float, bound_ns: float, config: planning.LoadTestConfig) -> Test:
    test = Test("server", rate=rate, bound_ns=bound_ns, min_duration_s=config.duration_s)
    return planning.supported(test, config.percentile, 1e9 / rate, config)


def _peak(session: Session, curve: ServiceCurve, bound_ns: float, percentile: float) -> float:
    """Return the rate at which the simulated queue reaches the bound."""
    return queueing.peak(curve, bound_ns, percentile, session.policy, workers=session.workers)


def _within(rate: float, low: float, high: float, width: float) -> float:
    """Move `rate` inside the bracket, away from its ends by a part of `width`."""
    if not low:
        return min(rate, high / _STEP)
    if math.isinf(high):
        return max(min(rate, low * _STEP**3), low * (1 + 0.9 * width))
    inside = width / 3
    if low * (1 + inside) < rate < high / (1 + inside):
        return rate
    return math.sqrt(low * high)


def _corrected(session: Session, curve: ServiceCurve, run: LoadTestRun) -> ServiceCurve:
    """Scale service times until the simulated percentile equals the measured one."""
    name = f"p{100 * run.test.percentile:g}"
    measured = run.latencies_ns.get(name, run.latencies_ns["p99"])
    low, high = _SCALES
    for _ in range(_SCALE_STEPS):
        middle = math.sqrt(low * high)
        load = queueing.simulate(
            _scaled(curve, middle), run.test.rate, session.policy, workers=session.workers,
            queries=min(_MAX_SIMULATED_QUERIES, max(run.queries, 500)),
        )  # fmt: skip
        slower = load.percentile_ns(run.test.percentile) > measured
        low, high = (low, middle) if slower else (middle, high)
    return _scaled(curve, math.sqrt(low * high))


def _scaled(curve: ServiceCurve, scale: float) -> ServiceCurve:
    times = {n: tuple(scale * time for time in times) for n, times in curve.times_ns.items()}
    return replace(curve, times_ns=times)
