"""The files that are open in the editor, as it has them."""

from __future__ import annotations

from urllib.parse import unquote

from lsprotocol import types
from pygls.workspace import Workspace

from slipstream.live.editor.text import Document


class Documents:
    """Open files by address; pygls keeps them up to date as the editor tells of changes.

    pygls' own texts end a line where Python's `splitlines` does: after a form feed an edit would
    land a line too low, or nowhere. So ours stand in their place, under the same addresses.
    """

    def __init__(self) -> None:
        self._workspace = Workspace(None)

    def keep_in(self, workspace: Workspace) -> None:
        """Where pygls keeps open files, from now on."""
        self._workspace = workspace

    def __contains__(self, uri: str) -> bool:
        return unquote(uri) in self._workspace.text_documents

    def __getitem__(self, uri: str) -> Document:
        """The open file; of one that is not, what is on disk."""
        document = self._workspace.text_documents.get(unquote(uri))
        return document if isinstance(document, Document) else self._document(uri)

    def all(self) -> list[Document]:
        """Those that are open."""
        every = self._workspace.text_documents.values()
        return [one for one in every if isinstance(one, Document)]

    def open(self, item: types.TextDocumentItem) -> Document:
        """The editor has opened a file."""
        document = self._document(item.uri, item.text, item.version)
        self._workspace.text_documents[unquote(item.uri)] = document
        return document

    def _document(self, uri: str, text: str | None = None, version: int | None = None) -> Document:
        codec = self._workspace.position_codec
        return Document(uri, source=text, version=version, position_codec=codec)
