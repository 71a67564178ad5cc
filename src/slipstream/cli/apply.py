"""``slipstream apply``: transform the real workload and check that it still runs."""

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
    from slipstream.source import WriteResult
    from slipstream.verbs.applying import ApplyResult


@options.asks(options.Runnable, threads=0, timeout="5min")
def command(
    request: options.Request,
    technique: options.Techniques = None,
    write: Annotated[
        bool, typer.Option("--write", help="Edit your file; the original is saved next to it.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Restore what --write edited.")] = False,
    as_json: options.Json = False,
) -> None:
    """Apply one technique (or combination) for real and run a few steps next to the original.

    The losses of both, from the same seed, are shown step by step (for inference, the difference
    of the outputs), followed by the equivalent edit of your source. Your files change only with
    --write.

        slipstream apply train.py:make_workload --technique amp:bf16
    """
    from slipstream.verbs.applying import apply

    if undo:
        _undo(request.target, conflicting=bool(technique or write), as_json=as_json)
        return
    if not technique:
        raise UsageError("--technique is missing", remedy="for example --technique amp:bf16")
    if len(technique) > 1:
        raise UsageError(
            f"got {len(technique)} alternatives, but only one can be applied",
            remedy="pass one --technique; join several with + to combine them",
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
        # The file is written even if the reader of the table, such as head, has left.
        with contextlib.suppress(BrokenPipeError):
            applied.table(files_unchanged=not write).print()
            _show_edit(applied)
    if write:
        applied = replace(applied, written=_written(applied, shown=not as_json))
    if as_json:
        emit_result(applied, as_json=True)
    elif (written := applied.written) is not None:
        note(f"{written.path} was edited; the original is saved as {written.backup.name}")
        note(f"to undo: slipstream apply {written.path} --undo")
    elif write:
        note("your file is unchanged: it already contains this edit")


_DIFF_STYLES = {"---": "bold", "+++": "bold", "@@": "cyan", "+": "green", "-": "red"}


def _show_edit(applied: ApplyResult) -> None:
    """Print the diff in the format of ``patch``, in colour on a terminal, and its notes."""
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


def _written(applied: ApplyResult, *, shown: bool) -> WriteResult | None:
    """Write the edited file; None if it already has the edit.

    Args:
        shown: whether the reason and the lines to write were already printed.
    """
    from slipstream.source import write

    path = applied.workload.path
    if applied.source is None:
        why = next((edit.note for edit in applied.code if edit.note and not edit.diff), "")
        if why and shown:
            why = "make the change by hand, as described above"
        raise WorkloadError(
            f"nothing was written: the file cannot be edited for {applied.technique}",
            where=str(path),
            remedy=why or "make the change by hand, as described on the technique's card",
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
            "--undo excludes --technique and --write", remedy=f"slipstream apply {target} --undo"
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
        saved = f"; the edited one is saved as {undone.backup.name}" if undone.backup else ""
        if not undone.earlier:
            note(f"restored the original {undone.path}{saved}")
        else:
            several = undone.earlier > 1
            note(f"undid the last edit of {undone.path}{saved}")
            note(
                f"{undone.earlier} earlier edit{'s remain' if several else ' remains'}; "
                f"run --undo again to undo {'the last of them' if several else 'it'}"
            )
