"""``slipstream bench report``: performance of a report of 200 000 tasks in a real browser."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from slipstream.graph import Allocations, Edges, Graph, replace_tasks
from slipstream.report.write import write_report
from slipstream.verbs.profiling import profile
from slipstream_bench import models
from slipstream_bench.browser import Browser, axe_core, browser, missing
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

_TASKS = 200_000
_MODEL = f"{models.__file__}:tiny_language_model"
_VIEWS = ("overview", "timeline", "breakdown", "memory", "whatifs", "history", "run")
_PAINT = "first paint of 200 k tasks"
_FRAME = "frame while zooming and panning over 200 k tasks, 95 of 100"
_SIZE = "size of a report of 200 k tasks"
_REQUESTS = "requests that leave the page"
_ACCESSIBLE = "accessibility violations, all views, light and dark"
_ROWS = (
    (_PAINT, "s", "<= 1"),
    (_FRAME, "ms", "<= 33"),
    (_SIZE, "MB", "<= 10"),
    (_REQUESTS, "requests", "<= 0"),
    (_ACCESSIBLE, "violations", "<= 0"),
)
# In each frame the wheel turns at some position, or the timeline is dragged; then the time to the
# next frame is what a user sees.
MOVE = """
const [frames, done] = [arguments[0], arguments[arguments.length - 1]];
const canvas = document.querySelector('.lanes canvas');
const area = canvas.getBoundingClientRect();
const at = (share) => ({clientX: area.left + share * area.width, clientY: area.top + 80,
  bubbles: true, cancelable: true});
const times = [];
let last = 0;
function next(now) {
  if (last) times.push(now - last);
  last = now;
  const n = times.length;
  if (n >= frames) { done(times); return; }
  const phase = n % 120;
  if (phase < 50) canvas.dispatchEvent(new WheelEvent('wheel', {...at(0.3), deltaY: -60}));
  else if (phase < 70) canvas.dispatchEvent(new WheelEvent('wheel', {...at(0.5), deltaX: 90}));
  else canvas.dispatchEvent(new WheelEvent('wheel', {...at(0.7), deltaY: 60}));
  requestAnimationFrame(next);
}
requestAnimationFrame(next);
"""


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield first paint, frames, size, requests and accessibility, in headless Chromium."""
    selected = [row for row in _ROWS if options.wants(row[0])]
    reason = missing()
    if reason is not None:
        yield from (not_judged(*row, reason) for row in selected)
        return
    if not selected:
        return
    options.progress("recording a step")
    recorded = profile(_MODEL, steps=5, threads=1)
    with tempfile.TemporaryDirectory(prefix="slipstream-report-") as folder:
        options.progress("writing the report")
        graph = repeated(recorded, -(-_TASKS // len(recorded)))
        large = write_report(graph, Path(folder) / "large.html", what_if=False)
        small = write_report(recorded, Path(folder) / "small.html", techniques=["accumulation:2"])
        detail = f"a language model's step, {len(recorded)} tasks, repeated: {len(graph)}"
        if options.wants(_SIZE):
            yield at_most(_SIZE, large.stat().st_size / 1e6, 10, "MB", detail=detail)
        with browser() as page:
            yield from _speed(options, page, large, detail)
            yield from _manners(options, page, (large, small))


def _speed(options: BenchOptions, page: Browser, path: Path, detail: str) -> Iterator[Bar]:
    if options.wants(_PAINT):
        loads = 15 if options.full else 5
        options.progress(_PAINT)
        seconds = sorted(_first_paint(page, path) for _ in range(loads))
        note = f"median of {loads} loads, until the timeline is drawn; maximum {seconds[-1]:.2f} s"
        yield at_most(_PAINT, median(seconds), 1.0, "s", n=loads, detail=f"{note}; {detail}")
    if options.wants(_FRAME):
        options.progress(_FRAME)
        page.open(path, view="timeline", size=(1920, 1080))
        yield frames_row(_FRAME, page, 1200 if options.full else 360)


def frames_row(bar: str, page: Browser, frames: int) -> Bar:
    """Return a row of frame times while an open timeline is moved."""
    times = page.wait(MOVE, frames)
    middle, slow = np.percentile(times, [50, 95])
    note = f"{frames} frames at 1920 x 1080; median {middle:.1f} ms, maximum {max(times):.0f} ms"
    return at_most(bar, float(slow), 33, "ms", n=frames, detail=note)


def _manners(options: BenchOptions, page: Browser, paths: Sequence[Path]) -> Iterator[Bar]:
    if options.wants(_REQUESTS):
        requests = []
        for path in paths:
            page.open(path, view="timeline")
            for view in _VIEWS:
                page.run(f"document.getElementById('tab-{view}').click()")
            requests += page.requests()
        yield at_most(
            _REQUESTS, len(requests), 0, "requests", detail=", ".join(requests[:3]) or "none"
        )
    if options.wants(_ACCESSIBLE):
        axe = axe_core()
        if axe is None:
            reason = "axe-core is not installed: npm ci in page/"
            yield not_judged(_ACCESSIBLE, "violations", "<= 0", reason)
            return
        found = []
        for dark in (False, True):
            for view in _VIEWS:
                page.open(paths[-1], view=view, dark=dark)
                found += [f"{view}: {violation}" for violation in page.violations(axe)]
        yield at_most(
            _ACCESSIBLE, len(found), 0, "violations", n=2 * len(_VIEWS), detail="; ".join(found[:2])
        )


def _first_paint(page: Browser, path: Path) -> float:
    """Return seconds from opening the file until the timeline is on the screen."""
    page.open(path, view="timeline", size=(1920, 1080))
    return 1e-3 * float(
        page.wait(
            "const done = arguments[arguments.length - 1];"
            "const look = () => {"
            "  const [drawn] = performance.getEntriesByName('slipstream-drawn');"
            "  const [paint] = performance.getEntriesByName('first-contentful-paint');"
            "  if (drawn && paint) done(Math.max(drawn.startTime, paint.startTime));"
            "  else setTimeout(look, 20);"
            "};"
            "look();"
        )
    )


def repeated(graph: Graph, times: int, seed: int = 0) -> Graph:
    """Return a step that repeats `graph` `times` times, with varying durations."""
    n = len(graph)
    order = np.tile(np.arange(n), times)
    tasks = graph.tasks.take(order)
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.1, len(order)))
    counts = np.tile(np.diff(graph.operand_start), times)
    edges, memory = graph.edges, graph.memory

    def again(column: np.ndarray, size: int) -> np.ndarray:
        """Repeat a column of task numbers for each repetition; -1 stays."""
        whole = np.tile(column.astype(np.int64), times)
        return np.where(whole < 0, -1, whole + np.repeat(np.arange(times) * n, size))

    # Lasting allocations exist once; those that outlive a repetition end when the step begins
    # again.
    passing = memory.take(np.flatnonzero(memory.producer >= 0))
    lasting = memory.take(np.flatnonzero(memory.producer < 0))
    parts = [
        (
            *lasting.columns().values(),
        ),
        (
            np.tile(passing.nbytes, times), np.tile(passing.storage, times),
            np.tile(passing.role, times), again(passing.producer, len(passing)),
            again(np.where(passing.release < 0, n - 1, passing.release), len(passing)),
        ),
    ]  # fmt: skip
    made = replace(
        graph,
        tasks=tasks,
        edges=Edges(
            again(edges.source, len(edges)).astype(np.int32),
            again(edges.target, len(edges)).astype(np.int32),
            np.tile(edges.kind, times), np.tile(edges.delay_ns, times), np.tile(edges.lag, times),
        ),
        operand_start=np.concatenate([[0], np.cumsum(counts)]),
        operands=np.tile(graph.operands, times),
        memory=Allocations.of(*(np.concatenate(pair) for pair in zip(*parts, strict=True))),
    )  # fmt: skip
    # Autograd numbers continue: a backward task belongs to the forward task of its repetition.
    apart = int(graph.tasks.sequence.max(initial=-1)) + 1
    sequence = np.where(
        tasks.sequence < 0, -1, tasks.sequence + np.repeat(np.arange(times), n) * apart
    )
    made = replace_tasks(made, duration_ns=made.tasks.duration_ns * noise, sequence=sequence)
    made.check()
    return made
