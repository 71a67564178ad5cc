"""Scaling of tasks by the ratio of their new call to their recorded one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.durations.durations import Durations, Ratio
from slipstream.graph import PROVENANCES, UNKNOWN_SPREAD, Call, Editor, Graph, unique_in_order
from slipstream.provenance import Provenance

UNKNOWN = Ratio(1.0, UNKNOWN_SPREAD, Provenance.ASSUMED)
"""Ratio of an unknown call, which keeps its duration."""


@dataclass(frozen=True, eq=False)
class CallChanges:
    """Tasks whose call changes, with few distinct pairs of calls.

    Attributes:
        tasks: int64 [k].
        pair: int64 [k], index in `pairs` for each task.
        pairs: (recorded call, new call), in order of first use.
    """

    tasks: NDArray[np.int64]
    pair: NDArray[np.int64]
    pairs: tuple[tuple[Call, Call], ...]

    def __len__(self) -> int:
        return len(self.tasks)

    @classmethod
    def by_call(
        cls, graph: Graph, tasks: NDArray[np.int64], calls: Mapping[int, Call]
    ) -> CallChanges:
        """Return the `tasks` whose call is replaced.

        Args:
            tasks: int64 [k], candidates.
            calls: the new call by number in ``graph.calls``.
        """
        replaced = np.zeros(len(graph.calls) + 1, bool)  # -1 is not a call
        replaced[list(calls)] = True
        tasks = tasks[replaced[graph.tasks.call[tasks]]]
        number = graph.tasks.call[tasks]
        order = unique_in_order(number, len(graph.calls))
        pair = np.zeros(len(graph.calls), np.int64)
        pair[order] = np.arange(len(order))
        pairs = tuple((graph.calls[recorded], calls[recorded]) for recorded in order.tolist())
        return cls(tasks, pair[number], pairs)

    @classmethod
    def of(cls, graph: Graph, calls: Mapping[int, Call]) -> CallChanges:
        """Return the changes for a new call per task; tasks should share equal `Call` objects."""
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
    edit: Editor, graph: Graph, changed: Mapping[int, Call] | CallChanges, durations: Durations
) -> None:
    """Set the duration of every task of `changed` to that of its new call.

    The measured duration in the step is scaled by the ratio of two micro-benchmarks (see
    `Durations.ratio`), in which effects of caches and neighbouring operators cancel. To a call that
    computes longer on no more memory (`_computes_longer_ns`) the extra time is added instead. An
    unknown call keeps its duration, marked as assumed.
    """
    if not isinstance(changed, CallChanges):
        changed = CallChanges.of(graph, changed)
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

    An unknown pair has `UNKNOWN`.
    """
    ratios = [durations.ratio(*pair) or UNKNOWN for pair in pairs]
    factor, spread = np.array([(ratio.value, ratio.spread) for ratio in ratios]).reshape(-1, 2).T
    code = np.array([PROVENANCES.index(ratio.provenance) for ratio in ratios], np.uint8)
    return factor, code, spread


def _computes_longer_ns(durations: Durations, old: Call, new: Call) -> float:
    """Return the extra time of `new` over `old` in ns; 0 if it moves more bytes or is unknown.

    Operands in the cache save a call the same time, whatever it computes. Scaled by the ratio, a
    matmul in a dtype without instructions would save ten times as much.
    """
    was, now = durations.lookup(old), durations.lookup(new)
    if was is None or now is None or new.moved_bytes > old.moved_bytes:
        return 0.0
    return max(now.nanoseconds - was.nanoseconds, 0.0)


def required_timings(graph: Graph, changed: Mapping[int, Call] | CallChanges) -> list[Call]:
    """Return the calls that `rescale` looks up, each next to the one that it replaces.

    Neighbours are interleaved in a measurement, so that their ratio holds while the speed drifts.
    """
    if not isinstance(changed, CallChanges):
        changed = CallChanges.of(graph, changed)
    return [call for pair in changed.pairs for call in pair]


def pace(graph: Graph, tasks: Iterable[int], durations: Durations) -> float:
    """Return the operators' time in the step relative to their benchmarks; 1 if unknown.

    It scales the benchmark of an *inserted* task to the step: its overhead per call and the
    machine's speed when it was recorded. In ratios of two benchmarks these cancel.

    Args:
        tasks: operators with a call.
    """
    chosen = _array(tasks)
    call = graph.tasks.call[chosen]
    benchmark_ns = np.full(len(graph.calls), np.nan)
    for number in unique_in_order(call, len(graph.calls)).tolist():
        answer = durations.lookup(graph.calls[number])
        if answer is not None:
            benchmark_ns[number] = answer.nanoseconds
    timed = ~np.isnan(benchmark_ns[call])
    recorded = _sum(graph.tasks.duration_ns[chosen[timed]])
    benchmarked = _sum(benchmark_ns[call[timed]])
    return recorded / benchmarked if recorded and benchmarked else 1.0


def common_spread(graph: Graph, tasks: Iterable[int], relative: float) -> float:
    """Return the spread per task for which the spread of their sum is `relative`.

    A prediction treats errors of different calls as independent, so that they average out. A common
    cause, such as an assumed factor or a busy machine, needs this larger spread.
    """
    chosen = _array(tasks)
    call = graph.tasks.call[chosen]
    numbers: dict[str, int] = {}
    same_call = np.zeros(len(graph.calls) + 1, np.int64)
    for number in unique_in_order(call[call >= 0], len(graph.calls)).tolist():
        same_call[number] = numbers.setdefault(graph.calls[number].key, len(numbers))
    # Tasks without a call are independent, as in a prediction.
    group = np.where(call >= 0, same_call[call], len(numbers) + np.arange(len(chosen)))
    sums = np.bincount(group, graph.tasks.duration_ns[chosen])
    durations = sums[unique_in_order(group, len(sums))].tolist()
    together = math.sqrt(sum(duration**2 for duration in durations))
    return relative * sum(durations) / together if together else relative


def _array(tasks: Iterable[int]) -> NDArray[np.int64]:
    return np.asarray(tasks if isinstance(tasks, np.ndarray) else list(tasks), np.int64)


def _sum(values: NDArray[np.float64]) -> float:
    """Sum sequentially, for reproducible rounding."""
    return float(values.cumsum()[-1]) if len(values) else 0.0
