"""Scale tasks by the micro-benchmarked ratio of what they would call to what they call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from slipstream.durations.durations import Durations
from slipstream.graph import Call, Editor, Graph
from slipstream.provenance import Provenance

_UNKNOWN_SPREAD = 0.5


def rescale(edit: Editor, graph: Graph, changed: Mapping[int, Call], durations: Durations) -> None:
    """Give every task of `changed` the duration its new call would have in its place.

    The ratio of two micro-benchmarks (or of what stands in for them, see `Durations.ratio`) scales
    what was measured in the step, not the benchmark's own value: what caches and neighbours do to
    the operator cancels. A call of which nothing is known keeps its time, marked as assumed.
    """
    for task, call in changed.items():
        now = float(graph.tasks.duration_ns[task])
        ratio = durations.ratio(graph.calls[graph.tasks.call[task]], call)
        if ratio is None:
            edit.set_duration(task, now, Provenance.ASSUMED, spread=_UNKNOWN_SPREAD, call=call)
        else:
            edit.set_duration(
                task, now * ratio.value, ratio.provenance, spread=ratio.spread, call=call
            )


def questions(graph: Graph, changed: Mapping[int, Call]) -> list[Call]:
    """What `rescale` will look up: each call beside the one it stands in for.

    Neighbours are measured in turns, so that their ratio holds while the machine's speed drifts.
    """
    pairs = [(graph.calls[graph.tasks.call[task]], call) for task, call in changed.items()]
    return [call for pair in pairs for call in pair]


def pace(graph: Graph, changed: Mapping[int, Call], durations: Durations) -> float:
    """How long the step takes over operators against their micro-benchmarks; 1 where unknown.

    It takes the benchmark of a task that is *put in* from the benchmark's pace (its cost of a
    call, the machine's speed at that hour) to the step's; in a ratio both cancel by themselves.
    """
    recorded = benchmarked = 0.0
    for task in changed:
        answer = durations.lookup(graph.calls[graph.tasks.call[task]])
        if answer is not None:
            recorded += float(graph.tasks.duration_ns[task])
            benchmarked += answer.nanoseconds
    return recorded / benchmarked if recorded and benchmarked else 1.0


def common_spread(graph: Graph, tasks: Iterable[int], relative: float) -> float:
    """The spread each of `tasks` has to carry for their sum to be off by `relative`.

    A prediction takes the errors of different calls to be independent, so that they average out.
    Where one cause moves all of them alike (an assumed factor, a busy machine) they do not; this
    makes up for it.
    """
    durations: dict[str, float] = {}
    for task in tasks:
        call = int(graph.tasks.call[task])
        # Tasks without a call are each on their own, as in a prediction.
        key = graph.calls[call].key if call >= 0 else f"task {task}"
        durations[key] = durations.get(key, 0.0) + float(graph.tasks.duration_ns[task])
    together = math.sqrt(sum(duration**2 for duration in durations.values()))
    return relative * sum(durations.values()) / together if together else relative
