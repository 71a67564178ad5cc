"""A save that changes no code: the step is as it was, only its lines have other numbers.

Formatting, comments and blank lines are saved more often than anything else; nothing is run for
them. What was recorded is written once more with the lines where they are now.
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
"""By file, as lines name it, where each of its lines is now."""
_LINE = re.compile(r"(.+):([0-9]+)")


def moved_lines(before: str, after: str) -> dict[int, int] | None:
    """Where each line that holds code is now; None where the code itself is another."""
    try:
        trees = ast.parse(before), ast.parse(after)
    except (SyntaxError, ValueError):
        return None
    if ast.dump(trees[0]) != ast.dump(trees[1]):
        return None
    moved: dict[int, int] = {}
    for one, other in zip(*map(ast.walk, trees), strict=True):
        for side in ("lineno", "end_lineno"):
            if hasattr(one, side):
                moved.setdefault(getattr(one, side), getattr(other, side))
    return moved


def relined(graph: Graph, moved: Moved) -> Graph:
    """`graph` with its lines where they are now."""
    lines = _in(graph.meta.get("lines"), moved)
    return replace(
        graph,
        strings=tuple(_text(one, moved) for one in graph.strings),
        meta={**graph.meta, "lines": lines} if lines is not None else graph.meta,
    )


def relined_document(before: Path, after: Path, name: str, moved: Moved) -> None:
    """Write the page's document of the folder `before` into `after`, its lines where they are now.

    Args:
        name: of the document among the folder's files.
    """
    shutil.copytree(before, after)
    document = json.loads((after / name).read_text(encoding="utf-8"))
    document["strings"] = [_text(one, moved) for one in document["strings"]]
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    (after / name).write_text(text, encoding="utf-8")


def _in(value: Any, moved: Moved) -> Any:
    """`value`, of a JSON document, with every line in it where it is now."""
    if isinstance(value, str):
        return _text(value, moved)
    if isinstance(value, Mapping):
        return {_text(key, moved): _in(one, moved) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in(one, moved) for one in value]
    return value


def _text(text: str, moved: Moved) -> str:
    match = _LINE.fullmatch(text)
    if match is None or match[1] not in moved:
        return text
    number = int(match[2])
    return f"{match[1]}:{moved[match[1]].get(number, number)}"
