"""Run, inspect, resume and replay studies, and predict them on more devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.search import Executor, StoredStudy, Study
    from slipstream.search.listing import Listing

app = typer.Typer(
    no_args_is_help=True,
    help="Search a space of settings: run, inspect, resume and replay a study.",
    epilog="A study is a function in your file that returns slipstream.study(...). Start "
    "with: slipstream search run FILE.py:FUNCTION --budget 50",
)

_Target = Annotated[
    str,
    typer.Argument(metavar="FILE.py:STUDY", help="A study, or a function that returns one."),
]
_File = Annotated[Path, typer.Argument(metavar="RUNS.db", help="File that stores a study.")]
_Name = Annotated[
    str | None, typer.Option("--study", metavar="NAME", help="The study, if the file has several.")
]
_Budget = Annotated[
    str | None,
    typer.Option(metavar="N|TIME", help="Trials (200) or time (15min); by default the study's."),
]
_Workers = Annotated[
    int, typer.Option(metavar="N", min=0, help="Worker processes; 0: in this process.")
]
_Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="local|ADDRESS",
        help="Run on Ray: a local cluster with --workers slots, or one at this address.",
    ),
]
_RunScheduler = Annotated[
    str,
    typer.Option(
        "--scheduler", metavar="NAME", help="With --ray, how trials get slots: fifo or level."
    ),
]
_Resize = Annotated[
    str | None,
    typer.Option(
        "--resize",
        metavar="TIME",
        help="With --ray, cost of a resize: trials that call run.checkpointed() may change slots "
        "while they run. By default they keep their slots until the end of the rung.",
    ),
]
_Timeout = Annotated[
    str | None, typer.Option(metavar="TIME", help="Stop a trial that takes longer than this.")
]


@app.command()
def run(
    study: _Target,
    budget: _Budget = None,
    workers: _Workers = 1,
    timeout: _Timeout = None,
    ray: _Ray = None,
    scheduler: _RunScheduler = "fifo",
    resize: _Resize = None,
    store: Annotated[
        Path | None, typer.Option(metavar="RUNS.db", help="Instead of the study's own store.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a study or resume it; all its data is in one file.

    Ctrl-C stops it at any time; the same command resumes it.

        slipstream search run digits.py:study --budget 15min --workers 2
    """
    loaded = _load(study)
    loaded.store_path = store or loaded.store_path or Path(f"{loaded.name}.db")
    _run(
        loaded, study, budget, _executor(workers, timeout, ray, scheduler, resize), as_json=as_json
    )


@app.command()
def resume(
    runs: _File,
    study: _Name = None,
    budget: _Budget = None,
    workers: _Workers = 1,
    timeout: _Timeout = None,
    ray: _Ray = None,
    scheduler: _RunScheduler = "fifo",
    resize: _Resize = None,
    as_json: Json = False,
) -> None:
    """Resume a study that was interrupted or killed, from its file.

    slipstream search resume digits.db --budget 100
    """
    reading = _read(runs, study)
    loaded = _load(_need_target(reading, runs))
    loaded.store_path = runs
    executor = _executor(workers, timeout, ray, scheduler, resize)
    _run(loaded, str(reading.target), budget, executor, as_json=as_json)


@app.command()
def status(runs: _File, study: _Name = None, as_json: Json = False) -> None:
    """Show the progress of a study, also while it runs: trials by state, and causes of failures."""
    from slipstream.cli._output import emit_result

    listing = _listing(runs, study)
    emit_result(listing, listing.status(), as_json=as_json)


@app.command()
def top(
    runs: _File,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of trials to show.")] = 10,
    study: _Name = None,
    as_json: Json = False,
) -> None:
    """Show the best trials, with predictions next to measurements."""
    from slipstream.cli._output import emit_result

    listing = _listing(runs, study)
    emit_result(listing, listing.top(n), as_json=as_json)


@app.command()
def pareto(
    runs: _File,
    study: _Name = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the front.")] = None,
    as_json: Json = False,
) -> None:
    """Show the Pareto-optimal trials."""
    from slipstream.cli._output import emit_result, need_place, note

    listing = _listing(runs, study)
    if svg is not None:
        from slipstream.files import write_text
        from slipstream.report.search import front_svg

        need_place(svg, ".svg", option="--svg")
        write_text(svg, front_svg(listing), "the image")
        note(f"wrote {svg}")
    emit_result(listing, listing.pareto(), as_json=as_json)


@app.command()
def replay(runs: _File, study: _Name = None, as_json: Json = False) -> None:
    """Recompute every proposal of a study and compare it with the stored one.

    This shows that the record alone determines the result. No trial is run.
    """
    from slipstream.cli._output import emit, progress
    from slipstream.tables import Column, Table

    reading = _read(runs, study)
    loaded = _load(_need_target(reading, runs))
    loaded.store_path = runs
    with progress("replaying") as report:
        report(f"{len(reading.trials)} trials")
        count = loaded.replay()
    table = Table(
        [Column("study"), Column("proposals", "right"), Column("differ", "right")],
        [(loaded.name, count, 0)],
        notes=[f"strategy {loaded.strategy.name}: every proposal is as recorded"],
    )
    emit(table, {"study": loaded.name, "proposals": count, "differ": 0}, as_json=as_json)


_Devices = Annotated[
    str, typer.Option("--gpus", metavar="N,N,...", help="Numbers of devices to compare.")
]
_Scheduler = Annotated[
    str, typer.Option("--scheduler", metavar="NAME", help="level, fifo, uniform or fluid.")
]
_Restart = Annotated[
    str, typer.Option("--restart", metavar="TIME", help="Cost of a resize to a trial.")
]


@app.command()
def predict(
    study: _Target,
    gpus: _Devices = "1,8,64",
    scheduler: _Scheduler = "level",
    restart: _Restart = "15s",
    price: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price per device-hour.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict how long a study takes by number of devices, and when more stop helping.

    The study's own loop and rung policy run on a virtual clock with the given scheduler; no device
    is needed. T* is a lower bound for every schedule.

        slipstream search predict digits.py:study --gpus 1,8,64,1000 --price 2.5
    """
    from slipstream.cli._output import emit, progress
    from slipstream.engines.trials.forecast import (
        forecast_table,
        parse_devices,
        to_json,
    )
    from slipstream.engines.trials.forecast import predict as forecast
    from slipstream.units import parse_duration_ns

    loaded, counts = _load(study), parse_devices(gpus)
    seconds = parse_duration_ns(restart, "restart") / 1e9
    forecasts = []
    with progress("predicting") as report:
        for n in counts:
            report(f"{n} devices")
            forecasts += forecast(loaded, [n], scheduler=scheduler, restart_s=seconds)
    title = f"study {loaded.name}: predicted"
    emit(forecast_table(forecasts, price, title), to_json(forecasts, price), as_json=as_json)


@app.command()
def timeline(
    study: _Target,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of devices.")] = 8,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.json", help="Output file of the trace.")
    ] = Path("timeline.json"),
    scheduler: _Scheduler = "level",
    restart: _Restart = "15s",
) -> None:
    """Predict which trial runs on which device when, as a trace for ui.perfetto.dev.

    slipstream search timeline digits.py:study --gpus 16 -o digits.json
    """
    import json

    from slipstream.cli._output import need_place, note
    from slipstream.engines.trials.forecast import predict as forecast
    from slipstream.engines.trials.timeline import perfetto
    from slipstream.files import write_text
    from slipstream.units import parse_duration_ns

    need_place(output, ".json")
    seconds = parse_duration_ns(restart, "restart") / 1e9
    (plan,) = forecast(_load(study), [gpus], scheduler=scheduler, restart_s=seconds, record=True)
    trace = perfetto(plan.intervals, plan.rows, f"{gpus} devices, {scheduler}")
    write_text(output, json.dumps(trace), "the trace")
    note(f"{len(plan.intervals)} slices; open {output} in ui.perfetto.dev")


def _run(
    study: Study, target: str, budget: str | None, executor: Executor, *, as_json: bool
) -> None:
    from slipstream.cli._output import emit_result, note, progress
    from slipstream.search import Budget
    from slipstream.search.listing import Listing

    path, _, name = target.rpartition(":")
    target = f"{Path(path).resolve()}:{name}"
    limit = None if budget is None else Budget.parse(budget)
    if study.why_strategy:
        note(f"strategy {study.strategy.name}: {study.why_strategy}")
    with progress(f"study {study.name}") as report:
        study.run(
            executor,
            budget=limit,
            progress=lambda current: report(Listing.of(current).line()),
            target=target,
        )
    listing = Listing.of(study)
    note(f"saved in {study.store_path}; to resume: slipstream search resume {study.store_path}")
    emit_result(listing, listing.top(5), listing.status(), as_json=as_json)


def _executor(
    workers: int, timeout: str | None, ray: str | None, scheduler: str, resize: str | None
) -> Executor:
    from slipstream.errors import UsageError
    from slipstream.search import Inline, Processes
    from slipstream.units import parse_duration_ns

    if ray is not None:
        from slipstream.engines.trials.ray_executor import RayExecutor

        if timeout is not None:
            raise UsageError(
                "--timeout stops slipstream's own workers, not those of Ray", remedy="omit it"
            )
        address = None if ray == "local" else ray
        restart_s = None if resize is None else parse_duration_ns(resize, "resize") / 1e9
        return RayExecutor(
            max(workers, 1), scheduler=scheduler, address=address, restart_s=restart_s
        )
    if scheduler != "fifo":
        raise UsageError(f"--scheduler {scheduler} needs Ray", remedy="--ray local")
    if resize is not None:
        raise UsageError("--resize needs Ray", remedy="--ray local")
    if workers == 0:
        return Inline()
    limit = None if timeout is None else parse_duration_ns(timeout, "timeout") / 1e9
    return Processes(workers, timeout_s=limit)


def _load(target: str) -> Study:
    from slipstream.errors import UsageError
    from slipstream.search import Study
    from slipstream.search.estimators import load_target
    from slipstream.units import with_article

    if ":" not in target:
        raise UsageError(f"'{target}' does not name a study", remedy=f"for example {target}:study")
    study = load_target(target)
    if callable(study):
        study = study()
    if not isinstance(study, Study):
        raise UsageError(
            f"'{target}' is {with_article(type(study).__name__)}",
            remedy="return slipstream.study(...)",
        )
    return study


def _read(runs: Path, study: str | None) -> StoredStudy:
    from slipstream.search import StoredStudy

    return StoredStudy(runs, study)


def _listing(runs: Path, study: str | None) -> Listing:
    from slipstream.search.listing import Listing

    return Listing.of(_read(runs, study))


def _need_target(reading: StoredStudy, runs: Path) -> str:
    from slipstream.errors import UsageError

    if reading.target is None:
        raise UsageError(
            f"{runs} does not record the file of its study",
            remedy="slipstream search run FILE.py:STUDY --store " + str(runs),
        )
    return str(reading.target)
