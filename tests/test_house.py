"""How rooms may lean on each other: in no circle, and on no private part of another.

What is not so yet is listed in `tests/house.json`; its lists can only get shorter. Whoever mends an
entry takes it out: a listed one that no longer exists fails here, too, and says so.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.technique import Technique, Traits, registry

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
LISTED = json.loads((ROOT / "tests" / "house.json").read_text())
ASKING = ("verbs", "report", "live", "cli")
"""Rooms that ask about techniques, through `Traits` and the protocol alone."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed."""
    modules = {}
    for path in sorted((SRC / "slipstream").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return modules


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name) of imports that run, wherever they stand; None for the module itself."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imports(other)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)
        else:
            yield from imports(node)


def edges() -> dict[str, set[str]]:
    """By module: modules of ours that it imports by name."""
    known = trees()
    targets: dict[str, set[str]] = {name: set() for name in known}
    for name, tree in known.items():
        for module, thing in imports(tree):
            target = f"{module}.{thing}" if f"{module}.{thing}" in known else module
            if target in known and target != name:
                targets[name].add(target)
    return targets


def circles() -> list[list[str]]:
    """Modules that import each other: strongly connected components, by Tarjan's algorithm."""
    graph = edges()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                components.append(component)

    for module in graph:
        if module not in index:
            visit(module)
    return sorted(components)


def private_imports() -> set[str]:
    """``importer: module or name`` of what is private to a folder that the importer is not in."""
    known, private = trees(), set()
    for name, tree in known.items():
        for module, thing in imports(tree):
            if not module.startswith("slipstream"):
                continue
            path = (module if thing is None else f"{module}.{thing}").split(".")
            for at, part in enumerate(path):
                if not part.startswith("_") or part.startswith("__"):
                    continue
                room = ".".join(path[:at])
                # A name is private to the folder of its module; a module of the top to itself.
                is_name = ".".join(path[: at + 1]) not in known
                if is_name and (SRC / Path(*path[:at])).with_suffix(".py").exists():
                    room = room if room.count(".") == 1 else room.rpartition(".")[0]
                if name != room and not name.startswith(f"{room}."):
                    private.add(f"{name}: {'.'.join(path[: at + 1])}")
    return private


def probes() -> set[str]:
    """``module: expression`` where a room asks for an attribute that is a technique's."""
    kinds = registry().values()
    members = {name for kind in (*kinds, Technique) for name in vars(kind)}
    members |= {field.name for kind in (*kinds, Traits) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    places = set()
    for name, tree in trees().items():
        if not name.startswith(tuple(f"slipstream.{room}" for room in ASKING)):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
                and isinstance(node.args[1], ast.Constant)
                and node.args[1].value in members
            ):
                places.add(f"{name}: {ast.unparse(node)}")
    return places


def check(kind: str, seen: set[str]) -> None:
    """Hold what was found against the list of that kind, both ways."""
    listed = set(LISTED[kind])
    new, gone = sorted(seen - listed), sorted(listed - seen)
    lines = [*(f"new, to be mended: {one}" for one in new)]
    lines += [f'gone: take it out of "{kind}" in tests/house.json: {one}' for one in gone]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_no_modules_import_each_other() -> None:
    """A listed circle may lose modules; then the shorter one takes its place in the list."""
    check("circles", {" ".join(one) for one in circles()})


def test_nobody_imports_what_is_private_to_another_room() -> None:
    check("private_imports", private_imports())


def test_nobody_probes_techniques_for_what_is_no_trait() -> None:
    check("probes", probes())


EMPTY = ("found", "made", "own", "said")
"""Names that hold nothing: a local is named after what it holds."""


def empty_locals() -> set[str]:
    """``module: name, line`` of locals with such a name."""
    stored = set()
    for module, tree in trees().items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Store):
                    continue
                if node.id in EMPTY:
                    stored.add(f"{module}: {node.id}, line {node.lineno}")
    return stored


def test_locals_are_named_after_what_they_hold() -> None:
    assert empty_locals() == set()


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest takes the second for the first, and whether it notices depends on who collects."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
