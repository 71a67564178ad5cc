"""``slipstream mlperf serve``: load-test a model with MLPerf's own load generator."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options

if TYPE_CHECKING:
    from slipstream.cli._output import Report
    from slipstream.mlperf.serving import Session

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="model.onnx, model.tflite, http://127.0.0.1:PORT/?key=..., or file.py:function, which "
        "builds a workload or is called with a batch.",
    ),
]
_Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATA",
        help="A data set (slipstream data ls), file.npz with x and y, or file.py:function that "
        "returns (x, y). By default the workload's own batch.",
    ),
]
_Range = Annotated[
    str | None,
    typer.Option("--range", metavar="LOW,HIGH", help="Values that pixels 0 and 255 map to: 0,1."),
]
_Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Use only the first N samples.")
]
_Batch = Annotated[
    int, typer.Option("--batch", metavar="N", min=1, help="Maximum number of queries per batch.")
]
_MaxQueueDelay = Annotated[
    str,
    typer.Option(
        "--max-queue-delay",
        metavar="TIME",
        help="Maximum time a query waits for others to join its batch.",
    ),
]
_Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Number of threads that call the model."),
]
_Threads = Annotated[int, typer.Option("--threads", metavar="N", min=0, help="Intra-op threads.")]
_CallTimeout = Annotated[
    str,
    typer.Option(
        "--call-timeout", metavar="TIME", help="Time limit for a call of the model, or a response."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the serving commands to ``slipstream mlperf``."""
    app.command("serve")(serve)
    app.command("peak")(peak)
    app.command("check-results")(check_results)


def serve(
    model: _Model,
    data: _Data = None,
    scenario: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="all, or single-stream, multi-stream, server, offline.",
        ),
    ] = "all",
    seconds: Annotated[
        str, typer.Option("--time", metavar="TIME", help="Approximate duration of each run.")
    ] = "5s",
    official: Annotated[
        bool, typer.Option("--official", help="Durations of the rules: ten minutes per scenario.")
    ] = False,
    latency_bound: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Latency bound of the server's percentile; by default 15 ms, or ten times the "
            "latency of a single query.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Query rate of the server scenario, for example 40/s; by default 70 % of the "
            "maximum rate that the queue simulation predicts.",
        ),
    ] = None,
    batch: _Batch = 1,
    max_queue_delay: _MaxQueueDelay = "0ms",
    workers: _Workers = None,
    threads: _Threads = 1,
    technique: options.Techniques = None,
    settings: options.Set = None,
    value_range: _Range = None,
    limit: _Limit = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Baseline model to measure alternately, without the techniques of --technique.",
        ),
    ] = None,
    audit: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="TEST01 (answers under load match), TEST04 (a sample repeated is no faster), "
            "COLD (nor is one seen before), or all. Exit code 1 if an audit fails.",
        ),
    ] = None,
    gate: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Required accuracy, such as 0.75; recorded with -o."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Write results in the layout of a submission: logs, settings, audits.",
        ),
    ] = None,
    call_timeout: _CallTimeout = "3s",
    as_json: options.Json = False,
) -> None:
    """Load-test a model by MLPerf rules, with MLPerf's own load generator, LoadGen.

    Four scenarios: one query at a time (single-stream), eight samples at a time (multi-stream),
    random arrivals with a latency bound (server), and all samples simultaneously (offline). If
    samples have labels, accuracy is measured as well.

    Runs are short by default and list the rules they do not meet: only --official uses the required
    durations. The p99 of the server scenario is predicted before the run, from a simulated queue.

        slipstream mlperf serve model.onnx --data digits --range 0,1

        slipstream mlperf serve train.py:make -t lowbit:w8a8 --scenario server --rate 40/s

        slipstream mlperf serve model.tflite --data cifar10_jpeg --batch 8 --max-queue-delay 2ms

        slipstream mlperf serve int8.tflite --against fp32.tflite --data cifar10_jpeg --time 1s
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.mlperf.serving import (
        AUDITS,
        LoadTestConfig,
        Place,
        benchmark,
        compare,
        scenarios,
    )
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.goals import parse_rate

    selected = scenarios(scenario)
    config = LoadTestConfig(
        None if official else parse_duration_ns(seconds, "--time") / 1e9,
        None if latency_bound is None else parse_duration_ns(latency_bound, "--latency-bound"),
        rate=None if rate is None else parse_rate(rate),
    )
    audits = AUDITS if audit == "all" else tuple(filter(None, (audit or "").split(",")))
    opened = functools.partial(
        _session, data=data, batch=batch, max_queue_delay=max_queue_delay, workers=workers,
        threads=threads, settings=settings, value_range=value_range, limit=limit,
        call_timeout=call_timeout,
    )  # fmt: skip
    with progress("mlperf serve") as report, opened(report, model, technique=technique) as session:
        if against is not None:
            with opened(report, against, technique=None) as base:
                compared = compare(base, session, selected, config, report=report)
        else:
            place = None if output is None else Place.of(output, session.about["model"])
            measured = benchmark(session, selected, config, place=place, audits=audits, gate=gate)
    if against is not None:
        emit_result(compared, compared.table(), as_json=as_json)
    else:
        emit_result(measured, *measured.tables(), as_json=as_json)
        if measured.failed:
            raise typer.Exit(1)


def peak(
    model: _Model,
    data: _Data = None,
    latency_bound: Annotated[str, typer.Option(metavar="TIME", help="Bound of p99.")] = "15ms",
    width: Annotated[
        float, typer.Option(metavar="SHARE", help="Relative width of the final bracket.")
    ] = 0.03,
    seconds: Annotated[
        str, typer.Option("--time", metavar="TIME", help="Approximate duration of each run.")
    ] = "5s",
    batch: _Batch = 1,
    max_queue_delay: _MaxQueueDelay = "0ms",
    workers: _Workers = None,
    threads: _Threads = 1,
    technique: options.Techniques = None,
    settings: options.Set = None,
    value_range: _Range = None,
    limit: _Limit = None,
    call_timeout: _CallTimeout = "3s",
    as_json: options.Json = False,
) -> None:
    """Find the maximum query rate that a server sustains within its latency bound.

    The search starts at the peak of a simulated queue, which every run corrects.

        slipstream mlperf peak model.tflite --data cifar10_jpeg --latency-bound 10ms --batch 8
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.mlperf.serving import LoadTestConfig, find_peak
    from slipstream.units import parse_duration_ns

    config = LoadTestConfig(
        parse_duration_ns(seconds, "--time") / 1e9,
        parse_duration_ns(latency_bound, "--latency-bound"),
    )
    with progress("mlperf peak") as report, _session(
        report, model, data=data, batch=batch, max_queue_delay=max_queue_delay, workers=workers,
        threads=threads, technique=technique, settings=settings, value_range=value_range,
        limit=limit, call_timeout=call_timeout,
    ) as session:  # fmt: skip
        sustained = find_peak(session, config, width)
    emit_result(sustained, sustained.table(), as_json=as_json)


def check_results(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of results.")],
    seconds: Annotated[
        str,
        typer.Option(
            "--time", metavar="TIME", help="Minimum duration of a performance run; by rule 10 min."
        ),
    ] = "10min",
    required: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Scenarios that every model must have, or all."),
    ] = None,
    audits: Annotated[
        str, typer.Option(metavar="NAME,...", help="Audits that every scenario must have.")
    ] = "TEST01,TEST04",
    as_json: options.Json = False,
) -> None:
    """Check a folder of results, from any tool, against the rules; exit code 1 on violations.

    slipstream mlperf check-results results
    """
    from slipstream.cli._output import emit_result
    from slipstream.mlperf.serving import check as checked
    from slipstream.mlperf.serving import scenarios
    from slipstream.units import parse_duration_ns

    titles = [entry.title for entry in scenarios(required)] if required else []
    submission = checked(
        folder,
        min_duration_s=parse_duration_ns(seconds, "--time") / 1e9,
        required=titles,
        audits=tuple(filter(None, audits.split(","))),
    )
    emit_result(submission, submission.table(), as_json=as_json)
    if submission.defects:
        raise typer.Exit(1)


def _session(
    report: Report, model: str, *, data: str | None, batch: int, max_queue_delay: str,
    workers: int | None, threads: int, technique: list[str] | None, settings: list[str] | None,
    value_range: str | None, limit: int | None, call_timeout: str,
) -> Session:  # fmt: skip
    """Open the model under test that the options of a command describe."""
    from slipstream.mlperf.serving import Session
    from slipstream.runtimes import BatchPolicy
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.request import Request

    return Session(
        model,
        data,
        threads=threads,
        arguments=Request.parse(model, settings=settings or ()).arguments,
        techniques=technique or (),
        value_range=parse_range(value_range),
        limit=limit,
        policy=BatchPolicy(batch, round(parse_duration_ns(max_queue_delay, "--max-queue-delay"))),
        workers=workers,
        patience_s=parse_duration_ns(call_timeout, "--call-timeout") / 1e9,
        report=report,
    )


def parse_range(text: str | None) -> tuple[float, float] | None:
    """Return the two numbers of ``0,1``; None for None.

    Raises:
        InvalidArgumentError: `text` is not two numbers.
    """
    from slipstream.errors import InvalidArgumentError

    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(
            "--range", f"'{text}' is not two numbers", remedy="for example --range 0,1"
        ) from None
    return low, high
