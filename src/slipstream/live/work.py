"""What jobs do in worker processes: record the user's step, draw it, simulate techniques on it.

A recording runs the user's code, in a process that ends with it. Simulating runs none of it, but
takes time and memory that the server should not spend: it must answer an editor at once, and be
as small after a thousand saves as after one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.capture import CaptureSettings, capture
from slipstream.child import channel, is_user_file
from slipstream.cluster import Cluster
from slipstream.durations import Durations
from slipstream.graph import Graph, Timeline, load, replay, save
from slipstream.heap import keep_pages
from slipstream.live.costs import costs
from slipstream.live.relined import relined, relined_document
from slipstream.measure import environment
from slipstream.report.document import make_document, prediction_document
from slipstream.report.history import past_predictions
from slipstream.report.what_if import WhatIfs, what_ifs
from slipstream.tables import json_values
from slipstream.verbs.advising import single_techniques
from slipstream.verbs.children import report_progress, run_program
from slipstream.verbs.devices.elsewhere import devices_for, predict_device
from slipstream.verbs.predicting import predict

DOCUMENT, COLUMNS = "document.json", "columns.deflate"

_graphs: dict[str, Graph] = {}
_timelines: dict[str, Timeline] = {}
_durations: dict[int, Durations] = {}


def record(
    workload: dict[str, Any],
    keep_in: str,
    threads: int,
    steps: int,
    root: str,
    first: str,
    whole: str,
) -> dict[str, Any]:
    """Record one step of the workload: the user's ``files`` that took part, and its ``costs``.

    The same of one step is sent as soon as it is known, and ``{"first": ...}`` when its recording
    is written.

    Args:
        root: the folder that lines are named from.
        first, whole: where the recordings go.
    """
    brief = CaptureSettings.first_look(threads)
    full = CaptureSettings(0, steps, threads)

    def recorded(graph: Graph) -> dict[str, Any]:
        return {"files": _users_files(), "costs": costs(graph, Path(root)).to_json()}

    def program(built: Any) -> Generator[None, Any, Any]:
        if steps > 1:
            graph = yield from capture(brief)(built)
            channel().send(recorded(graph))
            save(graph, Path(first))
            channel().send({"first": first})
        graph = yield from capture(full, report_progress)(built)
        save(graph, Path(whole))
        return recorded(graph)

    answer: dict[str, Any] = run_program(workload, keep_in, program)
    return answer


def draw(path: str, folder: str, techniques: list[str] | None, store: str | None) -> dict[str, Any]:
    """Write the page's document of the recording into `folder`; returns its predictions.

    Args:
        techniques: what to simulate; None for nothing, empty for all that are installed.
    """
    graph = _graph(path)
    machine = environment.capture(torch=False)
    workload = str(graph.meta.get("workload", ""))
    past = past_predictions(Path(store) if store else None, machine, workload)
    simulated = WhatIfs("skipped", "they are being simulated")
    if techniques is not None:
        simulated = what_ifs(
            graph, techniques, durations=_known(graph), widen=past.widen, report=report_progress,
        )  # fmt: skip
    document, arrays = make_document(graph, simulated, past, machine)
    document["what_ifs"] |= _offers(graph)
    text = json.dumps(json_values(document), separators=(",", ":"), ensure_ascii=False)
    (Path(folder) / DOCUMENT).write_text(text, encoding="utf-8")
    (Path(folder) / COLUMNS).write_bytes(arrays.compressed())
    return {
        "state": simulated.state,
        "reason": simulated.reason,
        "best": simulated.best,
        "pareto_front": sorted(simulated.front),
        "predictions": [
            json_values(p.to_json())
            for p in simulated.predictions
            if p.technique in simulated.ranked
        ],
        "not_applicable": [
            {"technique": p.technique, "reason": p.why_not} for p in simulated.refused
        ],
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


def forget() -> None:
    """Load recordings anew when they are asked about again."""
    _graphs.clear()
    _timelines.clear()


def simulate(
    path: str, text: str, cluster: str | None = None, workers: int | None = None
) -> dict[str, Any]:
    """What a combination would make of the recorded step: as the page shows a prediction.

    Args:
        cluster: a preset or short form, for what spreads the step over workers.
        workers: on as many of its devices; None for as many as `text` says.

    Raises:
        InvalidArgumentError: the cluster has fewer devices.
    """
    graph = _graph(path)
    where = Cluster.load(cluster) if cluster else None
    if path not in _timelines:
        _timelines.clear()
        _timelines[path] = replay(graph)
    asked = technique.parse(text)
    if workers is not None:
        asked = technique.on_workers(asked, workers)
    (prediction,) = predict(
        graph, [asked], durations=_known(graph), cluster=where, baseline=_timelines[path]
    )
    if prediction.why_not is not None:
        return {"technique": text, "reason": prediction.why_not}
    shared = prediction.to_json()["shared"]
    value: dict[str, Any] = json_values({**prediction_document(prediction), "shared": shared})
    return value


def on_device(path: str, device: str) -> dict[str, Any]:
    """The recorded step on another device: as `DevicePrediction.to_json` has it.

    An instruction set or a number of threads that nobody asked about is measured first.
    """
    value: dict[str, Any] = json_values(predict_device(_graph(path), device).to_json())
    return value


def _offers(graph: Graph) -> dict[str, list[str]]:
    """Names the page may ask for: techniques on one machine and on several workers, and devices."""
    kinds = technique.registry().items()
    # What changes how replicas exchange gradients needs replicas.
    spreading = [
        name if kind.traits.replicas == "makes" else f"ddp+{name}"
        for name, kind in kinds
        if kind.traits.is_distributed and not kind.traits.compresses
    ]
    return {
        "offered": [str(one) for one in single_techniques()],
        "spreading": sorted(spreading),
        "devices": devices_for(graph),
    }


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


def _users_files() -> list[str]:
    """Absolute paths of the user's modules."""
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return sorted(
        {
            str(Path(path).resolve())
            for path in paths
            if isinstance(path, str) and path.endswith(".py") and is_user_file(path)
        }
    )
