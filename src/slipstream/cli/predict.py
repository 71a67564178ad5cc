"""``slipstream predict``: what would these techniques make of this step?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._cluster import ClusterSizes, OnCluster
from slipstream.cli._workload import (
    Json,
    ScriptArguments,
    Set,
    Steps,
    StorePath,
    Target,
    Techniques,
    Threads,
    Timeout,
)
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.verbs.predicting import Prediction


def command(
    workload: Target,
    script_arguments: ScriptArguments = None,
    technique: Techniques = None,
    settings: Set = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    cluster: OnCluster = None,
    cluster_sizes: ClusterSizes = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Write the predicted step for ui.perfetto.dev; of several techniques FILE-1, ...",
        ),
    ] = None,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Predict what techniques would gain, without applying them.

    A recorded graph is edited and simulated; operators it would call differently are
    micro-benchmarked once per machine. Predictions are kept, to be scored by `prove`.

    Techniques that spread the step over workers need a cluster: a preset, a file from
    `slipstream cluster measure`, or a short form.

        slipstream predict run.slipgraph --technique amp:bf16

        slipstream predict run.slipgraph --cluster here.toml --technique ddp:workers=4
    """
    from slipstream.cli._cluster import cluster_of, shared_table
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import (
        graph_of,
        history,
        measured_note,
        needs_of,
        prediction_table,
    )
    from slipstream.verbs.predicting import predict

    if not technique:
        raise UsageError(
            "no technique is named",
            remedy="--technique amp:bf16; or `slipstream advise` to try every one",
        )
    needs = needs_of(technique)
    where = cluster_of(cluster, cluster_sizes)
    with progress("predicting") as say, history(store) as past:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say, needs=needs,
        )  # fmt: skip
        found = predict(graph, technique, cluster=where, widen=past.widen, say=say)
        name = str(graph.meta.get("workload", workload))
        past.keep(found, name)
        measured = past.measured(found, name, graph.meta.get("threads"))
        proofs = [measured_note(technique, one) for technique, one in measured.items()]
        table = prediction_table(graph, found, *proofs, past.note)
    tables = [table]
    if where is not None and any(p.shared is not None for p in found):
        tables.append(shared_table(graph, where, found))
    if timeline is not None:
        _write_timelines(found, timeline)
    payload = []
    for p in found:
        one = measured.get(p.technique)
        payload.append(p.to_json() | {"measured": one and one.to_json(p.low, p.high)})
    emit(tables, payload, as_json=as_json)


def _write_timelines(found: Sequence[Prediction], path: Path) -> None:
    """Each predicted step as a trace: at `path`, or numbered beside it where there are several."""
    from slipstream.graph import replay, write_perfetto

    graphs = [p.graph for p in found if p.graph is not None]
    for number, graph in enumerate(graphs, start=1):
        one = path if len(graphs) == 1 else path.with_stem(f"{path.stem}-{number}")
        write_perfetto(replay(graph), one)
