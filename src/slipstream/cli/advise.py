"""``slipstream advise``: what would make this cheaper?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._cluster import ClusterSizes, OnCluster
from slipstream.cli._workload import (
    Json,
    Record,
    ScriptArguments,
    Set,
    Steps,
    StorePath,
    Target,
    Threads,
    Timeout,
)

if TYPE_CHECKING:
    from slipstream.graph import Graph
    from slipstream.verbs.advising import Advice
    from slipstream.verbs.goals import Goal
    from slipstream.verbs.predicting import Prediction


def command(
    workload: Target,
    script_arguments: ScriptArguments = None,
    settings: Set = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            "--goal",
            "-g",
            metavar="GOAL",
            help="What must hold: 'memory<8GiB', 'latency<10ms'; or cost. Repeatable.",
        ),
    ] = None,
    combinations: Annotated[
        bool,
        typer.Option("--combinations/--no-combinations", help="Also try techniques together."),
    ] = True,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    record: Record = None,
    cluster: OnCluster = None,
    cluster_sizes: ClusterSizes = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --cluster: how many; 0: all devices.")
    ] = 0,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Try every technique on paper and rank them; say what does not pay, and why.

    Single techniques and combinations of those that help, the cheapest sample first. A star marks
    what nothing else beats in time, memory and effect on the numbers at once. Nothing is applied.

    Operators that techniques would change are timed once per machine, which takes up to a few
    minutes. Meanwhile a first table on stderr says what each technique can gain at most; stdout
    has the final table only. With --json there is no first table.

        slipstream advise train.py:make_workload

        slipstream advise run.slipgraph --goal 'memory<2GiB'

    With --cluster: ways to spread the step over workers instead, and should they compress what
    they send?

        slipstream advise run.slipgraph --cluster workers=8,link=1gbit,latency=50us
    """
    if cluster is not None:
        _on_cluster(
            workload, script_arguments, settings, cluster, cluster_sizes, workers,
            threads=threads, steps=steps, timeout=timeout, store=store, as_json=as_json,
        )  # fmt: skip
        return
    from slipstream.cli._first_look import show_first_look
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import (
        graph_of,
        history,
        prediction_table,
        statistics_of,
        target_of,
    )
    from slipstream.verbs.advising import advise
    from slipstream.verbs.goals import parse_goal

    goals = [parse_goal(text) for text in goal or ()]
    with progress("advising") as say, history(store) as past:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say,
            needs=statistics_of(record),
        )  # fmt: skip
        found = advise(
            graph, goals=goals, combinations=combinations, widen=past.widen, say=say,
            show=(lambda outlooks: None) if as_json else show_first_look(graph),
        )  # fmt: skip
        past.keep(found.predictions, str(graph.meta.get("workload", workload)))
    legend = "* nothing else is better in time, memory and numbers at once" if found.front else ""
    bound = _bound_to_functions(found, target_of(graph) or workload)
    script = (
        f"prove needs a function for {', '.join(bound)}: the edit finds no place in the script's "
        "loop, and `slipstream apply` shows the lines to write"
    )
    notes = (
        past.note, legend, *_about_goals(goals, found), script if bound else "",
        _why_not_the_largest(found, goals), _next(found, graph, bound),
    )  # fmt: skip
    table = prediction_table(graph, found.predictions, *notes, marked=found.front)
    payload: dict[str, Any] = {
        "predictions": [p.to_json() for p in found.predictions],
        "front": sorted(found.front),
        "best": found.best.technique if found.best is not None else None,
        "goals": [
            {
                "goal": str(one),
                "holds_as_it_is": one not in found.needed,
                "can_be_met": one not in found.unmet,
            }
            for one in goals
        ],
    }
    emit(table, payload, as_json=as_json)


def _on_cluster(
    workload: str,
    script_arguments: list[str] | None,
    settings: list[str] | None,
    cluster: str,
    sizes: list[str] | None,
    workers: int,
    *,
    threads: int,
    steps: int,
    timeout: str,
    store: Path | None,
    as_json: bool,
) -> None:
    from slipstream.cli._cluster import cluster_of, in_words, shared_table
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import graph_of, history, prediction_table
    from slipstream.verbs.spreading import spread

    where = cluster_of(cluster, sizes)
    assert where is not None
    with progress("advising") as say, history(store) as past:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say,
        )  # fmt: skip
        found = spread(graph, where, workers, widen=past.widen, say=say)
        past.keep(found.predictions, str(graph.meta.get("workload", workload)))
    words = [] if found.compressing is None else in_words(found.compressing)
    table = prediction_table(graph, found.predictions, past.note)
    payload = {
        "predictions": [p.to_json() for p in found.predictions],
        "compress": None
        if found.compressing is None
        else {
            "bandwidth_bytes_per_s": found.compressing.bandwidth,
            "needed_ratio": found.compressing.needed,
            "budget_ns": found.compressing.budget_ns,
            "pays_below_bytes_per_s": {
                m.prediction.technique: m.pays_below for m in found.compressing.methods
            },
            "best": None
            if found.compressing.best is None
            else found.compressing.best.prediction.technique,
        },
        "in_words": words,
    }
    emit([table, shared_table(graph, where, found.predictions, *words)], payload, as_json=as_json)


def _about_goals(goals: Sequence[Goal], found: Advice) -> list[str]:
    """A line a goal: whether it holds already, with which technique, or not at all."""
    lines = []
    for goal in goals:
        if goal.limit is None:
            lines.append("cost: no price is known here, so it goes with the time per sample")
        elif goal not in found.needed:
            lines.append(f"{goal}: holds as it is")
        elif goal in found.unmet:
            lines.append(f"{goal}: nothing here is predicted to reach it")
        elif found.best is not None:
            lines.append(f"{goal}: predicted to hold with {found.best.technique}")
    return lines


def _bound_to_functions(found: Advice, workload: str) -> list[str]:
    """What `prove` cannot measure on a plain script: it changes the loop, and finds no place."""
    from slipstream import technique
    from slipstream.workload import Workload

    # A recording may have come without its script.
    if not (workload.endswith(".py") and Path(workload).is_file()):
        return []
    script = Workload.parse(workload)
    return [
        p.technique
        for p in found.predictions
        if p.why_not is None
        and technique.not_in_script(technique.parse(p.technique), script) is not None
    ]


def _next(found: Advice, graph: Graph, unprovable: Collection[str]) -> str:
    """What to do with the ranking, in one line."""
    from slipstream.cli._workload import command_for

    if found.best is not None:
        verb = "apply" if found.best.technique in unprovable else "prove"
        return f"next: {command_for(verb, graph, found.best.technique)}"
    if found.unmet:
        return "a smaller model or batch, or a larger machine, is what is left"
    return "nothing here is worth the trouble: keep the step as it is"


def _why_not_the_largest(found: Advice, goals: Sequence[Goal]) -> str:
    """What the best has and those that gain more lack, in a line; empty where none gains more."""
    from slipstream.technique import QualityKind

    best = found.best
    if best is None:
        return ""
    above = [
        p
        for p in found.predictions
        if p.why_not is None and p.technique in found.front and p.ratio < best.ratio
    ]
    reasons = []
    if any(not goal.met_by(p) for p in above for goal in goals):
        reasons.append("reaches the goal")

    def trains(p: Prediction) -> bool:
        return p.quality is None or p.quality.kind is QualityKind.NEEDS_TRAINING

    if not trains(best) and any(map(trains, above)):
        reasons.append("leaves the training as it is")
    if best.verdict == "worth it" and any(p.verdict != best.verdict for p in above):
        reasons.append("is certain")
    if not reasons:
        return ""
    return f"{best.technique} comes next: the largest gain that {' and '.join(reasons)}"
