"""Durations that a test tells, in the place of a cache of micro-benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from slipstream.durations import Answer, Durations, Ratio
from slipstream.graph import Call, Graph, replace_tasks
from slipstream.provenance import Provenance
from slipstream.technique import Context


class KnownDurations:
    """Base of tables that only know what `lookup` says: nothing is estimated."""

    def lookup(self, call: Any) -> Answer | None:
        """The duration of `call`."""
        raise NotImplementedError

    def ratio(self, old: Any, new: Any) -> Ratio | None:
        """As `Durations.ratio`, of micro-benchmarks alone."""
        was, now = self.lookup(old), self.lookup(new)
        if was is None or now is None or not was.nanoseconds:
            return None
        spread = math.hypot(was.spread, now.spread)
        return Ratio(now.nanoseconds / was.nanoseconds, spread, now.provenance)


class BytesMoved(KnownDurations):
    """Of calls that were asked for before: a microsecond, and a nanosecond a byte of tensors."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def measure(
        self,
        calls: Iterable[Call],
        report: Callable[[str], None] | None = None,
        until: float = 0.0,
        **how: object,
    ) -> None:
        """Know `calls` from now on."""
        self._known |= {call.key for call in calls}

    def lookup(self, call: Call) -> Answer | None:
        """The duration of `call`, where it was asked for."""
        if call.key not in self._known:
            return None
        return Answer(bytes_ns(call), 0.0, Provenance.MICROBENCHMARK)


def bytes_ns(call: Call) -> float:
    """What `BytesMoved` says of a call."""
    return 1000.0 + sum(spec.nbytes for spec in (*call.inputs, *call.outputs))


def timed_by_bytes(graph: Graph) -> Graph:
    """`graph` with the durations that `BytesMoved` gives its calls, in place of the recorded."""
    calls = [graph.calls[number] if number >= 0 else None for number in graph.tasks.call]
    times = [0.0 if call is None else bytes_ns(call) for call in calls]
    return replace_tasks(graph, duration_ns=np.array(times))


def asked_first(technique: Any, graph: Graph) -> Context:
    """A context that knows from `BytesMoved` what `technique` asks about `graph`."""
    durations = BytesMoved()
    durations.measure(technique.required_timings(graph))
    return Context(cast("Durations", durations))
