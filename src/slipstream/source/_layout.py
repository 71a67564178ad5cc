"""Byte offsets of lines, tokens and logical lines in the UTF-8 form of a Python text."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_right
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_LAYOUT = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Token:
    """A token that is not layout, with its span."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class LogicalLine:
    """One or more simple statements, or the head of a block (and statements on the same line).

    Attributes:
        tokens: those without comments and line ends.
        end: start of the next physical line, or the end of the text.
    """

    tokens: tuple[Token, ...]
    end: int


class Layout:
    """Spans in `text`; columns are those of `ast`, which counts UTF-8 bytes.

    Raises:
        SyntaxError: the text is not valid Python.
    """

    def __init__(self, text: str) -> None:
        self.body = text.encode()
        ends = list(_LINE_END.finditer(self.body))
        self._starts = [0, *(end.end() for end in ends)]
        self._ends = [end.group().decode() for end in ends]
        # Python reads every line end as a line feed.
        normal = _LINE_END.sub(b"\n", self.body).decode()
        self.tree = ast.parse(normal)
        self._lines = [line + "\n" for line in normal.split("\n")]
        self.strings: list[tuple[int, int]] = []
        """Spans of string literals."""
        self.comments: list[Token] = []
        self.logical: list[LogicalLine] = []
        self._tokenise(normal)
        self._logical_starts = [line.tokens[0].start for line in self.logical]

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a position of `ast`: lines from 1, columns in bytes from 0."""
        return self._starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the start and end of a node with its decorators."""
        first: ast.AST = node
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            first = decorators[0]
        start = self.offset(first.lineno, first.col_offset)  # type: ignore[attr-defined]
        if decorators:
            # The at sign precedes the decorator's expression.
            start = self.body.rindex(b"@", 0, start)
        return start, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def line_of(self, offset: int) -> int:
        """Return the number of the physical line, from 1."""
        return bisect_right(self._starts, offset)

    def line_start(self, offset: int) -> int:
        """Return the start of the physical line that holds `offset`."""
        return self._starts[self.line_of(offset) - 1]

    def content_end(self, offset: int) -> int:
        """Return the end of the physical line that holds `offset`, without its line end."""
        line = self.line_of(offset)
        if line - 1 < len(self._ends):
            return self._starts[line] - len(self._ends[line - 1])
        return len(self.body)

    def newline(self, offset: int) -> str:
        """Return the line end of this line; if it has none, that of the file's first line."""
        line = self.line_of(offset)
        if line - 1 < len(self._ends):
            return self._ends[line - 1]
        return self._ends[0] if self._ends else "\n"

    def indent(self, offset: int) -> str:
        """Return the whitespace at the start of the physical line."""
        start = self.line_start(offset)
        line = self.body[start : self.content_end(offset)]
        return line[: len(line) - len(line.lstrip(b" \t\f"))].decode()

    def logical_line(self, offset: int) -> LogicalLine:
        """Return the logical line that holds `offset`."""
        return self.logical[bisect_right(self._logical_starts, offset) - 1]

    def in_string(self, offset: int) -> bool:
        """Whether a byte inserted at `offset` would become part of a string literal."""
        return any(start < offset < end for start, end in self.strings)

    def _tokenise(self, normal: str) -> None:
        tokens: list[Token] = []
        depth, opened = 0, 0
        fstring_start = getattr(tokenize, "FSTRING_START", -1)
        fstring_end = getattr(tokenize, "FSTRING_END", -1)
        lines = io.StringIO(normal, newline="\n")
        for token in tokenize.generate_tokens(lines.readline):
            start, end = self._place(*token.start), self._place(*token.end)
            if token.type == tokenize.NEWLINE:
                line = token.start[0]
                after = self._starts[line] if line < len(self._starts) else len(self.body)
                if tokens:
                    self.logical.append(LogicalLine(tuple(tokens), after))
                tokens = []
                continue
            if token.type == tokenize.COMMENT:
                self.comments.append(Token(token.string, start, end))
            if token.type in _LAYOUT:
                continue
            tokens.append(Token(token.string, start, end))
            if token.type == tokenize.STRING:
                self.strings.append((start, end))
            elif token.type == fstring_start:
                opened = opened if depth else start
                depth += 1
            elif token.type == fstring_end:
                depth -= 1
                if not depth:
                    self.strings.append((opened, end))

    def _place(self, line: int, column: int) -> int:
        if line > len(self._starts):
            return len(self.body)
        text = self._lines[line - 1]
        # The tokenizer counts characters.
        before = column if text.isascii() else len(text[:column].encode())
        return min(self._starts[line - 1] + before, len(self.body))
