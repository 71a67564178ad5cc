"""Marks in the text: what is wrong with it, and what would make it faster."""

from __future__ import annotations

import ast
import warnings
from typing import TYPE_CHECKING

from lsprotocol import types

from slipstream.live.analysis import Problem
from slipstream.live.editor.notes import parse
from slipstream.live.editor.text import Document, line_range, lines_of
from slipstream.live.editor.watch import Advice, View
from slipstream.workload.providers import provider_in
from slipstream.workload.recipe import workloads_in

if TYPE_CHECKING:
    from slipstream.live.editor.server import EditorServer

SOURCE = "slipstream"
_FEW = 256


class Diagnoser:
    """Finds and publishes the marks of open files; a text is looked at once a version."""

    def __init__(self, server: EditorServer) -> None:
        self._server = server
        self._syntax: dict[str, tuple[str, types.Diagnostic | None]] = {}
        self._workloads: dict[str, tuple[str, list[tuple[int, str]]]] = {}

    def publish(self, document: Document) -> None:
        """Tell the editor all marks of a file."""
        marks = []
        syntax = self._syntax_error(document)
        if syntax is not None:
            marks.append(syntax)
        view = self._server.view_of(document)
        if view is not None:
            if view.problem is not None and syntax is None:
                marks += self._problem(document, view.problem)
            marks += [diagnostic for _, diagnostic in self.advice(document)]
        self._server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, marks, document.version)
        )

    def advice(self, document: Document) -> list[tuple[Advice, types.Diagnostic]]:
        """What would pay, each with its mark; nothing while the text is another than analysed."""
        view = self._server.view_of(document)
        if view is None or not view.advice or not self._is_own(document, view):
            return []
        lines = self._server.map_of(document, lines_of(view.advised))
        marks = []
        for one in view.advice:
            line = lines.after_of(one.line)
            if line is not None:
                mark = types.Diagnostic(
                    range=line_range(document, line),
                    message=one.said,
                    severity=types.DiagnosticSeverity.Information,
                    source=SOURCE,
                    code=one.technique,
                )
                marks.append((one, mark))
        return marks

    def workloads(self, document: Document) -> list[tuple[int, str]]:
        """Functions that may be workloads, with lines from 0; of the last text that parses."""
        known = self._workloads.get(document.uri)
        text = document.source
        if known is None or known[0] != text:
            tree = parse(text)
            if tree is None:
                return known[1] if known is not None else []
            known = text, _candidates(tree)
            self._workloads[document.uri] = known
            while len(self._workloads) > _FEW:
                self._workloads.pop(next(iter(self._workloads)))
        return known[1]

    def _is_own(self, document: Document, view: View) -> bool:
        watch = self._server.watch_of(document)
        return watch is not None and watch.path == document.place

    def _syntax_error(self, document: Document) -> types.Diagnostic | None:
        text = document.source
        known = self._syntax.get(document.uri)
        if known is None or known[0] != text:
            known = text, _syntax_error(document)
            self._syntax[document.uri] = known
        return known[1]

    def _problem(self, document: Document, problem: Problem) -> list[types.Diagnostic]:
        path = document.place
        if problem.path and problem.path != path:
            return []
        watch = self._server.watch_of(document)
        if not problem.path and (watch is None or watch.path != path):
            return []
        message = problem.what + (f"\n{problem.remedy}" if problem.remedy else "")
        return [
            types.Diagnostic(
                range=line_range(document, max(problem.line - 1, 0)),
                message=message,
                severity=types.DiagnosticSeverity.Error,
                source=SOURCE,
            )
        ]


def _syntax_error(document: Document) -> types.Diagnostic | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(document.source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return types.Diagnostic(
            range=line_range(document, line - 1),
            message=f"Python cannot parse this: {getattr(error, 'msg', None) or error}",
            severity=types.DiagnosticSeverity.Error,
            source=SOURCE,
        )
    return None


def _candidates(tree: ast.Module) -> list[tuple[int, str]]:
    """What may be analysed in a file: its functions, of three providers the one of the model."""
    candidates = {node.name: node for node in workloads_in(tree)}
    model_provider = provider_in(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == model_provider:
            candidates[node.name] = node
    return [(node.lineno - 1, name) for name, node in candidates.items()]
