"""Search: studies that try candidates, what they found, and what more devices would bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.search import Executor, Reading, Study
    from slipstream.search.listing import Listing

app = typer.Typer(
    no_args_is_help=True,
    help="Search a space of settings: run a study, look at it, go on with it, replay it.",
    epilog="A study is a function in a file of yours that returns slipstream.study(...). Start "
    "with: slipstream search run FILE.py:FUNCTION --budget 50",
)

_Target = Annotated[
    str,
    typer.Argument(metavar="FILE.py:STUDY", help="A function that makes a study, or a study."),
]
_File = Annotated[Path, typer.Argument(metavar="RUNS.db", help="The file a study is kept in.")]
_Name = Annotated[
    str | None, typer.Option("--study", metavar="NAME", help="Which, where the file has several.")
]
_Budget = Annotated[
    str | None,
    typer.Option(metavar="N|TIME", help="Trials, as 200; or time, as 15min. Else the study's own."),
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
        "--scheduler", metavar="NAME", help="With --ray, who gets how many slots: fifo or level."
    ),
]
_Resize = Annotated[
    str | None,
    typer.Option(
        "--resize",
        metavar="TIME",
        help="With --ray, what a resize costs a trial: trials that call run.checkpointed() may be "
        "given other slots while they run. Left out, they keep theirs to their rung's end.",
    ),
]
_Timeout = Annotated[
    str | None, typer.Option(metavar="TIME", help="End a trial that takes longer than this.")
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
        Path | None, typer.Option(metavar="RUNS.db", help="In the place of the study's own store.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a study, or go on with it: every fact is kept in one file.

    Ctrl-C ends it at any moment; the same command goes on where it was.

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
    """Go on with a study that was interrupted or killed, from its file.

    slipstream search resume digits.db --budget 100
    """
    reading = _read(runs, study)
    loaded = _load(_need_target(reading, runs))
    loaded.store_path = runs
    executor = _executor(workers, timeout, ray, scheduler, resize)
    _run(loaded, str(reading.target), budget, executor, as_json=as_json)


@app.command()
def status(runs: _File, study: _Name = None, as_json: Json = False) -> None:
    """How far a study is, also while it runs: trials by state, and why some failed."""
    from slipstream.cli._output import emit_result

    listing = _listing(runs, study)
    emit_result(listing, listing.status(), as_json=as_json)


@app.command()
def top(
    runs: _File,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 10,
    study: _Name = None,
    as_json: Json = False,
) -> None:
    """The best trials, with what was predicted of them beside what was measured."""
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
    """What no other trial beats in all objectives at once."""
    from slipstream.cli._output import emit_result, need_place, note

    listing = _listing(runs, study)
    if svg is not None:
        from slipstream.files import write_text
        from slipstream.report.search import front_svg

        need_place(svg, ".svg", option="--svg")
        write_text(svg, front_svg(listing), "the picture")
        note(f"drawn: {svg}")
    emit_result(listing, listing.pareto(), as_json=as_json)


@app.command()
def replay(runs: _File, study: _Name = None, as_json: Json = False) -> None:
    """Make every proposal of a study again from its record, and hold them against it.

    It shows how the answer came about, and that nothing else decided it. No trial is run.
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
        notes=[f"strategy {loaded.strategy.name}: every proposal came out as recorded"],
    )
    emit(table, {"study": loaded.name, "proposals": count, "differ": 0}, as_json=as_json)


_Devices = Annotated[
    str, typer.Option("--gpus", metavar="N,N,...", help="Numbers of devices to compare.")
]
_Scheduler = Annotated[
    str, typer.Option("--scheduler", metavar="NAME", help="level, fifo, uniform or fluid.")
]
_Restart = Annotated[
    str, typer.Option("--restart", metavar="TIME", help="What a resize costs a trial.")
]


@app.command()
def predict(
    study: _Target,
    gpus: _Devices = "1,8,64",
    scheduler: _Scheduler = "level",
    restart: _Restart = "15s",
    price: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Of a device and hour.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How long a study takes on so many devices, and where more of them stop helping.

    The study's own loop and rung policy run on a virtual clock, with the scheduler that would run
    them; no device is needed. T* is what no schedule can be below.

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

    loaded, numbers = _load(study), parse_devices(gpus)
    seconds = parse_duration_ns(restart, "restart") / 1e9
    forecasts = []
    with progress("predicting") as report:
        for n in numbers:
            report(f"{n} devices")
            forecasts += forecast(loaded, [n], scheduler=scheduler, restart_s=seconds)
    title = f"study {loaded.name}: predicted"
    emit(forecast_table(forecasts, price, title), to_json(forecasts, price), as_json=as_json)


@app.command()
def timeline(
    study: _Target,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="How many devices.")] = 8,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.json", help="The trace.")
    ] = Path("timeline.json"),
    scheduler: _Scheduler = "level",
    restart: _Restart = "15s",
) -> None:
    """Which trial would run on which device when, as a trace for Perfetto (ui.perfetto.dev).

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
    made: Study, target: str, budget: str | None, executor: Executor, *, as_json: bool
) -> None:
    from slipstream.cli._output import emit_result, note, progress
    from slipstream.search import Budget
    from slipstream.search.listing import Listing

    place, _, name = target.rpartition(":")
    target = f"{Path(place).resolve()}:{name}"
    given = None if budget is None else Budget.parse(budget)
    if made.why_strategy:
        note(f"strategy {made.strategy.name}: {made.why_strategy}")
    with progress(f"study {made.name}") as report:
        made.run(
            executor,
            budget=given,
            progress=lambda study: report(Listing.of(study).line()),
            target=target,
        )
    listing = Listing.of(made)
    note(f"kept in {made.store_path}; go on with: slipstream search resume {made.store_path}")
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
                "--timeout ends processes of ours, not of Ray's", remedy="leave it out"
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
        raise UsageError(f"'{target}' names no study", remedy=f"for example {target}:study")
    study = load_target(target)
    if callable(study):
        study = study()
    if not isinstance(study, Study):
        raise UsageError(
            f"'{target}' is {with_article(type(study).__name__)}",
            remedy="return slipstream.study(...)",
        )
    return study


def _read(runs: Path, study: str | None) -> Reading:
    from slipstream.search import Reading

    return Reading(runs, study)


def _listing(runs: Path, study: str | None) -> Listing:
    from slipstream.search.listing import Listing

    return Listing.of(_read(runs, study))


def _need_target(reading: Reading, runs: Path) -> str:
    from slipstream.errors import UsageError

    if reading.target is None:
        raise UsageError(
            f"{runs} does not say which file its study is from",
            remedy="slipstream search run FILE.py:STUDY --store " + str(runs),
        )
    return str(reading.target)
