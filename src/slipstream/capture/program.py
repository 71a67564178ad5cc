"""The capture itself, as a program for `slipstream.workload.drive`: it yields for each step.

Plain and profiled steps alternate in short windows, so that both see the same machine. One more
step is recorded with its arguments and storages (the execution trace) and with module names. The
profiler costs time at every event; that cost is fitted from the two kinds of steps and taken off
the tasks (see `overhead.py` beside this file).
"""

from __future__ import annotations

import gc
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
from slipstream.capture.compiling import compiled_already, nothing
from slipstream.capture.events import StepEvents, is_typical, mark, profiler, steps_of
from slipstream.capture.lines import LineWatch, Seen
from slipstream.capture.memory import MemoryRecord, is_fitting, record_memory
from slipstream.capture.modules import ModuleNames
from slipstream.capture.other_size import OtherSize, record_other_size
from slipstream.capture.overhead import StepTimes
from slipstream.capture.paging import keep_pages
from slipstream.capture.parallel import capture_lanes
from slipstream.capture.place import MATTERS, Elsewhere, Place, find_device, find_elsewhere
from slipstream.capture.regions import record_regions
from slipstream.capture.statistics import OF_VALUES, record_statistics
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
# Reading a window's records empties the caches; a step this short is slower for a few steps after.
_SHORT_S, _SHORT_STEPS_PER_WINDOW, _SETTLING = 0.05, 6, 4
_LONGEST_CAPTURE_S = 60.0
_MIN_PROFILED = 3
# Before a step counts as one of several threads.
_SECOND_LOOKS = 3
_RETRIES = 4


@dataclass(frozen=True)
class CaptureSettings:
    """How a step is captured.

    Attributes:
        warmup: steps that run before anything is recorded: lazy state, caches, allocator.
        steps: profiled steps whose per-task minimum is taken, and as many plain ones.
        threads: intra-op threads, or 0 for what the workload sets.
        needs: further statistics to record, see `statistics.STATISTICS`.
        own_process: whether the process ends with the capture, so that its heap may be told to
            keep its pages; see `paging`.
        other_size: whether a step with another number of samples is recorded, from which the
            shapes of any other follow.
        longest_s: how long plain and profiled steps may take together; three are recorded in any
            case.
        once: whether a rough value will do: one step shows times and memory, in the state that
            caches happen to be in.
        short: whether the workload ends soon: no step runs only to settle the caches.
    """

    warmup: int = 3
    steps: int = 24
    threads: int = 0
    needs: tuple[str, ...] = ()
    own_process: bool = True
    other_size: bool = True
    longest_s: float = _LONGEST_CAPTURE_S
    once: bool = False
    short: bool = False

    @classmethod
    def first_look(cls, threads: int) -> CaptureSettings:
        """Numbers as soon as they can be had, after six steps; more will be recorded."""
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
"""Steps without which nothing can be captured."""


def capture(
    settings: CaptureSettings, report: Callable[[str], None] = lambda line: None
) -> Callable[[BuiltWorkload], Generator[None, Any, Graph]]:
    """Make the program that captures one step of the workload that it is given.

    Raises (when run):
        GraphError: the steps differ too much from one another to be aligned.
    """

    def program(built: BuiltWorkload) -> Generator[None, Any, Graph]:
        with ClosureWatch() as closures:
            return (yield from _Capture(built, settings, report, closures).run())

    return program


class _Capture:
    """One capture under way."""

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
        self._started = time.perf_counter()

    def run(self) -> Generator[None, Any, Graph]:
        """Record everything and put it together."""
        import torch

        built, settings, report = self._built, self._settings, self._report
        if settings.threads:
            torch.set_num_threads(settings.threads)
        place, elsewhere = yield from self._warm_up()
        per_step_s = (time.perf_counter() - self._started) / (settings.warmup + 1)
        # Of building and warming up; afterwards the workload's own pace of collecting is enough.
        gc.collect()
        # A slow step needs fewer repetitions: its tasks are long against the noise.
        affordable = int(settings.longest_s / 2 / max(per_step_s, 1e-9))
        steps = max(min(settings.steps, affordable), min(_MIN_PROFILED, settings.steps))
        if place is not None:
            if settings.short:
                # Lanes take three steps where one thread takes two, and a few to settle.
                steps = max(2 * steps // 3 - 1, 1)
            graph = yield from capture_lanes(built, place, steps, report)
            return _without_statistics(graph, place, settings.needs)
        faulting = None
        if settings.own_process:
            faulting = yield from keep_pages(steps, report)
        if settings.once:
            yield from self._record_once()
        else:
            yield from self._record_steps(steps, per_step_s < _SHORT_S and not settings.short)
        seen = yield from self._record_lines()
        if not settings.once:
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
        report("putting the recordings together")
        threads = torch.get_num_threads()
        with no_collection():
            graph = assemble(
                built, trace, parameters, names, self._profiled, self._plain.times, threads, other,
                self._memory, faulting, seen,
            )  # fmt: skip
        if elsewhere.operators:
            graph = replace(graph, meta={**graph.meta, "elsewhere": asdict(elsewhere)})
        return (yield from self._with_statistics(graph))

    def _warm_up(self) -> Generator[None, None, tuple[Place | None, Elsewhere]]:
        """Take the first steps; return their place (None: one thread), and what ran elsewhere."""
        self._report("warming up")
        for _ in range(self._settings.warmup):
            yield
        place = find_device(self._built)
        with (place or Place("cpu")).profiler() as watching:
            # The profiler's own first start is slow and allocates.
            yield
        elsewhere = Elsewhere(0, 0.0)
        if place is not None:
            return place, elsewhere
        elsewhere = find_elsewhere(watching.profiler.kineto_results.events())
        repeats = 0 if self._settings.short else _SECOND_LOOKS
        for _ in range(repeats if elsewhere.share > MATTERS else 0):
            # What a busy machine only held up in one step is short in another.
            with Place("cpu").profiler() as watching:
                yield
            again = find_elsewhere(watching.profiler.kineto_results.events())
            elsewhere = min(elsewhere, again, key=lambda look: look.share)
        return Place("cpu") if elsewhere.share > MATTERS else None, elsewhere

    def _record_once(self) -> Generator[None, None, None]:
        yield from self._plain.run(1)
        self._report("recording memory")
        with no_collection():
            watching, self._memory = yield from record_memory(self._built)
        self._profiled = steps_of(watching.profiler.kineto_results.events())

    def _record_steps(self, steps: int, settle: bool) -> Generator[None, None, None]:
        """Alternate windows of plain and profiled steps.

        Args:
            settle: whether windows begin with steps that fill the caches again.
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
        """Record the user's lines; None for compiled code, whose operators would run one by one."""
        if self._compiled:
            return None
        self._report("recording lines")
        with no_collection(), LineWatch(self._built.lines) as watch:
            yield
        return watch.seen

    def _record_arguments(self) -> Generator[None, None, tuple[ModuleNames, list[int], list[Node]]]:
        """Record a step's operators with their arguments: module names, parameters and the trace.

        A step that runs other operators than most profiled ones (an epoch ends in it, a checkpoint
        is saved) is recorded again.
        """
        self._report("recording arguments")
        names = ModuleNames(self._built.model, self._built.lines)
        if self._compiled or self._built.model is None:
            # Hooks make torch.compile compile again; not in the step that is recorded.
            with names:
                yield
        with temporary_folder("trace") as folder:
            for attempt in range(self._retries + 1):
                path = folder / f"trace-{attempt}.json"
                with names, recorded(path):
                    _show_parameters(self._built.model)
                    yield
                with no_collection():
                    parameters, trace = take_parameters(read_trace(path))
                if is_typical(find_units(trace).events, self._profiled):
                    break
        return names, parameters, trace

    def _fit_memory(self, trace: Sequence[Node]) -> Generator[None, None, None]:
        """Record the memory of further steps while it cannot be that of the recorded operators.

        In steps with a line search the number of operators differs.
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
            # Last: it keeps sums and watches every operator.
            observed = yield from record_statistics(
                self._built, needs, min(self._plain.times.wall_ns), self._report
            )
            graph = replace(graph, statistics=observed)
        return graph

    @property
    def _retries(self) -> int:
        """How often a step is recorded again that does not fit the others."""
        return 0 if self._settings.short or self._settings.once else _RETRIES

    @property
    def _compiled(self) -> bool:
        return self._built.model is not None and compiled_already(self._built.model)


class _PlainSteps:
    """Steps without a profiler, and what clocks say of them."""

    def __init__(self, built: BuiltWorkload, closures: ClosureWatch) -> None:
        self._built = built
        self._closures = closures
        self.times = StepTimes((), ())

    def run(self, count: int, settling: int = 0) -> Generator[None, None, None]:
        """`count` more of them, after `settling` that are not timed."""
        walls: list[int] = []
        cpus: list[int] = []
        loading: list[LoadingTime] = []
        updating: list[UpdateTime] = []
        collecting: list[CollectionTime] = []
        # For all of them: putting clocks in place costs the next step its caches, too.
        with (
            LoadingClock() as loader,
            UpdateClock(self._built.optimizer, self._closures) as update,
            CollectionClock(loader) as collector,
            closing(RunDelay()) as delay,
        ):
            delay.open()
            for _ in range(settling):
                yield
            began = delay.read()
            for _ in range(count):
                loader.take(), update.take(), collector.take()
                wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
                yield
                cpus.append(time.thread_time_ns() - cpu)
                walls.append(time.perf_counter_ns() - wall)
                loading.append(loader.take())
                updating.append(update.take())
                collecting.append(collector.take())
            queued = delay_between(began, delay.read()) or 0
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
    """Whether to make do with fewer steps: a machine may become busy after the first ones."""
    return profiled >= _MIN_PROFILED and time.perf_counter() - started > _LONGEST_CAPTURE_S


def _without_statistics(graph: Graph, place: Place, needs: tuple[str, ...]) -> Graph:
    """`graph` with the reason why what is recorded besides was not."""
    if not needs:
        return graph
    where = "a CUDA device" if place.device == "cuda" else "several threads"
    reason = f"statistics are not recorded of a step that runs on {where}"
    values = tuple(need for need in needs if need in OF_VALUES)
    empty = Statistics(recorded=values, reasons=dict.fromkeys(values, reason))
    meta = {**graph.meta, "regions": nothing(reason)} if "regions" in needs else graph.meta
    return replace(graph, statistics=empty, meta=meta)


def _show_parameters(model: torch.nn.Module | None) -> None:
    """Let the trace see which storages the parameters have; `trace.take_parameters` finds them."""
    import torch

    with torch.profiler.record_function(PARAMETERS), torch.no_grad():
        for parameter in model.parameters() if model is not None else ():
            parameter.detach()
