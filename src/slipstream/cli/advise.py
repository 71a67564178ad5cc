"""``slipstream advise``: rank every technique by predicted gain."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit_result, note, progress, show_progress

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.graph import Graph
    from slipstream.verbs.speedup_bounds import SpeedupBound
    from slipstream.workload import Workload


@options.asks(options.Target, threads=0, steps=24, timeout="5min")
def command(
    request: options.Request,
    goal: options.Goals = None,
    rate: options.Rate = None,
    combinations: Annotated[
        bool,
        typer.Option("--combinations/--no-combinations", help="Also combine techniques."),
    ] = True,
    record: options.Record = None,
    cluster: options.OnCluster = None,
    cluster_sizes: options.ClusterSizes = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --cluster: workers; 0: all devices.")
    ] = 0,
    time_limit: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time limit; at least half is reserved for the analysis after recording.",
        ),
    ] = "1min",
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Measure the first choice next to the unmodified workload."
        ),
    ] = True,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list what does not apply, with the reasons.")
    ] = False,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Predict and rank every technique, and measure the first choice.

    The table lists single techniques and combinations of those that help, by time per sample. A
    star marks Pareto-optimal choices in time, memory and numerics. At the end, within the time
    limit, the first choice runs a few steps next to the unmodified workload (not for a recording).
    Your files are not changed.

    Operators that techniques would change are timed once per machine, starting with those that
    account for most of the step. Operators beyond the time limit are estimated, with wider
    intervals; run advise again to time the remaining ones. Meanwhile a first table on stderr shows
    the maximum gain of each technique. stdout has the final table only; --json omits the first one.

        slipstream advise train.py:make_workload

        slipstream advise run.slipgraph --goal 'memory<2GiB' --time-limit 5min

        slipstream advise serve.py:make --goal 'p99<20ms' --rate 40/s

    With --cluster it ranks the ways to distribute the step over workers instead, with and without
    compressed communication:

        slipstream advise run.slipgraph --cluster workers=8,link=1gbit,latency=50us
    """
    from slipstream.mlperf.serving.threads import thread_costs
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.advising import advise
    from slipstream.verbs.checking import Check, measure_first_choice
    from slipstream.verbs.deadline import FOR_LAUNCHES, Schedule
    from slipstream.verbs.goals import parse_goals
    from slipstream.verbs.history import history
    from slipstream.verbs.request import request_of
    from slipstream.verbs.serving import need_inference
    from slipstream.verbs.speedup_bounds import first_look_table

    started, limit_s = time.monotonic(), parse_duration_ns(time_limit, "--time-limit") / 1e9
    where = options.cluster_of(cluster, cluster_sizes)
    if where is not None:
        _on_cluster(request, where, workers, store=store, as_json=as_json)
        return
    goals = parse_goals(goal or (), rate)
    with progress("advising") as report, history(store) as past:
        # Variation between launches is measured after the first table, since it takes longer.
        graph = request.graph(report, options.statistics_of(record), note, briefly=True)
        check = check and not request.recorded
        schedule = Schedule.of(started, time.monotonic(), limit_s, check=check)
        if rate is not None:
            need_inference(graph)
            costs = thread_costs(report)
            goals = [replace(goal, costs=costs) for goal in goals]

        def show(bounds: Sequence[SpeedupBound]) -> None:
            """Print the first table on stderr, above the progress line."""
            if not as_json:
                first_look_table(graph, bounds).print(sys.stderr)
                print(file=sys.stderr, flush=True)

        def settle(recorded: Graph) -> Graph:
            nonlocal graph
            now = time.monotonic()
            graph = request.with_page_faults(
                recorded, report, launch_s=schedule.starting_s / 2,
                until=now + FOR_LAUNCHES * (schedule.analysis - now),
            )  # fmt: skip
            return graph

        rank = partial(
            advise, goals=goals, combinations=combinations, widen=past.widen, report=report,
            threads=(request_of(graph) or request).threads,
        )  # fmt: skip
        advice = rank(graph, show=show, settle=settle, until=schedule.analysis)
        if advice.best is None and advice.not_timed and schedule.without_check > schedule.analysis:
            advice = rank(graph, until=schedule.without_check)
        shown = past.keep(advice.predictions, str(graph.meta.get("workload", request.target)))
        if advice.best is not None:
            first = Check(advice.best, alternative=advice.second, for_limit=bool(advice.needed))
            if check:
                first = measure_first_choice(
                    first, request, schedule, shown, store=past.store if past.writable else None,
                    progress=show_progress(report), report=report,
                )  # fmt: skip
            else:
                reason = "a recording is not run" if request.recorded else "--no-check"
                first = replace(first, reason=reason)
            advice = replace(advice, check=first)
    table = advice.table(
        graph, _workload(graph, request), past.note, everything=everything, time_limit=time_limit
    )
    emit_result(advice, table, as_json=as_json)


def _on_cluster(
    request: options.Request, cluster: Cluster, workers: int, *, store: Path | None, as_json: bool
) -> None:
    from slipstream.verbs.history import history
    from slipstream.verbs.spreading import spread

    with progress("advising") as report, history(store) as past:
        graph = request.graph(report, warn=note)
        spreading = spread(graph, cluster, workers, widen=past.widen, report=report)
        past.keep(spreading.predictions, str(graph.meta.get("workload", request.target)))
    emit_result(spreading, *spreading.tables(graph, cluster, past.note), as_json=as_json)


def _workload(graph: Graph, request: options.Request) -> Workload | None:
    """Return the recorded workload, or None if its file does not exist."""
    from slipstream.errors import SlipstreamError
    from slipstream.verbs.request import request_of

    with contextlib.suppress(SlipstreamError):
        return (request_of(graph) or request).workload()
    return None
