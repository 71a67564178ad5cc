"""Functions of jobs in worker processes: record the step, draw it, and simulate techniques.

A recording runs the user's code, in a process that exits afterwards. Simulation does not, but takes
time and memory that the server cannot spare: it must respond to an editor immediately, and must not
grow with the number of saves.
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
    complete: str,
) -> dict[str, Any]:
    """Record the workload, and return the user's ``files`` that were run and the ``costs``.

    Before that, it sends the same of a single step, and ``{"first": ...}`` when the recording of
    that step is written.

    Args:
        root: folder that lines are relative to.
        first, complete: paths of the two recordings.
    """
    brief = CaptureSettings.first_look(threads)
    full = CaptureSettings(0, steps, threads)

    def summary(graph: Graph) -> dict[str, Any]:
        return {"files": _user_files(), "costs": costs(graph, Path(root)).to_json()}

    def program(built: Any) -> Generator[None, Any, Any]:
        if steps > 1:
            graph = yield from capture(brief)(built)
            channel().send(summary(graph))
            save(graph, Path(first))
            channel().send({"first": first})
        graph = yield from capture(full, report_progress)(built)
        save(graph, Path(complete))
        return summary(graph)

    answer: dict[str, Any] = run_program(workload, keep_in, program)
    return answer


def draw(path: str, folder: str, techniques: list[str] | None, store: str | None) -> dict[str, Any]:
    """Write the page's document of the recording to `folder`, and return the predictions.

    Args:
        techniques: techniques to simulate; None for none, empty for all that are installed.
    """
    graph = _graph(path)
    machine = environment.capture(torch=False)
    workload = str(graph.meta.get("workload", ""))
    past = past_predictions(Path(store) if store else None, machine, workload)
    simulated = WhatIfs("skipped", "they are being simulated")
    if techniques is not None:
        simulated = what_ifs(
            graph, techniques, durations=_durations_for(graph), widen=past.widen,
            report=report_progress,
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
    """Copy a recording and its document with new line numbers, and return the costs.

    Args:
        path, document: the recording, and the folder of its document.
        moved: pairs of old and new line numbers, by file.
        root: folder that lines are relative to.
        into, drawn: where to write the recording and the document.
    """
    lines = {file: dict(pairs) for file, pairs in moved.items()}
    graph = _graphs[into] = relined(load(Path(path)), lines)
    save(graph, Path(into))
    relined_document(Path(document), Path(drawn), DOCUMENT, lines)
    return costs(graph, Path(root)).to_json()


def forget() -> None:
    """Clear the cached recordings and timelines."""
    _graphs.clear()
    _timelines.clear()


def simulate(
    path: str, text: str, cluster: str | None = None, workers: int | None = None
) -> dict[str, Any]:
    """Predict the recorded step with a combination, in the format of the page.

    Args:
        cluster: preset or short form of the cluster, for techniques that need workers.
        workers: number of devices to use; None for the number in `text`.

    Raises:
        InvalidArgumentError: the cluster has fewer devices.
    """
    graph = _graph(path)
    where = Cluster.load(cluster) if cluster else None
    if path not in _timelines:
        _timelines.clear()
        _timelines[path] = replay(graph)
    parts = technique.parse(text)
    if workers is not None:
        parts = technique.on_workers(parts, workers)
    (prediction,) = predict(
        graph, [parts], durations=_durations_for(graph), cluster=where, baseline=_timelines[path]
    )
    if prediction.why_not is not None:
        return {"technique": text, "reason": prediction.why_not}
    shared = prediction.to_json()["shared"]
    value: dict[str, Any] = json_values({**prediction_document(prediction), "shared": shared})
    return value


def on_device(path: str, device: str) -> dict[str, Any]:
    """Predict the recorded step on another device, as in `DevicePrediction.to_json`.

    A new instruction set or number of threads is measured first.
    """
    value: dict[str, Any] = json_values(predict_device(_graph(path), device).to_json())
    return value


def _offers(graph: Graph) -> dict[str, list[str]]:
    """Return the techniques and devices that the page offers."""
    kinds = technique.registry().items()
    # Techniques that only change gradient exchange need replicas from ddp.
    distributed = [
        name if kind.traits.replicas == "makes" else f"ddp+{name}"
        for name, kind in kinds
        if kind.traits.is_distributed and not kind.traits.compresses
    ]
    return {
        "offered": [str(single) for single in single_techniques()],
        "spreading": sorted(distributed),
        "devices": devices_for(graph),
    }


def _graph(path: str) -> Graph:
    if path not in _graphs:
        _graphs.clear()
        # Every request allocates and frees edited columns of the same sizes.
        keep_pages()
        _graphs[path] = load(Path(path))
    return _graphs[path]


def _durations_for(graph: Graph) -> Durations:
    threads = int(graph.meta.get("threads", 1))
    if threads not in _durations:
        _durations[threads] = Durations(threads=threads)
    return _durations[threads]


def _user_files() -> list[str]:
    """Return the absolute paths of the user's imported modules."""
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return sorted(
        {
            str(Path(path).resolve())
            for path in paths
            if isinstance(path, str) and path.endswith(".py") and is_user_file(path)
        }
    )
