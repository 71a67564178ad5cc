"""Durations that a test defines, instead of a cache of micro-benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from slipstream.durations import Durations, Ratio, Timing, TimingRequest
from slipstream.graph import Call, Graph, replace_tasks
from slipstream.provenance import Provenance
from slipstream.technique import Context


class KnownDurations:
    """Base of tables that only know the results of `lookup`: nothing is estimated."""

    def lookup(self, call: Any) -> Timing | None:
        """Return the duration of `call`."""
        raise NotImplementedError

    def ratio(self, old: Any, new: Any) -> Ratio | None:
        """Like `Durations.ratio`, from micro-benchmarks alone."""
        was, now = self.lookup(old), self.lookup(new)
        if was is None or now is None or not was.nanoseconds:
            return None
        spread = math.hypot(was.spread, now.spread)
        return Ratio(now.nanoseconds / was.nanoseconds, spread, now.provenance)


class BytesMoved(KnownDurations):
    """Durations of known calls: a microsecond plus a nanosecond per byte of tensors."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def measure(
        self,
        calls: Iterable[Call],
        report: Callable[[str], None] | None = None,
        until: float = 0.0,
        **how: object,
    ) -> None:
        """Make `calls` known from now on."""
        self._known |= {call.key for call in calls}

    def lookup(self, call: Call) -> Timing | None:
        """Return the duration of `call` if it is known."""
        if call.key not in self._known:
            return None
        return Timing(bytes_ns(call), 0.0, Provenance.MICROBENCHMARK)


def bytes_ns(call: Call | TimingRequest) -> float:
    """Return the duration of a call by `BytesMoved`."""
    call = call.call if isinstance(call, TimingRequest) else call
    return 1000.0 + sum(spec.nbytes for spec in (*call.inputs, *call.outputs))


def timed_by_bytes(graph: Graph) -> Graph:
    """Return `graph` with the durations of `BytesMoved` instead of the recorded ones."""
    calls = [graph.calls[number] if number >= 0 else None for number in graph.tasks.call]
    times = [0.0 if call is None else bytes_ns(call) for call in calls]
    return replace_tasks(graph, duration_ns=np.array(times))


def context_for(technique: Any, graph: Graph) -> Context:
    """Return a context that knows the calls that `technique` needs for `graph`, by `BytesMoved`."""
    durations = BytesMoved()
    durations.measure(technique.required_timings(graph))
    return Context(cast("Durations", durations))
