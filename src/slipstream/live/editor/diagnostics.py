"""Diagnostics of open files: errors, and techniques that would make them faster."""

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
_CACHED_TEXTS = 256


class Diagnoser:
    """Finds and publishes the diagnostics of open files; each text is parsed once per version."""

    def __init__(self, server: EditorServer) -> None:
        self._server = server
        self._workloads: dict[str, tuple[tuple[int, str], ...]] = {}

    def forget(self, uri: str) -> None:
        """Drop the data of a closed file."""
        self._workloads.pop(uri, None)

    def publish(self, document: Document) -> None:
        """Send all diagnostics of a file to the editor."""
        view, syntax = self._server.view_of(document), _syntax_error(document.source)
        diagnostics = []
        if syntax is not None:
            diagnostics.append(_error(document, *syntax))
        elif view is not None and view.analysis.problem is not None:
            diagnostics += self._problem(document, view.analysis.problem)
        diagnostics += [diagnostic for _, diagnostic in self.advice(document)]
        self._server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, diagnostics, document.version)
        )

    def advice(self, document: Document) -> list[tuple[Advice, types.Diagnostic]]:
        """Return worthwhile techniques with their diagnostics, if their lines are unchanged."""
        watch = self._server.own_watch(document)
        if watch is None or not watch.view.advice:
            return []
        view = watch.view
        lines = self._server.map_of(document, lines_of(view.advised))
        found = []
        for advice in view.advice:
            line = lines.after_of(advice.line)
            if line is not None:
                diagnostic = types.Diagnostic(
                    range=line_range(document, line),
                    message=advice.said,
                    severity=types.DiagnosticSeverity.Information,
                    source=SOURCE,
                    code=advice.technique,
                )
                found.append((advice, diagnostic))
        return found

    def workloads(self, document: Document) -> tuple[tuple[int, str], ...]:
        """Return possible workload functions with lines from 0, of the last valid text."""
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


@functools.lru_cache(_CACHED_TEXTS)
def _syntax_error(text: str) -> tuple[int, str] | None:
    """Return the line, from 0, and message of a syntax error; None for valid Python."""
    try:
        parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        message = f"Python cannot parse this: {getattr(error, 'msg', None) or error}"
        return (getattr(error, "lineno", None) or 1) - 1, message
    return None


@functools.lru_cache(_CACHED_TEXTS)
def _candidates(text: str) -> tuple[tuple[int, str], ...] | None:
    """Return functions that can be analysed as (line from 0, name); None for invalid Python.

    Of the three provider functions of a workload, only the one of the model is included.
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
