"""The capture itself, as a program for `slipstream.workload.drive`: it yields for each step.

Plain and profiled steps alternate in short windows, so that both see the same machine. One more
step is recorded with its arguments and storages (the execution trace) and with module names. The
profiler costs time at every event; that cost is fitted from the two kinds of steps and taken off
the tasks (see `overhead.py` beside this file).
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from slipstream.capture.compiling import compiled_already, nothing
from slipstream.capture.events import Step, mark, profiler, steps_of
from slipstream.capture.lines import LineWatch
from slipstream.capture.memory import record_memory
from slipstream.capture.modules import ModuleNames
from slipstream.capture.other_size import OtherSize, record_other_size
from slipstream.capture.overhead import StepTimes
from slipstream.capture.paging import keep_pages
from slipstream.capture.parallel import capture_lanes
from slipstream.capture.place import MATTERS, Elsewhere, Place, find_device, find_elsewhere
from slipstream.capture.regions import record_regions
from slipstream.capture.statistics import OF_VALUES, record_statistics
from slipstream.capture.trace import PARAMETERS, read_trace, recorded, take_parameters
from slipstream.graph import Graph, Statistics
from slipstream.graph.collection import no_collection
from slipstream.measure.arms import RunDelay, delay_between

if TYPE_CHECKING:
    import torch

    from slipstream.workload import Built

_STEPS_PER_WINDOW = 3
# Reading a window's records empties the caches; a step this short is slower for a few steps after.
_SHORT_S, _SHORT_STEPS_PER_WINDOW, _SETTLING = 0.05, 6, 4
_LONGEST_CAPTURE_S = 60.0
_FEWEST_STEPS = 3
# Before a step counts as one of several threads.
_SECOND_LOOKS = 3


@dataclass(frozen=True)
class CaptureSettings:
    """How a step is captured.

    Attributes:
        warmup: steps that run before anything is recorded: lazy state, caches, allocator.
        steps: profiled steps whose per-task minimum is taken, and as many plain ones.
        threads: intra-op threads, or 0 for what the workload sets.
        needs: statistics to record besides, see `statistics.STATISTICS`.
        own_process: whether the process ends with the capture, so that its heap may be told to
            keep its pages; see `paging`.
        other_size: whether a step with another number of samples is recorded, from which the
            shapes of any other follow.
        longest_s: how long plain and profiled steps may take together; three are recorded in any
            case.
        once: whether a rough value will do: one step tells times and memory, in the state that
            caches happen to be in.
    """

    warmup: int = 3
    steps: int = 24
    threads: int = 0
    needs: tuple[str, ...] = ()
    own_process: bool = True
    other_size: bool = True
    longest_s: float = _LONGEST_CAPTURE_S
    once: bool = False

    @classmethod
    def first_look(cls, threads: int) -> CaptureSettings:
        """Numbers as soon as they can be had, after six steps; more will be recorded."""
        return cls(0, 1, threads, own_process=False, other_size=False, once=True)


def capture(
    settings: CaptureSettings, say: Callable[[str], None] = lambda line: None
) -> Callable[[Built], Generator[None, Any, Graph]]:
    """The program that captures one step of whatever it is given.

    Raises (when run):
        GraphError: the steps differ too much from one another to be aligned.
    """

    def program(built: Built) -> Generator[None, Any, Graph]:
        import torch

        if settings.threads:
            torch.set_num_threads(settings.threads)
        say("warming up")
        started = time.perf_counter()
        for _ in range(settings.warmup):
            yield
        place = find_device(built)
        with (place or Place("cpu")).profiler() as watching:
            # The profiler's own first start is slow and allocates.
            yield
        per_step_s = (time.perf_counter() - started) / (settings.warmup + 1)
        elsewhere = Elsewhere(0, 0.0)
        if place is None:
            elsewhere = find_elsewhere(watching.profiler.kineto_results.events())
            for _ in range(_SECOND_LOOKS if elsewhere.share > MATTERS else 0):
                # What a busy machine only held up in one step is short in another.
                with Place("cpu").profiler() as watching:
                    yield
                again = find_elsewhere(watching.profiler.kineto_results.events())
                elsewhere = min(elsewhere, again, key=lambda one: one.share)
            place = Place("cpu") if elsewhere.share > MATTERS else None
        # Of building and warming up; afterwards the workload's own pace of collecting is enough.
        gc.collect()
        # A slow step needs fewer repetitions: its tasks are long against the noise.
        affordable = int(settings.longest_s / 2 / max(per_step_s, 1e-9))
        steps = max(min(settings.steps, affordable), min(_FEWEST_STEPS, settings.steps))
        if place is not None:
            graph = yield from capture_lanes(built, place, steps, say)
            return _without_statistics(graph, place, settings.needs)
        faulting = None
        if settings.own_process:
            faulting = yield from keep_pages(steps, say)
        plain = _PlainSteps(built)
        profiled: list[Step] = []
        memory = None
        if settings.once:
            yield from plain.run(1)
            say("recording memory")
            with no_collection():
                watching, memory = yield from record_memory(built)
            profiled = steps_of(watching.profiler.kineto_results.events())
        short = per_step_s < _SHORT_S
        most, settling = (_SHORT_STEPS_PER_WINDOW, _SETTLING) if short else (_STEPS_PER_WINDOW, 0)
        while len(profiled) < steps and not _long_enough(started, len(profiled)):
            window = min(most, steps - len(profiled))
            say(f"step {len(profiled) + 1} of {steps}")
            yield from plain.run(window, settling)
            with no_collection():
                with profiler() as watching:
                    for _ in range(settling):
                        yield
                    mark()
                    for _ in range(window):
                        yield
                        mark()
                profiled += steps_of(watching.profiler.kineto_results.events())
        compiled = built.model is None or compiled_already(built.model)
        seen = None
        if built.model is None or not compiled:
            say("recording lines")
            # Compiled code would be run one by one, or compiled again.
            with no_collection(), LineWatch(built.lines) as watch:
                yield
            seen = watch.seen
        if not settings.once:
            say("recording memory")
            with no_collection():
                _, memory = yield from record_memory(built)
        say("recording arguments")
        names = ModuleNames(built.model, built.lines)
        if compiled:
            # Hooks make torch.compile compile again; not in the step that is recorded.
            with names:
                yield
        with tempfile.TemporaryDirectory(prefix="slipstream-trace-") as folder:
            path = Path(folder) / "trace.json"
            with names, recorded(path):
                _show_parameters(built.model)
                yield
            say("building the graph")
            with no_collection():
                parameters, trace = take_parameters(read_trace(path))
        if settings.other_size:
            say("recording another number of samples")
            other = record_other_size(built, trace)
        else:
            other = OtherSize(0, built.samples, reason="no other number of samples was asked for")
        say("putting the recordings together")
        threads = torch.get_num_threads()
        with no_collection():
            graph = assemble(
                built, trace, parameters, names, profiled, plain.times, threads, other, memory,
                faulting, seen,
            )  # fmt: skip
        if elsewhere.operators:
            graph = replace(graph, meta={**graph.meta, "elsewhere": asdict(elsewhere)})
        if "regions" in settings.needs:
            regions = yield from record_regions(built, graph, settings.steps, say)
            graph = replace(graph, meta={**graph.meta, "regions": regions})
        if OF_VALUES.intersection(settings.needs):
            # Last: it keeps sums and watches every operator.
            observed = yield from record_statistics(
                built, settings.needs, min(plain.times.wall_ns), say
            )
            graph = replace(graph, statistics=observed)
        return graph

    return program


class _PlainSteps:
    """Steps without a profiler, and what clocks say of them."""

    def __init__(self, built: Built) -> None:
        self._built = built
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
            UpdateClock(self._built.optimizer) as update,
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
    return profiled >= _FEWEST_STEPS and time.perf_counter() - started > _LONGEST_CAPTURE_S


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
