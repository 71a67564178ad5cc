"""Commands of the language server: edits, analyses, the live page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.live.editor.notes import summary
from slipstream.live.editor.server import EditorServer, refusal
from slipstream.live.editor.watch import View, Watch
from slipstream.live.edits import with_batch_size, with_technique

SET_BATCH_SIZE = "slipstream.setBatchSize"
APPLY = "slipstream.apply"
UNDO = "slipstream.undo"
ANALYSE = "slipstream.analyse"
SHOW = "slipstream.show"
PAGE = "slipstream.page"


async def set_batch_size(ls: EditorServer, uri: str, samples: int, *version: Any) -> dict[str, Any]:
    """Edit the batch size in the text."""
    workload = _watch(ls, uri, version).analyst.workload
    return await ls.change(
        uri, f"batch size {samples}", lambda text: with_batch_size(text, workload, samples)
    )


async def apply(ls: EditorServer, uri: str, technique: str, *version: Any) -> dict[str, Any]:
    """Edit the text to apply a technique or a combination."""
    workload = _watch(ls, uri, version).analyst.workload
    return await ls.change(uri, technique, lambda text: with_technique(text, workload, technique))


async def undo(ls: EditorServer, uri: str) -> dict[str, Any]:
    """Undo the last of these edits, if the text has not changed since."""
    return await ls.take_back(uri)


def analyse(ls: EditorServer, target: str) -> bool:
    """Analyse ``file.py:function`` now and at every save; return whether that is possible."""
    return ls.begin(target) is not None


def show(ls: EditorServer, uri: str) -> dict[str, Any] | None:
    """Return the state of the file's analysis for a status line; None without an analysis."""
    view = ls.view_of(ls.documents[uri])
    return None if view is None else _state(view)


async def page(ls: EditorServer, uri: str, *show: Any) -> dict[str, Any]:
    """Serve the live page of the file's workload, and open it in a browser unless disabled."""
    watch = _watch(ls, uri)
    return {"address": await ls.open_page(watch, show=all(show))}


COMMANDS: Mapping[str, Callable[..., Any]] = {
    SET_BATCH_SIZE: set_batch_size, APPLY: apply, UNDO: undo, ANALYSE: analyse, SHOW: show,
    PAGE: page,
}  # fmt: skip


def _watch(ls: EditorServer, uri: str, versions: tuple[Any, ...] = ()) -> Watch:
    """Return the watch of the edited file.

    Args:
        versions: version of the text that the edit was offered for, if sent.

    Raises:
        JsonRpcException: the file is not analysed, or the text has another version.
    """
    document = ls.documents[uri]
    for offered in versions:
        if offered is not None and offered != document.version:
            raise refusal(
                f"the text is at version {document.version}, but the edit was made for {offered}"
            )
    watch = ls.own_watch(document)
    if watch is None:
        raise refusal(
            f"no workload of {Path(document.place).name} is analysed; click 'analyse what a step "
            f"of this costs' above its function, or run {ANALYSE} with file.py:function"
        )
    return watch


def _state(view: View) -> dict[str, Any]:
    analysis = view.analysis
    return {
        "state": analysis.state,
        "said": analysis.said,
        "stale": analysis.stale,
        "summary": summary(view.costs) if view.costs is not None else "",
        "problem": analysis.problem.what if analysis.problem is not None else None,
        "advice": [advice.said for advice in view.advice],
    }
