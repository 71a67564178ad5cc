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
        help="A task of the suite (slipstream mlperf tasks), or file.py:function of your own.",
    ),
]
Runs = Annotated[
    int, typer.Option("--runs", metavar="N", min=1, help="Runs of every arm, each from a new seed.")
]
_Threads = Annotated[
    int, typer.Option("--threads", metavar="N", min=1, help="Threads of every process.")
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FOLDER", help="Where the log files go; by default the cache."
    ),
]
Predicted = Annotated[
    bool,
    typer.Option(
        "--predict/--no-predict",
        help="Before the first run, predict what will be found: the step is recorded and edited, "
        "and what changes the numbers trains two quarters of a run on either side.",
    ),
]
_Division = Annotated[
    str,
    typer.Option(
        "--division",
        metavar="NAME",
        help="open, or closed: the reference's model, optimizer and numbers.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of training to ``slipstream mlperf``."""
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
            help="What to compare with, as ddp:workers=2 where a technique changes what replicas "
            "exchange; the task as it is by default.",
        ),
    ] = "",
    runs: Runs = 5,
    division: _Division = "open",
    target: Annotated[
        float | None,
        typer.Option("--target", metavar="X", help="Another quality than the task's; logged."),
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
    """Train until a quality is reached, with and without techniques, and compare the times.

    Every run has a process, a seed and a log of its own, in the format of MLPerf Training; the
    clock runs from the first touch of data to the evaluation that reaches the target. All arms
    train from the same seeds. Time to quality is told as its two factors: the time of a sample,
    and the samples to the target, each with its interval. What is predicted of them is kept
    before the first run, and stands beside what was measured.

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
    """What ``mlperf train`` and ``prove --to-quality`` do."""
    from slipstream.cli._output import emit_result, note, progress
    from slipstream.mlperf.training.judge import time_to_quality
    from slipstream.verbs.history import history
    from slipstream.verbs.training import predict_training

    if division not in ("open", "closed"):
        raise InvalidArgumentError(
            "--division", f"'{division}' is not possible", remedy="open or closed"
        )
    predictions = {}
    with progress(f"training {task}") as report:
        if predicted and techniques:
            with history(store) as past:
                predictions = predict_training(
                    task, list(techniques), past, against=against, runs=runs, threads=threads,
                    batch=batch, report=report,
                )  # fmt: skip
        for one in predictions.values():
            note(one.sentence)
        judged = time_to_quality(
            task, list(techniques), against=against, runs=runs, division=division, folder=output,
            threads=threads, batch=batch, target_quality=target,
            predictions=predictions, report=report,
        )  # fmt: skip
    note(f"logs: {judged.arms[0].folder.parent}")
    emit_result(judged, *judged.tables(), as_json=as_json)


def tasks(as_json: options.Json = False) -> None:
    """List the tasks that come with slipstream: model, data, target, and what a run takes.

    slipstream mlperf tasks
    """
    from slipstream.cli._output import emit_result
    from slipstream.mlperf.training.listing import Listing

    listing = Listing.of_suite()
    emit_result(listing, listing.table(), as_json=as_json)


def check(
    task: _Task,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With result_0.txt and so on.")],
    runs: Annotated[
        int | None,
        typer.Option("--runs", metavar="N", min=1, help="How many runs had been announced."),
    ] = None,
    as_checker: Annotated[
        bool,
        typer.Option(
            "--as-checker",
            help="Take deviations of the reference as the official checker does, not as the rules.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Hold the logs of a result against the rules: clock, seeds, evaluations, convergence.

    slipstream mlperf check fashion_cnn results/arm_0 --runs 5
    """
    from slipstream.cli._output import emit_result
    from slipstream.mlperf.training.listing import Checked

    checked = Checked.of(task, folder, runs, as_checker=as_checker)
    emit_result(checked, checked.table(), as_json=as_json)
    if checked.violations:
        raise typer.Exit(1)


def curve(
    task: _Task,
    batches: Annotated[
        str, typer.Option("--batches", metavar="N,...", help="Two batch sizes or more.")
    ],
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=3, help="Runs of each.")] = 4,
    threads: _Threads = 1,
    output: _Output = None,
    as_json: options.Json = False,
) -> None:
    """Train at several batch sizes: epochs to the target, pruned points, critical batch size.

    slipstream mlperf curve fashion_cnn --batches 64,128,256,512
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.mlperf.training.curve import BatchCurve

    sizes = options.numbers(batches, "--batches", "64,128,256", fewest=2)
    with progress(f"training {task}") as report:
        measured = BatchCurve.measure(
            task, sizes, runs=runs, threads=threads, folder=output, report=report
        )
    emit_result(measured, measured.table(), as_json=as_json)
