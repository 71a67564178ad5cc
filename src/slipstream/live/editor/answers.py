"""Answers to an editor's requests from the current analysis, without waiting."""

from __future__ import annotations

from lsprotocol import types

from slipstream.errors import SlipstreamError
from slipstream.live.editor.commands import ANALYSE, APPLY, PAGE, SET_BATCH_SIZE, SHOW
from slipstream.live.editor.notes import summary
from slipstream.live.editor.server import EditorServer
from slipstream.live.editor.text import Document, line_range
from slipstream.live.editor.watch import Watch
from slipstream.live.edits import batch_size_in

_BATCHES = (0.5, 2.0, 4.0)


def lenses(ls: EditorServer, document: Document) -> list[types.CodeLens]:
    """Return the cost of classes and functions, and of the step above a workload function."""
    return [*_workload_lenses(ls, document), *_block_lenses(ls, document)]


def _mark(ls: EditorServer, document: Document) -> str:
    """Return the prefix of stale costs, while a new text is analysed."""
    view = ls.view_of(document)
    return "… " if view is not None and view.analysis.stale else ""


def _block_lenses(ls: EditorServer, document: Document) -> list[types.CodeLens]:
    mark = _mark(ls, document)
    return [
        types.CodeLens(
            range=line_range(document, line),
            command=types.Command(title=mark + note.title, command=SHOW, arguments=[document.uri]),
        )
        for line, note in ls.placed(document, "blocks")
    ]


def _workload_lenses(ls: EditorServer, document: Document) -> list[types.CodeLens]:
    """Return the step cost above possible workload functions, or a command to analyse it."""
    path = document.place
    lenses = []
    for line, name in ls.diagnoser.workloads(document):
        target = f"{path}:{name}"
        watches = (watch for watch in ls.watches if watch.path == path)
        watch = next((w for w in watches if w.analyst.workload.function == name), None)
        if watch is None:
            title = "analyse what a step of this costs"
        elif watch.view.costs is None:
            title = watch.view.analysis.said or watch.view.analysis.state
        else:
            title = ("… " if watch.view.analysis.stale else "") + summary(watch.view.costs)
        offered = [types.Command(title=title, command=ANALYSE, arguments=[target])]
        if watch is not None:
            offered.append(types.Command("open the page", PAGE, arguments=[document.uri]))
        where = line_range(document, line)
        lenses += [types.CodeLens(range=where, command=command) for command in offered]
    return lenses


def hints(ls: EditorServer, document: Document) -> list[types.InlayHint]:
    """Return each line's share of the step, at the end of the line."""
    mark = _mark(ls, document)
    return [
        types.InlayHint(
            position=line_range(document, line).end,
            label=mark + note.title,
            tooltip=types.MarkupContent(types.MarkupKind.Markdown, note.hover),
            padding_left=True,
        )
        for line, note in ls.placed(document, "hints")
    ]


def hover(ls: EditorServer, document: Document, line: int) -> types.Hover | None:
    """Return the cost breakdown of a line; None if it has no note."""
    placed = ls.placed(document, "hints", "blocks")
    texts = [note.hover for at, note in placed if at == line and note.hover]
    if not texts:
        return None
    if _mark(ls, document):
        texts.append("*Costs of the previous text; the new one is being analysed.*")
    content = types.MarkupContent(types.MarkupKind.Markdown, "\n\n---\n\n".join(texts))
    return types.Hover(content, range=line_range(document, line))


def actions(ls: EditorServer, document: Document, first: int, last: int) -> list[types.CodeAction]:
    """Return the edits offered on lines `first` to `last`, from 0, inclusive."""
    watch = ls.own_watch(document)
    if watch is None:
        return []
    offered = [
        types.CodeAction(
            title=f"apply {advice.technique}: {advice.predicted}",
            kind=types.CodeActionKind.QuickFix,
            diagnostics=[diagnostic],
            command=types.Command(
                title="apply",
                command=APPLY,
                arguments=[document.uri, advice.technique, document.version],
            ),
        )
        for advice, diagnostic in ls.diagnoser.advice(document)
        if first <= diagnostic.range.start.line <= last
    ]
    return [*offered, *_batch_size_actions(watch, document, first, last)]


def _batch_size_actions(
    watch: Watch, document: Document, first: int, last: int
) -> list[types.CodeAction]:
    """Return edits to other batch sizes, on the line that sets the size."""
    kind = types.CodeActionKind.RefactorRewrite
    try:
        size = batch_size_in(document.source, watch.analyst.workload)
    except SlipstreamError:
        return []
    if not first <= size.line - 1 <= last:
        return []
    model = watch.view.analysis.batch
    offered = []
    for factor in _BATCHES:
        samples = max(1, round(size.value * factor))
        title = f"batch size {samples}"
        if model is not None and model.why_not is None:
            step = model.time(samples)
            title += f": predicted {samples / step.estimate * 1e9:,.0f} samples/s"
        command = types.Command(
            title=title,
            command=SET_BATCH_SIZE,
            arguments=[document.uri, samples, document.version],
        )
        offered.append(types.CodeAction(title=title, kind=kind, command=command))
    return offered
