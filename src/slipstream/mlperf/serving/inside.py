"""What runs in the child: load the model and its samples, time it, let LoadGen drive it."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import MissingExtraError
from slipstream.measure import CallableArm
from slipstream.measure.arms import MINIMUM_SAMPLE_NS
from slipstream.mlperf.serving import logs
from slipstream.mlperf.serving.library import Library, open_library
from slipstream.mlperf.serving.rules import SCENARIOS, Test
from slipstream.mlperf.serving.system import OwnQueue, System, Watch
from slipstream.runtimes import BatchPolicy, Runtime, load
from slipstream.runtimes.python import CallableRuntime, function_at

# A thread that waits for the interpreter gets it after this long; Python's own 5 ms are longer
# than many a model takes, and LoadGen's thread must get in between to issue in time.
_SWITCH_S = 5e-4
_FIRST_ROUNDS = 3
_COALESCED_FROM = 20_000

_model: Runtime | None = None
_library: Library | None = None
_own_queue: Any = None
_patience_s = 4.0


def open_model(
    source: str,
    data: str | None,
    kind: str | None,
    threads: int,
    arguments: dict[str, Any],
    techniques: Sequence[str],
    value_range: Sequence[float] | None,
    limit: int | None,
    patience_s: float,
) -> dict[str, Any]:
    """Load model and samples; what they are."""
    global _model, _library, _own_queue, _patience_s
    need_loadgen()
    from slipstream import technique

    sys.setswitchinterval(_SWITCH_S)
    _patience_s = patience_s
    function = function_at(source) if ".py:" in source else None
    if function is not None and "answer" in inspect.signature(function).parameters:
        _own_queue, _model = function, CallableRuntime(Path(source).name, function)
    else:
        parts = [one for text in techniques for one in technique.parse(text)]
        _model = load(
            source, kind=kind, threads=threads, arguments=arguments, techniques=parts,  # type: ignore[arg-type]
            timeout_s=patience_s,
        )  # fmt: skip
    limits = None if value_range is None else (value_range[0], value_range[1])
    _library = open_library(data, _model, limits, limit)
    return {
        "model": _model.name,
        "kind": "own queue" if _own_queue else _model.kind,
        "inputs": [str(one) for one in _model.inputs],
        "outputs": [str(one) for one in _model.outputs],
        "samples": len(_library),
        "performance_samples": _library.performance_count,
        "sample_bytes": _library.sample_bytes,
        "labelled": _library.labels is not None,
        "fixed_batch": _model.fixed_batch,
        "concurrent": _model.concurrent,
    }


def service_times(
    batches: Sequence[int], budget_s: float, fresh: int | None = None
) -> dict[str, list[float]]:
    """Nanoseconds of a batch, for each size: several samples, the first calls left out.

    Args:
        fresh: how many samples may be touched; None: all of the performance set.
    """
    assert _model is not None
    assert _library is not None
    if _own_queue is not None:
        return {}
    model, library, times = _model, _library, {}
    library.load(range(library.performance_count))
    count = library.performance_count if fresh is None else fresh
    with _watched() as watch:
        current = watch.call()
        for size in batches:

            def call(size: int = size) -> None:
                # A list of its own, by which the watch tells one call from the next.
                current.indices = [n % count for n in range(size)]
                model.run(library.take(current.indices))
                current.indices = None

            try:
                times[str(size)] = _times(call, budget_s / len(batches))
            except BaseException as error:
                watch.fail(error)
    library.unload([])
    return times


def _times(call: Any, budget_s: float) -> list[float]:
    arm = CallableArm("batch", call)
    arm.open(None)
    try:
        first = min(arm.sample(1, None)["wall"] for _ in range(_FIRST_ROUNDS))
        inner = max(1, round(MINIMUM_SAMPLE_NS / 4 / first))
        until = time.monotonic() + budget_s
        times: list[float] = []
        while not times or time.monotonic() < until:
            times.append(arm.sample(inner, None)["wall"])
        return times
    finally:
        arm.close()


def served_times(
    light: float,
    loaded: float,
    seconds: float,
    batch: int,
    delay_ns: int,
    workers: int,
    folder: str,
) -> dict[str, Any]:
    """What a query takes behind LoadGen and the threads of `System`, at two rates.

    Args:
        light: queries a second that hardly ever meet.
        loaded: near what the model can do, so that threads get into each other's way as they will.

    Returns:
        ``batches``, (size, nanoseconds) at the loaded rate; ``delay_ns``, from arrival to answer at
        the light rate, less what the worker took.
    """
    assert _model is not None
    assert _library is not None
    runs: dict[float, tuple[list[tuple[int, int]], float]] = {}
    # What a policy holds back is simulated: at the light rate nothing is to wait.
    for rate, policy in ((light, BatchPolicy(batch)), (loaded, BatchPolicy(batch, delay_ns))):
        taken: list[tuple[int, int]] = []
        test = Test("server", rate=rate, min_duration_s=seconds, min_queries=1, bound_ns=1e12)
        with _watched() as watch:
            system = System(
                _model, _library, watch, scenario="server", policy=policy, workers=workers,
                classes=_library.labels is not None, taken=taken,
            )  # fmt: skip
            try:
                log = under_load(system.issue, _library, test, Path(folder))
            finally:
                system.close()
        runs[rate] = taken, log.latencies_ns()["p50"]
    taken, latency_ns = runs[light]
    alone_ns = statistics.median(took for _, took in taken)
    return {"batches": runs[loaded][0], "delay_ns": max(0.0, latency_ns - alone_ns)}


def run(
    test: dict[str, Any],
    folder: str,
    batch: int,
    delay_ns: int,
    workers: int,
    audit: str | None = None,
) -> dict[str, Any]:
    """One run of LoadGen, its logs in `folder`; what is in them."""
    assert _model is not None
    assert _library is not None
    model, library = _model, _library
    asked = Test.from_json(test)
    policy = BatchPolicy(batch, delay_ns)
    library.shuffle = asked.shuffle
    with _watched() as watch:
        classes = library.labels is not None
        system: System | OwnQueue
        if _own_queue is not None:
            system = OwnQueue(_own_queue, library, watch, classes)
        else:
            system = System(
                model, library, watch, scenario=asked.scenario, policy=policy, workers=workers,
                classes=classes,
            )  # fmt: skip
        detail = under_load(system.issue, library, asked, Path(folder), audit or "")
        system.close()
        refused = watch.refused
    answers = logs.read_answers(Path(folder) / logs.ACCURACY)
    named = {index: logs.as_class(data) for index, data in answers}
    known = {index: one for index, one in named.items() if one is not None}
    return {
        "values": {key: detail.values[key] for key in detail.values if _told(key)},
        "errors": list(detail.errors),
        "refused": refused,
        "answers": len(named),
        "accuracy": library.accuracy(known) if asked.mode == "accuracy" and known else None,
    }


def under_load(
    issue: Callable[[Sequence[int], Sequence[int]], None],
    library: Library,
    test: Test,
    folder: Path,
    audit: str = "",
) -> logs.DetailLog:
    """Let LoadGen drive `issue` in this process until its run is over; its log, left in `folder`.

    Args:
        issue: takes the ids of queries and the samples' indices, and sees to their answers.
        audit: a file of settings that take the place of the test's.
    """
    import mlperf_loadgen as loadgen

    folder.mkdir(parents=True, exist_ok=True)
    output = loadgen.LogOutputSettings()
    output.outdir = str(folder)
    logging = loadgen.LogSettings()
    logging.log_output, logging.enable_trace = output, False
    # Nothing more comes: what waits is answered anyhow.
    sut = loadgen.ConstructFastSUT(issue, lambda: None)
    qsl = loadgen.ConstructQSL(
        len(library), library.performance_count, library.load, library.unload
    )
    try:
        loadgen.StartTestWithLogSettings(sut, qsl, _settings(test), logging, audit)
    finally:
        loadgen.DestroyQSL(qsl)
        loadgen.DestroyFastSUT(sut)
    return logs.read_detail(folder / logs.DETAIL)


def sample(**asked: Any) -> dict[str, float]:
    """One run of LoadGen as a sample of a comparison: nanoseconds of a query, or of a sample."""
    told = run(**asked)["values"]
    scenario = asked["test"]["scenario"]
    if scenario == "offline":
        return {"wall": 1e9 / told["result_samples_per_second"]}
    key = "mean" if scenario == "server" else "50.00_percentile"
    return {"wall": float(told[f"result_{key}_latency_ns"])}


def _told(key: str) -> bool:
    return key.startswith(("result_", "early_stopping", "effective_", "loadgen_version"))


def _settings(test: Test) -> Any:
    import mlperf_loadgen as loadgen

    rules, settings = SCENARIOS[test.scenario], loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, rules.title)
    settings.mode = {
        "performance": loadgen.TestMode.PerformanceOnly,
        "accuracy": loadgen.TestMode.AccuracyOnly,
        "peak": loadgen.TestMode.FindPeakPerformance,
    }[test.mode]
    settings.min_duration_ms = round(1e3 * test.min_duration_s)
    settings.min_query_count = test.min_queries
    settings.max_query_count = test.max_queries
    settings.qsl_rng_seed, settings.sample_index_rng_seed, settings.schedule_rng_seed = test.seeds
    settings.single_stream_expected_latency_ns = round(test.expected_ns)
    settings.single_stream_target_latency_percentile = test.percentile
    settings.multi_stream_expected_latency_ns = round(test.expected_ns)
    settings.multi_stream_target_latency_percentile = test.percentile
    settings.multi_stream_samples_per_query = test.samples_per_query
    settings.server_target_qps = settings.offline_expected_qps = test.rate
    settings.server_target_latency_ns = round(test.bound_ns)
    # Queries that are overdue together come in one call, where one by one they come too slowly.
    settings.server_coalesce_queries = test.rate > _COALESCED_FROM
    settings.server_target_latency_percentile = test.percentile
    settings.accuracy_log_sampling_target = test.log_answers
    settings.performance_issue_same = test.issue == "same"
    settings.performance_issue_unique = test.issue == "unique"
    return settings


@contextlib.contextmanager
def _watched() -> Iterator[Watch]:
    watch = Watch(_patience_s)
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


def need_loadgen() -> None:
    """Find LoadGen, or say what to install.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import mlperf_loadgen  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "serving under MLPerf rules", "mlcommons-loadgen", "mlperf"
        ) from error
