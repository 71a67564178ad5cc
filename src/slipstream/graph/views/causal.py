"""Virtual speed-ups: what would the step gain if one kind of operator were faster?

Of every operator in turn the duration of all its tasks is shortened in the simulated world. The
curve of the step's speed-up over the operator's says what is worth making faster before anybody
knows how: a steep one pays, a flat one never will, whatever it is replaced by.

Source: the idea of Curtsinger and Berger, "Coz: Finding Code that Counts with Causal Profiling",
SOSP 2015, on a simulated step, where a speed-up need not be faked by slowing all else down.
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
"""Shares taken off durations by default; 1 is an operator that takes no time at all."""


@dataclass(frozen=True)
class Curve:
    """What the step gains from one group of tasks becoming faster.

    Attributes:
        total_ns: duration of all its tasks, wherever they run; tasks: how many they are.
        faster: shares taken off their durations, ascending.
        step_ns: the step with each of them.
        baseline_ns: the step as it is.
    """

    name: str
    tasks: int
    total_ns: float
    faster: tuple[float, ...]
    step_ns: tuple[float, ...]
    baseline_ns: float

    @property
    def gains(self) -> tuple[float, ...]:
        """Shares of the step that are saved, one for each of `faster`."""
        if not self.baseline_ns:
            return (0.0,) * len(self.step_ns)
        return tuple(1.0 - step / self.baseline_ns for step in self.step_ns)

    @property
    def speedups(self) -> tuple[float, ...]:
        """How many times faster the step becomes."""
        return tuple(self.baseline_ns / step if step else float("inf") for step in self.step_ns)


def virtual_speedups(
    graph: Graph,
    by: str = "operator",
    *,
    faster: Sequence[float] = FASTER,
    most: int = 20,
) -> list[Curve]:
    """Curves of the groups with the longest total duration, the most profitable first.

    Args:
        by: what groups tasks: see `slipstream.graph.views.critical_path.GROUPS`.
        faster: shares taken off durations, each above 0 and up to 1.
        most: how many groups.

    Raises:
        InvalidArgumentError: a share outside (0, 1], or an unknown `by`.
        GraphError: the graph has a cycle.
    """
    shares = tuple(sorted(faster))
    if not shares or not all(0 < share <= 1 for share in shares):
        raise InvalidArgumentError("faster", f"{list(faster)} are not shares above 0 and up to 1")
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
