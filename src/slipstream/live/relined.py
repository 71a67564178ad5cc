"""Renumbered lines of a recording, after a save that changes no code.

Most saves change only formatting, comments or blank lines. They run nothing: the recording is
rewritten with the new line numbers.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.graph import Graph

Moved = Mapping[str, Mapping[int, int]]
"""New number of each line, by file name as in the graph's lines."""
_LINE = re.compile(r"(.+):([0-9]+)")


def moved_lines(before: str, after: str) -> dict[int, int] | None:
    """Return the new number of each line of code; None if the code differs."""
    try:
        trees = ast.parse(before), ast.parse(after)
    except (SyntaxError, ValueError):
        return None
    if ast.dump(trees[0]) != ast.dump(trees[1]):
        return None
    moved: dict[int, int] = {}
    for old, new in zip(*map(ast.walk, trees), strict=True):
        for side in ("lineno", "end_lineno"):
            if hasattr(old, side):
                moved.setdefault(getattr(old, side), getattr(new, side))
    return moved


def relined(graph: Graph, moved: Moved) -> Graph:
    """Return `graph` with the new line numbers."""
    lines = _renumber(graph.meta.get("lines"), moved)
    return replace(
        graph,
        strings=tuple(_text(text, moved) for text in graph.strings),
        meta={**graph.meta, "lines": lines} if lines is not None else graph.meta,
    )


def relined_document(before: Path, after: Path, name: str, moved: Moved) -> None:
    """Copy the page's document from folder `before` to `after`, with the new line numbers.

    Args:
        name: file name of the document.
    """
    shutil.copytree(before, after)
    document = json.loads((after / name).read_text(encoding="utf-8"))
    document["strings"] = [_text(string, moved) for string in document["strings"]]
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    (after / name).write_text(text, encoding="utf-8")


def _renumber(value: Any, moved: Moved) -> Any:
    """Return a JSON value with the new line numbers."""
    if isinstance(value, str):
        return _text(value, moved)
    if isinstance(value, Mapping):
        return {_text(key, moved): _renumber(item, moved) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renumber(item, moved) for item in value]
    return value


def _text(text: str, moved: Moved) -> str:
    match = _LINE.fullmatch(text)
    if match is None or match[1] not in moved:
        return text
    number = int(match[2])
    return f"{match[1]}:{moved[match[1]].get(number, number)}"
