"""Serving under MLPerf's inference rules: the real LoadGen, any runtime, four scenarios.

    from slipstream.mlperf import serving

    with serving.Session("model.onnx", "digits") as session:
        result = serving.benchmark(session, serving.scenarios("all"), serving.Wishes(seconds=5))

The model and LoadGen run in a child process that is watched: whatever either does, the caller is
told its cause. Nothing that is shorter than the rules is called an MLPerf result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.mlperf.serving.planning import Wishes, measured
    from slipstream.mlperf.serving.queueing import Load, ServiceCurve, peak, simulate
    from slipstream.mlperf.serving.results import Served, benchmark
    from slipstream.mlperf.serving.rules import SCENARIOS, Scenario, Test, scenarios
    from slipstream.mlperf.serving.session import Run, Session

_HOMES = {
    "planning": ("Wishes", "measured"),
    "queueing": ("Load", "ServiceCurve", "peak", "simulate"),
    "results": ("Served", "benchmark"),
    "rules": ("SCENARIOS", "Scenario", "Test", "scenarios"),
    "session": ("Run", "Session"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SCENARIOS",
    "Load",
    "Run",
    "Scenario",
    "Served",
    "ServiceCurve",
    "Session",
    "Test",
    "Wishes",
    "benchmark",
    "measured",
    "peak",
    "scenarios",
    "simulate",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
