"""Overhead of a server's threads per query, measured once per machine with a small model."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from slipstream.durations.durations import cache_folder, machine_key
from slipstream.errors import SlipstreamError
from slipstream.files import write_text
from slipstream.mlperf.serving.queueing import ServiceCurve
from slipstream.mlperf.serving.session import Session

_SIDE = 128


@dataclass(frozen=True)
class ThreadCosts:
    """Times that a server adds to the model's own.

    Attributes:
        query_ns: additional time of a worker per query.
        delay_ns: time from a query's arrival until an idle worker starts.
        known: whether the times were measured; if not, both are 0.
    """

    query_ns: float = 0.0
    delay_ns: float = 0.0
    known: bool = False

    def curve(self, step_ns: float) -> ServiceCurve:
        """Return the service times of a server whose model takes `step_ns` for a query."""
        return ServiceCurve({1: (step_ns + self.query_ns,)}, self.delay_ns)


UNKNOWN_COSTS = ThreadCosts()
"""Costs of 0 ns, not measured."""


def answer(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Compute for some tens of microseconds, mostly without the GIL."""
    return np.asarray(x @ np.ones((_SIDE, _SIDE), np.float32))


def samples() -> npt.NDArray[np.float32]:
    """Return samples of `answer`, float32 [8, 128]."""
    return np.ones((8, _SIDE), np.float32)


def thread_costs(report: Callable[[str], None] = lambda line: None) -> ThreadCosts:
    """Return this machine's costs from the cache, or measure them in some seconds.

    `UNKNOWN_COSTS` without LoadGen, or if the measurement fails.
    """
    path = cache_folder() / "serving" / f"threads-{machine_key()}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return ThreadCosts(**json.loads(path.read_text("utf-8")))
    try:
        with Session(f"{__file__}:answer", f"{__file__}:samples", report=report) as session:
            alone_ns = session.curve().median_ns(1)
            batches, delay_ns = session.lightly_served()
    except SlipstreamError:
        return UNKNOWN_COSTS
    query_ns = statistics.median(batches) - alone_ns
    costs = ThreadCosts(max(0.0, query_ns), delay_ns, known=True)
    with contextlib.suppress(OSError, SlipstreamError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(costs)))
    return costs
