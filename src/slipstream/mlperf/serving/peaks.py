"""The highest rate a server sustains within its bound, in few runs.

LoadGen's own search doubles a rate until it fails and then halves the bracket, a full run each. We
begin where the queue simulation says the peak is, and every run corrects the simulation: service
times are scaled until it gives the percentile that was measured, and the next rate is where the
corrected queue meets the bound. A few runs close a bracket of a few per cent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from slipstream.mlperf.serving import planning, queueing
from slipstream.mlperf.serving.queueing import ServiceCurve
from slipstream.mlperf.serving.rules import NOT_A_RESULT, Test
from slipstream.mlperf.serving.session import Run, Session
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_MOST_RUNS = 12
# Before the first run that counts: so many that are shorter by this factor, from whose more robust
# percentile the simulation is corrected.
_SCOUTS, _SHORTER, _SCOUTED = 2, 4, 0.90
# How far into an open side a rate is moved, and how far from a bracket's ends at least.
_STEP = 1.15
_SCALES = (0.25, 8.0)
_SCALE_STEPS = 9
_FEWER = 8_000


@dataclass(frozen=True)
class Peak:
    """What was found.

    Attributes:
        rate: the highest rate of a valid run; 0 where none was.
        above: the lowest rate that broke the bound; infinite where none did.
        predicted: the peak as the queue simulation had it before any run.
        runs: in the order they were made.
    """

    rate: float
    above: float
    predicted: float
    bound_ns: float
    percentile: float
    runs: tuple[Run, ...]

    def table(self) -> Table:
        """A row a run, the answer in the title."""
        fields: tuple[Field[Run], ...] = (
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
            f"the next rate up that broke the bound: {self.above:,.1f} queries/s"
            if math.isfinite(self.above)
            else "no rate that was tried broke the bound",
            f"{NOT_A_RESULT}: a search",
        ]
        return Table.of(self.runs, fields, title, notes)

    def to_json(self) -> dict[str, object]:
        """The answer for programs."""
        return {
            "peak": self.rate, "above": self.above, "predicted": self.predicted,
            "bound_ns": self.bound_ns, "percentile": self.percentile, "label": NOT_A_RESULT,
            "runs": [run.to_json() for run in self.runs],
        }  # fmt: skip


def find_peak(session: Session, wishes: planning.Wishes, width: float = 0.03) -> Peak:
    """The highest rate within the bound, to a bracket of relative `width`."""
    curve, bound = session.served(), planning.bound_of(session, wishes)
    predicted = _meets(session, curve, bound, wishes.percentile)
    low, high = 0.0, math.inf
    runs: list[Run] = []
    rate = predicted or 0.5 * curve.capacity(session.policy, session.workers)
    for _ in range(_SCOUTS):
        test = _test(rate, bound, wishes)
        scout = replace(
            test, min_duration_s=test.min_duration_s / _SHORTER,
            min_queries=max(1, test.min_queries // _SHORTER), percentile=_SCOUTED,
        )  # fmt: skip
        curve = _corrected(session, curve, session.run(scout))
        rate = _meets(session, curve, bound, wishes.percentile) or rate / 2
    while len(runs) < _MOST_RUNS and not high / max(low, 1e-9) <= 1 + width:
        run = session.run(_test(rate, bound, wishes))
        runs.append(run)
        if run.valid:
            low = max(low, rate)
        else:
            high = min(high, rate)
        curve = _corrected(session, curve, run)
        met = _meets(session, curve, bound, wishes.percentile)
        rate = _within(met, low, high, width)
    return Peak(low, high, predicted, bound, wishes.percentile, tuple(runs))


def _test(rate: float, bound_ns: float, wishes: planning.Wishes) -> Test:
    test = Test("server", rate=rate, bound_ns=bound_ns, min_duration_s=wishes.duration_s)
    return planning.supported(test, wishes.percentile, 1e9 / rate, wishes)


def _meets(session: Session, curve: ServiceCurve, bound_ns: float, percentile: float) -> float:
    """Where the simulated queue meets the bound."""
    return queueing.peak(curve, bound_ns, percentile, session.policy, workers=session.workers)


def _within(rate: float, low: float, high: float, width: float) -> float:
    """`rate`, moved inside the bracket, off its ends by a part of `width`."""
    if not low:
        return min(rate, high / _STEP)
    if math.isinf(high):
        return max(min(rate, low * _STEP**3), low * (1 + 0.9 * width))
    inside = width / 3
    if low * (1 + inside) < rate < high / (1 + inside):
        return rate
    return math.sqrt(low * high)


def _corrected(session: Session, curve: ServiceCurve, run: Run) -> ServiceCurve:
    """Service times scaled until the simulated percentile is the measured one."""
    name = f"p{100 * run.test.percentile:g}"
    measured = run.latencies_ns.get(name, run.latencies_ns["p99"])
    low, high = _SCALES
    for _ in range(_SCALE_STEPS):
        middle = math.sqrt(low * high)
        load = queueing.simulate(
            _scaled(curve, middle), run.test.rate, session.policy, workers=session.workers,
            queries=min(_FEWER, max(run.queries, 500)),
        )  # fmt: skip
        late = load.percentile_ns(run.test.percentile) > measured
        low, high = (low, middle) if late else (middle, high)
    return _scaled(curve, math.sqrt(low * high))


def _scaled(curve: ServiceCurve, scale: float) -> ServiceCurve:
    times = {n: tuple(scale * one for one in taken) for n, taken in curve.times_ns.items()}
    return replace(curve, times_ns=times)
