"""The protocol's requests, each answered from what is known without waiting for anything.

They arrive over stdin and stdout, or over one connection of this machine.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import BinaryIO

from lsprotocol import types
from pygls.uris import to_fs_path

from slipstream.live.editor import answers, commands
from slipstream.live.editor.server import EditorServer, MakeAnalyst

_SWITCH_S = 0.0005


def make_server(make_analyst: MakeAnalyst, target: str | None = None) -> EditorServer:
    """A server that answers editors, not connected yet."""
    server = EditorServer(make_analyst, target)

    @server.feature(types.INITIALIZE)
    def initialize(ls: EditorServer, params: types.InitializeParams) -> None:
        ls.documents.keep_in(ls.workspace)
        options = params.initialization_options
        target = getattr(options, "target", None)
        if isinstance(options, dict):
            target = options.get("target")
        if isinstance(target, str) and target:
            ls.target = _beside(target, params)

    @server.feature(types.INITIALIZED)
    def initialized(ls: EditorServer, params: types.InitializedParams) -> None:
        ls.started()

    @server.feature(types.SHUTDOWN)
    def shutdown(ls: EditorServer, params: None) -> None:
        ls.close()

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def did_open(ls: EditorServer, params: types.DidOpenTextDocumentParams) -> None:
        ls.typed(ls.documents.open(params.text_document))

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(ls: EditorServer, params: types.DidChangeTextDocumentParams) -> None:
        ls.typed(ls.documents[params.text_document.uri])

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def did_save(ls: EditorServer, params: types.DidSaveTextDocumentParams) -> None:
        ls.saved(ls.documents[params.text_document.uri])

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(ls: EditorServer, params: types.DidCloseTextDocumentParams) -> None:
        ls.closed(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_CODE_LENS)
    def code_lens(ls: EditorServer, params: types.CodeLensParams) -> list[types.CodeLens]:
        document = ls.documents[params.text_document.uri]
        return answers.lenses(ls, document)

    @server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    def inlay_hint(ls: EditorServer, params: types.InlayHintParams) -> list[types.InlayHint]:
        document = ls.documents[params.text_document.uri]
        first, last = params.range.start.line, params.range.end.line
        return [one for one in answers.hints(ls, document) if first <= one.position.line <= last]

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(ls: EditorServer, params: types.HoverParams) -> types.Hover | None:
        document = ls.documents[params.text_document.uri]
        return answers.hover(ls, document, params.position.line)

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(
            code_action_kinds=[types.CodeActionKind.QuickFix, types.CodeActionKind.RefactorRewrite]
        ),
    )
    def code_action(ls: EditorServer, params: types.CodeActionParams) -> list[types.CodeAction]:
        document = ls.documents[params.text_document.uri]
        first, last = params.range.start.line, params.range.end.line
        return answers.actions(ls, document, first, last)

    for name, command in commands.COMMANDS.items():
        server.command(name)(command)
    return server


def _beside(target: str, params: types.InitializeParams) -> str:
    """A target in the editor's words, from its folder."""
    path, colon, function = target.rpartition(":") if ".py:" in target else (target, "", "")
    folders = params.workspace_folders or []
    uri = folders[0].uri if folders else params.root_uri
    root = to_fs_path(uri) if uri else params.root_path
    if root and not Path(path).is_absolute():
        path = str(Path(root) / path)
    return path + colon + function


def serve_stdio(make_analyst: MakeAnalyst, target: str | None = None) -> None:
    """Serve an editor over stdin and stdout until it leaves; what others print goes to stderr."""
    protocol = os.fdopen(os.dup(1), "wb")
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _serve(make_analyst, target, sys.stdin.buffer, protocol)


def serve_tcp(make_analyst: MakeAnalyst, port: int, target: str | None = None) -> None:
    """Serve the one editor that connects to a port of this machine, until it leaves.

    Args:
        port: 0 for a free one; which it is, stderr tells.

    Raises:
        SlipstreamError: the port is taken.
    """
    # Here: over stdin and stdout nothing of the page's server is needed.
    from slipstream.live.server import HOST, listen

    with listen(port) as listening:
        print(f"waiting for an editor on {HOST}:{listening.getsockname()[1]}", file=sys.stderr)
        connection, _ = listening.accept()
    # Nobody listens from here on: a second editor's connection is refused.
    with connection, connection.makefile("rb") as requests, connection.makefile("wb") as answers:
        _serve(make_analyst, target, requests, answers)


def _serve(
    make_analyst: MakeAnalyst, target: str | None, requests: BinaryIO, answers: BinaryIO
) -> None:
    # Answers pass the threads that hear of analyses.
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("pygls").setLevel(logging.ERROR)
    server = make_server(make_analyst, target)
    try:
        server.start_io(stdin=requests, stdout=answers)
    finally:
        server.close()
