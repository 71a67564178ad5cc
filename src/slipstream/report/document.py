"""The document a page draws: all that is known of a step, as JSON and number columns.

A report carries it in its file; whatever else shows the same page serves the same document.
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
# Tasks of all edited steps together that get a timeline of their own; the others give numbers.
_MOST_EDITED_TASKS = 120_000


def make_document(
    graph: Graph, what_ifs: WhatIfs, past: Past, environment: Environment | None = None
) -> tuple[dict[str, Any], Arrays]:
    """The document of `graph`, and the columns it refers to.

    Args:
        environment: the machine predictions were made on; this one by default.

    Raises:
        GraphError: the graph's dependencies form a cycle.
    """
    baseline = replay(graph)
    arrays = Arrays()
    scenes = Scenes(arrays)
    as_it_is = predict(graph, [()], widen=past.widen)[0] if baseline.step_ns else None
    drawn = [scenes.scene(baseline, detail=True)]
    run = run_facts(graph, baseline, as_it_is, environment or capture(torch=False))
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
    """`document` with every text in it, names of keys aside, as `redact` gives it."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, Mapping):
            return {key: walk(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(one) for one in value]
        return value

    return {key: walk(value) for key, value in document.items()}


def _what_ifs(
    found: WhatIfs, past: Past, made: list[dict[str, Any]], scenes: Scenes
) -> dict[str, Any]:
    """What was simulated; edited steps are added to `made` while there is room for them."""
    shown = set(found.ranked)
    in_order = sorted(found.predictions, key=lambda p: p.technique not in shown)
    scene_of: dict[str, int] = {}
    room = _MOST_EDITED_TASKS
    for prediction in in_order:
        edited = prediction.graph
        if edited is not None and len(edited) <= room:
            room -= len(edited)
            scene_of[prediction.technique] = len(made)
            made.append(scenes.scene(replay(edited), detail=False))
    return {
        "state": found.state,
        "reason": found.reason,
        "predictions": [
            prediction_document(p, past, scene_of.get(p.technique)) for p in found.predictions
        ],
        "ranked": list(found.ranked),
        "pareto_front": sorted(found.front),
        "best": found.best,
        "not_applicable": [{"technique": p.technique, "reason": p.why_not} for p in found.refused],
        "failed": [{"technique": name, "reason": reason} for name, reason in found.failed],
        "combinations": list(found.combinations),
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
        "parts": [str(one) for one in p.techniques],
        "samples": facts["samples_per_step"][1],
        "peak_bytes": facts["peak_bytes"][1],
        "shares": facts["provenance"],
        "basis": facts["numerics_basis"] or "",
        "scene": scene,
        "measured": measured.to_json() if measured is not None else None,
    }


def _conflicts() -> dict[str, list[str]]:
    """Names that cannot be combined, by name."""
    known = technique.registry()
    clashes = {
        name: [other for other in known if technique.clash(kind, known[other])]
        for name, kind in known.items()
    }
    return {name: others for name, others in clashes.items() if others}
