"""`Source`: one Python file and its edits, each a span of bytes and the replacement."""

from __future__ import annotations

import ast
import codecs
import difflib
import io
import re
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from slipstream.errors import SlipstreamError, WorkloadError
from slipstream.source._layout import Layout, LogicalLine
from slipstream.source._names import Function, Names, default_of

_CONTEXT_LINES = 3
_DEFAULT_STEP = "    "
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


class EditLocationError(SlipstreamError):
    """The place of an edit cannot be determined; the message names what was missing."""


class AlreadyAppliedError(SlipstreamError):
    """The source already has the effect of the edit."""


@dataclass(frozen=True)
class Source:
    """A Python file on disk and its pending edits; immutable.

    Every edit returns a new `Source` and takes nodes of `tree`, which remains that of the unedited
    text, so that edits may be chained while they do not overlap. `reparse` starts again from the
    edited text.

    Attributes:
        path: the file, as the user named it.
        original: the file's bytes as read; `diff` starts from them.
        encoding: that of the file, by its coding line or byte order mark.
    """

    path: Path
    original: bytes = field(repr=False)
    encoding: str
    _base: str = field(repr=False)
    _edits: tuple[tuple[int, int, str], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read the file at `path`.

        Raises:
            WorkloadError: it cannot be read or is not valid Python.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WorkloadError(
                f"'{path}' cannot be read: {error.strerror}", remedy="check the path"
            ) from error
        return cls.of(content, path)

    @classmethod
    def of(cls, content: bytes, path: Path) -> Source:
        """Return a file with these bytes.

        Raises:
            WorkloadError: it is not valid Python, or its encoding cannot be determined.
        """
        try:
            encoding = _encoding(content)
            text = content.decode(encoding)
            if text.encode(encoding) != content:
                raise ValueError(f"its encoding {encoding} has several forms of one text")
            source = cls(path, content, encoding, text)
            _ = source._layout
        except (SyntaxError, ValueError, tokenize.TokenError) as error:
            line = getattr(error, "lineno", None)
            raise WorkloadError(
                f"Python cannot parse the file: {getattr(error, 'msg', None) or error}",
                where=f"{path}:{line}" if line else str(path),
                remedy="fix the file; Python cannot run it either",
            ) from error
        return source

    @classmethod
    def of_text(cls, text: str, path: Path) -> Source:
        """Return a file with the text of an editor, encoded as the text's coding line requests.

        Raises:
            WorkloadError: it is not valid Python, or has characters that its encoding lacks.
        """
        try:
            # The coding line itself is ASCII, whatever surrounds it.
            content = text.encode(_encoding(text.encode(errors="replace")))
        except (SyntaxError, ValueError, LookupError) as error:
            raise WorkloadError(
                f"the text cannot be written as Python: {error}",
                where=str(path),
                remedy="fix its coding line",
            ) from error
        return cls.of(content, path)

    @cached_property
    def _layout(self) -> Layout:
        with warnings.catch_warnings():
            # Python will warn of dubious escapes when it runs the file.
            warnings.simplefilter("ignore")
            return Layout(self._base)

    @property
    def tree(self) -> ast.Module:
        """The syntax tree of the text without the pending edits."""
        return self._layout.tree

    @cached_property
    def names(self) -> Names:
        """Scopes and bindings of `tree`."""
        return Names(self.tree)

    @cached_property
    def text(self) -> str:
        """The whole file after the edits.

        Raises:
            EditLocationError: two edits overlap, or the result would not be valid Python.
        """
        if not self._edits:
            return self._base
        parts, at = [], 0
        for start, end, new in sorted(self._edits, key=lambda edit: edit[:2]):
            if start < at:
                raise EditLocationError(
                    "two edits overlap", where=f"{self.path}:{self._layout.line_of(start)}"
                )
            parts += [self._layout.body[at:start], new.encode()]
            at = end
        text = b"".join([*parts, self._layout.body[at:]]).decode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(text, str(self.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise self.location_error(
                f"the edited file would not be valid Python: {error}"
            ) from error
        return text

    @property
    def content(self) -> bytes:
        """The file's bytes after the edits, in its encoding."""
        try:
            return self.text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise self.location_error(
                f"the edit cannot be written in the file's encoding {self.encoding}"
            ) from error

    @property
    def changed(self) -> bool:
        """Whether `content` differs from `original`."""
        return self.content != self.original

    def reparse(self) -> Source:
        """Return the file with the edits made: `tree` is that of the edited text."""
        return Source(self.path, self.original, self.encoding, self.text) if self._edits else self

    def diff(self) -> str:
        """Return a unified diff from the file as read, for ``patch -p1`` and ``git apply``.

        The path is relative to the current directory if the file is inside it.
        """
        path, here = self.path.resolve(), Path.cwd()
        path = path.relative_to(here) if path.is_relative_to(here) else self.path
        name = path.as_posix().lstrip("/")
        lines = difflib.unified_diff(
            _lines(self.original.decode(self.encoding)),
            _lines(self.text),
            f"a/{name}",
            f"b/{name}",
            n=_CONTEXT_LINES,
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node, with the file's line ends."""
        start, end = self._layout.span(node)
        return self._layout.body[start:end].decode()

    def line(self, node: ast.AST) -> str:
        """Return ``file:line`` of a node, for messages."""
        return f"{self.path}:{node.lineno}"  # type: ignore[attr-defined]

    def location_error(self, what: str, at: ast.AST | None = None) -> EditLocationError:
        """Return the error of an edit without a certain place, at a node or in the file."""
        return EditLocationError(what, where=str(self.path) if at is None else self.line(at))

    def already_applied(self, what: str, at: ast.AST) -> AlreadyAppliedError:
        """Return the error of an edit that the node `at` makes superfluous."""
        return AlreadyAppliedError(what, where=self.line(at))

    def replace(self, node: ast.AST, text: str) -> Source:
        """Replace an expression (without the parentheses around it) or statement by `text`."""
        return self._edited((*self._span(node), text))

    def surround(self, expression: ast.expr, before: str, after: str) -> Source:
        """Put `before` and `after` around an expression, in parentheses if it needs them."""
        start, end = self._span(expression)
        if not isinstance(expression, _ATOMS):
            before, after = f"{before}(", f"){after}"
        return self._edited((start, start, before))._edited((end, end, after))

    def insert_after(self, statement: ast.stmt, *lines: str) -> Source:
        """Insert `lines` after a whole statement, with its indentation.

        If the statement shares its line with others, so do the lines, with semicolons.
        """
        start, end = self._layout.span(statement)
        line = self._layout.logical_line(end - 1)
        if not self._alone(statement):
            return self._edited((end, end, "".join(f"; {text}" for text in lines)))
        newline, indent = self._layout.newline(start), self._layout.indent(start)
        at = line.end
        text = newline.join(indent + text for text in lines)
        if at == len(self._layout.body) and not self._layout.body.endswith((b"\n", b"\r")):
            return self._edited((at, at, newline + text))
        return self._edited((at, at, text + newline))

    def insert_before(self, statement: ast.stmt, *lines: str) -> Source:
        """Insert `lines` before a whole statement (and its decorators)."""
        start, _ = self._layout.span(statement)
        if not self._alone(statement):
            return self._edited((start, start, "".join(f"{text}; " for text in lines)))
        newline, indent = self._layout.newline(start), self._layout.indent(start)
        at = self._layout.line_start(start)
        return self._edited((at, at, "".join(indent + text + newline for text in lines)))

    def remove(self, statement: ast.stmt) -> Source:
        """Remove a whole statement and the comments on its lines.

        Raises:
            EditLocationError: it shares a line with others.
        """
        self._need_alone(statement)
        start, end = self._layout.span(statement)
        last = self._layout.logical_line(end - 1)
        return self._edited((self._layout.line_start(start), last.end, ""))

    def wrap(self, first: ast.stmt, last: ast.stmt, header: str) -> Source:
        """Indent the statements from `first` to `last` of one block under ``header``.

        Raises:
            EditLocationError: they share a line with others.
        """
        self._need_alone(first, last)
        layout = self._layout
        begin, (_, end) = layout.line_start(layout.span(first)[0]), layout.span(last)
        indent, step = layout.indent(begin), self._step(first)
        edited = self._edited((begin, begin, indent + header + layout.newline(begin)))
        for number in range(layout.line_of(begin), layout.line_of(end - 1) + 1):
            at = layout.offset(number, 0)
            blank = not layout.body[at : layout.content_end(at)].strip()
            if blank or layout.in_string(at):
                continue
            if layout.body[at:].startswith(indent.encode()):
                at += len(indent.encode())
            edited = edited._edited((at, at, step))
        return edited

    def set_keywords(self, call: ast.Call, **values: str) -> Source:
        """Set keyword arguments of `call`, each value as source text; replace existing values.

        Raises:
            AlreadyAppliedError: it has all of them.
            EditLocationError: a ``**mapping`` may hold one.
        """
        present = {keyword.arg: keyword.value for keyword in call.keywords}
        edited, missing = self, []
        for name, value in values.items():
            if name not in present:
                missing.append(f"{name}={value}")
            elif not is_same(present[name], value):
                edited = edited.replace(present[name], value)
        if missing and None in present:
            raise self.location_error(
                f"the call takes **{self.segment(present[None])}, which may hold "
                + " or ".join(text.partition("=")[0] for text in missing),
                call,
            )
        if missing:
            return edited._append_arguments(call, missing)
        if edited is self:
            text = ", ".join(f"{name}={value}" for name, value in values.items())
            raise self.already_applied(f"{text} is present", call)
        return edited

    def set_default(self, function: Function, name: str, value: str) -> Source:
        """Give the argument `name` of a function the default `value`.

        Raises:
            AlreadyAppliedError: it has this default.
            EditLocationError: there is no such argument, or it has no default.
        """
        default = default_of(function, name)
        if default is None:
            what = f"{function.name}() has no argument '{name}' with a default"
            raise self.location_error(what, function)
        if is_same(default, value):
            raise self.already_applied(f"{name}={value} is present", default)
        return self.replace(default, value)

    def with_import(self, module: str) -> Source:
        """Add ``import module`` to the file's imports unless it is present.

        Raises:
            EditLocationError: the module's name has another meaning in the file.
        """
        if self.names.module_name(module):
            return self
        name = module.partition(".")[0]
        bound = self.names.bindings(self.tree, name)
        if any(isinstance(node, ast.alias) and node.name == module for node in bound):
            return self
        # `import torch.optim` binds the name torch, to the module that `import torch` binds.
        if bound and self.names.module_name(name) != name:
            raise self.location_error(f"'{name}' has another meaning in this file")
        edited = self.insert_at_top(f"import {module}", before_others=True)
        # An earlier edit may have added it.
        return self if edited._edits[-1] in self._edits else edited

    def insert_at_top(
        self, *lines: str, after: ast.stmt | None = None, before_others: bool = False
    ) -> Source:
        """Insert `lines` after the file's leading imports (and after the statement `after`).

        Args:
            before_others: before the first import (except ``from __future__``) instead.
        """
        body = self.tree.body
        leading: list[ast.stmt] = []
        for number, statement in enumerate(body):
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not (isinstance(statement, (ast.Import, ast.ImportFrom)) or (text and not number)):
                break
            leading.append(statement)
        if before_others:
            others = [statement for statement in leading if not _is_first(statement)]
            if others:
                return self.insert_before(others[0], *lines)
        place = leading[-1] if leading else None
        if after is not None and (place is None or after.lineno > place.lineno):
            place = after
        if place is not None:
            return self.insert_after(place, *lines)
        if body:
            return self.insert_before(body[0], *lines)
        return self._edited((0, 0, "".join(f"{line}\n" for line in lines)))

    def fresh_name(self, *candidates: str) -> str:
        """Return the first candidate that the file does not use, or a numbered one."""
        numbered = (f"{candidates[0]}_{number}" for number in range(2, 1000))
        return next(name for name in (*candidates, *numbered) if name not in self.names.used)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Return the span of a node to edit; before Python 3.12, nodes of f-strings have none."""
        if any(isinstance(above, ast.JoinedStr) for above in self.names.ancestors(node)):
            raise self.location_error("it is in an f-string", node)
        return self._layout.span(node)

    def _edited(self, edit: tuple[int, int, str]) -> Source:
        return replace(self, _edits=(*self._edits, edit))

    def _alone(self, statement: ast.stmt) -> bool:
        """Whether a statement shares none of its lines with another one."""
        start, end = self._layout.span(statement)
        first = self._layout.logical_line(start)
        last = self._layout.logical_line(end - 1)
        return first.tokens[0].start == start and all(
            token.text == ";" for token in last.tokens if token.start >= end
        )

    def _need_alone(self, *statements: ast.stmt) -> None:
        for statement in statements:
            if not self._alone(statement):
                raise self.location_error("several statements are on one line", statement)

    def _step(self, statement: ast.stmt) -> str:
        """Return the indentation of a block in this file, preferably around `statement`."""
        inner = self._layout.indent(self._layout.span(statement)[0])
        parent = self.names.parent(statement)
        if isinstance(parent, ast.stmt):
            outer = self._layout.indent(self._layout.span(parent)[0])
            if len(inner) > len(outer) and inner.startswith(outer):
                return inner[len(outer) :]
        for line, after in pairwise(self._layout.logical):
            outer, inner = (self._indent_of(logical) for logical in (line, after))
            if line.tokens[-1].text == ":" and len(inner) > len(outer):
                return inner.removeprefix(outer)
        return _DEFAULT_STEP

    def _indent_of(self, line: LogicalLine) -> str:
        return self._layout.indent(line.tokens[0].start)

    def _append_arguments(self, call: ast.Call, texts: Sequence[str]) -> Source:
        layout, text = self._layout, ", ".join(texts)
        _, end = self._span(call)
        inside = [t for t in layout.logical_line(end - 1).tokens if t.start < end]
        close, before = inside[-1], inside[-2]
        if not call.args and not call.keywords:
            return self._edited((close.start, close.start, text))
        first = call.args[0] if call.args else None
        if isinstance(first, ast.GeneratorExp) and layout.span(first)[1] == end:
            # A generator needs parentheses unless it is the only argument.
            start = layout.span(first)[0]
            return self._edited((start, start, "("))._edited((end - 1, end - 1, f"), {text}"))
        comma = before.text == ","
        argument = max(layout.span(node)[0] for node in (*call.args, *call.keywords))
        begins_line = not layout.body[layout.line_start(argument) : argument].strip()
        if begins_line and layout.line_of(close.start) > layout.line_of(before.start):
            # One argument per line: so are the new ones, and a comment stays with its argument.
            indent = layout.newline(argument) + layout.indent(argument)
            at = layout.content_end(before.start)
            lines = "".join(indent + text + "," for text in texts)
            edited = self if comma else self._edited((before.end, before.end, ","))
            return edited._edited((at, at, lines if comma else lines[:-1]))
        at = inside[-3].end if comma else before.end
        return self._edited((at, at, f", {text}"))


def is_same(expression: ast.expr, *texts: str) -> bool:
    """Whether an expression is one of `texts`, up to formatting."""
    return any(ast.dump(expression) == ast.dump(ast.parse(t, mode="eval").body) for t in texts)


def _encoding(content: bytes) -> str:
    """Return the encoding of a file, by its byte order mark or coding line."""
    mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    # Other text on the coding line may be in the encoding that it declares.
    head = re.sub(rb"\r\n?", b"\n", content[len(mark) :]).split(b"\n", 2)[:2]
    plain = mark + re.sub(rb"[\x80-\xff]", b"?", b"\n".join(head))
    return tokenize.detect_encoding(io.BytesIO(plain).readline)[0]


def _is_first(statement: ast.stmt) -> bool:
    """Whether nothing may precede it: the module's docstring, imports from the future."""
    return isinstance(statement, ast.Expr) or (
        isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    )


def _lines(text: str) -> Sequence[str]:
    # As patch counts lines: a lone carriage return does not end one.
    return re.findall(r"[^\n]*\n|[^\n]+", text)
