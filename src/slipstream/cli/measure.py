"""Compare two commands or revisions, and check whether this machine is fit to measure on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit, emit_result, note, progress, show_progress
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.measure.arms import CommandArm
    from slipstream.measure.gate import Fitness

app = typer.Typer(
    no_args_is_help=True,
    help="Compare two commands or revisions, and check whether this machine is fit to measure on.",
)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def ab(
    command: list[str] = typer.Argument(  # noqa: B008 - typer declares arguments this way
        None, metavar="[-- COMMAND...]", help="With --base and --head: the command to run in each."
    ),
    base_cmd: str = typer.Option(None, "--base-cmd", help="Baseline command, as typed in a shell."),
    head_cmd: str = typer.Option(None, "--head-cmd", help="Candidate command."),
    base: str = typer.Option(None, "--base", metavar="REV", help="Baseline git revision."),
    head: str = typer.Option(None, "--head", metavar="REV", help="Candidate git revision."),
    metric: str = typer.Option(
        "auto",
        "--metric",
        help="Primary metric: wall, cpu or peak_mem; auto chooses wall or cpu from the data.",
    ),
    target: float = typer.Option(
        0.02, "--target", help="Stop when the interval of the ratio is narrower than this fraction."
    ),
    budget: str = typer.Option("60s", "--budget", help="Start no block after this time."),
    timeout: str = typer.Option("10min", "--timeout", help="Stop a command that takes longer."),
    level: float = typer.Option(
        0.95, "--level", help="Confidence level over all interim analyses."
    ),
    seed: int = typer.Option(0, "--seed", help="Seed of the order of the runs."),
    store: Path = typer.Option(  # noqa: B008
        None, "--store", help="Results store; .slipstream/results.db by default."
    ),
    save: bool = typer.Option(True, "--save/--no-save", help="Save the result in the store."),
    as_json: Json = False,
) -> None:
    """Run two commands (or one in two git revisions) alternately and report which is cheaper.

    The runs are interleaved in random order, so that a busy machine disturbs both equally. Every
    run is a new process, measured by wall time, CPU time including children, and peak memory. The
    interval keeps its level although the run stops once it is narrow: interim analyses are planned.
    In a tenth of the rounds the baseline also runs against itself; if that differs, nothing is
    claimed.

        slipstream measure ab --base-cmd 'python a.py' --head-cmd 'python b.py'

        slipstream measure ab --base main --head HEAD -- python bench.py
    """
    from slipstream.measure.arms import CommandArm
    from slipstream.measure.comparison import compare
    from slipstream.verbs.proving.proof import Proof

    revisions = _mode(base_cmd, head_cmd, base, head, command)
    with contextlib.ExitStack() as stack:
        if revisions:
            from slipstream.measure.revisions import Revisions

            checked_out = stack.enter_context(Revisions([base, head]))
            arms: Sequence[CommandArm] = checked_out.arms(command)
        else:
            arms = [CommandArm("base", base_cmd), CommandArm("head", head_cmd)]
        opened = None
        if save:
            from slipstream.measure.store import Store

            opened = stack.enter_context(Store(store))
        report = stack.enter_context(progress("measuring"))
        comparison = compare(
            arms,
            metrics=("wall", "cpu"),
            primary=metric,
            target=target,
            budget=budget,
            level=level,
            seed=seed,
            timeout=timeout,
            title=" vs ".join(arm.name for arm in arms) if revisions else "base vs head",
            store=opened,
            progress=show_progress(report),
        )
    proof = Proof(comparison)
    emit_result(proof, *proof.tables(), as_json=as_json)


def _mode(
    base_cmd: str | None,
    head_cmd: str | None,
    base: str | None,
    head: str | None,
    command: list[str] | None,
) -> bool:
    """Return whether revisions are compared; False for two commands."""
    remedy = (
        "--base-cmd CMD --head-cmd CMD compares two commands; "
        "--base REV --head REV -- COMMAND compares two revisions"
    )
    by_command, by_revision = (base_cmd, head_cmd), (base, head)
    if any(by_command) and (any(by_revision) or command):
        raise UsageError("commands and revisions cannot be compared together", remedy=remedy)
    if all(by_command):
        return False
    if all(by_revision) and command:
        if base == head:
            raise UsageError(f"'{base}' is compared with itself", remedy="name two revisions")
        return True
    raise UsageError("a comparison needs a baseline and a candidate", remedy=remedy)


@app.command()
def gate(
    seconds: float = typer.Option(60.0, "--seconds", help="Measuring time to estimate for."),
    as_json: Json = False,
) -> None:
    """Check whether this machine is fit to measure on now, and which differences it can detect.

    For two seconds, a fixed workload is compared with itself while system counters are read. Red
    does not prevent measuring: paired runs keep their confidence level on a busy machine and only
    need more time.
    """
    from slipstream.measure.gate import detectable_change

    if not 0 < seconds < float("inf"):
        raise UsageError("--seconds must be a positive number")
    note("probing for two seconds")
    _emit_fitness(detectable_change(seconds), as_json=as_json)


def _emit_fitness(fitness: Fitness, *, as_json: bool) -> None:
    from slipstream.tables import Column, Table
    from slipstream.units import format_detectable

    reading = fitness.reading
    rows = [
        ("this machine is", str(reading.level)),
        *(("because", reason) for reason in reading.reasons),
        (f"finds in {fitness.seconds:g} s, by CPU time", format_detectable(fitness.cpu)),
        (f"finds in {fitness.seconds:g} s, by wall time", format_detectable(fitness.wall)),
    ]
    notes = ["The smallest difference found 4 times out of 5, single-threaded samples of 10 ms."]
    if reading.unreadable:
        notes.append("unreadable here: " + ", ".join(reading.unreadable))
    payload = {
        "level": str(reading.level),
        "reasons": list(reading.reasons),
        "values": reading.values,
        "unreadable": list(reading.unreadable),
        "seconds": fitness.seconds,
        "detectable": {"wall": fitness.wall, "cpu": fitness.cpu},
        "blocks": fitness.blocks,
    }
    emit(Table([Column("what"), Column("answer")], rows, notes=notes), payload, as_json=as_json)
