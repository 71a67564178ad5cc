"""Sessions: a model and LoadGen in a supervised child process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from slipstream.child import Child
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.mlperf.serving.logs import DetailLog
from slipstream.mlperf.serving.queueing import Load, ServiceCurve
from slipstream.mlperf.serving.rules import NOT_A_RESULT, QUERY_BYTES, SCENARIOS, Test
from slipstream.runtimes import BatchPolicy
from slipstream.units import format_bytes

_INSIDE = "slipstream.mlperf.serving.inside"
# Importing torch and building a model send no messages.
_OPEN_S = 300.0
# The child ends itself when it has waited for `patience_s`; we do so if it cannot.
_MORE_S = 1.5
_CURVE_S = 1.0
# The overhead of server threads is measured for `_SERVED_S` at two shares of the model's capacity.
# For queries longer than `_SLOW_NS` it is below the noise.
_SERVED_S, _LIGHT, _LOADED, _SLOW_NS = 0.7, 0.05, 0.7, 30e6
_MIN_LIGHT, _RARE = 20.0, 100.0
MAX_DISTURBANCE = 2.0
"""Largest `ServiceCurve.disturbance` with which latencies are predicted."""


@dataclass(frozen=True)
class LoadTestRun:
    """The result of one LoadGen run.

    Attributes:
        valid: whether LoadGen calls the run valid, logged no errors, and no queries were refused.
        value: the scenario's metric: ns, queries/s or samples/s; for an accuracy run, the share of
            correct answers. None without a metric.
        latencies_ns: latencies of queries by name: ``p50``, ``p99``, ``mean``.
        reasons: why the run is not valid.
        attempts: number of runs, each with corrected hints.
        refused: number of queries that a server refused.
        predicted: load of a server, simulated before the run; None for other scenarios, or if other
            programs disturbed the calibration.
    """

    test: Test
    folder: Path
    valid: bool
    value: float | None
    queries: int
    latencies_ns: Mapping[str, float]
    reasons: tuple[str, ...]
    refused: int = 0
    answers: int = 0
    attempts: int = 1
    predicted: Load | None = field(default=None, repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """The run's description: without a review it is not an MLPerf result."""
        short = ", ".join(self.test.shortcomings)
        return f"{NOT_A_RESULT}: {short}" if short else f"{NOT_A_RESULT}: not reviewed"

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON."""
        return {
            "scenario": self.test.scenario, "mode": self.test.mode, "valid": self.valid,
            "metric": SCENARIOS[self.test.scenario].metric, "value": self.value,
            "percentile": self.test.percentile, "rate": self.test.rate,
            "bound_ns": self.test.bound_ns, "queries": self.queries,
            "latencies_ns": dict(self.latencies_ns), "reasons": list(self.reasons),
            "refused": self.refused, "attempts": self.attempts, "label": self.label,
            "folder": str(self.folder),
        }  # fmt: skip


class Session:
    """A model and LoadGen in a child process.

    Args:
        model: a source that `slipstream.runtimes.load` takes, or ``file.py:function`` with a
            parameter named ``answer``: a system that queues queries itself.
        data: samples, see `slipstream.mlperf.serving.library.open_library`.
        kind: kind of runtime, if `model` does not determine it.
        threads: threads per operator.
        arguments: arguments of the function that builds a workload.
        techniques: technique specs to apply to a workload.
        value_range: values to which 0 and 255 of images are mapped.
        limit: maximum number of samples.
        policy: how queries are batched.
        workers: threads that call the model; None for one, or eight for a remote server.
        patience_s: how long the model may take for a call, and a query for its answer.
        report: called with lines of progress.
    """

    def __init__(
        self,
        model: str,
        data: str | None = None,
        *,
        kind: str | None = None,
        threads: int = 1,
        arguments: Mapping[str, Any] | None = None,
        techniques: Sequence[str] = (),
        value_range: tuple[float, float] | None = None,
        limit: int | None = None,
        policy: BatchPolicy | None = None,
        workers: int | None = None,
        patience_s: float = 3.0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        if patience_s <= 0:
            raise InvalidArgumentError("patience", "it must be above zero")
        self.model = model
        # The query string may contain a server's key.
        short = model.partition("?")[0] if "://" in model else Path(model).name
        self.title = "+".join((short, *techniques))
        self.techniques = tuple(techniques)
        self.policy = policy or BatchPolicy()
        self.about: dict[str, Any] = {}
        self._workers, self._threads = workers, threads
        self._patience_s = patience_s
        self._report = report
        self._curve: ServiceCurve | None = None
        self._served: ServiceCurve | None = None
        self._child: Child | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._runs = 0
        self.open_arguments: dict[str, Any] = {
            "source": model, "data": data, "kind": kind, "threads": threads,
            "arguments": dict(arguments or {}), "techniques": list(techniques),
            "value_range": None if value_range is None else list(value_range), "limit": limit,
            "patience_s": patience_s,
        }  # fmt: skip

    def __enter__(self) -> Self:
        environment = {"OMP_NUM_THREADS": str(max(1, self._threads))}
        self._scratch = tempfile.TemporaryDirectory(prefix="slipstream-serving-")
        self._child = Child(f"the system under test ({self.title})", environment=environment)
        try:
            self._report("loading the model and its samples")
            self.about = self._call("open_model", _OPEN_S, **self.open_arguments)
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._end(at_once=kind is not None)

    def again(self) -> Session:
        """Return a session of the same system with a new process, which is not started yet."""
        opening = self.open_arguments
        limits = opening["value_range"]
        return Session(
            self.model, opening["data"], kind=opening["kind"], threads=self._threads,
            arguments=opening["arguments"], techniques=self.techniques,
            value_range=None if limits is None else (limits[0], limits[1]), limit=opening["limit"],
            policy=self.policy, workers=self._workers, patience_s=self._patience_s,
            report=self._report,
        )  # fmt: skip

    @property
    def workers(self) -> int:
        """Threads that call the model."""
        return self._workers or (8 if self.about.get("concurrent") else 1)

    @property
    def labelled(self) -> bool:
        """Whether the samples have labels."""
        return bool(self.about.get("labelled"))

    def curve(self) -> ServiceCurve:
        """Measure the time of batches by size, once per session.

        Systems that queue queries themselves have no batches; 1 ms per sample is assumed.
        """
        if self._curve is None:
            self._report("timing batches")
            sizes = [1, 8] if self.policy.maximum < 8 else [1, 8, self.policy.maximum]
            size = 2
            while size < self.policy.maximum:
                sizes.append(size)
                size *= 2
            sizes = sorted(set(sizes))
            times = self._call(
                "service_times", self._patience_s + _MORE_S, batches=sizes, budget_s=_CURVE_S
            )
            by_size = {int(size): tuple(samples) for size, samples in times.items()}
            self._curve = ServiceCurve(by_size) if by_size else ServiceCurve.of({1: 1e6})
        return self._curve

    def served(self) -> ServiceCurve:
        """Return `curve` with the overhead of LoadGen's thread and the workers, measured once."""
        if self._served is None:
            curve = self._served = self.curve()
            if self.about.get("kind") == "own queue" or curve.median_ns(1) > _SLOW_NS:
                return curve
            self._report("timing a server's threads")
            light = max(_LIGHT * 1e9 / curve.median_ns(1), _MIN_LIGHT)
            loaded = _LOADED * curve.capacity(self.policy, self.workers)
            self._served = curve.as_served(*self._served_times(light, loaded))
        return self._served

    def lightly_served(self) -> tuple[list[float], float]:
        """Serve rare queries, which hardly ever overlap.

        Returns:
            ns of each batch in its worker, and ns from arrival until a worker starts.
        """
        batches, delay_ns = self._served_times(_RARE, _RARE + 1)
        return [elapsed for _, elapsed in batches], delay_ns

    def _served_times(self, light: float, loaded: float) -> tuple[list[tuple[int, float]], float]:
        answer = self._call(
            "served_times", self._patience_s + _MORE_S, seconds=_SERVED_S, light=light,
            loaded=loaded, batch=self.policy.maximum, delay_ns=self.policy.delay_ns,
            workers=self.workers, folder=str(self.scratch("served")),
        )  # fmt: skip
        batches = [(int(size), float(batch_ns)) for size, batch_ns in answer["batches"]]
        return batches, answer["delay_ns"]

    def warm_up(self) -> None:
        """Let the model answer the first sample repeatedly, and no other."""
        self._call("service_times", self._patience_s + _MORE_S, batches=[1], budget_s=0.2, fresh=1)

    def report(self, line: str) -> None:
        """Show a line of progress."""
        self._report(line)

    def scratch(self, name: str) -> Path:
        """Return the path of a new temporary folder of this session."""
        assert self._scratch is not None
        self._runs += 1
        return Path(self._scratch.name) / f"{name}_{self._runs}"

    def run(self, test: Test, folder: Path | None = None, audit: Path | None = None) -> LoadTestRun:
        """Run LoadGen once; its logs stay in `folder`.

        Raises:
            SlipstreamError: the folder cannot be written, LoadGen's queries do not fit into memory,
                or the model failed or did not answer.
        """
        fits(test)
        folder = folder or self.scratch("run")
        writable(folder)
        self._report(f"{test.scenario}: {test.mode}")
        answer = self._call(
            "run",
            self._patience_s + _MORE_S,
            test=test.to_json(),
            folder=str(folder.resolve()),
            batch=self.policy.maximum,
            delay_ns=self.policy.delay_ns,
            workers=self.workers,
            audit=None if audit is None else str(audit),
        )
        return _run(test, folder, answer)

    def _call(self, function: str, timeout_s: float, **arguments: Any) -> Any:
        if self._child is None:
            raise SlipstreamError("the system under test is not running", remedy="use `with`")
        return self._child.call(
            f"{_INSIDE}:{function}",
            timeout_s=timeout_s,
            on_message=lambda message: self._report(str(message.get("say", ""))),
            **arguments,
        )

    def _end(self, *, at_once: bool) -> None:
        if self._child is not None:
            if at_once:
                self._child.kill()
            self._child.close()
            self._child = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def fits(test: Test) -> None:
    """Raise a `SlipstreamError` if LoadGen's queries do not fit into memory."""
    import psutil

    needed, free = QUERY_BYTES * test.queries_made, psutil.virtual_memory().available
    if test.mode == "performance" and needed > free:
        raise SlipstreamError(
            f"{test.scenario} for {test.min_duration_s:g} s needs {test.queries_made:,.0f} "
            f"queries, which LoadGen creates in advance: up to {format_bytes(needed)}, but only "
            f"{format_bytes(free)} are free",
            remedy="shorten the run (--time), or choose another --scenario",
        )


def writable(folder: Path) -> None:
    """Create `folder`, or raise a `SlipstreamError` if it cannot be written.

    LoadGen itself would end the process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SlipstreamError(
            f"the results cannot be written: {os.strerror(error.errno or 0)}",
            where=str(folder),
            remedy="choose another folder with -o",
        ) from error


_METRIC_KEYS = {
    "single-stream": "early_stopping_latency_ss",
    "multi-stream": "early_stopping_latency_ms",
    "server": "result_completed_samples_per_sec",
    "offline": "result_samples_per_second",
}


def _run(test: Test, folder: Path, answer: Mapping[str, Any]) -> LoadTestRun:
    values = answer["values"]
    log = DetailLog(values, tuple(answer["errors"]), ())
    reasons = []
    if test.mode == "accuracy":
        value, valid = answer["accuracy"], not log.errors
    else:
        value, valid = values.get(_METRIC_KEYS[test.scenario]), log.valid
        reason = values.get("result_invalid_reason")
        reasons += [reason.strip()] if isinstance(reason, str) else []
    reasons += list(log.errors)
    if answer["refused"]:
        valid = False
        reasons.append(f"{answer['refused']} queries were refused")
    return LoadTestRun(
        test, folder, valid, None if value is None else float(value),
        int(values.get("result_query_count", answer["answers"])), log.latencies_ns(),
        tuple(reasons), answer["refused"], answer["answers"], 1, None, values,
    )  # fmt: skip
