"""``slipstream predict``: what would these techniques make of this step?"""

from __future__ import annotations

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


def command(
    workload: Target,
    script_arguments: ScriptArguments = None,
    technique: Techniques = None,
    settings: Set = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Predict what techniques would gain, without applying them.

    A recorded graph is edited and simulated; operators it would call differently are
    micro-benchmarked once per machine. Predictions are kept, to be scored by `prove`.

        slipstream predict run.slipgraph --technique amp:bf16
    """
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import (
        graph_of,
        history,
        needs_of,
        prediction_table,
    )
    from slipstream.verbs._predict import predict

    if not technique:
        raise UsageError(
            "no technique is named",
            remedy="--technique amp:bf16; or `slipstream advise` to try every one",
        )
    needs = needs_of(technique)
    with progress("predicting") as say, history(store) as past:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say, needs=needs,
        )  # fmt: skip
        found = predict(graph, technique, widen=past.widen, say=say)
        past.keep(found, str(graph.meta.get("workload", workload)))
        table = prediction_table(graph, found, past.note)
    emit(table, [p.to_json() for p in found], as_json=as_json)
