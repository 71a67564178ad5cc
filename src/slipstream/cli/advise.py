"""``slipstream advise``: what would make this cheaper?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.cli._workload import (
    Json,
    ScriptArguments,
    Set,
    Steps,
    StorePath,
    Target,
    Threads,
    Timeout,
)

if TYPE_CHECKING:
    from slipstream.verbs._predict import Prediction


def command(
    workload: Target,
    script_arguments: ScriptArguments = None,
    settings: Set = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Try every technique on paper and rank them; say what does not pay, and why.

    Each is judged with its default settings; nothing is applied.

        slipstream advise train.py:make_workload

        slipstream advise run.slipgraph
    """
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import graph_of, history, prediction_json, prediction_table
    from slipstream.verbs._advise import advise

    with progress("advising") as say, history(store) as past:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say,
        )  # fmt: skip
        found = advise(graph, widen=past.widen, say=say)
        past.keep(found, str(graph.meta.get("workload", workload)))
        advice = _next(found, "WORKLOAD" if workload.endswith(".slipgraph") else workload)
        table = prediction_table(graph, found, past.note, advice)
    emit(table, [prediction_json(p) for p in found], as_json=as_json)


def _next(found: list[Prediction], workload: str) -> str:
    """What to do with the ranking, in one line."""
    for verdict in ("worth it", "undecided: prove it"):
        for prediction in found:
            if prediction.verdict == verdict:
                return f"next: slipstream prove {workload} --technique {prediction.technique}"
    return "nothing here is worth the trouble: keep the step as it is"
