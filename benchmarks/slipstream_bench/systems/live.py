"""``slipstream bench live``: latency from a save to results, and responsiveness of the page."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.child.fork_server import ForkServer
from slipstream.graph import load, save
from slipstream.live.analysis import Analyst
from slipstream.live.queue import warm_server
from slipstream.live.server import Live, serving
from slipstream.verbs.advising import single_techniques
from slipstream_bench.browser import Browser, browser, missing
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.report import frames_row, repeated

_SAVE = "save to first numbers of a 100-module model, over 5 steps"
_PAINT = "first paint of the live page, 200 k tasks"
_FRAME = "live frame while zooming and panning over 200 k tasks, 95 of 100"
_TOGGLE = "re-simulation after a toggle, 200 k tasks, median"
_SLOWEST = "re-simulation after a toggle, 200 k tasks, slowest technique"
_GROWTH = "growth of the server over re-analyses"
_ROWS = (
    (_SAVE, "s", "<= 1.5"),
    (_PAINT, "s", "<= 1"),
    (_FRAME, "ms", "<= 33"),
    (_TOGGLE, "ms", "<= 100"),
    (_SLOWEST, "ms", "<= 100"),
    (_GROWTH, "share", "<= 0.05"),
)
_TASKS = 200_000
_LAYERS = 50
_MODEL = f"""\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x)) + x


def make_workload(batch_size=64, width=128):
    model = nn.Sequential(*(Layer(width) for _ in range({_LAYERS})))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(batch_size, width), torch.randn(batch_size, width)
    return model, batch, nn.functional.mse_loss, optimizer
"""
_TINY = _MODEL.replace(f"range({_LAYERS})", "range(2)")
_WAIT_S = 300.0
# Repeated toggles of every technique, after the first; their median counts.
_SWITCHES = 3
# Caches fill during the first analyses; from then on the server should not grow.
_SETTLED = 10


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield rows on save to first numbers, first paint, frames, re-simulation and server growth."""
    selected = [row for row in _ROWS if options.wants(row[0])]
    if not selected:
        return
    server = warm_server({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    try:
        if options.wants(_SAVE):
            yield _first_numbers(options, server)
        if any(options.wants(name) for name in (_PAINT, _FRAME, _TOGGLE, _SLOWEST)):
            yield from _large(options, server)
        if options.wants(_GROWTH):
            yield _growth(options, server)
    finally:
        if server is not None:
            server.close()


@contextmanager
def _watching(text: str, server: ForkServer | None, steps: int) -> Iterator[tuple[Analyst, Path]]:
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = Path(folder) / "train.py"
        path.write_text(text, encoding="utf-8")
        with Analyst(
            f"{path}:make_workload", threads=1, steps=steps, techniques=None, batches=False,
            server=server,
        ) as analyst:  # fmt: skip
            yield analyst, path


def _first_numbers(options: BenchOptions, server: ForkServer | None) -> Bar:
    """Measure from a save to the first numbers, less the time of five steps."""
    saves = 15 if options.full else 5
    options.progress(_SAVE)
    with _watching(_MODEL, server, 3) as (analyst, path):
        found = analyst.wait(analyst.watch(), timeout_s=_WAIT_S)
        modules = 2 * _LAYERS + 1
        beyond, steps = [], []
        for number in range(saves):
            begun = time.monotonic()
            path.write_text(_MODEL.replace("lr=0.01", f"lr=0.01{number}"), encoding="utf-8")
            before = found.number
            found = analyst.wait(before + 1, state="first", timeout_s=_WAIT_S)
            elapsed_s = time.monotonic() - begun
            found = analyst.wait(found.number, timeout_s=_WAIT_S)
            assert found.costs is not None
            steps.append(found.costs.step_ns / 1e9)
            beyond.append(elapsed_s - 5 * steps[-1])
    detail = (
        f"median of {saves} saves, {modules} modules; a step takes {1e3 * median(steps):.1f} ms; "
        f"maximum {max(beyond):.2f} s; the watcher polls every 0.05 s"
    )
    return at_most(_SAVE, median(beyond), 1.5, "s", n=saves, detail=detail)


def _large(options: BenchOptions, server: ForkServer | None) -> Iterator[Bar]:
    """Replace the recording of a session by one of 200,000 tasks."""
    options.progress("recording a step")
    with _watching(_MODEL, server, 3) as (analyst, _):
        found = analyst.wait(analyst.analyse(), timeout_s=_WAIT_S)
        assert found.graph is not None
        assert found.document is not None
        recorded = load(found.graph)
        options.progress("making it large")
        graph = repeated(recorded, -(-_TASKS // len(recorded)))
        save(graph, found.graph)
        detail = f"a step of {len(recorded)} tasks, repeated: {len(graph)}"
        analyst.ask("slipstream.live.work:forget")
        analyst.ask(
            "slipstream.live.work:draw", path=str(found.graph), folder=str(found.document),
            techniques=None, store=None,
        )  # fmt: skip
        if options.wants(_TOGGLE):
            yield _toggle(options, analyst, detail)
        if options.wants(_SLOWEST):
            yield _slowest(options, analyst, detail)
        if not (options.wants(_PAINT) or options.wants(_FRAME)):
            return
        if (reason := missing()) is not None:
            for row in _ROWS[1:3]:
                yield not_judged(*row, reason)
            return
        with serving(analyst, 0) as live, browser() as page:
            yield from _feel(options, live, page, detail)


def _toggle(options: BenchOptions, analyst: Analyst, detail: str) -> Bar:
    name = "accumulation:4"
    count = 15 if options.full else 7
    (first, _), *later = (_timed(analyst, name)[:2] for _ in range(count))
    wall, cpu = zip(*later, strict=True)
    note = (
        f"{name}; {median(cpu):.0f} ms of CPU time, minimum wall {min(wall):.0f} ms, maximum "
        f"{max(wall):.0f} ms; the first toggle, which loads the graph, {first:.0f} ms"
    )
    return at_most(_TOGGLE, median(wall), 100, "ms", n=len(wall), detail=f"{note}; {detail}")


def _slowest(options: BenchOptions, analyst: Analyst, detail: str) -> Bar:
    """Toggle every technique that applies, and a combination, with its durations cached."""
    if not options.full:
        return not_judged(_SLOWEST, "ms", "<= 100", "some take a minute; needs --full")
    first, again = {}, {}
    for name in [*map(str, single_techniques()), "accumulation:4+fused_optimizer"]:
        options.progress(f"{_SLOWEST}: {name}")
        if analyst.simulate(name).get("reason") is None:
            taken = sorted(_timed(analyst, name)[:2] for _ in range(_SWITCHES))
            again[name] = taken[_SWITCHES // 2]
    # Discard what a technique caches of a recording, but not its durations.
    for name in again:
        analyst.ask("slipstream.live.work:forget")
        analyst.simulate("accumulation:2")
        first[name] = _timed(analyst, name)[0]
    times = ", ".join(
        f"{name} {wall:.0f} ms ({cpu:.0f} of CPU time; first time {first[name]:.0f})"
        for name, (wall, cpu) in again.items()
    )
    slowest = max(wall for wall, _ in again.values())
    detail = f"switched again, median of {_SWITCHES}: {times}; {detail}"
    return at_most(_SLOWEST, slowest, 100, "ms", n=len(again), detail=detail)


def _timed(analyst: Analyst, name: str) -> tuple[float, float, dict[str, Any]]:
    """Toggle a technique; return milliseconds until the answer, those of CPU time, and the
    answer."""
    before, begun = analyst.ask("time:process_time"), time.perf_counter()
    answer = analyst.simulate(name)
    wall = time.perf_counter() - begun
    return 1e3 * wall, 1e3 * (analyst.ask("time:process_time") - before), answer


_STANDS = "return !!document.querySelector('.lanes canvas')"


def _feel(options: BenchOptions, live: Live, page: Browser, detail: str) -> Iterator[Bar]:
    size = {"width": 1920, "height": 1080, "deviceScaleFactor": 1, "mobile": False}
    page.command("Emulation.setDeviceMetricsOverride", **size)
    page.driver.get(live.address)
    if options.wants(_PAINT):
        loads = 15 if options.full else 5
        seconds = []
        for _ in range(loads):
            options.progress(_PAINT)
            page.driver.get("about:blank")
            begun = time.perf_counter()
            page.driver.get(f"http://127.0.0.1:{live.port}/#timeline")
            while not page.run(_STANDS):
                time.sleep(0.005)
            seconds.append(time.perf_counter() - begun)
        note = f"median of {loads} loads, until the timeline is drawn; maximum {max(seconds):.2f} s"
        yield at_most(_PAINT, median(seconds), 1.0, "s", n=loads, detail=f"{note}; {detail}")
    if options.wants(_FRAME):
        options.progress(_FRAME)
        page.driver.get(f"http://127.0.0.1:{live.port}/#timeline")
        while not page.run(_STANDS):
            time.sleep(0.01)
        yield frames_row(_FRAME, page, 1200 if options.full else 360)


def _growth(options: BenchOptions, server: ForkServer | None) -> Bar:
    """Measure the private memory of this process, which serves, over saves of new texts."""
    import psutil

    saves = 200 if options.full else 40
    process = psutil.Process()
    with _watching(_TINY, server, 1) as (analyst, path), serving(analyst, 0):
        sizes: list[int] = []
        for number in range(saves):
            note = f"; grown {sizes[-1] / sizes[0] - 1:+.1%} so far" if sizes else ""
            options.progress(f"re-analysis {number + 1} of {saves}{note}")
            path.write_text(_TINY.replace("lr=0.01", f"lr=0.01{number}"), encoding="utf-8")
            analyst.wait(analyst.analyse(), timeout_s=_WAIT_S)
            if number >= _SETTLED - 1:
                gc.collect()
                sizes.append(process.memory_info().rss)
    grown = sizes[-1] / sizes[0] - 1
    detail = (
        f"resident {sizes[0] / 2**20:.1f} MiB after {_SETTLED} analyses, "
        f"{sizes[-1] / 2**20:.1f} MiB after {saves}"
    )
    return at_most(_GROWTH, grown, 0.05, "share", n=saves, detail=detail)
