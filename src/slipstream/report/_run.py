"""Facts about the recorded run: the machine, the settings, and caveats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slipstream.graph import PROVENANCES, Graph, Timeline, lane_utilisation
from slipstream.measure.records import Environment
from slipstream.units import format_bytes, format_duration, format_percent
from slipstream.verbs.results import Prediction

_FACTS = (
    ("cpu.model", "processor"),
    ("cpu.physical", "physical cores"),
    ("cpu.logical", "logical cores"),
    ("memory.total_mib", "memory"),
    ("gpu.visible", "GPU"),
    ("kernel.system", "system"),
    ("kernel.release", "kernel"),
    ("machine.container", "container"),
    ("python.version", "Python"),
    ("torch.version", "torch"),
)
_SAME_MACHINE = ("cpu.model", "cpu.logical")
# Number of `_FACTS` that identify a machine in a sentence.
_IDENTIFYING = 2


def run_facts(
    graph: Graph, baseline: Timeline, unchanged: Prediction | None, environment: Environment
) -> dict[str, Any]:
    """Return the header of the report: the workload, its step time and the sources of it.

    Args:
        unchanged: the prediction for the unchanged step, whose interval is the variation between
            recordings; None for a step without time.
        environment: where techniques were simulated. The report shows the machine on which the
            step was recorded, if it is known.
    """
    meta = graph.meta
    step_ns = baseline.step_ns
    tasks = graph.tasks
    shares = unchanged.shares if unchanged is not None else {}
    return {
        "workload": str(meta.get("workload", "this step")),
        "created": str(meta.get("created", "")),
        "training": bool(meta.get("training", False)),
        "samples": graph.samples,
        "tasks": len(graph),
        "step_ns": step_ns,
        "interval_ns": [step_ns * unchanged.low, step_ns * unchanged.high] if unchanged else None,
        "peak_bytes": baseline.peak_bytes,
        "recorded_ns": meta.get("step_ns") if isinstance(meta.get("step_ns"), Mapping) else {},
        "shares": {str(key): share for key, share in shares.items()},
        "provenances": [str(provenance) for provenance in PROVENANCES],
        "spread": float(tasks.spread.max(initial=0.0)),
        "settings": _settings(graph),
        "machine": _machine(_recorded_on(graph) or environment.facts),
        "notes": _notes(graph, environment.facts),
        "lanes": [asdict(lane) for lane in lane_utilisation(baseline)],
        "edits": [f"{edit.technique}: {edit.what}" for edit in graph.edits],
    }  # fmt: skip


def _settings(graph: Graph) -> list[list[str]]:
    """Return the recorded settings of the step, as pairs of name and value."""
    meta = graph.meta
    optimizer = meta.get("optimizer")
    baseline = meta.get("baseline")
    rows = [
        ("device", meta.get("device")),
        ("threads", meta.get("threads")),
        ("torch", meta.get("torch")),
        ("vector instructions", meta.get("cpu_capability")),
        ("samples per step", graph.samples or None),
        ("parameters", f"{meta['parameters']:,}" if meta.get("parameters") else None),
        ("optimizer", _call(optimizer) if isinstance(optimizer, Mapping) else None),
        ("autocast", baseline.get("amp") or "off" if isinstance(baseline, Mapping) else None),
        ("compiled", _yes_no(baseline, "compiled")),
        ("steps recorded", meta.get("aligned_steps", meta.get("steps"))),
        (
            "profiler overhead subtracted per event",
            _time(meta.get("profiler_ns_per_event") or None),
        ),
    ]
    return [[name, str(value)] for name, value in rows if value is not None]


def _call(optimizer: Mapping[str, Any]) -> str:
    settings = optimizer.get("settings")
    shown = ", ".join(
        f"{key}={value}"
        for key, value in (settings.items() if isinstance(settings, Mapping) else ())
        if value not in (None, False, 0, 0.0)
    )
    return f"{optimizer.get('class', 'optimizer')}({shown})"


def _yes_no(baseline: Any, key: str) -> str | None:
    if not isinstance(baseline, Mapping) or key not in baseline:
        return None
    return "yes" if baseline[key] else "no"


def _time(value: Any) -> str | None:
    return format_duration(float(value)) if isinstance(value, (int, float)) else None


def _machine(facts: Mapping[str, Any]) -> list[list[str]]:
    mib = facts.get("memory.total_mib")
    sizes = {"memory.total_mib": format_bytes(mib * 2**20)} if isinstance(mib, int) else {}
    rows = ((label, sizes.get(key, facts.get(key))) for key, label in _FACTS)
    return [
        [label, str(value)] for label, value in rows if value not in (None, "", "unreadable", "no")
    ]


def _recorded_on(graph: Graph) -> dict[str, Any]:
    """Return facts about the recording machine and its torch; empty if unknown."""
    recorded = graph.meta.get("machine")
    if not isinstance(recorded, Mapping):
        return {}
    return {**recorded, "torch.version": graph.meta.get("torch")}


def _notes(graph: Graph, here: Mapping[str, Any]) -> list[str]:
    """Return caveats of the recording; `here` are the facts of this machine."""
    meta = graph.meta
    notes = []
    recorded = _recorded_on(graph)
    if not recorded:
        notes.append(
            "The recording machine is unknown; the machine shown is the one that wrote this report."
        )
    elif any(recorded.get(name) != here.get(name) for name in _SAME_MACHINE):
        machine = ", ".join(value for _, value in _machine(here)[:_IDENTIFYING])
        notes.append(f"Techniques were simulated with timings from another machine: {machine}.")
    if meta.get("contended"):
        notes.append("The machine was busy while the step was recorded; minima were taken.")
    if meta.get("unaligned_share"):
        share = format_percent(float(meta["unaligned_share"]))
        notes.append(
            f"The steps differ in {share} of their operators; the report shows one of them."
        )
    if not len(graph):
        notes.append("The graph has no tasks: nothing ran, or nothing was recorded.")
    return notes
