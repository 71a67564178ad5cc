"""Request handlers of the language server, over stdin and stdout or one local connection."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lsprotocol import types
from pygls.uris import to_fs_path

from slipstream.live.editor import answers, commands
from slipstream.live.editor.server import EditorServer, MakeAnalyst
from slipstream.live.editor.text import Document

_SWITCH_S = 0.0005


def make_server(make_analyst: MakeAnalyst, target: str | None = None) -> EditorServer:
    """Return a language server that is not connected yet."""
    server = EditorServer(make_analyst, target)

    @server.feature(types.INITIALIZE)
    def initialize(ls: EditorServer, params: types.InitializeParams) -> None:
        ls.documents.keep_in(ls.workspace)
        options = params.initialization_options
        target = getattr(options, "target", None)
        if isinstance(options, dict):
            target = options.get("target")
        if isinstance(target, str) and target:
            ls.target = _absolute(target, params)

    @server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    def inlay_hint(ls: EditorServer, params: types.InlayHintParams) -> list[types.InlayHint]:
        document = _document(ls, params)
        first, last = params.range.start.line, params.range.end.line
        return [hint for hint in answers.hints(ls, document) if first <= hint.position.line <= last]

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(
            code_action_kinds=[types.CodeActionKind.QuickFix, types.CodeActionKind.RefactorRewrite]
        ),
    )
    def code_action(ls: EditorServer, params: types.CodeActionParams) -> list[types.CodeAction]:
        document = _document(ls, params)
        first, last = params.range.start.line, params.range.end.line
        return answers.actions(ls, document, first, last)

    for feature, answer in _ANSWERS.items():
        server.feature(feature)(answer)
    for name, command in commands.COMMANDS.items():
        server.command(name)(command)
    return server


_ANSWERS: Mapping[str, Callable[[EditorServer, Any], Any]] = {
    types.INITIALIZED: lambda ls, _: ls.started(),
    types.SHUTDOWN: lambda ls, _: ls.close(),
    types.TEXT_DOCUMENT_DID_OPEN: lambda ls, params: ls.typed(
        ls.documents.open(params.text_document)
    ),
    types.TEXT_DOCUMENT_DID_CHANGE: lambda ls, params: ls.typed(_document(ls, params)),
    types.TEXT_DOCUMENT_DID_SAVE: lambda ls, params: ls.saved(_document(ls, params)),
    types.TEXT_DOCUMENT_DID_CLOSE: lambda ls, params: ls.closed(params.text_document.uri),
    types.TEXT_DOCUMENT_CODE_LENS: lambda ls, params: answers.lenses(ls, _document(ls, params)),
    types.TEXT_DOCUMENT_HOVER: lambda ls, params: answers.hover(
        ls, _document(ls, params), params.position.line
    ),
}
"""Handlers of requests and notifications that need only the document."""


def _document(ls: EditorServer, params: Any) -> Document:
    return ls.documents[params.text_document.uri]


def _absolute(target: str, params: types.InitializeParams) -> str:
    """Resolve the editor's target relative to its workspace folder."""
    path, colon, function = target.rpartition(":") if ".py:" in target else (target, "", "")
    folders = params.workspace_folders or []
    uri = folders[0].uri if folders else params.root_uri
    root = to_fs_path(uri) if uri else params.root_path
    if root and not Path(path).is_absolute():
        path = str(Path(root) / path)
    return path + colon + function


def serve_stdio(make_analyst: MakeAnalyst, target: str | None = None) -> None:
    """Serve an editor over stdin and stdout until it exits; other output goes to stderr."""
    protocol = os.fdopen(os.dup(1), "wb")
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _serve(make_analyst, target, sys.stdin.buffer, protocol)


def serve_tcp(make_analyst: MakeAnalyst, port: int, target: str | None = None) -> None:
    """Serve the one editor that connects to a local port with the key, until it exits.

    Args:
        port: port on 127.0.0.1; 0 for a free one. The port and the key are printed on stderr.

    Raises:
        SlipstreamError: the port is taken.
    """
    # Imported here because serving over stdin and stdout does not need it.
    from slipstream.live.editor.admission import wait_for_editor
    from slipstream.loopback import HOST, listen, new_key

    key = new_key()
    with listen(port, 0) as listening:
        print(
            f"waiting for an editor on {HOST}:{listening.getsockname()[1]}, "
            f'with {{"key": "{key}"}} in its initializationOptions',
            file=sys.stderr,
            flush=True,
        )
        connection, requests = wait_for_editor(listening, key)
    # The port is now closed, so that a second editor cannot connect.
    with connection, requests, connection.makefile("wb") as answers:
        _serve(make_analyst, target, requests, answers)


def _serve(
    make_analyst: MakeAnalyst, target: str | None, requests: BinaryIO, answers: BinaryIO
) -> None:
    # Let answers run ahead of the threads that process analyses.
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("pygls").setLevel(logging.ERROR)
    server = make_server(make_analyst, target)
    try:
        server.start_io(stdin=requests, stdout=answers)
    finally:
        server.close()
