"""What is made of a recording: predictions, the page's document. Runs in a child.

No code of the user's runs here, but simulating takes time and memory that the server should not
spend: it must answer an editor at once, and be as small after a thousand saves as after one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.cluster import Cluster
from slipstream.durations import Durations
from slipstream.graph import Graph, Timeline, load, replay, save
from slipstream.heap import keep_pages
from slipstream.live._relined import relined, relined_document
from slipstream.live.costs import costs
from slipstream.measure.environment import capture
from slipstream.report._document import make_document, prediction_document
from slipstream.report._history import past_predictions
from slipstream.report._what_if import WhatIfs, what_ifs
from slipstream.tables import json_values
from slipstream.verbs.advising import single_names
from slipstream.verbs.children import say
from slipstream.verbs.devices.elsewhere import devices_for, predict_device
from slipstream.verbs.predicting import Prediction, predict
from slipstream.verbs.spreading import with_workers

DOCUMENT, COLUMNS = "document.json", "columns.deflate"

_graphs: dict[str, Graph] = {}
_timelines: dict[str, Timeline] = {}
_durations: dict[int, Durations] = {}


def draw(path: str, folder: str, techniques: list[str] | None, store: str | None) -> dict[str, Any]:
    """Write the page's document of the recording into `folder`; returns its predictions.

    Args:
        techniques: what to simulate; None for nothing, empty for all that are installed.
    """
    graph = _graph(path)
    environment = capture(torch=False)
    workload = str(graph.meta.get("workload", ""))
    past = past_predictions(Path(store) if store else None, environment, workload)
    found = WhatIfs("skipped", "they are being simulated")
    if techniques is not None:
        found = what_ifs(
            graph, techniques, durations=_known(graph), widen=past.widen, say=say,
        )  # fmt: skip
    document, arrays = make_document(graph, found, past, environment)
    document["what_ifs"] |= _offers(graph)
    text = json.dumps(json_values(document), separators=(",", ":"), ensure_ascii=False)
    (Path(folder) / DOCUMENT).write_text(text, encoding="utf-8")
    (Path(folder) / COLUMNS).write_bytes(arrays.compressed())
    return {
        "state": found.state,
        "reason": found.reason,
        "best": found.best,
        "front": sorted(found.front),
        "predictions": [_plain(p) for p in found.predictions if p.technique in found.ranked],
        "refused": [{"technique": p.technique, "reason": p.why_not} for p in found.refused],
    }


def reline(
    path: str,
    document: str,
    moved: dict[str, list[tuple[int, int]]],
    root: str,
    into: str,
    drawn: str,
) -> dict[str, Any]:
    """Write a recording, and its document, once more with other numbers of lines; its costs.

    Args:
        path, document: the recording, and the folder of what was drawn of it.
        moved: by file, each of its lines and where that is now.
        root: the folder that lines are named from.
        into, drawn: where they go.
    """
    lines = {file: dict(pairs) for file, pairs in moved.items()}
    graph = _graphs[into] = relined(load(Path(path)), lines)
    save(graph, Path(into))
    relined_document(Path(document), Path(drawn), DOCUMENT, lines)
    return costs(graph, Path(root)).to_json()


def redraw(path: str, folder: str) -> None:
    """Load the recording at `path` anew, and draw it."""
    forget()
    draw(path, folder, None, None)


def forget() -> None:
    """Load recordings anew when they are asked about again."""
    _graphs.clear()
    _timelines.clear()


def simulate(
    path: str, technique: str, cluster: str | None = None, workers: int | None = None
) -> dict[str, Any]:
    """What a combination would make of the recorded step: as the page shows a prediction.

    Args:
        cluster: a preset or short form, for what spreads the step over workers.
        workers: on as many of its devices; None for as many as `technique` says.

    Raises:
        InvalidArgumentError: the cluster has fewer devices.
    """
    graph = _graph(path)
    where = Cluster.load(cluster) if cluster else None
    if path not in _timelines:
        _timelines.clear()
        _timelines[path] = replay(graph)
    asked = technique if workers is None else with_workers(technique, workers)
    (found,) = predict(
        graph, [asked], durations=_known(graph), cluster=where, baseline=_timelines[path]
    )
    if found.why_not is not None:
        return {"technique": technique, "why_not": found.why_not}
    shared = found.to_json()["shared"]
    value: dict[str, Any] = json_values({**prediction_document(found), "shared": shared})
    return value


def on_device(path: str, device: str) -> dict[str, Any]:
    """The recorded step on another device: as `OnDevice.to_json` has it.

    An instruction set or a number of threads that nobody asked about is measured first.
    """
    value: dict[str, Any] = json_values(predict_device(_graph(path), device).to_json())
    return value


def _offers(graph: Graph) -> dict[str, list[str]]:
    """Names the page may ask for: techniques on one machine and on several workers, and devices."""
    kinds = technique.registry().items()
    # What changes how replicas exchange gradients needs replicas.
    spreading = [
        name if hasattr(kind, "workers") else f"ddp+{name}"
        for name, kind in kinds
        if getattr(kind, "needs_cluster", False)
    ]
    return {
        "offered": single_names(),
        "spreading": sorted(spreading),
        "devices": devices_for(graph),
    }


def _plain(p: Prediction) -> dict[str, Any]:
    value: dict[str, Any] = json_values(p.to_json())
    return value


def _graph(path: str) -> Graph:
    if path not in _graphs:
        _graphs.clear()
        # Every question makes and frees edited columns of the same sizes.
        keep_pages()
        _graphs[path] = load(Path(path))
    return _graphs[path]


def _known(graph: Graph) -> Durations:
    threads = int(graph.meta.get("threads", 1))
    if threads not in _durations:
        _durations[threads] = Durations(threads=threads)
    return _durations[threads]
