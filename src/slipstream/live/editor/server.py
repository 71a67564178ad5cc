"""State of the language server: open files, analyses, live pages and edits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol
from pygls.uris import from_fs_path

from slipstream.errors import SlipstreamError
from slipstream.live.analysis import Analyst
from slipstream.live.editor.diagnostics import Diagnoser
from slipstream.live.editor.notes import Note
from slipstream.live.editor.text import Document, Documents, LineMap, position_at, spans
from slipstream.live.editor.watch import View, Watch
from slipstream.live.edits import Edited

# The protocol's RequestFailed and RequestCancelled.
_REFUSED, _CANCELLED = -32803, -32800
# A changed text is checked after this long without typing.
_PAUSE_S = 0.3
# Number of cancelled requests to remember; edits are short, so older ones are finished.
_MAX_CANCELLED = 256
MakeAnalyst = Callable[[str], Analyst]


class Protocol(LanguageServerProtocol):
    """pygls' protocol, which also remembers which requests the editor cancelled.

    pygls cancels the requests it awaits, but a command continues in a separate task.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._cancelled: deque[int | str] = deque(maxlen=_MAX_CANCELLED)

    def handle_message(self, message: Any) -> None:
        """Handle a message of the editor."""
        if isinstance(message, types.CancelNotification):
            self._cancelled.append(message.params.id)
        super().handle_message(message)

    def is_cancelled(self, request: int | str | None) -> bool:
        """Return whether the editor has cancelled this request."""
        return request in self._cancelled


class Pages:
    """Live pages of analysts, each served from its first use. Thread-safe."""

    def __init__(self) -> None:
        self._served: dict[int, str] = {}
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()

    def address(self, analyst: Analyst) -> str:
        """Return the address of the page, including the key of this session.

        Raises:
            SlipstreamError: see `slipstream.live.server.serving`.
        """
        # Imported here because it is slow, and an editor may never open a page.
        from slipstream.live.server import serving

        with self._lock:
            if id(analyst) not in self._served:
                live = self._open.enter_context(serving(analyst))
                self._served[id(analyst)] = live.address
            return self._served[id(analyst)]

    def close(self) -> None:
        """Stop serving."""
        with self._lock:
            self._open.close()
            self._served.clear()


class EditorServer(LanguageServer):
    """Costs, advice and edits of workloads, for one editor.

    Args:
        make_analyst: returns the analyst of ``file.py:function``; may raise `SlipstreamError`.
        target: workload to analyse at the start; None to wait for a request.
    """

    protocol: Protocol

    def __init__(self, make_analyst: MakeAnalyst, target: str | None = None) -> None:
        super().__init__("slipstream", version("slipstream"), protocol_cls=Protocol)
        self.documents = Documents()
        self.diagnoser = Diagnoser(self)
        self.target = target
        self._make_analyst = make_analyst
        self._watches: dict[str, Watch] = {}
        self._pages = Pages()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undo: dict[str, list[Edited]] = {}
        self._maps: dict[str, tuple[object, object, LineMap]] = {}
        self._pending: dict[str, asyncio.TimerHandle] = {}

    @property
    def watches(self) -> list[Watch]:
        """The workloads that are analysed."""
        return list(self._watches.values())

    def own_watch(self, document: Document) -> Watch | None:
        """Return the watch of the workload in this file."""
        watches = (watch for watch in self._watches.values() if watch.path == document.place)
        return next(watches, None)

    def watch_of(self, document: Document) -> Watch | None:
        """Return a watch with notes on this file, preferably that of its own workload."""
        others = (watch for watch in self._watches.values() if document.place in watch.view.notes)
        return self.own_watch(document) or next(others, None)

    def view_of(self, document: Document) -> View | None:
        """Return the view of the file's workload; None if it is not analysed."""
        watch = self.watch_of(document)
        return watch.view if watch is not None else None

    def map_of(self, document: Document, lines: tuple[str, ...]) -> LineMap:
        """Map lines of the analysed text to lines of the open file."""
        now = document.lines
        cached = self._maps.get(document.uri)
        if cached is None or cached[0] is not lines or cached[1] is not now:
            cached = lines, now, LineMap(lines, tuple(now))
            self._maps[document.uri] = cached
        return cached[2]

    def placed(self, document: Document, *kinds: str) -> list[tuple[int, Note]]:
        """Return notes with their current lines, from 0, except those of changed lines.

        Args:
            kinds: ``blocks``, ``hints``.
        """
        view = self.view_of(document)
        notes = view.notes.get(document.place) if view is not None else None
        if notes is None:
            return []
        lines = self.map_of(document, notes.lines)
        every = [note for kind in kinds for note in getattr(notes, kind)]
        moved = ((lines.after_of(note.line), note) for note in every)
        return [(line, note) for line, note in moved if line is not None]

    def begin(self, target: str) -> Watch | None:
        """Analyse a workload now and at every save; None if it is not a valid workload."""
        path, colon, function = target.rpartition(":")
        # The command line and the editor may name the same workload differently.
        name = str(Path(path).resolve()) + colon + function if colon else target
        try:
            if name in self._watches:
                self._watches[name].analyst.analyse(again=True)
                return self._watches[name]
            analyst = self._make_analyst(target)
        except SlipstreamError as error:
            self._show_error(error)
            return None
        watch = Watch(analyst, self._changed)
        self._watches[name] = watch
        analyst.watch()
        return watch

    def saved(self, document: Document) -> None:
        """Analyse a saved file immediately, without waiting for the file watcher."""
        watch = self.watch_of(document)
        if watch is not None:
            watch.analyst.analyse()

    def typed(self, document: Document) -> None:
        """Schedule the diagnostics of a changed text for the next pause in typing."""
        if self._loop is None:
            return
        if document.uri in self._pending:
            self._pending[document.uri].cancel()
        self._pending[document.uri] = self._loop.call_later(
            _PAUSE_S, self.diagnoser.publish, document
        )

    def closed(self, uri: str) -> None:
        """Drop the data of a closed file."""
        self._maps.pop(uri, None)
        self.diagnoser.forget(uri)
        if (pending := self._pending.pop(uri, None)) is not None:
            pending.cancel()

    def close(self) -> None:
        """Stop all analyses and pages."""
        for handle in self._pending.values():
            handle.cancel()
        self._pages.close()
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

    def _changed(self) -> None:
        """Schedule a refresh; called in an analyst's thread."""
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self.refresh)
            except RuntimeError:
                return  # the loop was closed in the meantime

    def refresh(self) -> None:
        """Ask the editor to refresh its requests, and publish diagnostics."""
        capabilities = self.client_capabilities.workspace
        if capabilities is not None:
            if capabilities.code_lens and capabilities.code_lens.refresh_support:
                self.workspace_code_lens_refresh(None, _ignore)
            if capabilities.inlay_hint and capabilities.inlay_hint.refresh_support:
                self.workspace_inlay_hint_refresh(None, _ignore)
        for document in self.documents.all():
            self.diagnoser.publish(document)
        for watch in self._watches.values():
            # The file with an error may not be open.
            problem = watch.view.analysis.problem
            if problem is not None and problem.path:
                uri = from_fs_path(problem.path)
                if uri is not None and uri not in self.documents:
                    self.diagnoser.publish(self.documents[uri])

    def started(self) -> None:
        """Start when the editor is ready."""
        self._loop = asyncio.get_running_loop()
        # Import in advance what the first edit needs.
        threading.Thread(target=_warm_up, daemon=True).start()
        if self.target is not None:
            self.begin(self.target)

    async def open_page(self, watch: Watch, *, show: bool) -> str:
        """Serve the live page of a workload, and return its address.

        Args:
            show: whether to open it in a browser.

        Raises:
            JsonRpcException: the page cannot be served; its message has the reason.
        """
        try:
            address = await asyncio.get_running_loop().run_in_executor(
                self.thread_pool, self._pages.address, watch.analyst
            )
        except SlipstreamError as error:
            raise _refused(error) from error
        window = self.client_capabilities.window
        if show and window and window.show_document and window.show_document.support:
            await self.window_show_document_async(
                types.ShowDocumentParams(uri=address, external=True)
            )
        elif show:
            text = f"The live page is at {address}"
            self.window_show_message(types.ShowMessageParams(types.MessageType.Info, text))
        return address

    async def change(self, uri: str, label: str, make: Callable[[str], Edited]) -> dict[str, Any]:
        """Ask the editor to edit an open file.

        Raises:
            JsonRpcException: the edit failed; its message has the reason, the file is unchanged.
        """
        document = self.documents[uri]
        before, seen = document.source, document.version
        request = self.protocol.msg_id
        try:
            edited = await asyncio.get_running_loop().run_in_executor(
                self.thread_pool, make, before
            )
        except SlipstreamError as error:
            raise _refused(error) from error
        if self.protocol.is_cancelled(request):
            raise JsonRpcException("the request was cancelled", _CANCELLED)
        if document.version != seen or document.source != before:
            raise refusal("the text has changed since the request; nothing was edited")
        await self._send(document, edited, label)
        self._undo.setdefault(uri, []).append(edited)
        return {"label": edited.label, "note": edited.note, "version": document.version}

    async def take_back(self, uri: str) -> dict[str, Any]:
        """Undo the last edit of slipstream exactly, if the text has not changed since."""
        document, done = self.documents[uri], self._undo.get(uri, [])
        if not done:
            raise refusal("slipstream has made no edit to undo")
        last = done[-1]
        if document.source != last.after:
            raise refusal("the text has changed since the edit; use the editor's own undo")
        await self._send(document, Edited(last.after, last.before, last.label), "undo")
        done.pop()
        return {"label": last.label, "version": document.version}

    async def _send(self, document: Document, edited: Edited, label: str) -> None:
        changes: list[Any] = [
            types.TextEdit(
                types.Range(position_at(document, span.begin), position_at(document, span.end)),
                span.new,
            )
            for span in spans(edited.before, edited.after)
        ]
        support = self.client_capabilities.workspace
        if support and support.workspace_edit and support.workspace_edit.document_changes:
            identifier = types.OptionalVersionedTextDocumentIdentifier(
                uri=document.uri, version=document.version
            )
            edit = types.WorkspaceEdit(
                document_changes=[types.TextDocumentEdit(identifier, changes)]
            )
        else:
            edit = types.WorkspaceEdit(changes={document.uri: changes})
        answer = await self.workspace_apply_edit_async(
            types.ApplyWorkspaceEditParams(edit=edit, label=f"slipstream: {label}")
        )
        if not answer.applied:
            reason = answer.failure_reason or "it gave no reason"
            raise refusal(f"the editor did not apply the edit: {reason}")

    def _show_error(self, error: SlipstreamError) -> None:
        text = error.what + (f" ({error.remedy})" if error.remedy else "")
        self.window_show_message(types.ShowMessageParams(types.MessageType.Error, text))


def refusal(reason: str) -> JsonRpcException:
    """Return the error response to a request that cannot be served."""
    return JsonRpcException(reason, _REFUSED)


def _refused(error: SlipstreamError) -> JsonRpcException:
    parts = [error.what, *(f"where: {error.where}" for _ in [0] if error.where)]
    parts += [f"try: {error.remedy}"] if error.remedy else []
    return refusal("; ".join(parts))


def _warm_up() -> None:
    from slipstream import technique

    technique.registry()


def _ignore(*_: object) -> None:
    """Ignore the response to a refresh request."""
