"""Loaded by every Python process that a trial of `mutants` starts: it puts the fault in there, too.

Files stay unchanged: the module's source is replaced during its import. `probe` inserts calls
before given statements in the same way, to record which tests run them.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from typing import Any

_Made = Callable[[str], Any]


class _Loader(SourceFileLoader):
    """The module's own loader, except that the code is given; nothing is cached."""

    make: _Made

    def get_code(self, fullname: str) -> Any:
        """Return the replaced code of the module."""
        return compile(self.make(self.path), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, made: dict[str, _Made]) -> None:
        self.made = made

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the regular finders, with a loader of other code."""
        make = self.made.pop(name, None)
        if make is None:
            return None
        try:
            spec = find_spec(name)
        finally:
            self.made[name] = make
        if spec is None or spec.origin is None:
            return spec
        loader = _Loader(name, spec.origin)
        loader.make = make
        spec.loader = loader
        return spec


def install(path: str) -> None:
    """Replace the sources of modules by those in a JSON file: name -> source."""
    with open(path, encoding="utf-8") as file:
        made = {name: lambda _, text=text: text for name, text in json.load(file).items()}
    sys.meta_path.insert(0, _Finder(made))


def probe(path: str) -> None:
    """Record which tests run which places.

    Args:
        path: a JSON file ``{"log": FILE, "places": {module: {line: [number, ...]}}}``; a line
            ``number<tab>test`` is added to the log where a test comes by the first time.
    """
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = set()

    def come_by(numbers: Sequence[int]) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if test and (numbers[0], test) not in seen:
            seen.add((numbers[0], test))
            os.write(log, "".join(f"{number}\t{test}\n" for number in numbers).encode())

    builtins._come_by = come_by  # type: ignore[attr-defined]
    made: dict[str, _Made] = {
        name: lambda path, lines=lines: with_probes(path, {int(n): lines[n] for n in lines})
        for name, lines in request["places"].items()
    }
    sys.meta_path.insert(0, _Finder(made))


def with_probes(path: str, lines: Mapping[int, Sequence[int]]) -> ast.Module:
    """Return the file's module with a call before the innermost statement at each of `lines`."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    for line, numbers in lines.items():
        block, at = _innermost(tree.body, line)
        call = f"_come_by({tuple(numbers)!r})"
        made = ast.parse(call).body[0]
        for node in ast.walk(made):
            ast.copy_location(node, block[at])
        block.insert(at, made)
    return tree


def _innermost(block: list[Any], line: int) -> tuple[list[Any], int]:
    at = max(i for i, node in enumerate(block) if i == 0 or node.lineno <= line)
    inside = [node for node in ast.iter_child_nodes(block[at]) if hasattr(node, "body")]
    for part in [block[at], *inside]:
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(part, name, None) or ()
            if isinstance(inner, list) and inner[0].lineno <= line <= inner[-1].end_lineno:
                return _innermost(inner, line)
    return block, at


if _PATH := os.environ.get("SLIPSTREAM_FAULT", ""):
    install(_PATH)
if _PATH := os.environ.get("SLIPSTREAM_PROBES", ""):
    probe(_PATH)
