"""Check imports between packages: no cycles, and no private names of another package.

`tests/structure.json` lists modules exceptions; its lists can only get shorter. An entry that no
longer exists fails, too: remove it with the change that fixes it.
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
LISTED = json.loads((ROOT / "tests" / "structure.json").read_text())
USERS = ("verbs", "report", "live", "cli")
"""Packages that query techniques, which they do only through `Traits` and the protocol."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Parse every module of the package; by module name."""
    modules = {}
    for path in sorted((SRC / "slipstream").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return modules


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) of imports at run time, also in functions; None for a whole module."""
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
    """Return the modules of this package that each module imports."""
    modules = trees()
    targets: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for module, thing in imports(tree):
            target = f"{module}.{thing}" if f"{module}.{thing}" in modules else module
            if target in modules and target != name:
                targets[name].add(target)
    return targets


def cycles() -> list[list[str]]:
    """Return modules that import each other: strongly connected components (Tarjan)."""
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
    """Return ``importer: name`` for private names that are imported from outside their package."""
    modules, private = trees(), set()
    for name, tree in modules.items():
        for module, thing in imports(tree):
            if not module.startswith("slipstream"):
                continue
            path = (module if thing is None else f"{module}.{thing}").split(".")
            for at, part in enumerate(path):
                if not part.startswith("_") or part.startswith("__"):
                    continue
                package = ".".join(path[:at])
                # A name is private to its module's package; in a top-level module, to the module.
                is_name = ".".join(path[: at + 1]) not in modules
                if is_name and (SRC / Path(*path[:at])).with_suffix(".py").exists():
                    package = package if package.count(".") == 1 else package.rpartition(".")[0]
                if name != package and not name.startswith(f"{package}."):
                    private.add(f"{name}: {'.'.join(path[: at + 1])}")
    return private


def probes() -> set[str]:
    """Return ``module: expression`` for `getattr` or `hasattr` of a technique's attributes."""
    kinds = registry().values()
    members = {name for kind in (*kinds, Technique) for name in vars(kind)}
    members |= {field.name for kind in (*kinds, Traits) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    places = set()
    for name, tree in trees().items():
        if not name.startswith(tuple(f"slipstream.{package}" for package in USERS)):
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
    """Fail if `seen` differs from the listed exceptions of this kind."""
    listed = set(LISTED[kind])
    new, gone = sorted(seen - listed), sorted(listed - seen)
    lines = [f"new, to be fixed: {entry}" for entry in new]
    lines += [f'fixed: remove it from "{kind}" in tests/structure.json: {entry}' for entry in gone]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_no_modules_import_each_other() -> None:
    """A listed cycle that loses modules is replaced by the shorter one."""
    check("cycles", {" ".join(modules) for modules in cycles()})


def test_private_names_are_imported_only_inside_their_package() -> None:
    check("private_imports", private_imports())


def test_techniques_are_queried_only_through_traits() -> None:
    check("probes", probes())


def test_test_files_have_distinct_names() -> None:
    """Pytest confuses test modules of the same name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
