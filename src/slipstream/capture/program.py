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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.capture.assemble import assemble
from slipstream.capture.compiling import compiled_already
from slipstream.capture.events import MARKER, Step, steps_of
from slipstream.capture.loading import LoadingClock
from slipstream.capture.memory import gradients, held, memory_profiler, read_memory
from slipstream.capture.modules import ModuleNames
from slipstream.capture.other_size import record_other_size
from slipstream.capture.overhead import LoadingTime, StepTimes
from slipstream.capture.paging import keep_pages
from slipstream.capture.regions import record_regions
from slipstream.capture.statistics import OF_VALUES, record_statistics
from slipstream.capture.trace import PARAMETERS, read_trace, recorded, take_parameters
from slipstream.capture.updating import UpdateClock, UpdateTime
from slipstream.graph import Graph
from slipstream.graph.collection import no_collection

if TYPE_CHECKING:
    import torch

    from slipstream.workload import Built

_STEPS_PER_WINDOW = 3
# Reading a window's records empties the caches; a step this short is slower for a few steps after.
_SHORT_S, _SHORT_STEPS_PER_WINDOW, _SETTLING = 0.05, 6, 4
_LONGEST_CAPTURE_S = 60.0
_FEWEST_STEPS = 3


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
    """

    warmup: int = 3
    steps: int = 24
    threads: int = 0
    needs: tuple[str, ...] = ()
    own_process: bool = True


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
        with _profiler():
            # The profiler's own first start is slow and allocates.
            yield
        per_step_s = (time.perf_counter() - started) / (settings.warmup + 1)
        # Of building and warming up; afterwards the workload's own pace of collecting is enough.
        gc.collect()
        # A slow step needs fewer repetitions: its tasks are long against the noise.
        affordable = int(_LONGEST_CAPTURE_S / 2 / max(per_step_s, 1e-9))
        steps = max(min(settings.steps, affordable), min(_FEWEST_STEPS, settings.steps))
        faulting = None
        if settings.own_process:
            faulting = yield from keep_pages(steps, say)
        walls: list[int] = []
        cpus: list[int] = []
        loading: list[LoadingTime] = []
        updating: list[UpdateTime] = []
        profiled: list[Step] = []
        short = per_step_s < _SHORT_S
        most, settling = (_SHORT_STEPS_PER_WINDOW, _SETTLING) if short else (_STEPS_PER_WINDOW, 0)
        while len(profiled) < steps:
            window = min(most, steps - len(profiled))
            say(f"step {len(profiled) + 1} of {steps}")
            # For the whole window: putting clocks in place costs the next step its caches, too.
            with LoadingClock() as loader, UpdateClock(built.optimizer) as update:
                for _ in range(settling):
                    yield
                for _ in range(window):
                    loaded, _ = loader.time, update.take()
                    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
                    yield
                    cpus.append(time.thread_time_ns() - cpu)
                    walls.append(time.perf_counter_ns() - wall)
                    loading.append(loader.time - loaded)
                    updating.append(update.take())
            with no_collection():
                with _profiler() as profiler:
                    for _ in range(settling):
                        yield
                    _mark()
                    for _ in range(window):
                        yield
                        _mark()
                profiled += steps_of(profiler.profiler.kineto_results.events())
        say("recording memory")
        with no_collection():
            with memory_profiler() as profiler:
                yield
                before = held(built)
                _mark()
                yield
                _mark()
                after = gradients(built)
            memory = read_memory(profiler, before, after)
        say("recording arguments")
        names = ModuleNames(built.model)
        if built.model is None or compiled_already(built.model):
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
        say("recording another number of samples")
        other = record_other_size(built, trace)
        say("putting the recordings together")
        times = StepTimes(tuple(walls), tuple(cpus), tuple(loading), tuple(updating))
        threads = torch.get_num_threads()
        with no_collection():
            graph = assemble(
                built, trace, parameters, names, profiled, times, threads, other, memory, faulting
            )
        if "regions" in settings.needs:
            regions = yield from record_regions(built, graph, settings.steps, say)
            graph = replace(graph, meta={**graph.meta, "regions": regions})
        if OF_VALUES.intersection(settings.needs):
            # Last: it keeps sums and watches every operator.
            found = yield from record_statistics(built, settings.needs, min(walls), say)
            graph = replace(graph, statistics=found)
        return graph

    return program


def _mark() -> None:
    import torch

    with torch.profiler.record_function(MARKER):
        pass


def _show_parameters(model: torch.nn.Module | None) -> None:
    """Let the trace see which storages the parameters have; `trace.take_parameters` finds them."""
    import torch

    with torch.profiler.record_function(PARAMETERS), torch.no_grad():
        for parameter in model.parameters() if model is not None else ():
            parameter.detach()


def _profiler() -> Any:
    import torch

    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=False
    )
