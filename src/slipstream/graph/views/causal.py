"""Virtual speed-ups: the effect of a faster operator on the step time.

The simulation shortens all tasks of one operator at a time. The curve of the step's speed-up over
the operator's shows which operators are worth optimising: a flat curve means that no replacement
can reduce the step time.

Source: the idea of Curtsinger and Berger, "Coz: Finding Code that Counts with Causal Profiling",
SOSP 2015, on a simulated step, which needs no slow-down of everything else to emulate a speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream import native
from slipstream.errors import InvalidArgumentError
from slipstream.graph.graph import Graph
from slipstream.graph.timeline import lower
from slipstream.graph.views.critical_path import namer

FASTER = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Default shares by which durations are reduced; at 1 the operator takes no time."""


@dataclass(frozen=True)
class Curve:
    """Step time as a function of the speed of a group of tasks.

    Attributes:
        tasks: number of tasks.
        total_ns: total duration of the tasks, on all lanes.
        faster: shares by which their durations are reduced, ascending.
        step_ns: the step time for each share.
        baseline_ns: the unchanged step time.
    """

    name: str
    tasks: int
    total_ns: float
    faster: tuple[float, ...]
    step_ns: tuple[float, ...]
    baseline_ns: float

    @property
    def gains(self) -> tuple[float, ...]:
        """The relative reduction of the step time, for each of `faster`."""
        if not self.baseline_ns:
            return (0.0,) * len(self.step_ns)
        return tuple(1.0 - step / self.baseline_ns for step in self.step_ns)

    @property
    def speedups(self) -> tuple[float, ...]:
        """The speed-up of the step, for each of `faster`."""
        return tuple(self.baseline_ns / step if step else float("inf") for step in self.step_ns)


def virtual_speedups(
    graph: Graph,
    by: str = "operator",
    *,
    faster: Sequence[float] = FASTER,
    most: int = 20,
) -> list[Curve]:
    """Return curves of the groups with the longest total duration, the largest gain first.

    Args:
        by: the grouping, one of `slipstream.graph.views.critical_path.GROUPS`.
        faster: shares by which durations are reduced, above 0 and up to 1.
        most: the maximum number of groups.

    Raises:
        InvalidArgumentError: a share outside (0, 1], or an unknown `by`.
        GraphError: the graph has a cycle.
    """
    shares = tuple(sorted(faster))
    if not shares or not all(0 < share <= 1 for share in shares):
        raise InvalidArgumentError(
            "faster", f"the shares {list(faster)} are not all above 0 and at most 1"
        )
    name = namer(graph, by)
    groups: dict[str, list[int]] = {}
    for task in range(len(graph)):
        groups.setdefault(name(task), []).append(task)
    program = lower(graph)
    compiled = program.compile()
    duration = program.duration_ns
    totals = {key: float(duration[rows].sum()) for key, rows in groups.items()}
    longest = sorted(groups, key=lambda key: (-totals[key], key))[:most]
    baseline = _step_ns(compiled.simulate())
    curves = []
    for key in longest:
        rows = np.array(groups[key], np.int64)
        steps = []
        for share in shares:
            changed = native.quantize_ns(duration[rows] * (1.0 - share))
            steps.append(_step_ns(compiled.resimulate(rows, changed)))
        curves.append(Curve(key, len(rows), totals[key], shares, tuple(steps), baseline))
    return sorted(curves, key=lambda curve: (curve.step_ns[-1], -curve.total_ns, curve.name))


def _step_ns(schedule: native.Schedule) -> float:
    ends = schedule.step_end_ns
    return float(ends[-1] - ends[-2])
