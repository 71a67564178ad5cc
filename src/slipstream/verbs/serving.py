"""What a step means for a server: latencies at a rate, and the highest rate within a bound.

A recorded inference step is a query. Queries come at random (Poisson) to one worker that answers
them one after the other, so that two figures follow from the step's predicted time alone, by the
queue simulation that ``slipstream mlperf serve`` shows beside what it measures.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import UsageError
from slipstream.graph import Graph
from slipstream.mlperf.serving.queueing import Load, ServiceCurve, peak, simulate
from slipstream.tables import Field, Table
from slipstream.units import format_duration
from slipstream.verbs.results import Predicted

_SHARES = (0.50, 0.90, 0.99)


@functools.lru_cache(maxsize=256)
def loaded(step_ns: float, rate: float) -> Load:
    """A server whose queries take `step_ns` each, at `rate` queries a second."""
    return simulate(ServiceCurve.of({1: step_ns}), rate)


@dataclass(frozen=True)
class Serving:
    """A step under load.

    Attributes:
        technique: what was applied; ``as recorded`` for nothing.
        step_ns: of a query by itself.
        load: at the rate that was asked for.
        peak: queries a second within the bound; None where none was given.
    """

    technique: str
    step_ns: float
    load: Load
    peak: float | None

    @classmethod
    def of(
        cls, technique: str, step_ns: float, rate: float, bound: tuple[float, float] | None
    ) -> Serving:
        """Foresee it.

        Args:
            bound: (share of queries, nanoseconds) that is to hold.
        """
        highest = None
        if bound is not None:
            highest = peak(ServiceCurve.of({1: step_ns}), bound[1], bound[0])
        return cls(technique, step_ns, loaded(step_ns, rate), highest)

    @property
    def keeps_up(self) -> bool:
        """Whether queries are answered as fast as they come."""
        return self.load.rate * self.step_ns < 1e9

    def to_json(self) -> dict[str, Any]:
        """For programs; times in nanoseconds."""
        latencies = {f"p{100 * s:g}_ns": self.load.percentile_ns(s) for s in _SHARES}
        return {
            "rate": self.load.rate, "keeps_up": self.keeps_up, "peak": self.peak,
            **(latencies if self.keeps_up else dict.fromkeys(latencies)),
        }  # fmt: skip


def need_inference(graph: Graph) -> None:
    """Nothing, unless the step trains: such a step is no query.

    Raises:
        UsageError: it does.
    """
    if graph.meta.get("training"):
        raise UsageError(
            "a training step answers no queries, and --rate is of queries",
            remedy="name a workload without an optimizer: return (model, inputs)",
        )


def foresee(
    predictions: Sequence[Predicted], rate: float, bound: tuple[float, float] | None = None
) -> list[Serving]:
    """The step as recorded, and with each technique."""
    if not predictions:
        return []
    base = Serving.of("as recorded", predictions[0].baseline_ns, rate, bound)
    return [base, *(Serving.of(one.technique, one.step_ns, rate, bound) for one in predictions)]


def serving_table(found: Sequence[Serving], bound: tuple[float, float] | None) -> Table:
    """A row a technique."""

    def latency(share: float) -> Field[Serving]:
        def cell(one: Serving) -> str:
            return format_duration(one.load.percentile_ns(share)) if one.keeps_up else "grows"

        return Field.number(f"p{100 * share:g}", cell)

    fields = [
        Field.of("technique", lambda one: one.technique),
        Field.number("a query", lambda one: format_duration(one.step_ns)),
        *map(latency, _SHARES),
        Field.number("busy", lambda one: f"{100 * min(one.load.busy, 1):.0f} %"),
    ]
    if bound is not None:
        limit = f"peak (p{100 * bound[0]:g} < {format_duration(bound[1])})"
        fields.append(Field.number(limit, lambda one: f"{one.peak or 0:,.1f}/s"))
    title = f"under {found[0].load.rate:g} queries/s, one at a time" if found else ""
    notes = [
        "a query is the recorded step; arrivals at random, one worker (simulated); measured: "
        "slipstream mlperf serve"
    ]
    return Table.of(found, fields, title, notes)
