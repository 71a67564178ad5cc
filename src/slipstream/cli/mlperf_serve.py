"""``slipstream mlperf serve``: a model under load, driven by MLPerf's own load generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import _options as options

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="model.onnx, model.tflite, http://127.0.0.1:PORT/?key=..., or file.py:function: one "
        "that builds a workload, or one that is called with a batch.",
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
    typer.Option("--range", metavar="LOW,HIGH", help="What pixel values 0 and 255 become: 0,1."),
]
_Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Take only the first N samples.")
]
_Batch = Annotated[
    int, typer.Option("--batch", metavar="N", min=1, help="Queries that may be answered together.")
]
_Delay = Annotated[
    str,
    typer.Option(
        "--delay", metavar="TIME", help="How long a query may be held back for others to join it."
    ),
]
_Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Threads that call the model."),
]
_Threads = Annotated[
    int, typer.Option("--threads", metavar="N", min=0, help="Threads inside an operator.")
]
_Patience = Annotated[
    str,
    typer.Option(
        "--patience", metavar="TIME", help="How long a call of the model, or an answer, may take."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of serving to ``slipstream mlperf``."""
    app.command("serve")(serve)


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
        str, typer.Option("--time", metavar="TIME", help="About how long each run may take.")
    ] = "5s",
    official: Annotated[
        bool, typer.Option("--official", help="The rules' durations: ten minutes a scenario.")
    ] = False,
    bound: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="What the server's percentile may take; by default 15 ms, or ten times a query "
            "by itself.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Queries that arrive at the server, as 40/s; by default 70 % of what the queue "
            "simulation says is possible.",
        ),
    ] = None,
    batch: _Batch = 1,
    delay: _Delay = "0ms",
    workers: _Workers = None,
    threads: _Threads = 1,
    technique: options.Techniques = None,
    settings: options.Set = None,
    value_range: _Range = None,
    limit: _Limit = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Leave LoadGen's logs there."),
    ] = None,
    patience: _Patience = "3s",
    as_json: options.Json = False,
) -> None:
    """Put a model under load as MLPerf does, with its own load generator, LoadGen.

    Four scenarios: one query after the other (single-stream), eight samples at a time
    (multi-stream), queries that arrive at random and may take so long at most (server), all at
    once (offline). Where samples have classes, their answers are checked, too.

    Runs are short by default and say what they lack: only --official takes as long as the rules
    ask for. The server's predicted p99 comes from a simulated queue, and is known before the run.

        slipstream mlperf serve model.onnx --data digits --range 0,1

        slipstream mlperf serve train.py:make -t lowbit:w8a8 --scenario server --rate 40/s

        slipstream mlperf serve model.tflite --data cifar10_jpeg --batch 8 --delay 2ms -o results
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.mlperf.serving import Session, Wishes, benchmark, scenarios
    from slipstream.runtimes import BatchPolicy
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.request import Request

    chosen = scenarios(scenario)
    wishes = Wishes(
        None if official else parse_duration_ns(seconds, "--time") / 1e9,
        None if bound is None else parse_duration_ns(bound, "--bound"),
        rate=None if rate is None else parse_rate(rate),
    )
    policy = BatchPolicy(batch, round(parse_duration_ns(delay, "--delay")))
    asked = Request.parse(model, settings=settings or ())
    with (
        progress("mlperf serve") as say,
        Session(
            model, data, threads=threads, arguments=asked.arguments,
            techniques=technique or (), value_range=parse_range(value_range), limit=limit,
            policy=policy, workers=workers,
            patience_s=parse_duration_ns(patience, "--patience") / 1e9, say=say,
        ) as session,
    ):  # fmt: skip
        found = benchmark(session, chosen, wishes, output)
    emit_result(found, found.table(), as_json=as_json)


def parse_range(text: str | None) -> tuple[float, float] | None:
    """The two numbers of ``0,1``.

    Raises:
        InvalidArgumentError: it is not of that form.
    """
    from slipstream.errors import InvalidArgumentError

    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(
            "--range", f"'{text}' is not two numbers", remedy="as --range 0,1"
        ) from None
    return low, high


def parse_rate(text: str) -> float:
    """Queries a second, of ``40/s`` or ``40``.

    Raises:
        InvalidArgumentError: it is not of that form, or not above zero.
    """
    from slipstream.errors import InvalidArgumentError

    try:
        rate = float(text.removesuffix("/s").replace(",", ""))
    except ValueError:
        rate = float("nan")
    if not 0 < rate < float("inf"):
        raise InvalidArgumentError("--rate", f"'{text}' is not a rate", remedy="as --rate 40/s")
    return rate
