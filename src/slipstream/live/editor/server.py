"""The server's state: what is open, what is analysed and served, and the edits it has made."""

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
# While somebody types, a text is looked at when this long nothing was typed.
_PAUSE_S = 0.3
# An edit takes a moment; what was cancelled before the last so many is over.
_REMEMBERED = 256
MakeAnalyst = Callable[[str], Analyst]


class Protocol(LanguageServerProtocol):
    """pygls' protocol, which also remembers what the editor cancelled.

    pygls cancels what it waits for itself; a command goes on in a task of its own, untold.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._cancelled: deque[int | str] = deque(maxlen=_REMEMBERED)

    def handle_message(self, message: Any) -> None:
        """Do what the editor says."""
        if isinstance(message, types.CancelNotification):
            self._cancelled.append(message.params.id)
        super().handle_message(message)

    def is_cancelled(self, request: int | str | None) -> bool:
        """Whether the editor does not want this request's answer any more."""
        return request in self._cancelled


class Pages:
    """Serves the page of an analyst from when it is first asked for. Thread-safe."""

    def __init__(self) -> None:
        self._served: dict[int, str] = {}
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()

    def address(self, analyst: Analyst) -> str:
        """Where the page is, with the key of this session.

        Raises:
            SlipstreamError: as `slipstream.live.server.serving`.
        """
        # Here: an editor that shows no page need not wait for what serves it.
        from slipstream.live.server import serving

        with self._lock:
            if id(analyst) not in self._served:
                live = self._open.enter_context(serving(analyst))
                self._served[id(analyst)] = live.address
            return self._served[id(analyst)]

    def close(self) -> None:
        """Serve them no more."""
        with self._lock:
            self._open.close()
            self._served.clear()


class EditorServer(LanguageServer):
    """Costs, advice and edits of workloads, for one editor.

    Args:
        make_analyst: makes the analyst of ``file.py:function``; may raise a `SlipstreamError`.
        target: what to analyse from the beginning; None: what the editor's user asks for.
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

    # What is known of an open file.

    @property
    def watches(self) -> list[Watch]:
        """The workloads that are analysed."""
        return list(self._watches.values())

    def own_watch(self, document: Document) -> Watch | None:
        """The analysed workload whose file this is."""
        of_path = (one for one in self._watches.values() if one.path == document.place)
        return next(of_path, None)

    def watch_of(self, document: Document) -> Watch | None:
        """The workload that has something to say of a file: its own first."""
        others = (one for one in self._watches.values() if document.place in one.view.notes)
        return self.own_watch(document) or next(others, None)

    def view_of(self, document: Document) -> View | None:
        """What is known of the file's workload; None where nothing is analysed."""
        watch = self.watch_of(document)
        return watch.view if watch is not None else None

    def map_of(self, document: Document, lines: tuple[str, ...]) -> LineMap:
        """Where the lines of the analysed text are in the open file."""
        now = document.lines
        known = self._maps.get(document.uri)
        if known is None or known[0] is not lines or known[1] is not now:
            known = lines, now, LineMap(lines, tuple(now))
            self._maps[document.uri] = known
        return known[2]

    def placed(self, document: Document, *kinds: str) -> list[tuple[int, Note]]:
        """Notes with the line, from 0, where each belongs now; not those of changed lines.

        Args:
            kinds: ``blocks``, ``hints``.
        """
        view = self.view_of(document)
        notes = view.notes.get(document.place) if view is not None else None
        if notes is None:
            return []
        lines = self.map_of(document, notes.lines)
        every = ((lines.after_of(one.line), one) for kind in kinds for one in getattr(notes, kind))
        return [(line, note) for line, note in every if line is not None]

    # Analyses.

    def begin(self, target: str) -> Watch | None:
        """Analyse a workload now and whenever it is saved; None where it cannot be one."""
        path, colon, function = target.rpartition(":")
        # On the command line and in the editor the same workload has different names.
        name = str(Path(path).resolve()) + colon + function if colon else target
        try:
            if name in self._watches:
                self._watches[name].analyst.analyse(again=True)
                return self._watches[name]
            analyst = self._make_analyst(target)
        except SlipstreamError as error:
            self._say_error(error)
            return None
        watch = Watch(analyst, self._changed)
        self._watches[name] = watch
        analyst.watch()
        return watch

    def saved(self, document: Document) -> None:
        """A file was saved: look at once, without waiting for whoever looks at files."""
        watch = self.watch_of(document)
        if watch is not None:
            watch.analyst.analyse()

    def typed(self, document: Document) -> None:
        """A file's text changed: look at it when there is a pause."""
        if self._loop is None:
            return
        if document.uri in self._pending:
            self._pending[document.uri].cancel()
        self._pending[document.uri] = self._loop.call_later(
            _PAUSE_S, self.diagnoser.publish, document
        )

    def closed(self, uri: str) -> None:
        """A file is not open any more."""
        self._maps.pop(uri, None)
        self.diagnoser.forget(uri)
        if (pending := self._pending.pop(uri, None)) is not None:
            pending.cancel()

    def close(self) -> None:
        """End all analyses."""
        for handle in self._pending.values():
            handle.cancel()
        self._pages.close()
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

    def _changed(self) -> None:
        """Something new is known; called in an analyst's thread."""
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self.refresh)
            except RuntimeError:
                return  # closed just now

    def refresh(self) -> None:
        """Have the editor ask again, and publish diagnostics."""
        capabilities = self.client_capabilities.workspace
        if capabilities is not None:
            if capabilities.code_lens and capabilities.code_lens.refresh_support:
                self.workspace_code_lens_refresh(None, _ignore)
            if capabilities.inlay_hint and capabilities.inlay_hint.refresh_support:
                self.workspace_inlay_hint_refresh(None, _ignore)
        for document in self.documents.all():
            self.diagnoser.publish(document)
        for watch in self._watches.values():
            # A file with an error may not be open.
            problem = watch.view.analysis.problem
            if problem is not None and problem.path:
                uri = from_fs_path(problem.path)
                if uri is not None and uri not in self.documents:
                    self.diagnoser.publish(self.documents[uri])

    def started(self) -> None:
        """The editor is ready."""
        self._loop = asyncio.get_running_loop()
        # What a first edit would import, while nobody waits for it.
        threading.Thread(target=_warm_up, daemon=True).start()
        if self.target is not None:
            self.begin(self.target)

    async def open_page(self, watch: Watch, *, show: bool) -> str:
        """Serve the live page of a workload; its address.

        Args:
            show: whether to open it in a browser.

        Raises:
            JsonRpcException: it cannot be served, with the reason.
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

    # Edits.

    async def change(self, uri: str, label: str, make: Callable[[str], Edited]) -> dict[str, Any]:
        """Have the editor edit an open file.

        Raises:
            JsonRpcException: it cannot be done, with the reason; then the file is as it was.
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
            raise refusal("the text was changed meanwhile; nothing was edited")
        await self._send(document, edited, label)
        self._undo.setdefault(uri, []).append(edited)
        return {"label": edited.label, "note": edited.note, "version": document.version}

    async def take_back(self, uri: str) -> dict[str, Any]:
        """Undo the last edit of ours, to the byte, if nothing was changed since."""
        document, done = self.documents[uri], self._undo.get(uri, [])
        if not done:
            raise refusal("there is no edit of slipstream's to take back")
        last = done[-1]
        if document.source != last.after:
            raise refusal("the text was changed since; use the editor's own undo")
        await self._send(document, Edited(last.after, last.before, last.label), "undo")
        done.pop()
        return {"label": last.label, "version": document.version}

    async def _send(self, document: Document, edited: Edited, label: str) -> None:
        changes: list[Any] = [
            types.TextEdit(
                types.Range(position_at(document, one.begin), position_at(document, one.end)),
                one.new,
            )
            for one in spans(edited.before, edited.after)
        ]
        can = self.client_capabilities.workspace
        if can and can.workspace_edit and can.workspace_edit.document_changes:
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

    def _say_error(self, error: SlipstreamError) -> None:
        text = error.what + (f" ({error.remedy})" if error.remedy else "")
        self.window_show_message(types.ShowMessageParams(types.MessageType.Error, text))


def refusal(reason: str) -> JsonRpcException:
    """What answers a wish that cannot be met."""
    return JsonRpcException(reason, _REFUSED)


def _refused(error: SlipstreamError) -> JsonRpcException:
    parts = [error.what, *(f"where: {error.where}" for _ in [0] if error.where)]
    parts += [f"try: {error.remedy}"] if error.remedy else []
    return refusal("; ".join(parts))


def _warm_up() -> None:
    from slipstream import technique

    technique.registry()


def _ignore(*_: object) -> None:
    """An editor's answer to a request to ask again says nothing."""
