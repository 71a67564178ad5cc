"""Benchmark serving under MLPerf's inference rules, with LoadGen and any runtime.

    from slipstream.mlperf import serving

    with serving.Session("model.onnx", "digits") as session:
        result = serving.benchmark(session, serving.scenarios("all"), serving.Wishes(seconds=5))

The model and LoadGen run in a supervised child process, so that crashes and hangs become errors
with their cause. Runs that are shorter than the rules require are never called MLPerf results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.mlperf.serving.audits import AUDITS, Audit, audit
    from slipstream.mlperf.serving.checking import Checked, check
    from slipstream.mlperf.serving.comparing import Compared, compare
    from slipstream.mlperf.serving.peaks import Peak, find_peak
    from slipstream.mlperf.serving.planning import Wishes, measured
    from slipstream.mlperf.serving.queueing import Load, ServiceCurve, peak, simulate
    from slipstream.mlperf.serving.results import Served, benchmark
    from slipstream.mlperf.serving.rules import SCENARIOS, Scenario, Test, scenarios
    from slipstream.mlperf.serving.session import LoadTestRun, Session
    from slipstream.mlperf.serving.tree import Place

_HOMES = {
    "audits": ("AUDITS", "Audit", "audit"),
    "checking": ("Checked", "check"),
    "comparing": ("Compared", "compare"),
    "peaks": ("Peak", "find_peak"),
    "planning": ("Wishes", "measured"),
    "queueing": ("Load", "ServiceCurve", "peak", "simulate"),
    "results": ("Served", "benchmark"),
    "rules": ("SCENARIOS", "Scenario", "Test", "scenarios"),
    "session": ("LoadTestRun", "Session"),
    "tree": ("Place",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AUDITS",
    "SCENARIOS",
    "Audit",
    "Checked",
    "Compared",
    "Load",
    "LoadTestRun",
    "Peak",
    "Place",
    "Scenario",
    "Served",
    "ServiceCurve",
    "Session",
    "Test",
    "Wishes",
    "audit",
    "benchmark",
    "check",
    "compare",
    "find_peak",
    "measured",
    "peak",
    "scenarios",
    "simulate",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
