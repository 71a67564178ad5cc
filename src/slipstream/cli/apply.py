"""``slipstream apply``: transform the real workload, and see that it still runs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._workload import (
    Json,
    Runnable,
    ScriptArguments,
    Set,
    Techniques,
    Threads,
    Timeout,
)
from slipstream.errors import UsageError, WorkloadError

if TYPE_CHECKING:
    from slipstream.source import Written
    from slipstream.tables import Table
    from slipstream.verbs.applying import Applied
    from slipstream.workload import Workload


def command(
    workload: Runnable,
    script_arguments: ScriptArguments = None,
    technique: Techniques = None,
    settings: Set = None,
    threads: Threads = 0,
    timeout: Timeout = "5min",
    write: Annotated[
        bool, typer.Option("--write", help="Edit your file so; the old one is kept beside it.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put back what --write replaced.")] = False,
    as_json: Json = False,
) -> None:
    """Apply one technique (or combination) for real and run a few steps beside the original.

    The losses of both, from the same seed, are shown step by step (of an inference, how far the
    outputs lie apart); then the edit of your source that does the same. Your files are not
    changed, unless you say --write.

        slipstream apply train.py:make_workload --technique amp:bf16
    """
    from slipstream.cli._output import emit, note, progress
    from slipstream.cli._workload import workload_of
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.applying import apply

    if undo:
        _undo(workload, conflicting=bool(technique or write), as_json=as_json)
        return
    if not technique:
        raise UsageError("no technique is named", remedy="--technique amp:bf16")
    if len(technique) > 1:
        raise UsageError(
            f"{len(technique)} alternatives are named, and one can be applied",
            remedy="one --technique; to apply several together, join them with +",
        )
    recipe = workload_of(workload, script_arguments, settings)
    with progress(f"applying {technique[0]}") as say:
        applied = apply(
            recipe,
            technique[0],
            threads=threads,
            timeout_s=parse_duration_ns(timeout, "--timeout") / 1e9,
            say=say,
        )
    if not as_json:
        # A reader that left, as head does, takes nothing back of what was asked for.
        with contextlib.suppress(BrokenPipeError):
            emit(_table(applied, recipe, technique[0], write), {}, as_json=False)
            _show_edit(applied)
    written = _written(applied, shown=not as_json) if write else None
    if as_json:
        payload = {
            "workload": recipe.name,
            "technique": technique[0],
            "losses_before": list(applied.before),
            "losses_after": list(applied.after),
            "finite": applied.finite,
            "not_run": applied.not_run,
            "relative_difference": applied.difference,
            "output_difference": applied.outputs.difference if applied.outputs else None,
            "diffs": [change.diff for change in applied.code],
            "diff": applied.diff,
            "code_notes": [change.note for change in applied.code if change.note],
            "written": str(written.path) if written else None,
            "backup": str(written.backup) if written else None,
        }
        emit([], payload, as_json=True)
    elif written is not None:
        note(f"{written.path} is edited; what it was is in {written.backup.name}")
        note(f"to go back: slipstream apply {written.path} --undo")
    elif write:
        note("your file is as it was: nothing of this is missing in it")


def _table(applied: Applied, recipe: Workload, technique: str, write: bool) -> Table:
    from slipstream.tables import Column, Table

    rows = [
        (step, _number(before), _number(after), _difference(before, after))
        for step, (before, after) in enumerate(zip(applied.before, applied.after, strict=True), 1)
        if before is not None or after is not None
    ]
    return Table(
        [
            Column("step", "right"),
            Column("loss as it is", "right"),
            Column(f"with {technique}", "right"),
            Column("difference", "right"),
        ],
        rows,
        title=f"{recipe.name} with {technique}",
        notes=_findings(applied, write),
    )


def _findings(applied: Applied, write: bool) -> list[str]:
    """In words: does it run, and does it compute the same?"""
    from slipstream.measure.checks import format_share

    kept = "" if write else "; your files were not changed"
    if applied.not_run is not None:
        return [f"not run with it: {applied.not_run}{kept}"]
    notes = ["the transformed workload runs" + kept]
    outputs = applied.outputs
    if not applied.finite:
        what = "a loss" if outputs is None else "an output"
        notes.append(f"{what} is not finite: do not use this technique here")
    elif applied.difference is not None:
        size = f"{100 * abs(applied.difference):.3f} %"
        notes.append(f"after {len(applied.after)} steps the losses differ by {size}")
    elif outputs is None:
        notes.append("its steps return no number, so that losses cannot be compared")
    elif outputs.difference is None:
        notes.append(f"its outputs cannot be compared: {outputs.reason}")
    elif outputs.difference == 0:
        notes.append("its output is the same to the last bit")
    else:
        share = format_share(outputs.difference)
        notes.append(f"its output differs by at most {share} of the largest value")
    return notes


_DIFF_STYLES = {"---": "bold", "+++": "bold", "@@": "cyan", "+": "green", "-": "red"}


def _show_edit(applied: Applied) -> None:
    """The diff as ``patch`` takes it, in colour on a terminal, and what to know about it."""
    from rich.text import Text

    from slipstream.tables import console_for

    console = console_for(sys.stdout, soft_wrap=True)
    diff = applied.diff
    if diff:
        sys.stdout.write("\n")
    if not console.is_terminal:
        sys.stdout.write(diff)
    else:
        for line in diff.split("\n")[:-1]:
            found = (style for start, style in _DIFF_STYLES.items() if line.startswith(start))
            console.print(Text(line.rstrip("\r"), style=next(found, "")))
    for change in applied.code:
        if change.note:
            console.print(Text(f"\n{change.note}", style="dim"))


def _written(applied: Applied, *, shown: bool) -> Written | None:
    """The file after ``--write``; None where it has the edit already.

    Args:
        shown: whether the reason and the lines to write stand on the screen already.

    Raises:
        WorkloadError: there is no whole edit, or the file cannot be written.
    """
    from slipstream.source import write

    path = applied.workload.path
    if applied.source is None:
        why = next((one.note for one in applied.code if one.note and not one.diff), "")
        if why and shown:
            why = "make the change by hand, as said above"
        raise WorkloadError(
            "nothing was written: there is no edit of the file for all of it",
            where=str(path),
            remedy=why or "make the change by hand, as the technique's card says",
        )
    if not applied.source.changed:
        return None
    if not applied.finite:
        raise WorkloadError(
            "nothing was written: with this technique "
            f"{'a loss' if applied.outputs is None else 'an output'} is not finite",
            where=str(path),
        )
    return write(applied.source)


def _undo(target: str, *, conflicting: bool, as_json: bool) -> None:
    from slipstream.cli._output import emit, note
    from slipstream.source import undo

    if conflicting:
        raise UsageError(
            "--undo stands alone", remedy=f"slipstream apply {target} --undo, and nothing else"
        )
    found = undo(Path(target.rpartition(":")[0] if ".py:" in target else target))
    if as_json:
        payload = {
            "restored": str(found.path),
            "kept": str(found.backup) if found.backup else None,
            "earlier_edits": found.earlier,
        }
        emit([], payload, as_json=True)
    else:
        kept = f"; the edited one is kept as {found.backup.name}" if found.backup else ""
        if not found.earlier:
            note(f"{found.path} is what it was{kept}")
        else:
            several = found.earlier > 1
            note(f"the last edit of {found.path} is taken back{kept}")
            note(
                f"{found.earlier} earlier edit{'s are' if several else ' is'} still in it; "
                f"--undo again takes {'the last of them' if several else 'it'} back"
            )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _difference(before: float | None, after: float | None) -> str:
    if before is None or after is None or not before:
        return "-"
    percent = round(100 * (after - before) / abs(before), 3)
    return f"{percent:+.3f} %" if percent else "0 %"
