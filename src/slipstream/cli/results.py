"""List, show, compare and export stored experiments, and find regressions."""

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
    help="List, show, compare and export stored experiments, and find regressions.",
    epilog="ID is an id from `slipstream results ls`, a prefix of one, or `last`.",
)

_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of an experiment, or `last`.")]


@app.command("ls")
def list_experiments(store: StorePath = None, as_json: Json = False) -> None:
    """List every experiment with its verdicts, the newest last."""
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
    empty = "" if summaries else f"No experiments in this store yet: {where}"
    table = Table.of(summaries, fields, notes=[empty])
    payload = [asdict(s) | {"verdicts": verdicts[s.experiment_id]} for s in summaries]
    emit(table, payload, as_json=as_json)


@app.command()
def show(
    experiment_id: _Id,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML file.")] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Recompute the claims from the samples; fail if any digit differs.",
        ),
    ] = False,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Show one experiment, with predictions next to measurements.

    An interrupted experiment is shown with the data it had by then; one with real ranks includes
    the tables of ranks, layers and links that `prove` printed.
    """
    from slipstream.measure.comparison import Comparison
    from slipstream.measure.page import comparison_html
    from slipstream.verbs.proving.proof import Proof

    with _open(store) as opened:
        experiment = opened.load(experiment_id)
        claims = _claims(opened, experiment)
        # A killed run has no stored claims.
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
        typer.Option("--unpaired", help="Ignore different environments; every row is marked."),
    ] = False,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Compare the medians of two experiments: a hint, never a verdict.

    Experiments that were not measured side by side differ in more than the code. If the recorded
    environments differ, the command fails and names the differences, unless you pass --unpaired.
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
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.")],
    to: Annotated[
        str | None,
        typer.Option(help="jsonl (everything), csv or parquet (samples); by default from FILE."),
    ] = None,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Export experiments to a file for other programs."""
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
        bool, typer.Option("--all", help="Also list improvements and earlier steps.")
    ] = False,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Find regressions between experiments of the same title and arms; exit code 1 if any.

    It compares paired ratios to the baseline, and names the two revisions between which the change
    happened and all other differences of the environments.
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
    empty = "" if changes else f"No regression in {len(history)} experiments."
    table = Table.of(changes, fields, notes=[empty])
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
    """Return the stored claims, or for an unfinished experiment, those its samples allow."""
    from slipstream.measure.claims import claims

    stored = store.claims(experiment.experiment_id)
    return stored or (claims(experiment) if experiment.series else ())
