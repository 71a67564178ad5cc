"""Open files and their texts as the protocol counts them: lines, units of UTF-16, edits."""

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

# Python's splitlines() knows more ends of lines than the protocol and Python's own parser do.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
# Of lines that differ: more are not compared one by one, since that takes their square.
_MOST_COMPARED = 400


def lines_of(text: str) -> tuple[str, ...]:
    """The lines of a text with their ends, as the protocol counts them."""
    return tuple(_LINE.findall(text))


class Document(TextDocument):
    """An open file. Its `lines` end where the protocol says; they are split once a version."""

    _split: tuple[str | None, tuple[str, ...]] = (None, ())

    @cached_property
    def place(self) -> str:
        """Where the file is, absolute and without links, as an analysis names it."""
        return str(Path(self.path).resolve())

    @property
    def lines(self) -> Sequence[str]:
        """The lines with their ends."""
        text = self.source
        if self._split[0] is not text:
            self._split = text, lines_of(text)
        return self._split[1]


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


@dataclass(frozen=True)
class LineMap:
    """Which line of one text is which of another, where it is the same line.

    Attributes:
        before, after: lines of both.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]

    @cached_property
    def _found(self) -> dict[int, int]:
        before, after = self.before, self.after
        head, tail = _common_ends(before, after)
        after_of = {i: i for i in range(head)}
        shift = len(after) - len(before)
        after_of.update({i: i + shift for i in range(len(before) - tail, len(before))})
        old, new = before[head : len(before) - tail], after[head : len(after) - tail]
        if max(len(old), len(new)) <= _MOST_COMPARED:
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            for a, b, size in matcher.get_matching_blocks():
                after_of.update({head + a + k: head + b + k for k in range(size)})
        return after_of

    def after_of(self, line: int) -> int | None:
        """Where line `line` (from 0) is now; None where it was changed or is gone."""
        return self._found.get(line)


@dataclass(frozen=True)
class Span:
    """A replacement: characters ``begin`` to ``end`` of a text become ``new``."""

    begin: int
    end: int
    new: str


def spans(before: str, after: str) -> list[Span]:
    """The least replacements, line by line, that make `after` of `before`; in order."""
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
    """A replacement without what both texts begin and end with."""
    head, tail = _common_ends(old, new)
    # Half of a line's end is no place for an editor's cursor.
    while head and old[head - 1] == "\r":
        head -= 1
    while tail and old[len(old) - tail] == "\n" and old[len(old) - tail - 1 :][:1] == "\r":
        tail -= 1
    return Span(begin + head, begin + len(old) - tail, new[head : len(new) - tail])


def _common_ends(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """How many elements both begin with, and of the rest, end with."""
    shortest = min(len(one), len(other))
    head = 0
    while head < shortest and one[head] == other[head]:
        head += 1
    tail = 0
    while tail < shortest - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head, tail


def position_at(document: Document, offset: int) -> types.Position:
    """The protocol's position of a character of an open file."""
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
    """The protocol's range of a line (from 0) without its indentation and its end."""
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
