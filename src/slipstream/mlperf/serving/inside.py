"""Entry points of the child process: load the model and its samples, time it, run LoadGen."""

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
from slipstream.mlperf.serving.system import AsyncSystem, System, Watch
from slipstream.runtimes import BatchPolicy, Runtime, load
from slipstream.runtimes.python import CallableRuntime, function_at

# LoadGen's thread must get the GIL between model calls to issue queries in time; Python's default
# of 5 ms is longer than many models take.
_SWITCH_S = 5e-4
_FIRST_ROUNDS = 3
_COALESCED_FROM = 20_000

_model: Runtime | None = None
_library: Library | None = None
_async_function: Any = None
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
    """Load the model and its samples, and describe them."""
    global _model, _library, _async_function, _patience_s
    need_loadgen()
    from slipstream import technique

    sys.setswitchinterval(_SWITCH_S)
    _patience_s = patience_s
    function = function_at(source) if ".py:" in source else None
    if function is not None and "answer" in inspect.signature(function).parameters:
        _async_function, _model = function, CallableRuntime(Path(source).name, function)
    else:
        parts = [part for text in techniques for part in technique.parse(text)]
        _model = load(
            source, kind=kind, threads=threads, arguments=arguments, techniques=parts,  # type: ignore[arg-type]
            timeout_s=patience_s,
        )  # fmt: skip
    limits = None if value_range is None else (value_range[0], value_range[1])
    _library = open_library(data, _model, limits, limit)
    return {
        "model": _model.name,
        "kind": "own queue" if _async_function else _model.kind,
        "inputs": [str(spec) for spec in _model.inputs],
        "outputs": [str(spec) for spec in _model.outputs],
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
    """Measure ns per batch for each batch size, several times after warm-up.

    Args:
        fresh: number of samples to use; None for all of the performance set.
    """
    assert _model is not None
    assert _library is not None
    if _async_function is not None:
        return {}
    model, library, times = _model, _library, {}
    library.load(range(library.performance_count))
    count = library.performance_count if fresh is None else fresh
    with _watched() as watch:
        current = watch.call()
        for size in batches:

            def call(size: int = size) -> None:
                # The watch distinguishes calls by the identity of this list.
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
    """Measure the time of queries behind LoadGen and the threads of `System`, at two rates.

    Args:
        light: queries per second at which queries hardly ever overlap.
        loaded: queries per second near the model's capacity, at which threads contend.

    Returns:
        ``batches``: (size, ns) pairs at the loaded rate; ``delay_ns``: from arrival to answer at
        the light rate, less the worker's time.
    """
    assert _model is not None
    assert _library is not None
    runs: dict[float, tuple[list[tuple[int, int]], float]] = {}
    # The policy's delay is simulated elsewhere: at the light rate no query may wait.
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
    alone_ns = statistics.median(batch_ns for _, batch_ns in taken)
    return {"batches": runs[loaded][0], "delay_ns": max(0.0, latency_ns - alone_ns)}


def run(
    test: dict[str, Any],
    folder: str,
    batch: int,
    delay_ns: int,
    workers: int,
    audit: str | None = None,
) -> dict[str, Any]:
    """Run LoadGen once with its logs in `folder`, and return their contents."""
    assert _model is not None
    assert _library is not None
    model, library = _model, _library
    settings = Test.from_json(test)
    policy = BatchPolicy(batch, delay_ns)
    library.shuffle = settings.shuffle
    with _watched() as watch:
        classes = library.labels is not None
        system: System | AsyncSystem
        if _async_function is not None:
            system = AsyncSystem(_async_function, library, watch, classes)
        else:
            system = System(
                model, library, watch, scenario=settings.scenario, policy=policy, workers=workers,
                classes=classes,
            )  # fmt: skip
        detail = under_load(system.issue, library, settings, Path(folder), audit or "")
        system.close()
        refused = watch.refused
    answers = logs.read_answers(Path(folder) / logs.ACCURACY)
    classes_of = {index: logs.as_class(data) for index, data in answers}
    classified = {index: found for index, found in classes_of.items() if found is not None}
    return {
        "values": {key: detail.values[key] for key in detail.values if _is_returned(key)},
        "errors": list(detail.errors),
        "refused": refused,
        "answers": len(classes_of),
        "accuracy": library.accuracy(classified)
        if settings.mode == "accuracy" and classified
        else None,
    }


def under_load(
    issue: Callable[[Sequence[int], Sequence[int]], None],
    library: Library,
    test: Test,
    folder: Path,
    audit: str = "",
) -> logs.DetailLog:
    """Run LoadGen on `issue` in this process, and return its log, which stays in `folder`.

    Args:
        issue: takes the ids of queries and the indices of their samples, and answers them.
        audit: path of a file with settings that override the test's; empty for none.
    """
    import mlperf_loadgen as loadgen

    folder.mkdir(parents=True, exist_ok=True)
    output = loadgen.LogOutputSettings()
    output.outdir = str(folder)
    logging = loadgen.LogSettings()
    logging.log_output, logging.enable_trace = output, False
    # The flush callback does nothing: waiting queries are answered without it.
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


def sample(**arguments: Any) -> dict[str, float]:
    """Run LoadGen once as a sample of a comparison: ns per query, or per sample (offline)."""
    values = run(**arguments)["values"]
    scenario = arguments["test"]["scenario"]
    if scenario == "offline":
        return {"wall": 1e9 / values["result_samples_per_second"]}
    key = "mean" if scenario == "server" else "50.00_percentile"
    return {"wall": float(values[f"result_{key}_latency_ns"])}


def _is_returned(key: str) -> bool:
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
    # At high rates, issuing overdue queries one by one is too slow.
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
    """Raise a `MissingExtraError` if LoadGen is not installed."""
    try:
        import mlperf_loadgen  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "serving under MLPerf rules", "mlcommons-loadgen", "mlperf"
        ) from error
