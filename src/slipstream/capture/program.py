"""The capture as a program for `slipstream.workload.drive`, which yields for each step.

Plain and profiled steps alternate in short windows, so that both run under the same conditions. One
more step is recorded with its arguments and storages (the execution trace) and with module names.
The profiler's cost per event is fitted from the two kinds of steps and subtracted from the tasks
(see `overhead.py`).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from slipstream.capture.assemble import assemble
from slipstream.capture.clocks import (
    CollectionClock,
    CollectionTime,
    LoadingClock,
    LoadingTime,
    UpdateClock,
    UpdateTime,
)
from slipstream.capture.closures import ClosureWatch
from slipstream.capture.compiling import compiled_already, no_regions
from slipstream.capture.events import StepEvents, is_typical, mark, profiler, steps_of
from slipstream.capture.lines import LineWatch, Seen
from slipstream.capture.memory import MemoryRecord, is_fitting, record_memory
from slipstream.capture.modules import ModuleNames
from slipstream.capture.other_size import OtherSize, record_other_size
from slipstream.capture.overhead import StepTimes
from slipstream.capture.paging import keep_pages
from slipstream.capture.parallel import capture_lanes
from slipstream.capture.place import (
    MIN_SHARE,
    OffThreadWork,
    Place,
    find_device,
    find_off_thread_work,
)
from slipstream.capture.regions import record_regions
from slipstream.capture.statistics import OF_VALUES, record_statistics
from slipstream.capture.storages import number_storages
from slipstream.capture.trace import PARAMETERS, Node, read_trace, recorded, take_parameters
from slipstream.capture.units import find_units
from slipstream.files import temporary_folder
from slipstream.graph import Graph, Statistics
from slipstream.graph.collection import no_collection
from slipstream.measure.arms import RunDelay, delay_between

if TYPE_CHECKING:
    import torch

    from slipstream.workload import BuiltWorkload

_STEPS_PER_WINDOW = 3
# Reading a window's records evicts the caches, which slows down the next few steps of this length.
_SHORT_S, _SHORT_STEPS_PER_WINDOW, _SETTLING = 0.05, 6, 4
_MAX_CAPTURE_S = 60.0
_MIN_PROFILED = 3
# Repeated checks before a step counts as running on several threads.
_REPEATED_CHECKS = 3
_RETRIES = 4
# After this many times the limit for timed steps, a recorded step is retried once only.
_SLOW = 5


@dataclass(frozen=True)
class CaptureSettings:
    """Settings of a capture.

    Attributes:
        warmup: Steps before the recording, for lazy state, caches and the allocator.
        steps: Number of profiled steps, over which per-task minima are taken, and of plain steps.
        threads: Intra-op threads, or 0 for the workload's setting.
        needs: Further statistics to record, see `statistics.STATISTICS`.
        own_process: Whether the process ends with the capture, so that its heap may be configured
            to keep its pages; see `paging`.
        other_size: Whether to record a step with another number of samples, from which shapes
            are extrapolated.
        time_limit_s: Time limit for plain and profiled steps together; at least three of each are
            recorded, or one if the limit is shorter than two steps.
        once: Whether a rough value suffices: one step gives times and memory, whatever the state
            of the caches.
        short: Whether the workload ends soon, so that no step runs only to settle the caches.
    """

    warmup: int = 3
    steps: int = 24
    threads: int = 0
    needs: tuple[str, ...] = ()
    own_process: bool = True
    other_size: bool = True
    time_limit_s: float = _MAX_CAPTURE_S
    once: bool = False
    short: bool = False

    @classmethod
    def first_look(cls, threads: int) -> CaptureSettings:
        """Return settings for a first result after six steps, before a full capture."""
        return cls(0, 1, threads, own_process=False, other_size=False, once=True)

    def within(self, available: int) -> CaptureSettings | None:
        """Return the settings for a workload of `available` steps; None if those are too few."""
        if available < MIN_STEPS:
            return None
        warmup = min(self.warmup, max(available - _FIXED_STEPS - 2, 0) // 4)
        steps = min(self.steps, (available - _FIXED_STEPS - warmup) // 2)
        return replace(
            self, warmup=warmup, steps=max(steps, 1), own_process=False, short=True, once=steps < 1
        )


_FIXED_STEPS = 6
"""Steps that a capture takes in addition to `CaptureSettings.warmup` and twice its `steps`: the
profiler's first, and those that record lines, memory (two) and arguments (up to two)."""
MIN_STEPS = 6
"""Minimum number of steps of a capture."""


def capture(
    settings: CaptureSettings, report: Callable[[str], None] = lambda line: None
) -> Callable[[BuiltWorkload], Generator[None, Any, Graph]]:
    """Return a program that captures one step of a workload.

    Raises (when run):
        GraphError: The steps differ too much to be aligned.
    """

    def program(built: BuiltWorkload) -> Generator[None, Any, Graph]:
        with ClosureWatch() as closures:
            return (yield from _Capture(built, settings, report, closures).run())

    return program


class _Capture:
    """State of one capture."""

    def __init__(
        self,
        built: BuiltWorkload,
        settings: CaptureSettings,
        report: Callable[[str], None],
        closures: ClosureWatch,
    ) -> None:
        self._built = built
        self._settings = settings
        self._report = report
        self._plain = _PlainSteps(built, closures)
        self._profiled: list[StepEvents] = []
        self._memory: MemoryRecord | None = None
        self._once = settings.once
        self._started = time.perf_counter()

    def run(self) -> Generator[None, Any, Graph]:
        """Record all parts and assemble the graph."""
        import torch

        built, settings, report = self._built, self._settings, self._report
        if settings.threads:
            torch.set_num_threads(settings.threads)
        place, off_thread, per_step_s = yield from self._warm_up()
        # Free garbage of building and warm-up; afterwards the workload collects at its own pace.
        gc.collect()
        # A slow step needs fewer repetitions: its tasks are long compared with the noise.
        affordable = int(settings.time_limit_s / 2 / max(per_step_s, 1e-9))
        fewest = _MIN_PROFILED if affordable else 1
        steps = max(min(settings.steps, affordable), min(fewest, settings.steps))
        self._once = settings.once or not affordable
        if place is not None:
            if settings.short:
                # Lanes need three steps per two of a single thread, and a few to settle.
                steps = max(2 * steps // 3 - 1, 1)
            graph = yield from capture_lanes(built, place, steps, report)
            return _without_statistics(graph, place, settings.needs)
        faulting = None
        if settings.own_process:
            faulting = yield from keep_pages(steps, report)
        if self._once:
            yield from self._record_once()
        else:
            yield from self._record_steps(steps, per_step_s < _SHORT_S and not settings.short)
        seen = yield from self._record_lines()
        if not self._once:
            report("recording memory")
            with no_collection():
                _, self._memory = yield from record_memory(built)
        names, parameters, trace = yield from self._record_arguments()
        yield from self._fit_memory(trace)
        if settings.other_size:
            report("recording another number of samples")
            other = record_other_size(built, trace)
        else:
            other = OtherSize(0, built.samples, reason="no other number of samples was requested")
        report("assembling the recordings")
        threads = torch.get_num_threads()
        with no_collection():
            graph = assemble(
                built, trace, parameters, names, self._profiled, self._plain.times, threads, other,
                self._memory, faulting, seen,
            )  # fmt: skip
        if off_thread.operators:
            graph = replace(graph, meta={**graph.meta, "elsewhere": asdict(off_thread)})
        return (yield from self._with_statistics(graph))

    def _warm_up(self) -> Generator[None, None, tuple[Place | None, OffThreadWork, float]]:
        """Run the first steps.

        Returns:
            Where they run (None: on one thread), operators on other threads, and the time of the
            fastest step in s, since the first may compile.
        """
        self._report("warming up")
        per_step_s, slow_s = math.inf, self._settings.time_limit_s / 2
        for number in range(self._settings.warmup):
            began = time.perf_counter()
            yield
            per_step_s = min(per_step_s, time.perf_counter() - began)
            # A script has run steps before these.
            if per_step_s > slow_s and (number or self._built.from_script):
                break
        place = find_device(self._built)
        with (place or Place("cpu")).profiler() as watching:
            # The first start of the profiler is slow and allocates.
            began = time.perf_counter()
            yield
            per_step_s = min(per_step_s, time.perf_counter() - began)
        off_thread = OffThreadWork(0, 0.0)
        if place is not None:
            return place, off_thread, per_step_s
        off_thread = find_off_thread_work(watching.profiler.kineto_results.events())
        repeats = 0 if self._settings.short else _REPEATED_CHECKS
        for _ in range(repeats if off_thread.share > MIN_SHARE else 0):
            # Work delayed by other load in one step is short in another.
            with Place("cpu").profiler() as watching:
                yield
            again = find_off_thread_work(watching.profiler.kineto_results.events())
            off_thread = min(off_thread, again, key=lambda look: look.share)
        place = Place("cpu") if off_thread.share > MIN_SHARE else None
        return place, off_thread, per_step_s

    def _record_once(self) -> Generator[None, None, None]:
        yield from self._plain.run(1)
        self._report("recording memory")
        with no_collection():
            watching, self._memory = yield from record_memory(self._built)
        self._profiled = steps_of(watching.profiler.kineto_results.events())

    def _record_steps(self, steps: int, settle: bool) -> Generator[None, None, None]:
        """Alternate windows of plain and profiled steps.

        Args:
            settle: Whether windows begin with steps that refill the caches.
        """
        window_steps, settling = _STEPS_PER_WINDOW, 0
        if settle:
            window_steps, settling = _SHORT_STEPS_PER_WINDOW, _SETTLING
        profiled = self._profiled
        while len(profiled) < steps and not _long_enough(self._started, len(profiled)):
            window = min(window_steps, steps - len(profiled))
            self._report(f"step {len(profiled) + 1} of {steps}")
            yield from self._plain.run(window, settling)
            with no_collection():
                with profiler() as watching:
                    for _ in range(settling):
                        yield
                    mark()
                    for _ in range(window):
                        yield
                        mark()
                profiled += steps_of(watching.profiler.kineto_results.events())

    def _record_lines(self) -> Generator[None, None, Seen | None]:
        """Record the user's lines; None for compiled code, since this would run it eagerly."""
        if self._compiled:
            return None
        self._report("recording lines")
        with no_collection(), LineWatch(self._built.lines) as watch:
            yield
        return watch.seen

    def _record_arguments(self) -> Generator[None, None, tuple[ModuleNames, list[int], list[Node]]]:
        """Record a step's operators with their arguments; return names, parameters and trace.

        A step that runs other operators than most profiled ones (the end of an epoch, a checkpoint)
        is recorded again.
        """
        self._report("recording arguments")
        names = ModuleNames(self._built.model, self._built.lines)
        if self._compiled or self._built.model is None:
            # Hooks trigger recompilation, which must not happen in the recorded step.
            with names:
                yield
        with temporary_folder("trace") as folder:
            for attempt in range(self._retries + 1):
                path = folder / f"trace-{attempt}.json"
                with names, recorded(path):
                    _mark_parameters(self._built.model)
                    yield
                with no_collection():
                    nodes = read_trace(path)
                    number_storages(nodes)
                    parameters, trace = take_parameters(nodes)
                if is_typical(find_units(trace).events, self._profiled):
                    break
        return names, parameters, trace

    def _fit_memory(self, trace: Sequence[Node]) -> Generator[None, None, None]:
        """Record the memory of further steps until one fits the recorded operators.

        With a line search, the number of operators varies between steps.
        """
        units = find_units(trace)
        for attempt in range(self._retries):
            if is_fitting(self._memory, trace, units):
                return
            self._report(f"recording memory again, {attempt + 1} of at most {self._retries}")
            with no_collection():
                _, self._memory = yield from record_memory(self._built)

    def _with_statistics(self, graph: Graph) -> Generator[None, Any, Graph]:
        needs = self._settings.needs
        if "regions" in needs:
            regions = yield from record_regions(
                self._built, graph, self._settings.steps, self._report
            )
            graph = replace(graph, meta={**graph.meta, "regions": regions})
        if OF_VALUES.intersection(needs):
            # Last, since it stores sums and intercepts every operator.
            observed = yield from record_statistics(
                self._built, needs, min(self._plain.times.wall_ns), self._report
            )
            graph = replace(graph, statistics=observed)
        return graph

    @property
    def _retries(self) -> int:
        """Maximum number of retries for a step that does not fit the others."""
        if self._settings.short or self._settings.once:
            return 0
        # An evaluation after every few steps rarely follows another.
        elapsed_s = time.perf_counter() - self._started
        return 1 if self._once or elapsed_s > _SLOW * self._settings.time_limit_s else _RETRIES

    @property
    def _compiled(self) -> bool:
        return self._built.model is not None and compiled_already(self._built.model)


class _PlainSteps:
    """Steps without a profiler, and their times."""

    def __init__(self, built: BuiltWorkload, closures: ClosureWatch) -> None:
        self._built = built
        self._closures = closures
        self.times = StepTimes((), ())

    def run(self, count: int, settling: int = 0) -> Generator[None, None, None]:
        """Run `count` timed steps after `settling` untimed ones."""
        walls: list[int] = []
        cpus: list[int] = []
        loading: list[LoadingTime] = []
        updating: list[UpdateTime] = []
        collecting: list[CollectionTime] = []
        # Install the clocks once for all steps, since installing them also evicts caches.
        with (
            LoadingClock() as loader,
            UpdateClock(self._built.optimizer, self._closures) as update,
            CollectionClock(loader) as collector,
            closing(RunDelay()) as delay,
        ):
            delay.open()
            for _ in range(settling):
                yield
            delay_before = delay.read()
            for _ in range(count):
                loader.take(), update.take(), collector.take()
                wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
                yield
                cpus.append(time.thread_time_ns() - cpu)
                walls.append(time.perf_counter_ns() - wall)
                loading.append(loader.take())
                updating.append(update.take())
                collecting.append(collector.take())
            queued = delay_between(delay_before, delay.read()) or 0
        before = self.times
        self.times = StepTimes(
            (*before.wall_ns, *walls),
            (*before.cpu_ns, *cpus),
            (*before.loading, *loading),
            (*before.updating, *updating),
            (*before.collecting, *collecting),
            before.queued_ns + queued,
        )


def _long_enough(started: float, profiled: int) -> bool:
    """Whether to stop with fewer steps, since a machine may become busy after the first ones."""
    return profiled >= _MIN_PROFILED and time.perf_counter() - started > _MAX_CAPTURE_S


def _without_statistics(graph: Graph, place: Place, needs: tuple[str, ...]) -> Graph:
    """Add to `graph` the reason for missing statistics."""
    if not needs:
        return graph
    where = "a CUDA device" if place.device == "cuda" else "several threads"
    reason = f"statistics are not recorded for a step on {where}"
    values = tuple(need for need in needs if need in OF_VALUES)
    empty = Statistics(recorded=values, reasons=dict.fromkeys(values, reason))
    meta = {**graph.meta, "regions": no_regions(reason)} if "regions" in needs else graph.meta
    return replace(graph, statistics=empty, meta=meta)


def _mark_parameters(model: torch.nn.Module | None) -> None:
    """Make the parameters' storages visible in the trace, for `trace.take_parameters`."""
    import torch

    with torch.profiler.record_function(PARAMETERS), torch.no_grad():
        for parameter in model.parameters() if model is not None else ():
            parameter.detach()
