"""The event engine: from a `Program` to the `Schedule` of its tasks.

One engine serves the whole package. Programs whose lanes all have a fixed order, without resources
and transfers, take one pass in topological order; all others take an event loop. Both exist in C++
(``native/src/``) and in Python (`_engine_reference`, `_network_reference`), with bitwise equal
results.

Source: Algorithm 1 of Zhu et al., "Daydream: Accurately Estimating the Efficacy of Optimizations
for DNN Training", USENIX ATC 2020, extended by policies, delays, steps, preemption and resources.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native._bindings import ENGINE, BlockTimeline, NativePlan, NativeProgram
from slipstream.native._engine_reference import ReferenceProgram
from slipstream.native._memory import MemoryTimeline, memory_timeline
from slipstream.native.inputs import (
    Float64s,
    Int32s,
    as_integers,
    as_times,
    check_index,
    frozen,
)
from slipstream.native.loader import why_no_library
from slipstream.native.results import QueueCounts, RateChanges, Simulation

if TYPE_CHECKING:
    from slipstream.native.program import Program

# Multiples of this whose sum is less than 2^53 of it (2.4 hours) add without rounding, in any
# order. A power of two; far below the resolution of any clock.
RESOLUTION_NS = 2.0**-10
_EXACT_SUM_NS = 2.0**53 * RESOLUTION_NS

# Re-simulation looks up a recomputed task's neighbours block by block, at about four times the cost
# of the full pass; beyond this share of blocks it takes the full pass.
_MAX_RECOMPUTED = 0.1


def quantize_ns(time_ns: npt.ArrayLike) -> Float64s:
    """Round `time_ns` to multiples of `RESOLUTION_NS`.

    If all times of a program are such multiples, re-simulation may shift a whole part of the
    timeline and still be bitwise equal to a full pass. `slipstream.graph` rounds every duration.
    """
    rounded: Float64s = np.rint(np.asarray(time_ns, np.float64) / RESOLUTION_NS) * RESOLUTION_NS
    return rounded


def simulate(program: Program, duration_ns: npt.ArrayLike | None = None) -> Schedule:
    """Return the schedule of `program`, optionally with other durations (float64 [tasks]).

    Raises:
        GraphError: dependencies form a cycle; the error names its tasks.
        InvalidArgumentError: a duration is negative, infinite or not a number.
    """
    return program.compile().simulate(duration_ns)


class Schedule:
    """Start and end of every task in every step. Arrays are read-only.

    Attributes:
        program: the simulated program.
        makespan_ns: latest end of all tasks; gaps after it do not count.
        step_end_ns: float64 [steps]; latest end of each step.
        recomputed_tasks: number of computed task instances; fewer than all after `resimulate`.
        rate_changes: changes of transfer rates, if requested; otherwise None.
        queues: counts of packets, if transfers travel as packets; otherwise None.
    """

    def __init__(
        self,
        program: Program,
        durations: Float64s | _Edits,
        timeline: Simulation | _Shifted,
    ) -> None:
        self.program = program
        self._durations = durations
        self._timeline = timeline
        self.rate_changes: RateChanges | None = None
        self.queues: QueueCounts | None = None
        if isinstance(timeline, Simulation):
            step_end_ns = timeline.step_end_ns
            self.recomputed_tasks = program.steps * program.tasks
            self.rate_changes, self.queues = timeline.rate_changes, timeline.queues
        else:
            step_end_ns = timeline.blocks.step_end_ns
            self.recomputed_tasks = timeline.blocks.recomputed_tasks
        self.step_end_ns = frozen(step_end_ns, np.float64)
        self.makespan_ns = float(step_end_ns.max())

    @functools.cached_property
    def duration_ns(self) -> Float64s:
        """Simulated durations, float64 [tasks]."""
        if isinstance(self._durations, _Edits):
            self._durations = self._durations.applied()
        return frozen(self._durations, np.float64)

    @functools.cached_property
    def start_ns(self) -> Float64s:
        """Starts, float64 [steps, tasks]; the first start of a preempted task."""
        return frozen(self._written.start_ns, np.float64)

    @functools.cached_property
    def end_ns(self) -> Float64s:
        """Ends, float64 [steps, tasks]."""
        return frozen(self._written.end_ns, np.float64)

    @functools.cached_property
    def lane_busy_ns(self) -> Float64s:
        """Time for which each lane runs tasks in all steps, without gaps, float64 [lanes].

        A concurrent lane counts each of its tasks in full.
        """
        if self.program.flows is not None:
            spans = (self.end_ns - self.start_ns).sum(axis=0)
            moves = self.program.flows.nbytes > 0.0
            spent = np.where(moves, spans, self.duration_ns * self.program.steps)
            return cast(
                Float64s, np.bincount(self.program.lane, spent, minlength=self.program.lanes)
            )
        one_step = np.bincount(self.program.lane, self.duration_ns, minlength=self.program.lanes)
        return cast(Float64s, one_step * self.program.steps)

    @functools.cached_property
    def memory(self) -> MemoryTimeline:
        """Lifetimes of the program's tensors, and peaks.

        Raises:
            InvalidArgumentError: the program has no tensors.
        """
        if self.program.tensors is None:
            raise InvalidArgumentError("program", "has no tensors, and so no memory timeline")
        return memory_timeline(self.program.tensors, self.start_ns, self.end_ns)

    @property
    def _written(self) -> Simulation:
        if isinstance(self._timeline, _Shifted):
            self._timeline = self._timeline.written()
        return self._timeline

    @functools.cached_property
    def _shift_is_exact(self) -> bool:
        """Whether all sums of this schedule's times are exact; see `RESOLUTION_NS`."""
        program = self.program
        times = (self.duration_ns, program.gap_ns, program.edges.delay_ns)
        total = program.steps * math.fsum(float(part.sum()) for part in times)
        # Half of the range is reserved for edits.
        return total < _EXACT_SUM_NS / 2 and all(_on_grid(part) for part in times)


@dataclass(frozen=True)
class _Edits:
    """Durations of a re-simulation, applied when first read."""

    base_ns: Float64s
    task_ids: Int32s
    new_ns: Float64s

    def applied(self) -> Float64s:
        durations = self.base_ns.copy()
        durations[self.task_ids] = self.new_ns
        return durations


@dataclass(frozen=True)
class _Shifted:
    """The timeline of a re-simulation, computed in full when first read."""

    plan: NativePlan
    base_start_ns: Float64s
    base_end_ns: Float64s
    blocks: BlockTimeline

    def written(self) -> Simulation:
        times = self.plan.materialise(self.base_start_ns, self.base_end_ns, self.blocks)
        return Simulation(*times, self.blocks.step_end_ns)


class Compiled:
    """The part of a program that does not depend on durations. Immutable and thread-safe.

    Attributes:
        program: the compiled program.
        backend: ``"native"`` or ``"python"``.
        fixed_order: whether simulating it is one pass in topological order.
    """

    def __init__(self, program: Program, backend: Literal["native", "python"]) -> None:
        self.program = program
        self.backend = backend
        self._engine: NativeProgram | ReferenceProgram
        if backend == "python":
            self._engine = ReferenceProgram(program)
        else:
            loaded = ENGINE.library
            if loaded is None:
                raise SlipstreamError(f"the compiled engine is not available: {why_no_library()}")
            self._engine = NativeProgram(loaded, program)
        self.fixed_order = self._engine.fixed_order
        self._local = threading.local()

    def simulate(
        self,
        duration_ns: npt.ArrayLike | None = None,
        *,
        rate_changes: bool = False,
        force_event_loop: bool = False,
    ) -> Schedule:
        """Return the schedule with `duration_ns` (float64 [tasks]; default: the program's).

        Args:
            rate_changes: whether to record every change of a transfer's rate.
            force_event_loop: whether to take the event loop even if one pass suffices (for tests).

        Raises:
            InvalidArgumentError: a duration is negative, infinite or not a number.
        """
        program = self.program
        durations = program.duration_ns
        if duration_ns is not None:
            durations = as_times("duration_ns", duration_ns, program.tasks, program.task_name)
        packets = program.flows is not None and program.flows.packets is not None
        if rate_changes and packets:
            raise InvalidArgumentError(
                "rate_changes",
                "is not available for packets, which have no rates",
                remedy="simulate fluids",
            )
        run = self._engine.simulate(
            durations, rate_changes=rate_changes, force_event_loop=force_event_loop
        )
        return Schedule(program, durations, run)

    def resimulate(
        self,
        task_ids: npt.ArrayLike | Sequence[int],
        duration_ns: npt.ArrayLike,
        *,
        base: Schedule | None = None,
    ) -> Schedule:
        """Return the schedule with `duration_ns` for `task_ids`, bitwise equal to a full pass.

        On fixed-order programs only the changed part is computed, and parts that are merely delayed
        are shifted (if times are multiples of `RESOLUTION_NS`, see `quantize_ns`). The timeline is
        computed in full when `start_ns` or `end_ns` is first read; `makespan_ns` and `step_end_ns`
        are available immediately. If too much changes, and on other programs, a full pass is taken.

        Args:
            task_ids: int [edits], each task at most once.
            duration_ns: float64 [edits].
            base: a schedule of the same program; by default that of the program's durations, which
                is cached.

        Raises:
            InvalidArgumentError: a task is out of range or duplicated, a duration is negative,
                infinite or not a number, or `base` belongs to another program.
        """
        program = self.program
        ids = as_integers("task_ids", task_ids, np.int32)
        check_index("task_ids", ids, program.tasks, "edit", "task")
        new = as_times("duration_ns", duration_ns, ids.size, "edit")
        self._check_distinct(ids)
        if base is None:
            base = self._baseline
        elif base.program is not program:
            raise InvalidArgumentError("base", "is a schedule of another program")
        edits = _Edits(base.duration_ns, ids, new)
        if isinstance(self._engine, NativeProgram) and self.fixed_order and program.tasks:
            shifted = self._shift_blocks(base, edits)
            if shifted is not None:
                return Schedule(program, edits, shifted)
        return Schedule(program, edits, self._simulate_edited(edits))

    def _shift_blocks(self, base: Schedule, edits: _Edits) -> _Shifted | None:
        plan = self._plan
        exact = (
            base._shift_is_exact
            and _on_grid(edits.new_ns)
            and self.program.steps * float(edits.new_ns.sum()) < _EXACT_SUM_NS / 2
        )
        slots = math.ceil(_MAX_RECOMPUTED * plan.blocks * self.program.steps)
        timeline = (base.start_ns, base.end_ns, _block_ends(plan, base))
        blocks = plan.resimulate(
            edits.base_ns, timeline, edits.task_ids, edits.new_ns, exact, slots
        )
        return None if blocks is None else _Shifted(plan, base.start_ns, base.end_ns, blocks)

    def _simulate_edited(self, edits: _Edits) -> Simulation:
        """Take a full pass, with each thread's copy of the baseline's durations.

        Copying all durations would cost half as much as the pass, so only edited ones are replaced.
        """
        cached: tuple[Float64s, Float64s] | None = getattr(self._local, "durations", None)
        if cached is None or cached[0] is not edits.base_ns:
            cached = self._local.durations = (edits.base_ns, edits.base_ns.copy())
        durations = cached[1]
        durations[edits.task_ids] = edits.new_ns
        try:
            return self._engine.simulate(durations)
        finally:
            durations[edits.task_ids] = edits.base_ns[edits.task_ids]

    @functools.cached_property
    def _plan(self) -> NativePlan:
        return NativePlan(cast(NativeProgram, self._engine), self.program)

    @functools.cached_property
    def _baseline(self) -> Schedule:
        return self.simulate()

    def _check_distinct(self, ids: Int32s) -> None:
        if ids.size < 2 or bool(np.all(ids[1:] > ids[:-1])):
            return
        ordered = np.sort(ids)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if twice.size:
            name = self.program.task_name(int(ordered[twice[0]]))
            raise InvalidArgumentError("task_ids", f"{name} is listed twice")


def compile_program(
    program: Program, backend: Literal["auto", "native", "python"] = "auto"
) -> Compiled:
    """Return the compiled form of `program`, built at the first call and cached in the program.

    Args:
        backend: ``"auto"`` uses native code if it is available.

    Raises:
        GraphError: dependencies form a cycle; the error names its tasks.
        SlipstreamError: ``"native"`` was requested but is not available.
    """
    if backend not in ("auto", "native", "python"):
        raise InvalidArgumentError("backend", f"'{backend}' is not auto, native or python")
    if backend == "auto":
        backend = "python" if ENGINE.library is None else "native"
    cached: dict[str, Any] = program.__dict__.setdefault("_compiled", {})
    if backend not in cached:
        cached[backend] = Compiled(program, backend)
    return cast(Compiled, cached[backend])


def _on_grid(times_ns: Float64s) -> bool:
    scaled = times_ns * (1.0 / RESOLUTION_NS)
    return bool(np.array_equal(scaled, np.rint(scaled)))


def _block_ends(plan: NativePlan, base: Schedule) -> Float64s:
    cached: Float64s | None = base.__dict__.get("_block_end_ns")
    if cached is None:
        cached = base.__dict__["_block_end_ns"] = plan.block_ends(base.end_ns)
    return cached
