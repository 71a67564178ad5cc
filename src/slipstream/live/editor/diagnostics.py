"""Marks in the text: what is wrong with it, and what would make it faster."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from lsprotocol import types

from slipstream.live.analysis import Problem
from slipstream.live.editor.notes import parse
from slipstream.live.editor.text import Document, line_range, lines_of
from slipstream.live.editor.watch import Advice
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
        self._workloads: dict[str, tuple[tuple[int, str], ...]] = {}

    def forget(self, uri: str) -> None:
        """A file is not open any more."""
        self._workloads.pop(uri, None)

    def publish(self, document: Document) -> None:
        """Tell the editor all marks of a file."""
        view, syntax = self._server.view_of(document), _syntax_error(document.source)
        marks = []
        if syntax is not None:
            marks.append(_error(document, *syntax))
        elif view is not None and view.analysis.problem is not None:
            marks += self._problem(document, view.analysis.problem)
        marks += [diagnostic for _, diagnostic in self.advice(document)]
        self._server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, marks, document.version)
        )

    def advice(self, document: Document) -> list[tuple[Advice, types.Diagnostic]]:
        """What would pay, each with its mark; nothing while the text is another than analysed."""
        watch = self._server.own_watch(document)
        if watch is None or not watch.view.advice:
            return []
        view = watch.view
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

    def workloads(self, document: Document) -> tuple[tuple[int, str], ...]:
        """Functions that may be workloads, with lines from 0; of the last text that parses."""
        candidates = _candidates(document.source)
        if candidates is not None:
            self._workloads[document.uri] = candidates
        return self._workloads.get(document.uri, ())

    def _problem(self, document: Document, problem: Problem) -> list[types.Diagnostic]:
        is_own = self._server.own_watch(document) is not None
        if problem.path != document.place and (problem.path or not is_own):
            return []
        message = problem.what + (f"\n{problem.remedy}" if problem.remedy else "")
        return [_error(document, max(problem.line - 1, 0), message)]


def _error(document: Document, line: int, message: str) -> types.Diagnostic:
    severity = types.DiagnosticSeverity.Error
    return types.Diagnostic(line_range(document, line), message, severity=severity, source=SOURCE)


@functools.lru_cache(_FEW)
def _syntax_error(text: str) -> tuple[int, str] | None:
    """The line, from 0, that Python cannot parse, and why; None where it can."""
    try:
        parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        message = f"Python cannot parse this: {getattr(error, 'msg', None) or error}"
        return (getattr(error, "lineno", None) or 1) - 1, message
    return None


@functools.lru_cache(_FEW)
def _candidates(text: str) -> tuple[tuple[int, str], ...] | None:
    """What may be analysed in a file: its functions, of three providers the one of the model.

    None where it is no Python.
    """
    if _syntax_error(text) is not None:
        return None
    tree = parse(text)
    candidates = {node.name: node for node in workloads_in(tree)}
    model_provider = provider_in(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == model_provider:
            candidates[node.name] = node
    return tuple((node.lineno - 1, name) for name, node in candidates.items())
