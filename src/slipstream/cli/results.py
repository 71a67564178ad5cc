"""Look at what was measured: list, show, compare, export, find regressions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json, StorePath
from slipstream.cli._output import emit, emit_result, note
from slipstream.files import write_text
from slipstream.tables import Column, Field, Table
from slipstream.units import format_percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.measure.history import SpeedChange
    from slipstream.measure.records import Claim, Experiment
    from slipstream.measure.store import Store, Summary

app = typer.Typer(
    no_args_is_help=True,
    help="Look at what was measured: list, show, compare, export, find regressions.",
    epilog="ID is what `slipstream results ls` shows, its first letters, or `last`.",
)

_Id = Annotated[str, typer.Argument(metavar="ID", help="An experiment: its id, or `last`.")]


@app.command("ls")
def list_experiments(store: StorePath = None, as_json: Json = False) -> None:
    """List every experiment, the newest last, with its verdicts."""
    from slipstream.measure.claims import headline

    with _open(store) as opened:
        where = opened.path
        summaries = opened.list()
        claims = {s.experiment_id: opened.claims(s.experiment_id) for s in summaries}
    verdicts = {
        identity: ", ".join(f"{c.arm} {c.verdict.value}" for c in headline(claimed))
        for identity, claimed in claims.items()
    }
    fields: tuple[Field[Summary], ...] = (
        Field.of("id", lambda s: s.experiment_id),
        Field.of("measured", lambda s: s.created),
        Field.of("title", lambda s: s.title),
        Field.of("verdict", lambda s: verdicts[s.experiment_id] or "-"),
        Field.of("status", lambda s: s.status),
        Field.number("blocks", lambda s: s.blocks, optional=True),
        Field.of("arms", lambda s: ", ".join(s.arms), optional=True),
        Field.of("environment", lambda s: s.env_id, optional=True),
    )
    empty = "" if summaries else f"Nothing was measured yet in this store: {where}"
    table = Table.of(summaries, fields, notes=[empty])
    payload = [asdict(s) | {"verdicts": verdicts[s.experiment_id]} for s in summaries]
    emit(table, payload, as_json=as_json)


@app.command()
def show(
    experiment_id: _Id,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file.")] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Recompute the claims from the samples; fail if a single digit differs.",
        ),
    ] = False,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Show one experiment: prediction and measurement side by side.

    An experiment that was interrupted is shown with what it had by then; one of real ranks with
    the tables of ranks, layers and links that `prove` printed.
    """
    from slipstream.measure.comparison import Comparison
    from slipstream.measure.page import comparison_html
    from slipstream.verbs.proving.proof import Proof

    with _open(store) as opened:
        experiment = opened.load(experiment_id)
        claims = _claims(opened, experiment)
        # Those of a run that was killed were never stored.
        if verify and (experiment.status == "complete" or opened.claims(experiment_id)):
            opened.recompute(experiment_id)
            note(f"{len(claims)} claims recomputed from the samples: the same to the last digit")
    if html is not None:
        write_text(html, comparison_html(experiment, claims))
    proof = Proof(Comparison(experiment, tuple(claims)))
    if markdown and not as_json:
        print("\n".join(table.to_markdown() for table in proof.tables()), end="")
        return
    emit_result(proof, *proof.tables(), as_json=as_json)


@app.command()
def compare(
    a: _Id,
    b: _Id,
    unpaired: Annotated[
        bool,
        typer.Option("--unpaired", help="Also when the environments differ; every row says so."),
    ] = False,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Hold one experiment's medians against another's: a hint, never a verdict.

    What was not measured side by side differs in more than the code. If the two environments
    differ in anything that is captured, this refuses and names it, unless you insist.
    """
    from slipstream.measure.render import compare_experiments, row_json, rows_table

    with _open(store) as opened:
        first, second = opened.load(a), opened.load(b)
    rows = compare_experiments(first, second, unpaired=unpaired)
    note = f"A = {first.experiment_id}, B = {second.experiment_id}; {rows[0].mark}."
    table = rows_table(rows, title=f"{first.title} / {second.title}", notes=(note,))
    payload = {
        "a": first.experiment_id, "b": second.experiment_id, "rows": [*map(row_json, rows)],
    }  # fmt: skip
    emit(table, payload, as_json=as_json)


@app.command()
def export(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Experiments, or `all`.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to.")],
    to: Annotated[
        str | None,
        typer.Option(help="jsonl (everything), csv or parquet (samples); by default as FILE ends."),
    ] = None,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Write experiments to a file other programs read."""
    from slipstream.measure.export import export as write

    with _open(store) as opened:
        if ids == ["all"]:
            ids = [summary.experiment_id for summary in opened.list()]
        experiments = [opened.load(identity) for identity in ids]
        kind = to or output.suffix.removeprefix(".")
        count = write([(e, _claims(opened, e)) for e in experiments], kind, output)
    what = "experiments" if kind == "jsonl" else "samples"
    columns = [Column("file"), Column(what, "right")]
    table = Table(columns, [(output, count)])
    emit(table, {"file": str(output), "format": kind, what: count}, as_json=as_json)


@app.command()
def regress(
    title: Annotated[str, typer.Option(help="Only experiments whose title contains this.")] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also improvements, and steps long past.")
    ] = False,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Find what got worse between experiments of the same title and arms; exit code 1 if any.

    It compares ratios to the baseline, each measured in pairs, and names the revisions between
    which the step lies and every other fact in which the environments differ.
    """
    from slipstream.measure.history import steps

    with _open(store) as opened:
        history = [
            (opened.outline(s.experiment_id), opened.claims(s.experiment_id))
            for s in opened.list()
            if title in s.title
        ]
    changes = [step for step in steps(history) if everything or (step.worse and step.latest)]
    fields: tuple[Field[SpeedChange], ...] = (
        Field.of("title", lambda s: s.title),
        Field.of("what", lambda s: f"{s.arm}: {s.metric}"),
        Field.number("before", lambda s: f"{s.old.ratio:.3f}"),
        Field.number("after", lambda s: f"{s.new.ratio:.3f}"),
        Field.number("change", _change),
        Field.of("code", lambda s: f"{s.revisions[0]} → {s.revisions[1]}"),
        Field.of("environment differs in", lambda s: ", ".join(s.differing) or "nothing"),
        Field.of("experiments", lambda s: f"{s.before} → {s.after}", optional=True),
    )
    none = "" if changes else f"No regression in {len(history)} experiments."
    table = Table.of(changes, fields, notes=[none])
    emit(table, changes, as_json=as_json)
    if any(step.worse and step.latest for step in changes):
        raise typer.Exit(1)


def _change(step: SpeedChange) -> str:
    change = format_percent(step.new.ratio / step.old.ratio - 1, signed=True)
    return change + (" worse" if step.worse else " better")


def _open(path: Path | None) -> Store:
    from slipstream.measure.store import Store

    return Store(path, read_only=True)


def _claims(store: Store, experiment: Experiment) -> Sequence[Claim]:
    """The stored claims, or those an experiment without an end allows so far."""
    from slipstream.measure.claims import claims

    stored = store.claims(experiment.experiment_id)
    return stored or (claims(experiment) if experiment.series else ())
