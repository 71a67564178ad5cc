"""The document that the page draws: a step as JSON and numeric columns.

The report's file contains it; the live page serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slipstream import technique
from slipstream.graph import Graph, Kind, StepPhase, replay
from slipstream.measure.environment import capture
from slipstream.measure.records import Environment
from slipstream.report._arrays import Arrays
from slipstream.report._families import FAMILIES
from slipstream.report._run import run_facts
from slipstream.report._scene import Scenes
from slipstream.report.history import Past
from slipstream.report.what_if import WhatIfs
from slipstream.verbs.explaining.movement import movement_page
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Prediction

SCHEMA = 2
# Total tasks of the edited steps with a timeline; further steps only have numbers.
_MAX_EDITED_TASKS = 120_000


def make_document(
    graph: Graph, what_ifs: WhatIfs, past: Past, environment: Environment | None = None
) -> tuple[dict[str, Any], Arrays]:
    """Return the document of `graph` and the columns to which it refers.

    Args:
        environment: machine of the predictions; this one by default.

    Raises:
        GraphError: the graph's dependencies form a cycle.
    """
    baseline = replay(graph)
    arrays = Arrays()
    scenes = Scenes(arrays)
    unchanged = predict(graph, [()], widen=past.widen)[0] if baseline.step_ns else None
    drawn = [scenes.scene(baseline, detail=True)]
    run = run_facts(graph, baseline, unchanged, environment or capture(torch=False))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "title": f"{run['workload']} · slipstream report",
        "run": run,
        "families": list(FAMILIES),
        "kinds": [kind.name.lower() for kind in Kind],
        "phases": [phase.name.lower() for phase in StepPhase],
        "what_ifs": _what_ifs(what_ifs, past, drawn, scenes),
        "history": past.to_json(),
        "movement": movement_page(graph),
        "scenes": drawn,
    }
    return document | scenes.shared(), arrays


def redacted(document: Mapping[str, Any], redact: Callable[[str], str]) -> dict[str, Any]:
    """Apply `redact` to every text in `document`, except for keys."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, Mapping):
            return {key: walk(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(entry) for entry in value]
        return value

    return {key: walk(value) for key, value in document.items()}


def _what_ifs(
    simulated: WhatIfs, past: Past, drawn: list[dict[str, Any]], scenes: Scenes
) -> dict[str, Any]:
    """Return the what-ifs; append scenes of edited steps to `drawn` up to the limit of tasks."""
    shown = set(simulated.ranked)
    in_order = sorted(simulated.predictions, key=lambda p: p.technique not in shown)
    scene_of: dict[str, int] = {}
    room = _MAX_EDITED_TASKS
    for prediction in in_order:
        edited = prediction.graph
        if edited is not None and len(edited) <= room:
            room -= len(edited)
            scene_of[prediction.technique] = len(drawn)
            drawn.append(scenes.scene(replay(edited), detail=False))
    return {
        "state": simulated.state,
        "reason": simulated.reason,
        "predictions": [
            prediction_document(p, past, scene_of.get(p.technique)) for p in simulated.predictions
        ],
        "ranked": list(simulated.ranked),
        "pareto_front": sorted(simulated.front),
        "best": simulated.best,
        "not_applicable": [
            {"technique": p.technique, "reason": p.why_not} for p in simulated.refused
        ],
        "failed": [{"technique": name, "reason": reason} for name, reason in simulated.failed],
        "combinations": list(simulated.combinations),
        "conflicts": _conflicts(),
    }


def prediction_document(
    p: Prediction, past: Past | None = None, scene: int | None = None
) -> dict[str, Any]:
    """Convert a prediction to what the page shows.

    For a technique that was measured, the speed-up is the one predicted before the measurement.
    """
    measured = past.measured.get((p.technique, p.metric)) if past is not None else None
    if measured is not None and isinstance(p, Predicted):
        shown = measured.predicted or p.to_record("", "")
        p = replace(p, ratio=shown.ratio, low=shown.low, high=shown.high)
        measured = replace(measured, predicted=shown)
    facts = p.to_json()
    same = (
        "technique", "step_ns", "speedup", "speedup_interval", "numerics", "verdict",
        "verdict_text", "edits", "metric",
    )  # fmt: skip
    return {
        **{key: facts[key] for key in same},
        "parts": [str(part) for part in p.techniques],
        "samples": facts["samples_per_step"][1],
        "peak_bytes": facts["peak_bytes"][1],
        "shares": facts["provenance"],
        "basis": facts["numerics_basis"] or "",
        "scene": scene,
        "measured": measured.to_json() if measured is not None else None,
    }


def _conflicts() -> dict[str, list[str]]:
    """Return the names with which each technique cannot be combined."""
    kinds = technique.registry()
    clashes = {
        name: [other for other in kinds if technique.clash(kind, kinds[other])]
        for name, kind in kinds.items()
    }
    return {name: others for name, others in clashes.items() if others}
