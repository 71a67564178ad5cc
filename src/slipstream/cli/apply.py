"""``slipstream apply``: transform the real workload, and see that it still runs."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, emit_result, note, progress
from slipstream.errors import UsageError, WorkloadError
from slipstream.tables import console_for

if TYPE_CHECKING:
    from slipstream.source import Written
    from slipstream.verbs.applying import ApplyResult


@options.asks(options.Runnable, threads=0, timeout="5min")
def command(
    request: options.Request,
    technique: options.Techniques = None,
    write: Annotated[
        bool, typer.Option("--write", help="Edit your file so; the old one is kept beside it.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put back what --write replaced.")] = False,
    as_json: options.Json = False,
) -> None:
    """Apply one technique (or combination) for real and run a few steps beside the original.

    The losses of both, from the same seed, are shown step by step (of an inference, how far the
    outputs lie apart); then the edit of your source that does the same. Your files are not
    changed, unless you say --write.

        slipstream apply train.py:make_workload --technique amp:bf16
    """
    from slipstream.verbs.applying import apply

    if undo:
        _undo(request.target, conflicting=bool(technique or write), as_json=as_json)
        return
    if not technique:
        raise UsageError("no technique is named", remedy="--technique amp:bf16")
    if len(technique) > 1:
        raise UsageError(
            f"{len(technique)} alternatives are named, and one can be applied",
            remedy="one --technique; to apply several together, join them with +",
        )
    recipe = request.workload()
    with progress(f"applying {technique[0]}") as report:
        applied = apply(
            recipe,
            technique[0],
            threads=request.threads,
            timeout_s=request.timeout_s,
            report=report,
        )
    if not as_json:
        # A reader that left, as head does, takes nothing back of what was asked for.
        with contextlib.suppress(BrokenPipeError):
            applied.table(files_unchanged=not write).print()
            _show_edit(applied)
    if write:
        applied = replace(applied, written=_written(applied, shown=not as_json))
    if as_json:
        emit_result(applied, as_json=True)
    elif (written := applied.written) is not None:
        note(f"{written.path} is edited; what it was is in {written.backup.name}")
        note(f"to go back: slipstream apply {written.path} --undo")
    elif write:
        note("your file is as it was: nothing of this is missing in it")


_DIFF_STYLES = {"---": "bold", "+++": "bold", "@@": "cyan", "+": "green", "-": "red"}


def _show_edit(applied: ApplyResult) -> None:
    """The diff as ``patch`` takes it, in colour on a terminal, and what to know about it."""
    from rich.text import Text

    console = console_for(sys.stdout, soft_wrap=True)
    diff = applied.diff
    if diff:
        sys.stdout.write("\n")
    if not console.is_terminal:
        sys.stdout.write(diff)
    else:
        for line in diff.split("\n")[:-1]:
            styles = (style for start, style in _DIFF_STYLES.items() if line.startswith(start))
            console.print(Text(line.rstrip("\r"), style=next(styles, "")))
    for change in applied.code:
        if change.note:
            console.print(Text(f"\n{change.note}", style="dim"))


def _written(applied: ApplyResult, *, shown: bool) -> Written | None:
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
    from slipstream.source import undo

    if conflicting:
        raise UsageError(
            "--undo stands alone", remedy=f"slipstream apply {target} --undo, and nothing else"
        )
    undone = undo(Path(target.rpartition(":")[0] if ".py:" in target else target))
    if as_json:
        payload = {
            "restored": str(undone.path),
            "kept": str(undone.backup) if undone.backup else None,
            "earlier_edits": undone.earlier,
        }
        emit([], payload, as_json=True)
    else:
        kept = f"; the edited one is kept as {undone.backup.name}" if undone.backup else ""
        if not undone.earlier:
            note(f"{undone.path} is what it was{kept}")
        else:
            several = undone.earlier > 1
            note(f"the last edit of {undone.path} is taken back{kept}")
            note(
                f"{undone.earlier} earlier edit{'s are' if several else ' is'} still in it; "
                f"--undo again takes {'the last of them' if several else 'it'} back"
            )
