"""Functions of the capture rows of ``slipstream bench graph`` in child processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from statistics import median
from typing import Any

from slipstream.capture import CaptureSettings, capture, program
from slipstream.capture.events import MARKER
from slipstream.graph import Graph, replay
from slipstream.verbs.children import report_progress, run_program
from slipstream_bench.harness import busy_cores

_Program = Generator[None, Any, Any]


def build_times(workload: dict[str, Any], keep_in: str, steps: int) -> Any:
    """Return CPU seconds of a capture between its steps, and the profiler's part of them.

    They exclude the garbage collection, which a capture runs once between warm-up and the first
    timed step, and the additional step at another size.
    """
    import gc

    import torch

    def timed(built: Any) -> _Program:
        stopping = _clock(torch.profiler.profile, "stop")
        left_out = (_clock(gc, "collect"), _clock(program, "record_other_size"))
        running = capture(CaptureSettings(steps=steps, threads=1), report_progress)(built)
        between = 0.0
        while True:
            begin = time.process_time()
            try:
                running.send(None)
            except StopIteration as end:
                between += time.process_time() - begin
                graph: Graph = end.value
                break
            between += time.process_time() - begin
            yield
        return {
            "events": graph.meta["events_per_step"] * graph.meta["aligned_steps"],
            "tasks": len(graph),
            "profiler_s": stopping(),
            "build_s": between - stopping() - sum(spent() for spent in left_out),
        }

    return run_program(workload, keep_in, timed)


def _clock(owner: Any, name: str) -> Callable[[], float]:
    """Make the function `name` of `owner` sum its CPU seconds; return a function to read them."""
    function, spent = getattr(owner, name), [0.0]

    def timed(*arguments: Any, **keywords: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*arguments, **keywords)
        finally:
            spent[0] += time.process_time() - begin

    setattr(owner, name, timed)
    return lambda: spent[0]


def captures(workload: dict[str, Any], keep_in: str, steps: int, repeats: int, hogs: int) -> Any:
    """Alternate plain steps, a capture, and (with `hogs`) a capture alongside busy processes.

    The plain steps are not those on which a capture is calibrated.
    """

    def alternating(built: Any) -> _Program:
        settings = CaptureSettings(steps=steps, threads=1)
        quiet: list[float] = []
        results: list[dict[str, Any]] = []
        yield from capture(CaptureSettings(steps=3, threads=1))(built)
        quiet.append((yield from _plain(steps)))
        for number in range(repeats):
            report_progress(f"capture {number + 1} of {repeats}")
            idle = yield from capture(settings)(built)
            quiet.append((yield from _plain(steps)))
            result = {"idle": _summary(idle), "plain_ns": (quiet[-2], quiet[-1])}
            if hogs:
                with busy_cores(hogs):
                    loaded = yield from capture(settings)(built)
                result["loaded"] = _summary(loaded)
            results.append(result)
        return results

    return run_program(workload, keep_in, alternating)


def _plain(steps: int) -> Generator[None, Any, float]:
    """Return the minimum CPU nanoseconds of `steps` steps without a profiler."""
    times = []
    for _ in range(steps):
        begin = time.thread_time_ns()
        yield
        times.append(time.thread_time_ns() - begin)
    return float(min(times))


def _summary(graph: Graph) -> dict[str, float]:
    meta = graph.meta
    return {
        "step_ns": replay(graph).step_ns,
        "wall_ns": meta["step_ns"]["wall_median"],
        "events": meta["events_per_step"],
        "per_event_ns": meta["profiler_ns_per_event"],
        "scale": meta["residual_scale"],
    }


def allocator_peak(workload: dict[str, Any], keep_in: str, steps: int) -> Any:
    """Return the allocator's peak bytes in each of the last of `steps` steps.

    The profiler runs from before the model is built, so that the count includes everything.
    """
    import torch
    from torch._C._profiler import _EventType

    def stepping(built: Any) -> _Program:
        torch.set_num_threads(1)
        for _ in range(steps):
            yield
            with torch.profiler.record_function(MARKER):
                pass
        return None

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run_program(workload, keep_in, stepping)
    marks: list[int] = []
    counts: list[tuple[int, int]] = []
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            counts.append((event.start_time_ns, event.typed[1].total_allocated))
        elif event.name == MARKER:
            marks.append(event.start_time_ns)
    marks.sort()
    # The first step creates the optimizer's state.
    peaks = [
        max(total for when, total in counts if begin <= when < end)
        for begin, end in itertools.pairwise(marks)
    ]
    return {"peaks": peaks, "peak_bytes": int(median(peaks))}
