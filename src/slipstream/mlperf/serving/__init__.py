"""Benchmark serving under MLPerf's inference rules, with LoadGen and any runtime.

    from slipstream.mlperf import serving

    with serving.Session("model.onnx", "digits") as session:
        config = serving.LoadTestConfig(seconds=5)
        result = serving.benchmark(session, serving.scenarios("all"), config)

The model and LoadGen run in a supervised child process, so that crashes and hangs become errors
with their cause. Runs that are shorter than the rules require are never called MLPerf results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.mlperf.serving.audits import AUDITS, Audit, audit
    from slipstream.mlperf.serving.checking import CheckResult, check
    from slipstream.mlperf.serving.comparing import ServingComparison, compare
    from slipstream.mlperf.serving.peaks import Peak, find_peak
    from slipstream.mlperf.serving.planning import LoadTestConfig, run_scenario
    from slipstream.mlperf.serving.queueing import Load, ServiceCurve, peak, simulate
    from slipstream.mlperf.serving.results import ServingResult, benchmark
    from slipstream.mlperf.serving.rules import SCENARIOS, Scenario, Test, scenarios
    from slipstream.mlperf.serving.session import LoadTestRun, Session
    from slipstream.mlperf.serving.tree import Place

_HOMES = {
    "audits": ("AUDITS", "Audit", "audit"),
    "checking": ("CheckResult", "check"),
    "comparing": ("ServingComparison", "compare"),
    "peaks": ("Peak", "find_peak"),
    "planning": ("LoadTestConfig", "run_scenario"),
    "queueing": ("Load", "ServiceCurve", "peak", "simulate"),
    "results": ("ServingResult", "benchmark"),
    "rules": ("SCENARIOS", "Scenario", "Test", "scenarios"),
    "session": ("LoadTestRun", "Session"),
    "tree": ("Place",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AUDITS",
    "SCENARIOS",
    "Audit",
    "CheckResult",
    "Load",
    "LoadTestConfig",
    "LoadTestRun",
    "Peak",
    "Place",
    "Scenario",
    "ServiceCurve",
    "ServingComparison",
    "ServingResult",
    "Session",
    "Test",
    "audit",
    "benchmark",
    "check",
    "compare",
    "find_peak",
    "peak",
    "run_scenario",
    "scenarios",
    "simulate",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
