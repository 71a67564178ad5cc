"""Intra-op threads: each operator distributes its loop over several cores.

Source: PyTorch's intra-op parallelism (``torch.set_num_threads``). Amdahl's law applies twice:
small operators are not faster, nor are Python and dispatch between operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import Durations, TimingRequest, common_spread, usable_cores
from slipstream.errors import InvalidArgumentError
from slipstream.graph import UNKNOWN_SPREAD, Editor, Graph, unique_in_order
from slipstream.provenance import Provenance
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.workload import BuiltWorkload, Workload


@dataclass(frozen=True)
class Threads(TechniqueSettings):
    """Run operators on `count` threads; 0 for one per physical core this process may use."""

    count: int = 0

    name: ClassVar[str] = "threads"
    # After techniques that change operators, so that the changed ones are timed.
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE + 6, clock="wall")
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same operators; sums may be split differently"
    )

    def __str__(self) -> str:
        # The resolved number, because "threads:0" in a table is not informative.
        return f"{self.name}:{self._threads}"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InvalidArgumentError("threads:count", f"{self.count} is negative")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the number of threads is impossible or unchanged; None otherwise."""
        device = str(graph.meta.get("device", "cpu"))
        if device != "cpu":
            return f"the step's operators run on the device '{device}', not on the CPU"
        cores = usable_cores()
        if cores == 1:
            return "this process may use only one core"
        if self._threads == _now(graph):
            return f"the step runs on {_now(graph)} threads already"
        if self._threads > cores:
            return f"this process may use {cores} cores; more threads than that wait for each other"
        return None

    def minimum_share(self, graph: Graph) -> float:
        """Return the share if work is perfectly parallel; 0 for fewer threads."""
        return _now(graph) / self._threads if self._threads > _now(graph) else 0.0

    def required_timings(self, graph: Graph) -> Sequence[TimingRequest]:
        """Return every operator at the current and the new number of threads, by wall clock."""
        return [
            TimingRequest(graph.calls[call], threads, wall=True)
            for call in _calls(graph)
            for threads in (_now(graph), self._threads)
        ]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale each operator by its ratio; gaps between operators are unchanged.

        The ratio compares the fastest of many repetitions, which had the cores to themselves. If
        another program uses a core during the step, all operators are slowed down together, so the
        variation of repetitions enters the interval as a common error.
        """
        tasks, now_ns = _operators(graph), graph.tasks.duration_ns
        ratio, spread = np.full((2, len(graph.calls)), np.nan)
        for call in _calls(graph):
            measured = _ratio(graph, call, self._threads, context.durations)
            if measured is not None:
                ratio[call], spread[call] = measured
        has_ratio = ~np.isnan(ratio[graph.tasks.call[tasks]])
        timed, unknown = tasks[has_ratio], tasks[~has_ratio]
        calls = graph.tasks.call[timed]
        noise = float(np.dot(now_ns[timed], spread[calls]))
        common = common_spread(graph, timed, noise / max(float(now_ns[timed].sum()), 1.0))
        edit = Editor(graph, str(self))
        edit.scale(
            timed, ratio[calls], Provenance.MICROBENCHMARK,
            spread=np.maximum(common, spread[calls]),
        )  # fmt: skip
        edit.set_duration(unknown, now_ns[unknown], Provenance.ASSUMED, spread=UNKNOWN_SPREAD)
        return edit.apply(f"{len(timed)} operators on {self._threads} threads")

    def apply(self, built: BuiltWorkload) -> None:
        """Set torch's number of threads in this process."""
        import torch

        torch.set_num_threads(self._threads)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return ``torch.set_num_threads(N)`` after the imports."""
        line = f"set_num_threads({self._threads})"
        return CodeChange.of(
            workload, lambda where: where.at_top(f"{{torch}}.{line}"), by_hand=f"torch.{line}"
        )

    @property
    def _threads(self) -> int:
        return self.count or usable_cores()


def _now(graph: Graph) -> int:
    return int(graph.meta.get("threads", 1))


def _operators(graph: Graph) -> NDArray[np.int64]:
    """Return the tasks of the main lane with a known call; loader processes are single-threaded."""
    return np.flatnonzero((graph.tasks.call >= 0) & (graph.tasks.lane == 0))


def _calls(graph: Graph) -> list[int]:
    """Return the numbers of the operators' calls."""
    calls: list[int] = unique_in_order(
        graph.tasks.call[_operators(graph)], len(graph.calls)
    ).tolist()
    return calls


def _ratio(
    graph: Graph, number: int, threads: int, durations: Durations
) -> tuple[float, float] | None:
    """Return the ratio of new to old duration and its relative spread; None if unknown."""
    call = graph.calls[number]
    counts = (_now(graph), threads)
    old, new = (durations.lookup(TimingRequest(call, count, wall=True)) for count in counts)
    if old is None or new is None or not old.nanoseconds:
        return None
    return new.nanoseconds / old.nanoseconds, math.hypot(old.spread, new.spread)
