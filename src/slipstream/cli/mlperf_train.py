"""``slipstream mlperf train``, ``tasks``, ``check`` and ``curve``: time to quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli import _options as options
from slipstream.errors import InvalidArgumentError

_Task = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="A task of the suite (slipstream mlperf tasks), or your own file.py:function.",
    ),
]
Runs = Annotated[
    int, typer.Option("--runs", metavar="N", min=1, help="Runs per arm, each with a new seed.")
]
_Threads = Annotated[
    int, typer.Option("--threads", metavar="N", min=1, help="Threads per process.")
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FOLDER", help="Folder of the log files; by default in the cache."
    ),
]
Predicted = Annotated[
    bool,
    typer.Option(
        "--predict/--no-predict",
        help="Whether to predict the result before the first run: the step is recorded and edited, "
        "and techniques that change numerics train two quarters of a run on either side.",
    ),
]
_Division = Annotated[
    str,
    typer.Option(
        "--division",
        metavar="NAME",
        help="open, or closed: the model, optimizer and numerics of the reference.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the training commands to ``slipstream mlperf``."""
    app.command()(train)
    app.command()(tasks)
    app.command()(check)
    app.command()(curve)


def train(
    task: _Task,
    technique: options.Techniques = None,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="NAME:KEY=VALUE,...",
            help="Baseline, for example ddp:workers=2 for a technique that changes what replicas "
            "exchange; by default the unmodified task.",
        ),
    ] = "",
    runs: Runs = 5,
    division: _Division = "open",
    target: Annotated[
        float | None,
        typer.Option("--target", metavar="X", help="Another target quality; logged."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="Another batch size; logged.")
    ] = None,
    threads: _Threads = 1,
    predicted: Predicted = True,
    output: _Output = None,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Train to a target quality, with and without techniques, and compare the times.

    Every run has its own process, seed and log, in the format of MLPerf Training. The clock runs
    from the first access to data until the evaluation that reaches the target. All arms train from
    the same seeds. Time to quality is reported as two factors, time per sample and samples to the
    target, each with an interval. Predictions are stored before the first run and shown next to
    the measurements.

        slipstream mlperf train fashion_cnn -t lowrank:0.25 --runs 5

        slipstream mlperf train mine.py:digits -t ddp:workers=2+powersgd:4
    """
    to_quality(
        task, technique or (), against=against, runs=runs, division=division, target=target,
        batch=batch, threads=threads, predicted=predicted, output=output, store=store,
        as_json=as_json,
    )  # fmt: skip


def to_quality(
    task: str, techniques: Any, *, runs: int, against: str = "", division: str = "open",
    target: float | None = None, batch: int | None = None, threads: int = 1,
    predicted: bool = True, output: Path | None = None, store: Path | None = None,
    as_json: bool = False,
) -> None:  # fmt: skip
    """Run ``mlperf train`` and ``prove --to-quality``."""
    from slipstream.cli._output import emit_result, note, progress
    from slipstream.mlperf.training.judge import time_to_quality
    from slipstream.verbs.history import history
    from slipstream.verbs.training import predict_training

    if division not in ("open", "closed"):
        raise InvalidArgumentError(
            "--division", f"'{division}' is not a division", remedy="pass open or closed"
        )
    predictions = {}
    with progress(f"training {task}") as report:
        if predicted and techniques:
            with history(store) as past:
                predictions = predict_training(
                    task, list(techniques), past, against=against, runs=runs, threads=threads,
                    batch=batch, report=report,
                )  # fmt: skip
        for prediction in predictions.values():
            note(prediction.sentence)
        judged = time_to_quality(
            task, list(techniques), against=against, runs=runs, division=division, folder=output,
            threads=threads, batch=batch, target_quality=target,
            predictions=predictions, report=report,
        )  # fmt: skip
    note(f"logs: {judged.arms[0].folder.parent}")
    emit_result(judged, *judged.tables(), as_json=as_json)


def tasks(as_json: options.Json = False) -> None:
    """List the tasks of the suite: model, data, target, and the duration of a run.

    slipstream mlperf tasks
    """
    from slipstream.cli._output import emit_result
    from slipstream.mlperf.training.listing import Listing

    listing = Listing.of_suite()
    emit_result(listing, listing.table(), as_json=as_json)


def check(
    task: _Task,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with result_0.txt, ...")],
    runs: Annotated[
        int | None,
        typer.Option("--runs", metavar="N", min=1, help="Number of runs that were planned."),
    ] = None,
    as_checker: Annotated[
        bool,
        typer.Option(
            "--as-checker",
            help="Judge deviations from the reference by the official checker, not by the rules.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check the logs of a result against the rules: clock, seeds, evaluations, convergence.

    slipstream mlperf check fashion_cnn results/arm_0 --runs 5
    """
    from slipstream.cli._output import emit_result
    from slipstream.mlperf.training.listing import CheckResult

    checked = CheckResult.of(task, folder, runs, as_checker=as_checker)
    emit_result(checked, checked.table(), as_json=as_json)
    if checked.violations:
        raise typer.Exit(1)


def curve(
    task: _Task,
    batches: Annotated[
        str, typer.Option("--batches", metavar="N,...", help="At least two batch sizes.")
    ],
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=3, help="Runs per size.")] = 4,
    threads: _Threads = 1,
    output: _Output = None,
    as_json: options.Json = False,
) -> None:
    """Train at several batch sizes: epochs to the target, pruned points, critical batch size.

    slipstream mlperf curve fashion_cnn --batches 64,128,256,512
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.mlperf.training.curve import BatchCurve

    sizes = options.numbers(batches, "--batches", "64,128,256", min_count=2)
    with progress(f"training {task}") as report:
        measured = BatchCurve.measure(
            task, sizes, runs=runs, threads=threads, folder=output, report=report
        )
    emit_result(measured, measured.table(), as_json=as_json)
