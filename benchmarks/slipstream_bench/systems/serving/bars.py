"""``slipstream bench serving``: validity of measurements under load, and their cost.

The queue is compared with theory, the verdicts with LoadGen's, the harness with plain LoadGen, the
peak search with LoadGen's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import queue
import random
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.child import Child
from slipstream.errors import SlipstreamError
from slipstream.mlperf.serving import (
    SCENARIOS,
    LoadTestConfig,
    Place,
    ServiceCurve,
    Session,
    Test,
    benchmark,
    check,
    find_peak,
    peak,
    run_scenario,
    simulate,
)
from slipstream.mlperf.serving import statistics as stopping
from slipstream.mlperf.serving.inside import under_load
from slipstream.mlperf.serving.library import Library
from slipstream.mlperf.serving.logs import DetailLog
from slipstream.mlperf.serving.rules import QUERY_BYTES
from slipstream.mlperf.serving.system import System, Watch
from slipstream.runtimes import BatchPolicy, serving
from slipstream.runtimes import load as load_model
from slipstream.runtimes.python import CallableRuntime
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most
from slipstream_bench.systems.serving.answering import rows, timed

Times = tuple[float, float]

_HERE = Path(__file__).parent / "answering.py"
_ROWS, _DIGITS = f"{_HERE}:rows", f"{_HERE}:digits"
_RUNTIMES = ("torch", "onnx", "litert", "callable", "http")
_SERVICE_NS = 5e6
_BOUND_NS = 50e6
_RAW_BYTES = 16


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer loads, systems and cases; rows of long runs are recorded."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _verdicts(options)
        yield from _costs(options, Path(folder))
        yield from _queue(options, Path(folder))
        yield from _valid(options, Path(folder))
        yield from _random_systems(options)
        yield from _peak(options)
        yield from _predicted(options)
        yield from _growth(options)
        yield from _official(options, Path(folder))


# Verdicts.


def _verdicts(options: BenchOptions) -> Iterator[Bar]:
    """Compare how many of the slowest queries are discarded, and whether enough remain.

    LoadGen runs once per process at a time, and mostly sleeps in a short run, so processes share
    the cases.
    """
    bar = "early-stopping verdicts equal LoadGen's"
    if not options.wants(bar, 20):
        return
    options.progress(bar)
    count, processes = (10_000, 8) if options.full else (60, 2)
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(contextlib.closing(Child(f"cases of seed {seed}")))
            for seed in range(processes)
        ]
        for seed, child in enumerate(children):
            child.start_call(f"{__name__}:differing", seed=seed, count=count // processes)
        wrong = [case for child in children for case in child.finish_call()]
    equal = count - len(wrong)
    detail = "random numbers of queries and percentiles, each a run of LoadGen"
    yield Bar(
        bar, equal, f"of {count}", f"= {count}", not wrong, count,
        f"{detail}; differing: {wrong[:3]}" if wrong else detail,
    )  # fmt: skip


def differing(seed: int, count: int) -> list[tuple[int, float, int | None, int | None]]:
    """Return those of `count` random cases in which LoadGen's verdict differs from ours: queries,
    percentile, and how many queries we and LoadGen discard."""
    chance, wrong = random.Random(seed), []
    library = Library([np.zeros((16, 1), np.float32)])
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            queries = round(10 ** chance.uniform(0.5, 3.7))
            percentile = chance.choice((0.5, 0.9, 0.95, 0.97, 0.99))
            log = under_load(
                _raw, library, Test(
                    "single-stream", min_duration_s=0.0, min_queries=queries, max_queries=queries,
                    percentile=percentile, expected_ns=1e6,
                ), Path(folder),
            )  # fmt: skip
            queries = int(log.get("result_query_count"))
            ours = stopping.discarded(queries, percentile)
            # LoadGen reports the number of discarded queries in a sentence only.
            words = str(log.get("early_stopping_result"))
            theirs = (
                int(words.split("Would discard ")[1].split()[0]) if "discard" in words else None
            )
            if ours != theirs or (ours is None) is bool(log.get("early_stopping_met")):
                wrong.append((queries, percentile, ours, theirs))
    return wrong


def _raw(ids: Sequence[int], indices: Sequence[int]) -> None:
    """Answer every query immediately, with nothing around LoadGen."""
    import mlperf_loadgen

    mlperf_loadgen.QuerySamplesComplete(
        [mlperf_loadgen.QuerySampleResponse(query, _ADDRESS, _RAW_BYTES) for query in ids]
    )


_ANSWER = np.zeros(_RAW_BYTES, np.uint8)
_ADDRESS = _ANSWER.__array_interface__["data"][0]


# Cost of the harness.


def _costs(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    rounds = 12 if options.full else 4
    library = Library([np.zeros((1024, 4), np.float32)])
    single = Test("single-stream", min_duration_s=0.3, expected_ns=2000.0, percentile=0.9)
    bar = "harness over raw LoadGen, single-stream, a query"
    if options.wants(bar, 10):
        options.progress(bar)
        pairs = [
            (_p50(under_load(_raw, library, single, folder)), _p50(_ours(single, library, folder)))
            for _ in range(rounds)
        ]
        added = statistics.median(ours - raw for raw, ours in pairs)
        detail = f"p50 {statistics.median(raw for raw, _ in pairs):.0f} ns raw, {rounds} pairs"
        yield at_most(bar, added / 1e3, 2.0, "us", n=rounds, detail=detail)
        whole = statistics.median(ours for _, ours in pairs)
        yield at_most("single-stream p50 of no work", whole / 1e3, 3.0, "us", n=rounds)
    for name, target, rate in (("server", 150e3, 155e3), ("offline", 1e6, 1.5e6)):
        bar = f"{name}, no work, a second"
        if not options.wants(bar, 8):
            continue
        options.progress(bar)
        test = Test(name, min_duration_s=0.4, rate=rate, bound_ns=1e9)
        key = (
            "result_completed_samples_per_sec" if name == "server" else "result_samples_per_second"
        )
        raw, ours = [], []
        for _ in range(rounds):
            with _raw_thread() as issue:
                raw.append(float(under_load(issue, library, test, folder).get(key)))
            ours.append(float(_ours(test, library, folder).get(key)))
        detail = f"raw LoadGen with a Python thread, alternating: {statistics.median(raw):,.0f}"
        yield at_least(bar, statistics.median(ours), target, "/s", n=rounds, detail=detail)


def _p50(log: DetailLog) -> float:
    return log.latencies_ns()["p50"]


@contextmanager
def _raw_thread() -> Iterator[Callable[[Sequence[int], Sequence[int]], None]]:
    waiting: queue.SimpleQueue[Sequence[int] | None] = queue.SimpleQueue()

    def work() -> None:
        while (ids := waiting.get()) is not None:
            _raw(ids, ids)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda ids, indices: waiting.put(ids)
    finally:
        waiting.put(None)
        thread.join()


def _ours(test: Test, library: Library, folder: Path) -> DetailLog:
    """Run a test through our harness, with a model that returns a constant."""
    ready = np.zeros((512, 4), np.int32)
    model = CallableRuntime("none", lambda x: ready[: len(x)])
    system = System(
        model, library, Watch(60.0), scenario=test.scenario, policy=BatchPolicy(512), classes=False
    )
    try:
        return under_load(system.issue, library, test, folder)
    finally:
        system.close()


# The queue.


@contextmanager
def _timed(service_ns: float, **named: Any) -> Iterator[Session]:
    with _service(service_ns), Session(f"{_HERE}:timed", _ROWS, **named) as session:
        yield session


@contextmanager
def _service(service_ns: float) -> Iterator[None]:
    """Make `timed` take `service_ns`, here and in children that start meanwhile."""
    os.environ["SERVICE_US"] = str(service_ns / 1e3)
    try:
        yield
    finally:
        del os.environ["SERVICE_US"]


def _queue(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    """Compare one server with constant service time with M/D/1.

    A run of a minute at load 0.9 differs from the formula by more than the target by chance,
    depending on the drawn arrivals. So the simulated queue is compared with the formula; LoadGen's
    measurement of our harness with the queue of its own arrivals, for the measured service times
    and for exact ones, which is the formula's case with the same arrivals.
    """
    loads = (0.3, 0.5, 0.7, 0.8, 0.9) if options.full else (0.5, 0.8)
    seconds = 60.0 if options.full else 8.0
    kinds: dict[str, tuple[float, Callable[[float], tuple[Times, Times]]]] = {
        "simulated queue off M/D/1": (30.0, lambda load: (_simulated(load), _formula(load))),
        "harness off the queue of its arrivals": (
            len(loads) * seconds, lambda load: _harness_and_queues(folder, seconds, load)[:2],
        ),
        "harness off the same with exact service": (
            len(loads) * seconds, lambda load: _harness_and_queues(folder, seconds, load)[::2],
        ),
    }  # fmt: skip
    for kind, (takes_s, pair) in kinds.items():
        limits = {f"{kind}, {what}": limit for what, limit in (("mean", 5.0), ("p99", 10.0))}
        rows = {bar: limit for bar, limit in limits.items() if options.wants(bar, takes_s)}
        if not rows:
            continue
        off: dict[str, list[float]] = {bar: [] for bar in limits}
        for load in loads:
            options.progress(f"{kind} at load {load:g}")
            ours, expected = pair(load)
            for bar, value, reference in zip(limits, ours, expected, strict=True):
                off[bar].append(100 * abs(value / reference - 1))
        for bar, limit in rows.items():
            shown = ", ".join(f"{error:.1f}" for error in off[bar])
            detail = f"{shown} % at loads {', '.join(f'{load:g}' for load in loads)}"
            yield at_most(bar, max(off[bar]), limit, "%", n=len(loads), detail=detail)


# So long that the tenths of a millisecond that threads add to a query do not matter even at a load
# of 0.9, where 20 ms would make the mean 9 % longer.
_QUEUED_NS = 100e6


def _simulated(load: float) -> Times:
    """Return mean and p99 of 400,000 simulated queries."""
    rate = load * 1e9 / _QUEUED_NS
    queue = simulate(ServiceCurve.of({1: _QUEUED_NS}), rate, BatchPolicy(1), queries=400_000)
    return queue.mean_ns, queue.percentile_ns(0.99)


def _formula(load: float) -> Times:
    """Return mean and p99 of M/D/1."""
    mean_ns = _QUEUED_NS * (1 + load / (2 * (1 - load)))
    # From below, since far beyond the result the terms of the series no longer cancel.
    high = 1.0
    while _waits_at_most(load, high) < 0.99:
        high += 1.0
    low = high - 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _waits_at_most(load, middle) < 0.99 else (low, middle)
    return mean_ns, _QUEUED_NS * (1 + high)


def _waits_at_most(load: float, times: float) -> float:
    """Return the share of M/D/1 queries that wait at most `times` service times (Erlang, 1909)."""
    terms = (
        (-load * (times - k)) ** k / math.factorial(k) * math.exp(load * (times - k))
        for k in range(int(times) + 1)
    )
    return (1 - load) * math.fsum(terms)


@functools.cache
def _harness_and_queues(folder: Path, seconds: float, load: float) -> tuple[Times, Times, Times]:
    """Return mean and p99 of LoadGen's measurement, and of one server's queue of its arrivals.

    The queue has the measured service times (other programs slow a call in both), and the exact
    ones.
    """
    arrived: list[int] = []
    service_ns: list[int] = []

    def answer(x: NDArray[Any]) -> NDArray[np.float64]:
        began = time.perf_counter_ns()
        answers = timed(x)
        service_ns.append(time.perf_counter_ns() - began)
        return answers

    x, _ = rows()
    model, policy = CallableRuntime("timed", answer), BatchPolicy(1)
    test = Test("server", min_duration_s=seconds, rate=load * 1e9 / _QUEUED_NS, bound_ns=1e10)
    library = Library([x])
    with _service(_QUEUED_NS):
        system = System(
            model, library, Watch(60.0), scenario="server", policy=policy, classes=False
        )

        def issue(ids: Sequence[int], indices: Sequence[int]) -> None:
            arrived.extend([time.perf_counter_ns()] * len(ids))
            system.issue(ids, indices)

        try:
            found = under_load(issue, library, test, folder).latencies_ns()
        finally:
            system.close()
    exact_ns = [round(_QUEUED_NS)] * len(arrived)
    return (found["mean"], found["p99"]), _in_turn(arrived, service_ns), _in_turn(arrived, exact_ns)


def _in_turn(arrived: Sequence[int], service_ns: Sequence[int]) -> Times:
    """Return mean and p99 from arrival to answer, one query after another."""
    done, latencies = 0, []
    for arrival, service in zip(arrived, service_ns, strict=True):
        done = max(done, arrival) + service
        latencies.append(done - arrival)
    return float(np.mean(latencies)), float(np.quantile(latencies, 0.99))


# Valid runs.


def _valid(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    bar = "scenarios x runtimes, short, valid"
    if not options.wants(bar, 60):
        return
    config, good, seconds, lacking = LoadTestConfig(seconds=0.5), 0, time.monotonic(), []
    for kind in _RUNTIMES:
        options.progress(f"all scenarios on {kind}")
        try:
            with _on(kind, folder) as session:
                for scenario in SCENARIOS.values():
                    run = run_scenario(session, scenario, config)
                    good += run.valid
                    if not run.valid:
                        lacking.append(f"{kind} {scenario.name}: {run.reasons}")
        except SlipstreamError as error:
            lacking.append(f"{kind}: {error.what}")
    elapsed_s, every = time.monotonic() - seconds, len(_RUNTIMES) * len(SCENARIOS)
    detail = f"{elapsed_s:.0f} s in all, at most 90 allowed" + "".join(f"; {x}" for x in lacking)
    yield Bar(
        bar,
        good,
        f"of {every}",
        f"= {every} in 90 s",
        good == every and elapsed_s <= 90,
        every,
        detail,
    )


@contextmanager
def _on(kind: str, folder: Path) -> Iterator[Session]:
    if kind == "callable":
        with Session(f"{_HERE}:scores", _ROWS) as session:
            yield session
    elif kind == "litert":
        from slipstream import data

        path = data.get("mlperf_tiny").paths["ad01_int8"]
        with Session(str(path), f"{_HERE}:anomalies") as session:
            yield session
    elif kind == "http":
        with (
            load_model(str(_exported(folder))) as model,
            serving(model, port=0) as server,
            Session(server.address, _DIGITS) as session,
        ):
            yield session
    else:
        with Session(_source(kind, folder), _DIGITS) as session:
            yield session


def _source(kind: str, folder: Path) -> str:
    return (
        str(_exported(folder))
        if kind == "onnx"
        else f"{Path(__file__).parent}/torch_digits.py:make"
    )


def _exported(folder: Path) -> Path:
    import warnings

    import torch

    from slipstream_bench.systems.serving.torch_digits import make

    path = folder / "digits.onnx"
    if not path.exists():
        model, x = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model, (x,), str(path), input_names=["x"], output_names=["y"],
                dynamic_axes={"x": {0: "n"}, "y": {0: "n"}}, dynamo=False,
            )  # fmt: skip
    return path


def _random_systems(options: BenchOptions) -> Iterator[Bar]:
    """Test systems with latencies over four decades, of unknown speed to the harness."""
    bar = "random systems valid without hints"
    count = 100 if options.full else 8
    if not options.wants(bar, 6.0 * count):
        return
    chance, good, bad = random.Random(7), 0, []
    for number in range(count):
        service = 10 ** chance.uniform(np.log10(20e3), np.log10(200e6))
        scenario = SCENARIOS[chance.choice(list(SCENARIOS))]
        options.progress(f"{bar}: {number + 1} of {count}")
        with _timed(service) as session:
            run = run_scenario(session, scenario, LoadTestConfig(seconds=1.0))
        good += run.valid
        if not run.valid:
            bad.append(f"{scenario.name} of {service / 1e6:.3g} ms: {'; '.join(run.reasons)}")
    yield Bar(
        bar, good, f"of {count}", f"= {count}", good == count, count,
        "; ".join(["20 us to 200 ms, a second each, three reruns at most", *bad[:4]]),
    )  # fmt: skip


# Peak and predictions.


def _peak(options: BenchOptions) -> Iterator[Bar]:
    near, time_bar = "peak against the known capacity", "peak search's time over LoadGen's own"
    if not (options.wants(near, 90) or options.wants(time_bar, 90)):
        return
    options.progress("peak search")
    seconds = 20.0 if options.full else 3.0
    with _timed(_SERVICE_NS) as session:
        # The capacity as served, since threads add to the time of each query.
        true = peak(session.served(), _BOUND_NS, 0.99)
        began = time.monotonic()
        found = find_peak(session, LoadTestConfig(seconds=seconds, bound_ns=_BOUND_NS))
        ours = time.monotonic() - began
        began = time.monotonic()
        theirs = session.run(
            Test("server", "peak", min_duration_s=seconds, min_queries=662, rate=0.25 * true,
                 bound_ns=_BOUND_NS)
        )  # fmt: skip
        their_s = time.monotonic() - began
    detail = f"{found.rate:.1f}/s found, {true:.1f}/s by theory, LoadGen {theirs.value or 0:.1f}/s"
    yield at_most(near, 100 * abs(found.rate / true - 1), 3.0, "%", detail=detail)
    yield at_most(
        time_bar, ours / their_s, 1 / 3, "x", n=len(found.runs),
        detail=f"{ours:.1f} s and {their_s:.1f} s, runs of {seconds:g} s; bracket of 3 %",
    )  # fmt: skip


def _predicted(options: BenchOptions) -> Iterator[Bar]:
    """Compare p99 under load and the peak within a bound, predicted by the queue from service times
    alone, with measurements of real models."""
    bars = {
        what: f"predicted {what}, median error" for what in ("p99 under load", "peak within 15 ms")
    }
    selected = [what for what, bar in bars.items() if options.wants(bar, 25)]
    if not selected:
        return
    rounds = 5 if options.full else 1
    ratios: dict[str, dict[str, list[float]]] = {what: {} for what in selected}
    for kind, policy in itertools.product(("onnx", "torch"), _BATCHERS):
        title = f"{kind}, {policy}"
        for number in range(rounds):
            options.progress(f"predicted under load: {title}, {number + 1} of {rounds}")
            # A separate process each, timed just before the load test.
            with (
                tempfile.TemporaryDirectory() as folder,
                Session(_source(kind, Path(folder)), _DIGITS, policy=policy) as session,
            ):
                for what, of_one in ratios.items():
                    predicted, true = _FORESEEN[what](session)
                    of_one.setdefault(title, []).append(predicted / true)
    for what, of_one in ratios.items():
        errors = {name: 100 * abs(statistics.median(each) - 1) for name, each in of_one.items()}
        middle, worst = statistics.median(errors.values()), max(errors.values())
        shown = "; ".join(
            f"{name} {np.array2string(np.array(each), precision=2)}"
            for name, each in of_one.items()
        )
        yield Bar(
            bars[what], middle, "%", "<= 10 (worst <= 25)", middle <= 10 and worst <= 25,
            len(errors), f"predicted over measured: {shown}", 10.0, data={"ratios": of_one},
        )  # fmt: skip


_BATCHERS = (BatchPolicy(1), BatchPolicy(8), BatchPolicy(8, 2_000_000))


def _p99(session: Session) -> tuple[float, float]:
    """Return predicted and measured p99 at the rate that `run_scenario` chooses."""
    config = LoadTestConfig(seconds=4.0, bound_ns=1e9)
    run = run_scenario(session, SCENARIOS["server"], config)
    # NaN if other programs disturbed the calibration.
    predicted = math.nan if run.predicted is None else run.predicted.percentile_ns(0.99)
    return predicted, run.latencies_ns["p99"]


def _highest(session: Session) -> tuple[float, float]:
    """Return the peak predicted before any run, and the one found by search."""
    peaks = find_peak(session, LoadTestConfig(seconds=3.0, bound_ns=15e6))
    return peaks.predicted, peaks.rate


_FORESEEN = {"p99 under load": _p99, "peak within 15 ms": _highest}


# Growth, and runs of the official length.

# LoadGen creates every query in advance: ten minutes of a model of microseconds are a billion.
_OFFICIAL_NS = 2e6


def _growth(options: BenchOptions) -> Iterator[Bar]:
    """Measure time and memory per query from a thousand queries to a million."""
    bars = {
        "time a query, a million over ten thousand": 1.2,
        "memory of queries over what is stated": 1.0,
    }
    selected = [bar for bar in bars if options.wants(bar, 20)]
    if not selected:
        return
    sizes = (1_000, 10_000, 100_000, 1_000_000)
    each_ns, grown = {}, {}
    for size in sizes:
        options.progress(f"{size:,} queries")
        with contextlib.closing(Child(f"{size:,} queries")) as child:
            each_ns[size], grown[size] = child.call(f"{__name__}:growing", queries=size)
    stated = QUERY_BYTES * sizes[-1]
    values = (each_ns[1_000_000] / each_ns[10_000], grown[1_000_000] / stated)
    times = ", ".join(f"{each_ns[size] / 1e3:.2f} us of {size:,}" for size in sizes)
    memory = ", ".join(f"{grown[size] / 1e6:.0f} MB of {size:,}" for size in sizes)
    memory += f"; {stated / 1e6:.0f} MB stated for the last"
    for (bar, limit), value, detail in zip(bars.items(), values, (times, memory), strict=True):
        if bar in selected:
            yield at_most(bar, value, limit, "x", detail=detail)


def growing(queries: int) -> tuple[float, float]:
    """Return nanoseconds per query of a single-stream run without work, and the growth of the
    process's peak memory in bytes."""
    library = Library([np.zeros((1024, 4), np.float32)])
    test = Test(
        "single-stream", min_duration_s=0.0, min_queries=queries, max_queries=queries,
        expected_ns=1e6,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        _ours(replace(test, min_queries=100, max_queries=100), library, Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        log = _ours(test, library, Path(folder))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return log.latencies_ns()["mean"], grown * 1024.0


def _official(options: BenchOptions, folder: Path) -> Iterator[Bar]:
    """Run ten minutes per scenario, as the rules require, and check the submission tree."""
    bar = "ten minutes a scenario, the tree's defects"
    if not options.wants(bar, 3600):
        return
    options.progress(f"{bar}: an hour")
    chosen = [SCENARIOS["single-stream"], SCENARIOS["offline"]]
    audits = ("TEST01", "TEST04")
    with _timed(_OFFICIAL_NS) as session:
        served = benchmark(
            session, chosen, LoadTestConfig(seconds=None), place=Place.of(folder / "tree", "timed"),
            audits=audits, gate=0.5,
        )  # fmt: skip
    defects = check(
        folder / "tree", required=[scenario.title for scenario in chosen], audits=audits
    ).defects
    queries = ", ".join(f"{row.run.test.scenario} {row.run.queries:,}" for row in served.rows)
    detail = f"queries: {queries}; " + "; ".join(
        f"{defect.kind}: {defect.what}" for defect in defects[:3]
    )
    yield Bar(bar, len(defects), "", "= 0", not defects, len(chosen), detail.removesuffix("; "))
