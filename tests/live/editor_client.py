"""A language client for tests: pygls' client plus the behaviour of an editor."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
import textwrap
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types
from pygls.lsp.client import LanguageClient

T = TypeVar("T")
# Only a limit for hanging tests.
PATIENCE_S = 300.0
# Enough to get a recording; later states are covered elsewhere.
BRIEFLY = ("--threads", "1", "--steps", "1", "--no-what-if", "--no-batches")


class Editor:
    """An editor with one open file: it stores the text, applies edits, and collects messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = path.as_uri()
        self.text = ""
        self.version = 0
        self.client = LanguageClient("editor", "1")
        self.diagnostics: dict[str, list[types.Diagnostic]] = {}
        self.asked_again = 0
        self.messages: list[str] = []
        self.refuse: str | None = None
        self.labels: list[str] = []
        self._changed = asyncio.Condition()
        self._listen()

    def _listen(self) -> None:
        client = self.client

        @client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        async def publish(params: types.PublishDiagnosticsParams) -> None:
            self.diagnostics[params.uri] = list(params.diagnostics)
            await self._notify()

        @client.feature(types.WORKSPACE_CODE_LENS_REFRESH)
        async def refresh(params: Any) -> None:
            self.asked_again += 1
            await self._notify()

        @client.feature(types.WORKSPACE_INLAY_HINT_REFRESH)
        async def hints(params: Any) -> None:
            await self._notify()

        @client.feature(types.WINDOW_SHOW_MESSAGE)
        async def show(params: types.ShowMessageParams) -> None:
            self.messages.append(params.message)
            await self._notify()

        @client.feature(types.WORKSPACE_APPLY_EDIT)
        def apply(params: types.ApplyWorkspaceEditParams) -> types.ApplyWorkspaceEditResult:
            self.labels.append(params.label or "")
            (change,) = params.edit.document_changes or []
            assert isinstance(change, types.TextDocumentEdit)
            if self.refuse is not None or change.text_document.version != self.version:
                return types.ApplyWorkspaceEditResult(False, self.refuse or "another version")
            edits = [
                text_edit for text_edit in change.edits if isinstance(text_edit, types.TextEdit)
            ]
            for edit in sorted(edits, key=lambda e: _key(e.range.start), reverse=True):
                self.type(edit.range, edit.new_text)
            return types.ApplyWorkspaceEditResult(True)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @property
    def marks(self) -> list[types.Diagnostic]:
        """Return the diagnostics of the open file."""
        return self.diagnostics.get(self.uri, [])

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until messages of the server make `ready` true."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(ready), PATIENCE_S)

    async def start(self, *arguments: str, options: Any = None, **environment: str) -> None:
        """Start the server as an editor does."""
        await self.client.start_io(
            sys.executable, "-m", "slipstream", "lsp", *arguments,
            env={**os.environ, **environment},
        )  # fmt: skip
        await self.initialize(options)

    async def initialize(self, options: Any = None) -> types.InitializeResult:
        """The handshake."""
        refresh = types.CodeLensWorkspaceClientCapabilities(refresh_support=True)
        capabilities = types.ClientCapabilities(
            workspace=types.WorkspaceClientCapabilities(
                apply_edit=True,
                workspace_edit=types.WorkspaceEditClientCapabilities(document_changes=True),
                code_lens=refresh,
                inlay_hint=types.InlayHintWorkspaceClientCapabilities(refresh_support=True),
            )
        )
        found = await self.client.initialize_async(
            types.InitializeParams(
                capabilities=capabilities,
                root_uri=self.path.parent.as_uri(),
                initialization_options=options,
            )
        )
        self.client.initialized(types.InitializedParams())
        return found

    def open(self) -> None:
        """Open the file."""
        self.text = self.path.read_bytes().decode()
        self.version = 1
        item = types.TextDocumentItem(self.uri, types.LanguageKind.Python, 1, self.text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def type(self, where: types.Range, text: str) -> None:
        """Replace a range, counted in UTF-16, as an editor does on typing."""
        begin, end = offset(self.text, where.start), offset(self.text, where.end)
        self.text = self.text[:begin] + text + self.text[end:]
        self.version += 1
        self.client.text_document_did_change(
            types.DidChangeTextDocumentParams(
                types.VersionedTextDocumentIdentifier(version=self.version, uri=self.uri),
                [types.TextDocumentContentChangePartial(text=text, range=where)],
            )
        )

    def save(self) -> None:
        """Write the file, and notify the server."""
        self.path.write_bytes(self.text.encode())
        self.client.text_document_did_save(
            types.DidSaveTextDocumentParams(types.TextDocumentIdentifier(self.uri))
        )

    @property
    def document(self) -> types.TextDocumentIdentifier:
        return types.TextDocumentIdentifier(self.uri)

    async def lenses(self) -> dict[int, list[str]]:
        """Return titles by line."""
        found = await self.client.text_document_code_lens_async(types.CodeLensParams(self.document))
        titles: dict[int, list[str]] = {}
        for lens in found or ():
            assert lens.command is not None
            titles.setdefault(lens.range.start.line, []).append(lens.command.title)
        return titles

    async def hints(self) -> dict[int, types.InlayHint]:
        """Return hints by line."""
        whole = types.Range(types.Position(0, 0), types.Position(10_000, 0))
        found = await self.client.text_document_inlay_hint_async(
            types.InlayHintParams(self.document, whole)
        )
        return {hint.position.line: hint for hint in found or ()}

    async def hover(self, line: int, character: int = 0) -> str:
        found = await self.client.text_document_hover_async(
            types.HoverParams(self.document, types.Position(line, character))
        )
        if found is None:
            return ""
        assert isinstance(found.contents, types.MarkupContent)
        return found.contents.value

    async def actions(self, line: int) -> Sequence[types.CodeAction]:
        where = types.Range(types.Position(line, 0), types.Position(line, 0))
        found = await self.client.text_document_code_action_async(
            types.CodeActionParams(self.document, where, types.CodeActionContext([]))
        )
        return [_as_action(action) for action in found or ()]

    async def run(self, command: str, *arguments: Any) -> Any:
        return await self.client.workspace_execute_command_async(
            types.ExecuteCommandParams(command, list(arguments))
        )

    async def state(self) -> str:
        found = await self.run("slipstream.show", self.uri)
        return "" if found is None else str(found["state"])

    async def until_state(self, *states: str) -> str:
        """Wait until the analysis is in one of these states."""
        while (state := await self.state()) not in states:
            seen = self.asked_again
            await self.until(lambda seen=seen: self.asked_again != seen)  # type: ignore[misc]
        return state

    async def leave(self) -> None:
        """Shut the server down as an editor does."""
        await asyncio.wait_for(self.client.shutdown_async(None), PATIENCE_S)
        self.client.exit(None)
        await asyncio.wait_for(self.client.stop(), PATIENCE_S)


class Session:
    """An editor and its event loop, in the thread of the test."""

    def __init__(self, path: Path, text: str) -> None:
        path.write_bytes(textwrap.dedent(text).lstrip().encode())
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.editor = Editor(path)

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        """Run the loop until it is done."""
        return self.loop.run_until_complete(asyncio.wait_for(what, PATIENCE_S))

    def line(self, text: str) -> int:
        """The number, from 0, of the line with this text."""
        lines = self.editor.text.split("\n")
        return next(i for i, line in enumerate(lines) if text in line)

    def end(self) -> None:
        self.do(self.editor.leave())
        self.loop.close()


def started(path: Path, text: str, *arguments: str, function: str = "make_workload") -> Session:
    """Return a server that analyses `function` of an open file with this text."""
    session = Session(path, text)
    session.do(session.editor.start(f"{path}:{function}", *BRIEFLY, *arguments))
    session.editor.open()
    return session


def offset(text: str, position: types.Position) -> int:
    """Return the number of characters before a position in lines and UTF-16 units."""
    begin = 0
    for _ in range(position.line):
        begin = min(
            (text.find(end, begin) + len(end) for end in ("\r\n", "\n") if end in text[begin:]),
            default=len(text),
        )
    units = text[begin:].encode("utf-16-le")[: 2 * position.character]
    return begin + len(units.decode("utf-16-le"))


def _as_action(found: types.Command | types.CodeAction) -> types.CodeAction:
    """pygls' client takes any action with a command for the command itself."""
    if isinstance(found, types.CodeAction):
        return found
    return types.CodeAction(
        title=found.title, command=types.Command(**ast.literal_eval(found.command))
    )


def _key(position: types.Position) -> tuple[int, int]:
    return position.line, position.character
