"""``slipstream advise``: what would make this cheaper?"""

from __future__ import annotations

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
        good = [p for p in found if p.why_not is None and p.verdict == "worth it"]
        advice = (
            f"next: slipstream prove WORKLOAD --technique {good[0].technique}"
            if good
            else "nothing here is worth the trouble: keep the step as it is"
        )
        table = prediction_table(graph, found, past.note, advice)
    emit(table, [prediction_json(p) for p in found], as_json=as_json)
