"""Open files, their lines and positions as the protocol counts them, and edits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from lsprotocol import types
from pygls.workspace import ServerTextPosition, TextDocument, Workspace

# str.splitlines() splits at more characters than the protocol and Python's own parser.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
# Maximum number of changed lines to match individually, since that takes quadratic time.
_MAX_COMPARED = 400


def lines_of(text: str) -> tuple[str, ...]:
    """Return the lines of a text with line ends, as the protocol counts them."""
    return tuple(_LINE.findall(text))


class Document(TextDocument):
    """An open file with `lines` as the protocol counts them, split once per version."""

    _split: tuple[str | None, tuple[str, ...]] = (None, ())

    @cached_property
    def place(self) -> str:
        """Absolute path of the file without links, as in an analysis."""
        return str(Path(self.path).resolve())

    @property
    def lines(self) -> Sequence[str]:
        """Lines with line ends."""
        text = self.source
        if self._split[0] is not text:
            self._split = text, lines_of(text)
        return self._split[1]


class Documents:
    """Open files by URI, which pygls updates with the editor's changes.

    pygls' own documents split lines like `str.splitlines`: after a form feed, an edit would be a
    line too low, or fail. `Document` replaces them, under the same URIs.
    """

    def __init__(self) -> None:
        self._workspace = Workspace(None)

    def keep_in(self, workspace: Workspace) -> None:
        """Use the workspace in which pygls stores open files."""
        self._workspace = workspace

    def __contains__(self, uri: str) -> bool:
        return unquote(uri) in self._workspace.text_documents

    def __getitem__(self, uri: str) -> Document:
        """Return the open file, or the file on disk if it is not open."""
        document = self._workspace.text_documents.get(unquote(uri))
        return document if isinstance(document, Document) else self._document(uri)

    def all(self) -> list[Document]:
        """Return all open files."""
        documents = self._workspace.text_documents.values()
        return [document for document in documents if isinstance(document, Document)]

    def open(self, item: types.TextDocumentItem) -> Document:
        """Add a file that the editor has opened."""
        document = self._document(item.uri, item.text, item.version)
        self._workspace.text_documents[unquote(item.uri)] = document
        return document

    def _document(self, uri: str, text: str | None = None, version: int | None = None) -> Document:
        codec = self._workspace.position_codec
        return Document(uri, source=text, version=version, position_codec=codec)


@dataclass(frozen=True)
class LineMap:
    """Mapping from the lines of one text to the unchanged lines of another.

    Attributes:
        before, after: lines of both texts.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]

    @cached_property
    def _lines_after(self) -> dict[int, int]:
        before, after = self.before, self.after
        head, tail = _common_ends(before, after)
        after_of = {i: i for i in range(head)}
        shift = len(after) - len(before)
        after_of.update({i: i + shift for i in range(len(before) - tail, len(before))})
        old, new = before[head : len(before) - tail], after[head : len(after) - tail]
        if max(len(old), len(new)) <= _MAX_COMPARED:
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            for a, b, size in matcher.get_matching_blocks():
                after_of.update({head + a + k: head + b + k for k in range(size)})
        return after_of

    def after_of(self, line: int) -> int | None:
        """Return the new number of `line`, from 0; None if it was changed or deleted."""
        return self._lines_after.get(line)


@dataclass(frozen=True)
class Span:
    """Replacement of the characters ``begin`` to ``end`` of a text by ``new``."""

    begin: int
    end: int
    new: str


def spans(before: str, after: str) -> list[Span]:
    """Return the smallest replacements, line by line, from `before` to `after`, in order."""
    old, new = lines_of(before), lines_of(after)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line))
    replacements = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            replacements.append(_trimmed(starts[a], "".join(old[a:b]), "".join(new[c:d])))
    return replacements


def _trimmed(begin: int, old: str, new: str) -> Span:
    """Return the replacement without the common prefix and suffix of both texts."""
    head, tail = _common_ends(old, new)
    # A position between \r and \n is not valid in an editor.
    while head and old[head - 1] == "\r":
        head -= 1
    while tail and old[len(old) - tail] == "\n" and old[len(old) - tail - 1 :][:1] == "\r":
        tail -= 1
    return Span(begin + head, begin + len(old) - tail, new[head : len(new) - tail])


def _common_ends(left: Sequence[str], right: Sequence[str]) -> tuple[int, int]:
    """Return the lengths of the common prefix and of the common suffix after it."""
    shortest = min(len(left), len(right))
    head = 0
    while head < shortest and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < shortest - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    return head, tail


def position_at(document: Document, offset: int) -> types.Position:
    """Return the protocol's position of a character offset in an open file."""
    lines, row = document.lines, 0
    while row < len(lines) and offset >= len(lines[row]):
        if row == len(lines) - 1 and not lines[row].endswith(("\r", "\n")):
            break
        offset -= len(lines[row])
        row += 1
    if row == len(lines):
        return types.Position(row, 0)
    return document.position_to_client_units(ServerTextPosition(row, offset))


def line_range(document: Document, line: int) -> types.Range:
    """Return the protocol's range of a line, from 0, without indentation and line end."""
    lines = document.lines
    if not lines:
        return types.Range(types.Position(0, 0), types.Position(0, 0))
    line = min(max(line, 0), len(lines) - 1)
    text = lines[line].rstrip("\r\n")
    begin = len(text) - len(text.lstrip())
    return types.Range(
        document.position_to_client_units(ServerTextPosition(line, min(begin, len(text)))),
        document.position_to_client_units(ServerTextPosition(line, len(text))),
    )
