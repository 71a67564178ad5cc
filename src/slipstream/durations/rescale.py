"""Scale tasks by the micro-benchmarked ratio of what they would call to what they call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.durations.durations import Durations, Ratio
from slipstream.graph import PROVENANCES, UNKNOWN_SPREAD, Call, Editor, Graph, distinct
from slipstream.provenance import Provenance

UNKNOWN = Ratio(1.0, UNKNOWN_SPREAD, Provenance.ASSUMED)
"""Of a call of which nothing is known: it keeps its time."""


@dataclass(frozen=True, eq=False)
class Changed:
    """Tasks that would make other calls: few pairs of calls stand for many tasks.

    Attributes:
        tasks: int64 [k].
        pair: int64 [k], what each of them does, as an index in `pairs`.
        pairs: the recorded call and the new one, in the order in which tasks first make them.
    """

    tasks: NDArray[np.int64]
    pair: NDArray[np.int64]
    pairs: tuple[tuple[Call, Call], ...]

    def __len__(self) -> int:
        return len(self.tasks)

    @classmethod
    def by_call(cls, graph: Graph, tasks: NDArray[np.int64], calls: Mapping[int, Call]) -> Changed:
        """Return the `tasks` whose call is replaced.

        Args:
            tasks: int64 [k], candidates.
            calls: the new call by number in ``graph.calls``.
        """
        replaced = np.zeros(len(graph.calls) + 1, bool)  # -1 is not a call
        replaced[list(calls)] = True
        tasks = tasks[replaced[graph.tasks.call[tasks]]]
        number = graph.tasks.call[tasks]
        order = distinct(number, len(graph.calls))
        pair = np.zeros(len(graph.calls), np.int64)
        pair[order] = np.arange(len(order))
        pairs = tuple((graph.calls[recorded], calls[recorded]) for recorded in order.tolist())
        return cls(tasks, pair[number], pairs)

    @classmethod
    def of(cls, graph: Graph, calls: Mapping[int, Call]) -> Changed:
        """Of a new call for each of some tasks; one object for tasks that do the same is best."""
        tasks = np.fromiter(calls, np.int64, len(calls))
        numbers: dict[tuple[int, int], int] = {}
        recorded = graph.tasks.call[tasks].tolist()
        pair = [
            numbers.setdefault((old, id(new)), len(numbers))
            for old, new in zip(recorded, calls.values(), strict=True)
        ]
        new_of = {id(call): call for call in calls.values()}
        pairs = tuple((graph.calls[old], new_of[new]) for old, new in numbers)
        return cls(tasks, np.array(pair, np.int64), pairs)


def rescale(
    edit: Editor, graph: Graph, changed: Mapping[int, Call] | Changed, durations: Durations
) -> None:
    """Give every task of `changed` the duration its new call would have in its place.

    The ratio of two micro-benchmarks (or of what stands in for them, see `Durations.ratio`) scales
    what was measured in the step, not the benchmark's own value: what caches and neighbours do to
    the operator cancels. A call that takes longer over no more memory (`_computes_longer_ns`) is
    given what it takes longer instead. A call of which nothing is known keeps its time, marked as
    assumed.
    """
    if not isinstance(changed, Changed):
        changed = Changed.of(graph, changed)
    factor, code, spread = ratio_columns(durations, changed.pairs)
    longer_ns = np.array([_computes_longer_ns(durations, *pair) for pair in changed.pairs])
    factor[longer_ns > 0] = 1.0
    call = np.array([edit.call_number(new) for _, new in changed.pairs], np.int64)
    tasks, pair = changed.tasks, changed.pair
    edit.set_duration(
        tasks,
        graph.tasks.duration_ns[tasks] * factor[pair] + longer_ns[pair],
        code[pair],
        spread=spread[pair],
        call=call[pair],
    )


def ratio_columns(
    durations: Durations, pairs: Iterable[tuple[Call, Call]]
) -> tuple[NDArray[np.float64], NDArray[np.uint8], NDArray[np.float64]]:
    """Return the ratios of pairs of calls as factors, indices in `PROVENANCES` and spreads.

    A pair of which nothing is known has `UNKNOWN`.
    """
    ratios = [durations.ratio(*pair) or UNKNOWN for pair in pairs]
    factor, spread = np.array([(ratio.value, ratio.spread) for ratio in ratios]).reshape(-1, 2).T
    code = np.array([PROVENANCES.index(ratio.provenance) for ratio in ratios], np.uint8)
    return factor, code, spread


def _computes_longer_ns(durations: Durations, old: Call, new: Call) -> float:
    """How much longer `new` computes on no more memory than `old`; 0 where it does not.

    Near operands save a call the same time whatever it then computes. Multiplied by the ratio, a
    product whose operands come from the cache would save ten times that in a type for which the
    processor has no instructions.
    """
    was, now = durations.lookup(old), durations.lookup(new)
    if was is None or now is None or new.moved_bytes > old.moved_bytes:
        return 0.0
    return max(now.nanoseconds - was.nanoseconds, 0.0)


def required_timings(graph: Graph, changed: Mapping[int, Call] | Changed) -> list[Call]:
    """What `rescale` will look up: each call beside the one it stands in for.

    Neighbours are measured in turns, so that their ratio holds while the machine's speed drifts.
    """
    if not isinstance(changed, Changed):
        changed = Changed.of(graph, changed)
    return [call for pair in changed.pairs for call in pair]


def pace(graph: Graph, tasks: Iterable[int], durations: Durations) -> float:
    """How long the step takes over operators against their micro-benchmarks; 1 where unknown.

    It takes the benchmark of a task that is *put in* from the benchmark's pace (its cost of a
    call, the machine's speed at that hour) to the step's; in a ratio both cancel by themselves.

    Args:
        tasks: operators that have a call.
    """
    chosen = _array(tasks)
    call = graph.tasks.call[chosen]
    benchmark_ns = np.full(len(graph.calls), np.nan)
    for number in distinct(call, len(graph.calls)).tolist():
        answer = durations.lookup(graph.calls[number])
        if answer is not None:
            benchmark_ns[number] = answer.nanoseconds
    known = ~np.isnan(benchmark_ns[call])
    recorded = _sum(graph.tasks.duration_ns[chosen[known]])
    benchmarked = _sum(benchmark_ns[call[known]])
    return recorded / benchmarked if recorded and benchmarked else 1.0


def common_spread(graph: Graph, tasks: Iterable[int], relative: float) -> float:
    """The spread each of `tasks` has to carry for their sum to be off by `relative`.

    A prediction takes the errors of different calls to be independent, so that they average out.
    Where one cause moves all of them alike (an assumed factor, a busy machine) they do not; this
    makes up for it.
    """
    chosen = _array(tasks)
    call = graph.tasks.call[chosen]
    numbers: dict[str, int] = {}
    alike = np.zeros(len(graph.calls) + 1, np.int64)
    for number in distinct(call[call >= 0], len(graph.calls)).tolist():
        alike[number] = numbers.setdefault(graph.calls[number].key, len(numbers))
    # Tasks without a call are each on their own, as in a prediction.
    group = np.where(call >= 0, alike[call], len(numbers) + np.arange(len(chosen)))
    sums = np.bincount(group, graph.tasks.duration_ns[chosen])
    durations = sums[distinct(group, len(sums))].tolist()
    together = math.sqrt(sum(duration**2 for duration in durations))
    return relative * sum(durations) / together if together else relative


def _array(tasks: Iterable[int]) -> NDArray[np.int64]:
    return np.asarray(tasks if isinstance(tasks, np.ndarray) else list(tasks), np.int64)


def _sum(values: NDArray[np.float64]) -> float:
    """In order, one after the other."""
    return float(values.cumsum()[-1]) if len(values) else 0.0
