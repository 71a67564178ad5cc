"""Predict a server under load: latencies at a rate, and the highest rate within a bound.

A recorded inference step is a query. Queries arrive at random (Poisson) at one worker that answers
them sequentially. Both figures follow from the step's predicted time and this machine's
`ThreadCosts`, by the queue simulation of ``slipstream mlperf serve``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import UsageError
from slipstream.graph import Graph
from slipstream.mlperf.serving.queueing import Load, peak, simulate
from slipstream.mlperf.serving.threads import UNKNOWN_COSTS, ThreadCosts
from slipstream.tables import Field, Table
from slipstream.units import format_duration
from slipstream.verbs.results import Predicted

_SHARES = (0.50, 0.90, 0.99)


@functools.lru_cache(maxsize=256)
def loaded(step_ns: float, rate: float, costs: ThreadCosts = UNKNOWN_COSTS) -> Load:
    """Simulate a server whose model takes `step_ns` per query, at `rate` queries per second."""
    return simulate(costs.curve(step_ns), rate)


@dataclass(frozen=True)
class Serving:
    """A step under load.

    Attributes:
        technique: the technique applied; ``as recorded`` for none.
        step_ns: time of a single query.
        load: at the requested rate.
        peak: queries per second within the bound; None without one.
        met: whether `load` keeps the bound; None without one.
    """

    technique: str
    step_ns: float
    load: Load
    peak: float | None
    met: bool | None = None

    @classmethod
    def of(
        cls, technique: str, step_ns: float, rate: float, bound: tuple[float, float] | None,
        costs: ThreadCosts = UNKNOWN_COSTS,
    ) -> Serving:  # fmt: skip
        """Simulate the step under load."""
        load = loaded(step_ns, rate, costs)
        if bound is None:
            return cls(technique, step_ns, load, None)
        highest = peak(costs.curve(step_ns), bound[1], bound[0])
        met = load.keeps_up and load.percentile_ns(bound[0]) < bound[1]
        return cls(technique, step_ns, load, highest, met)

    @property
    def keeps_up(self) -> bool:
        return self.load.keeps_up

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload; times in nanoseconds."""
        latencies = {f"p{100 * s:g}_ns": self.load.percentile_ns(s) for s in _SHARES}
        return {
            "rate": self.load.rate, "keeps_up": self.keeps_up, "peak": self.peak,
            "met": self.met,
            **(latencies if self.keeps_up else dict.fromkeys(latencies)),
        }  # fmt: skip


def need_inference(graph: Graph) -> None:
    """Raise a `UsageError` if the step trains, since such a step is not a query."""
    if graph.meta.get("training"):
        raise UsageError(
            "a training step answers no queries, so --rate does not apply to it",
            remedy="pass a workload without an optimizer: return (model, inputs)",
        )


def predict_serving(
    predictions: Sequence[Predicted], rate: float, bound: tuple[float, float] | None = None,
    costs: ThreadCosts = UNKNOWN_COSTS,
) -> list[Serving]:  # fmt: skip
    """Simulate the step under load, as recorded and with each technique."""
    if not predictions:
        return []
    steps = {"as recorded": predictions[0].baseline_ns}
    steps |= {prediction.technique: prediction.step_ns for prediction in predictions}
    return [Serving.of(name, step_ns, rate, bound, costs) for name, step_ns in steps.items()]


def serving_table(
    found: Sequence[Serving], bound: tuple[float, float] | None, costs: ThreadCosts = UNKNOWN_COSTS
) -> Table:
    def latency(share: float) -> Field[Serving]:
        def cell(serving: Serving) -> str:
            return (
                format_duration(serving.load.percentile_ns(share)) if serving.keeps_up else "grows"
            )

        return Field.number(f"p{100 * share:g}", cell)

    fields = [
        Field.of("technique", lambda serving: serving.technique),
        Field.number("query alone", lambda serving: format_duration(serving.step_ns)),
        *map(latency, _SHARES),
        Field.number("busy", lambda serving: f"{100 * min(serving.load.busy, 1):.0f} %"),
    ]
    if bound is not None:
        limit = f"peak (p{100 * bound[0]:g} < {format_duration(bound[1])})"
        fields.append(Field.number(limit, lambda serving: f"{serving.peak or 0:,.1f}/s"))
        fields.append(Field.of("goal met", lambda serving: "yes" if serving.met else "no"))
    title = f"under {found[0].load.rate:g} queries/s, one at a time" if found else ""
    notes = [
        "a query is the recorded step; Poisson arrivals, one worker (simulated); to measure it: "
        "slipstream mlperf serve",
        f"a server's threads add {format_duration(costs.delay_ns)} before a query and "
        f"{format_duration(costs.query_ns)} to it (measured on this machine)"
        if costs.known
        else "excluding the cost of a server's threads, which is unknown here; LoadGen measures "
        "it: pip install 'slipstream[mlperf]'",
    ]
    return Table.of(found, fields, title, notes)
