"""``slipstream advise``: what would make this cheaper?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit_result, note, progress

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.graph import Graph
    from slipstream.verbs.outlooks import Outlook
    from slipstream.workload import Workload


# To end the batch and the combinations under way, to rank all, and to print it; and for what is
# measured on two threads, which takes twice its seconds.
_ENDING_S, _ENDING = 7.0, 0.12


@options.asks(options.Target, threads=0, steps=24, timeout="5min")
def command(
    request: options.Request,
    goal: options.Goals = None,
    rate: options.Rate = None,
    combinations: Annotated[
        bool,
        typer.Option("--combinations/--no-combinations", help="Also try techniques together."),
    ] = True,
    record: options.Record = None,
    cluster: options.OnCluster = None,
    cluster_sizes: options.ClusterSizes = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --cluster: how many; 0: all devices.")
    ] = 0,
    within: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long it may take; half of it at least is left for after the recording.",
        ),
    ] = "1min",
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Try every technique on paper and rank them; say what does not pay, and why.

    Single techniques and combinations of those that help, the cheapest sample first. A star marks
    what nothing else beats in time, memory and effect on the numbers at once. Nothing is applied.

    Operators that techniques would change are timed once per machine, those first that most of the
    step hangs on; what there is no time for is estimated, intervals are as wide as that, and asking
    again goes on. Meanwhile a first table on stderr says what each technique can gain at most;
    stdout has the final table only. With --json there is no first table.

        slipstream advise train.py:make_workload

        slipstream advise run.slipgraph --goal 'memory<2GiB' --within 5min

        slipstream advise serve.py:make --goal 'p99<20ms' --rate 40/s

    With --cluster: ways to spread the step over workers instead, and should they compress what
    they send?

        slipstream advise run.slipgraph --cluster workers=8,link=1gbit,latency=50us
    """
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.advising import advise
    from slipstream.verbs.goals import parse_goals
    from slipstream.verbs.history import history
    from slipstream.verbs.outlooks import first_look_table
    from slipstream.verbs.serving import need_inference

    began, within_s = time.monotonic(), parse_duration_ns(within, "--within") / 1e9
    where = options.cluster_of(cluster, cluster_sizes)
    if where is not None:
        _on_cluster(request, where, workers, store=store, as_json=as_json)
        return
    goals = parse_goals(goal or (), rate)
    with progress("advising") as say, history(store) as past:
        # What other launches differ by is watched after the first table: it takes longer.
        graph = request.graph(say, options.statistics_of(record), note, briefly=True)
        until = max(began + within_s, time.monotonic() + within_s / 2)
        until -= min(_ENDING_S, _ENDING * within_s)
        if rate is not None:
            need_inference(graph)

        def show(outlooks: Sequence[Outlook]) -> None:
            """The first table, on stderr, above whatever progress is shown."""
            if not as_json:
                first_look_table(graph, outlooks).print(sys.stderr)
                print(file=sys.stderr, flush=True)

        def settle(recorded: Graph) -> Graph:
            nonlocal graph
            graph = request.settled(recorded, say)
            return graph

        advice = advise(
            graph, goals=goals, combinations=combinations, widen=past.widen, say=say, show=show,
            settle=settle, until=until,
        )  # fmt: skip
        past.keep(advice.predictions, str(graph.meta.get("workload", request.target)))
    emit_result(advice, advice.table(graph, _script(graph, request), past.note), as_json=as_json)


def _on_cluster(
    request: options.Request, cluster: Cluster, workers: int, *, store: Path | None, as_json: bool
) -> None:
    from slipstream.verbs.history import history
    from slipstream.verbs.spreading import spread

    with progress("advising") as say, history(store) as past:
        graph = request.graph(say, warn=note)
        spreading = spread(graph, cluster, workers, widen=past.widen, say=say)
        past.keep(spreading.predictions, str(graph.meta.get("workload", request.target)))
    emit_result(spreading, *spreading.tables(graph, cluster, past.note), as_json=as_json)


def _script(graph: Graph, request: options.Request) -> Workload | None:
    """The plain script that was recorded, where it is one and is there."""
    from slipstream.verbs.request import request_of
    from slipstream.workload import Workload

    target = (request_of(graph) or request).target
    # A recording may have come without its script.
    return Workload.parse(target) if target.endswith(".py") and Path(target).is_file() else None
