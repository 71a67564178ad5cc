"""The protocol's requests, each answered from what is known without waiting for anything."""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types
from pygls.uris import to_fs_path

from slipstream.live.editor import answers, commands
from slipstream.live.editor.server import EditorServer, MakeAnalyst


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
